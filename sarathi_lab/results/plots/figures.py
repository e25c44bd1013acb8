"""Draws the paper's figures in one style: the paper's points, what is simulated, and what each
device measured.

A policy has the colour that it has in all pictures, other series go from dark to light, and each
has its own marker. The paper's points are hollow, simulated ones a broken line, measured ones
filled with their interval, in a row of panels per device.
"""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import cycle
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from sarathi_lab.results.plots.look import Look, in_tokens, policy_of
from sarathi_lab.results.plots.style import (
    LINES,
    WIDTH,
    colours,
    finished,
    marker,
    panels,
    shades,
    tick_in_steps,
)

MOST_MARKERS = 22  # of a line: where the paper's points are dense, they would hide each other
# Of simulated lines, the one that is drawn by default first.
SIMULATED: Sequence[Any] = (LINES["simulated"], LINES["analytic"], "-.", (0, (5, 1, 1, 1, 1, 1)))
# for the colour-blind, and from dark to light without colour; its lightest is lost on white
COLOURS = "viridis"
HATCHES = ("", "//", "..", "xx", "\\\\", "++")
MOST_TICKS = 9  # values along x that are each named
NEAREST = 0.09  # of the axis, between two that are
PANEL = 2.5  # inches of its height
COLUMN = 3.4  # inches of the widest

Styles = Mapping[str, tuple[Any, str]]  # colour and marker by series


def draw(look: Look, points: pd.DataFrame, *, is_all: bool = False) -> Figure:
    """One figure of the paper from its points in the columns of `figure.parquet`, one axes a panel.

    Columns `low` and `high`, where there are any, are the interval around y of what was measured.
    Of a simulated GPU one line is drawn, the profiled one if there is any, and of a measured device
    the panels with at least half of their points, with a line that says what is left out; `is_all`
    draws all.
    """
    shown = _shown(points, look)
    left_out = "" if is_all else _left_out(shown)
    shown = shown[shown.y.notna()] if is_all else _telling(shown)
    rows = _rows(shown)
    columns = min(look.columns, max(own.panel.nunique() for own in rows.values()))
    order = list(dict.fromkeys(shown.panel))  # the paper's
    places: list[tuple[str, str | None]] = []
    for title, own in rows.items():
        names = sorted(own.panel.unique(), key=order.index)  # the same in every row
        left = -len(names) % columns  # in the last line of the row
        places += [(title, name) for name in names + [None] * left]
    num_lines = len(places) // columns
    width = min(WIDTH, max(COLUMN * columns, 6.4))
    canvas, axes = panels(num_lines, columns, (width, PANEL * num_lines + 1.1))
    styles = _styles(sorted(dict.fromkeys(shown.series), key=_number))
    # By device: profiled, analytic, counted instead of served.
    devices = map(str, shown.device[shown.source == "simulated"].unique())
    lines = dict(zip(devices, cycle(SIMULATED), strict=False))
    for ax, (title, panel) in zip(axes, places, strict=True):
        if panel is None:
            ax.set_axis_off()
            continue
        chosen = rows[title][rows[title].panel == panel]
        if look.is_bars:
            _bars(ax, chosen, list(dict.fromkeys(shown.device)))
        else:
            _panel(ax, chosen, look, styles, lines)
        titles = [title if len(rows) > 1 else "", look.panel(panel)]
        ax.set_title("\n".join(filter(None, titles)))
        ax.set_xlabel(look.xs.get(panel, look.x))
        ax.set_ylabel(look.units.get(panel, look.y or chosen.unit.iloc[0]))
    canvas.suptitle(look.title)
    sources = _source_bars(shown) if look.is_bars else _source_lines(shown, lines)
    keys: list[Artist] = [
        Line2D([], [], color=colour, marker=marker, linewidth=1.0, label=look.series_name(name))
        for name, (colour, marker) in ({} if look.is_bars else styles).items()
    ]
    notes = [*textwrap.wrap(left_out, int(11 * width)), *([look.legend] if keys else [])]
    columns = _legend_columns([str(key.get_label()) for key in keys + sources], width)
    title = "\n".join(filter(None, notes))
    canvas.legend(handles=keys + sources, loc="outside lower center", ncols=columns, title=title)
    return finished(canvas)


