"""Pictures of the experiments of serving: stalls, ablation, capacity, the token budget. Tables in,
axes out.
"""

from __future__ import annotations

import math
import textwrap
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sarathi_lab.results.plots.style import WIDTH, colours, finished, marker, panels, tick_in_steps

GAPS, TBT, TTFT, CAPACITY = "longest gap", "TBT P99", "TTFT P50", "capacity"
PAPER = "paper"
COLUMNS = 4
MOST_LEVEL = 5  # bars whose names have room beside each other


def draw(name: str, title: str, points: pd.DataFrame) -> Figure:
    """The picture of an experiment from its points: a row of panels a device, a panel a data set or
    quantity.

    `points` has the columns of recorded results (`load.POINT_COLUMNS`), dataset, slo and quantity,
    `device` in words, and `source`, "paper" for marks at the bars of its own `hardware`.
    """
    look = LOOKS[name]
    is_shown = points.y.notna() & points.quantity.isin(look.quantities)
    if look.unit is not None:
        is_shown &= points.unit == look.unit
    shown = points[is_shown].fillna({"slo": ""})
    keys = zip(shown.dataset, shown.slo, shown.quantity, strict=True)
    places_of = [look.place(*key) for key in keys]
    shown = shown.assign(place=places_of, hardware=shown.get("hardware"))
    own, papers = shown[shown.source != PAPER], shown[shown.source == PAPER]
    if not look.is_split:  # a point has a coordinate of each quantity
        num_quantities = own.groupby(["device", "place", "series", "x"]).quantity
        own = own[num_quantities.transform("nunique") == len(look.quantities)]
    places = list(dict.fromkeys(zip(own.device, own.place, strict=True)))
    most = max(Counter(device for device, _ in places).values(), default=1)
    columns = max(1, min(len(places), COLUMNS // most * most or COLUMNS))
    rows = math.ceil(len(places) / columns) if places else 1
    size = (max(5.0, WIDTH / COLUMNS * columns), 2.6 * rows + 0.8)
    figure, axes = panels(rows, columns, size)
    for ax in axes[len(places) :]:
        ax.set_axis_off()
    for ax, (device, place) in zip(axes, places, strict=False):
        chosen = own[(own.device == device) & (own.place == place)]
        look.panel(chosen, ax)
        is_same = papers.hardware.isin(chosen.hardware.dropna())
        _paper_marks(papers[(papers.place == place) & is_same], ax)
        titles = textwrap.wrap(str(device), 26) + textwrap.wrap(place, 26)
        ax.set_title("\n".join(titles), fontsize=9)
    if look.is_legend_below and places:
        handles: dict[str, Artist] = {}
        for ax in axes[: len(places)]:
            own_handles, labels = ax.get_legend_handles_labels()
            handles = dict(zip(labels, own_handles, strict=True)) | handles
            if (legend := ax.get_legend()) is not None:
                legend.remove()
        letters = 14 * size[0] / max(map(len, handles), default=1)  # that a row has room for
        options = {"fontsize": 8, "ncols": min(3, max(1, int(letters)))}
        figure.legend(handles.values(), handles.keys(), loc="outside lower center", **options)
    return finished(figure, title)


def stalls(points: pd.DataFrame, ax: Axes) -> Axes:
    """The longest gaps in milliseconds by the time they ended, a marker for every policy."""
    colour = colours(list(points.series.unique()))
    for i, (series, rows) in enumerate(points.groupby("series", sort=False)):
        line = rows.sort_values("x")
        style: dict[str, Any] = {"color": colour[str(series)], "markersize": 3, "alpha": 0.8}
        ax.plot(line.x, line.y, marker(i), label=str(series), **style)
    ax.set(xlabel="time [s]", ylabel="longest gap [ms]", yscale="log")
    ax.minorticks_off()
    return ax


def bars(points: pd.DataFrame, ax: Axes) -> Axes:
    """A bar per series with its interval."""
    rows = points.drop_duplicates("series")
    places = np.arange(len(rows))
    ax.bar(places, rows.y, 0.6, color=[*map(colours(list(rows.series)).get, rows.series)])
    if {"low", "high"} <= set(rows):
        ax.vlines(places, rows.low, rows.high, color="black", linewidth=0.9)
    names = [str(name).replace("_", " ") for name in rows.series]
    if len(rows) > MOST_LEVEL:
        ax.set_xticks(places, names, fontsize=8, rotation=90)
    else:
        ax.set_xticks(places, [name.replace(" ", "\n") for name in names], fontsize=8)
    unit = str(rows.unit.iloc[0])
    ax.set_ylabel({"1/s": "requests per second", "s": "seconds"}.get(unit, unit))
    ax.grid(axis="x", visible=False)
    return ax


def budgets(points: pd.DataFrame, ax: Axes) -> Axes:
    """P99 time between tokens by P50 TTFT, a point per token budget: down and left is better."""
    both = points.pivot(index="x", columns="quantity", values="y").reindex(columns=[TTFT, TBT])
    both = both.sort_index()
    ax.plot(both[TTFT], both[TBT], color="0.6", linewidth=0.9)
    for i, (budget, row) in enumerate(both.iterrows()):
        ax.plot(row[TTFT], row[TBT], marker(i), color=f"C{i}", label=f"{budget:g}")
    ax.set(xlabel="TTFT P50 [s]", ylabel="TBT P99 [s]", xscale="log", yscale="log")
    ax.margins(0.1)
    for axis in (ax.xaxis, ax.yaxis):
        tick_in_steps(axis)
    ax.legend(title="budget", fontsize=8, title_fontsize=8, loc="best")
    return ax


def tradeoff(points: pd.DataFrame, ax: Axes) -> Axes:
    """One quantity by another, in seconds, a marker per series: down and left is better."""
    y, x = points.quantity.unique()
    both = points.pivot(index="series", columns="quantity", values="y")
    for i, series in enumerate(points.series.unique()):
        style: dict[str, Any] = {"linestyle": "none", "color": f"C{i % 10}"}
        style["fillstyle"] = "none" if i >= 10 else "full"  # colours and markers begin anew
        ax.plot(both[x][series], both[y][series], marker(i), label=str(series), **style)
    ax.set(xlabel=f"{x} [s]", ylabel=f"{y} [s]", yscale="log")
    ax.minorticks_off()
    ax.margins(0.1)
    return ax


def lines(points: pd.DataFrame, ax: Axes, x: str = "chunk [tokens]") -> Axes:
    """A quantity by tokens, or by another `x`, a line per series with its interval."""
    for i, (series, rows) in enumerate(points.groupby("series", sort=False)):
        line = rows.sort_values("x")
        ax.plot(line.x, line.y, marker(i), linestyle="-", color=f"C{i}", label=str(series))
        if {"low", "high"} <= set(line):
            ax.vlines(line.x, line.low, line.high, color=f"C{i}", linewidth=0.9)
    quantity = f"{points.quantity.iloc[0]} [{points.unit.iloc[0]}]"
    ax.set(xlabel=x, ylabel="\n".join(textwrap.wrap(quantity, 24)))
    if x.endswith("[tokens]"):
        ax.set_xscale("log", base=2)
        ax.xaxis.set_major_formatter("{x:g}")
    ax.legend(fontsize=8, loc="best")
    return ax


@dataclass(frozen=True)
class ServingLook:
    """A panel a data set, objective and, with `is_split`, quantity; one legend for all of them if
    `is_legend_below`, where a series looks the same in all of them.
    """

    panel: Callable[[pd.DataFrame, Axes], Axes]
    quantities: tuple[str, ...]
    unit: str | None = None
    is_split: bool = False
    is_legend_below: bool = False

    def place(self, dataset: str, slo: str, quantity: str) -> str:
        place = f"{dataset}, {slo}" if slo else dataset
        return f"{place}: {quantity}" if self.is_split else place


LOOKS: Mapping[str, ServingLook] = {
    "sarathi_serve_stalls": ServingLook(stalls, (GAPS,), "ms", is_legend_below=True),
    "sarathi_serve_ablation": ServingLook(bars, (TTFT, TBT), is_split=True),
    "sarathi_serve_capacity": ServingLook(bars, (CAPACITY,)),
    "sarathi_serve_budget": ServingLook(budgets, (TTFT, TBT)),
    "disaggregation": ServingLook(bars, ("goodput per GPU",)),
    "long_prompts": ServingLook(tradeoff, ("TTFT P99, short", "TTFT, long"), is_legend_below=True),
    "dynamic_chunks": ServingLook(lines, ("throughput / one stage's",), is_legend_below=True),
    "layered_prefill": ServingLook(
        partial(lines, x="load [of saturation]"), ("TTFT mean",), is_legend_below=True
    ),
    "adaptive_budgets": ServingLook(bars, (CAPACITY,)),
    "p_pas_gain": ServingLook(
        bars, ("mean latency, low load", "mean latency, high load"), is_split=True
    ),
    "energy": ServingLook(bars, ("energy a token", "power of a device"), is_split=True),
    "speculation": ServingLook(
        lines,
        ("latency P50 / no drafts", "throughput, all at once / no drafts"),
        is_split=True,
        is_legend_below=True,
    ),
    "agentic": ServingLook(
        bars, ("TTFT P50, later turns", "hit share, later turns"), is_split=True
    ),
}


def _paper_marks(points: pd.DataFrame, ax: Axes) -> None:
    """The paper's values as hollow marks at the bars of the same names."""
    names = [label.get_text().replace("\n", " ") for label in ax.get_xticklabels()]
    for series, y in zip(points.series.astype(str), points.y, strict=True):
        if series in names:
            ax.plot(names.index(series), y, "o", color="black", fillstyle="none", label="paper")
    if len(points):
        ax.set_ylim(top=1.25 * ax.get_ylim()[1])  # room for the legend
        handles, labels = ax.get_legend_handles_labels()
        ax.legend(handles[:1], labels[:1], fontsize=8)