def _legend_columns(labels: Sequence[str], width: float) -> int:
    """The most columns in which labels, listed column by column, are no wider than `width`."""
    for number in range(len(labels), 1, -1):
        parts = np.array_split([len(label) for label in labels], number)
        if sum(0.62 + 0.07 * max(part) for part in parts) <= width:  # of a key and of a letter
            return number
    return 1


def _number(series: str) -> float:
    """What numbers and chunks are ordered by, before names, which stay as they come."""
    found = re.fullmatch(r"(?:C=|sarathi)?(\d+)", series)
    return float(found[1]) if found else math.inf


def _styles(series: Sequence[str]) -> dict[str, tuple[Any, str]]:
    """Colour and marker: shades of its policy's colour for a series that is of one."""
    own: dict[str | None, list[str]] = {}
    for name in series:
        own.setdefault(policy_of(name), []).append(name)
    taken: dict[str, Any] = {}
    for policy, names in own.items():
        if policy is None:
            values = list(plt.get_cmap(COLOURS)(np.linspace(0.0, 0.85, max(2, len(names)))))
        else:
            values = list(shades(colours([policy])[policy], len(names)))
        taken |= dict(zip(names, values, strict=False))
    return {name: (taken[name], marker(i)) for i, name in enumerate(series)}


def _shown(points: pd.DataFrame, look: Look) -> pd.DataFrame:
    shown = points[~points.panel.isin(look.left_out)]
    if look.series:
        shown = shown[shown.series.isin(look.series)]
    swapped = shown.panel.isin(look.is_swapped)
    x, y = shown.x.where(~swapped, shown.y), shown.y.where(~swapped, shown.x)
    return shown.assign(x=x, y=y, series=shown.series.map(in_tokens))


def _is_sparse(points: pd.DataFrame) -> pd.Series:
    """Of measured points whether their panel has a number at less than half of its places, or at
    one of several.
    """
    panel = points.y.notna().groupby([points.device, points.panel])
    is_single = (panel.transform("sum") < 2) & (panel.transform("size") > 1)
    return (points.source == "measured") & (is_single | (panel.transform("mean") < 0.5))


def _telling(points: pd.DataFrame) -> pd.DataFrame:
    """Without sparse panels, and of what is simulated the first line of every GPU and model."""
    method = points.get("method", pd.Series("", points.index)).fillna("")
    level = points.get("level", pd.Series("", points.index)).fillna("")
    rank = 2 * (method != "") + (level != "profiled")
    keys = [points[name].fillna("") for name in ("hardware", "model", "panel") if name in points]
    best = rank.groupby(keys).transform("min") if keys else rank
    is_first = (points.source != "simulated") | (rank == best)
    kept = points[points.y.notna() & is_first & ~_is_sparse(points)]
    return kept if len(kept) else points[points.y.notna()]


def _left_out(points: pd.DataFrame) -> str:
    """What `_telling` leaves out of the measured devices, in one line."""
    parts = []
    for device, own in points[_is_sparse(points)].groupby("device", sort=False):
        parts.append(f"{own.y.notna().sum()} of {len(own)} points on {device} measured")
    return f"Left out, too few to draw: {', '.join(parts)}" if parts else ""


def _rows(points: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Points of the rows of panels by title, the paper and its GPUs first; a measured device, whose
    panels and sizes are its own, gets a row for itself.
    """
    is_own = points.source == "measured"
    simulated = "paper and simulated" if (points.source == "paper").any() else "simulated"
    rows = {simulated: points[~is_own]} if (~is_own).any() else {}
    for device, own in points[is_own].groupby("device", sort=False):
        rows["\n".join(textwrap.wrap(f"measured on {device}", 30))] = own
    return rows


def _panel(
    ax: Axes, points: pd.DataFrame, look: Look, styles: Styles, lines: Mapping[str, Any]
) -> None:
    has_paper = (points.source == "paper").any()
    for (series, device), rows in points.groupby(["series", "device"], sort=False):
        colour, marker = styles[str(series)]
        ordered = rows.sort_values("x")
        style: dict[str, Any] = {"color": colour, "marker": marker}
        match str(rows.source.iloc[0]):
            case "paper":
                style |= {"linestyle": "", "fillstyle": "none", "zorder": 3}
            case "simulated":
                if has_paper and len(rows) > 1:  # the paper's markers, which it runs through, tell
                    style["marker"] = ""
                has_method = rows.get("method", pd.Series([""])).iloc[0]
                style |= {"linestyle": lines[str(device)], "linewidth": 0.8 if has_method else 1.3}
            case _:
                _intervals(ax, ordered, colour)
        ax.plot(ordered.x, ordered.y, markevery=math.ceil(len(rows) / MOST_MARKERS), **style)
    _scales(ax, points, look)


def _intervals(ax: Axes, rows: pd.DataFrame, colour: Any) -> None:
    if {"low", "high"} <= set(rows):
        ax.vlines(rows.x, rows.low, rows.high, color=colour, linewidth=0.8)


def _scales(ax: Axes, points: pd.DataFrame, look: Look) -> None:
    if look.log_x and points.x.min() > 0:
        ax.set_xscale("log", base=2)
        ax.xaxis.set_major_formatter("{x:g}")
    elif len(xs := np.unique(points.x)) <= MOST_TICKS and (
        len(xs) < 2 or np.diff(xs).min() >= NEAREST * np.ptp(xs)  # else names lie over each other
    ):
        ax.set_xticks(xs, [f"{x:g}" for x in xs])
    elif (xs == xs.round()).all():
        ax.xaxis.set_major_locator(MaxNLocator(7, integer=True))
    if look.log_y and points.y.min() > 0:
        ax.set_yscale("log")
        tick_in_steps(ax.yaxis)
    elif points.y.min() > 0 and points.y.max() > 2 * points.y.min():
        ax.set_ylim(bottom=0)  # heights are read; what lies close together is not


def _bars(ax: Axes, points: pd.DataFrame, devices: Sequence[str]) -> None:
    """A group of bars a series, one bar a device; hatches tell them apart without colour."""
    names = list(dict.fromkeys(points.series))
    own = [device for device in devices if device in set(points.device)]
    width = 0.8 / len(own)
    for i, device in enumerate(own):
        rows = points[points.device == device].drop_duplicates("series")
        rows = rows.set_index("series").reindex(names)
        places = np.arange(len(names)) + (i - (len(own) - 1) / 2) * width
        ax.bar(places, rows.y, width, **_bar_look(device, devices))
        _intervals(ax, rows.assign(x=places), "black")
    ax.set_xticks(range(len(names)), names)
    ax.grid(axis="x", visible=False)


def _bar_look(device: str, devices: Sequence[str]) -> dict[str, Any]:
    colours = ["white", *plt.get_cmap(COLOURS)(np.linspace(0.3, 1.0, 5))]
    i = devices.index(device) if "paper" in devices else devices.index(device) + 1
    style = {"facecolor": colours[i % len(colours)], "hatch": HATCHES[i % len(HATCHES)]}
    return {**style, "edgecolor": "black", "linewidth": 0.8}


def _source_lines(points: pd.DataFrame, lines: Mapping[str, Any]) -> list[Artist]:
    """What the kinds of line and marker mean."""
    black = partial(Line2D, [], [], color="black")
    keys: list[Artist] = [black(linestyle=style, label=device) for device, style in lines.items()]
    if (points.source == "paper").any():
        keys.insert(0, black(marker="o", fillstyle="none", linestyle="", label="paper"))
    if (points.source == "measured").any():
        keys.append(black(marker="o", label="measured, with its interval"))
    return keys


def _source_bars(points: pd.DataFrame) -> list[Artist]:
    sources = {str(row.device): row.source for row in points.drop_duplicates("device").itertuples()}
    return [
        Patch(
            label=f"measured on {device}" if source == "measured" else device,
            **_bar_look(device, list(sources)),
        )
        for device, source in sources.items()
    ]
