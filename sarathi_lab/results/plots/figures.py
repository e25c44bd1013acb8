"""Draws the paper's figures in one style: the paper's points, what is simulated, and what each
device measured.

Everything can be told apart without colour: a series has its own marker, a source its own line. The
paper's points are hollow, simulated ones a line, measured ones filled with their interval, in a row
of panels per device.
"""

from __future__ import annotations

import math
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

from sarathi_lab.results.plots.look import Look
from sarathi_lab.results.plots.style import finished, marker, panels, tick_in_steps

MOST_MARKERS = 22  # of a line: where the paper's points are dense, they would hide each other
LINES: Sequence[Any] = ("-", "--", (0, (1, 1)), "-.", (0, (5, 1, 1, 1, 1, 1)))
# for the colour-blind, and from dark to light without colour; its lightest is lost on white
COLOURS = "viridis"
HATCHES = ("", "//", "..", "xx", "\\\\", "++")
MOST_TICKS = 9  # values along x that are each named
NEAREST = 0.06  # of the axis, between two that are
PANEL = (3.3, 2.7)  # inches

Styles = Mapping[str, tuple[Any, str]]  # colour and marker by series


def draw(look: Look, points: pd.DataFrame) -> Figure:
    """One figure of the paper from its points in the columns of `figure.parquet`, one axes a panel.

    Columns `low` and `high`, where there are any, are the interval around y of what was measured.
    """
    shown = _shown(points, look)
    rows = _rows(shown)
    columns = min(look.columns, max(own.panel.nunique() for own in rows.values()))
    places: list[tuple[str, str | None]] = []
    for title, own in rows.items():
        names = list(dict.fromkeys(own.panel))
        left = -len(names) % columns  # in the last line of the row
        places += [(title, name) for name in names + [None] * left]
    num_lines = len(places) // columns
    size = (max(PANEL[0] * columns, 4.2) + 2.0, PANEL[1] * num_lines + 0.9)
    canvas, axes = panels(num_lines, columns, size)
    series = list(dict.fromkeys(shown.series))
    colours = plt.get_cmap(COLOURS)(np.linspace(0.0, 0.85, max(2, len(series))))
    styles = {name: (colours[i], marker(i)) for i, name in enumerate(series)}
    # By device: profiled solid, analytic dashed, counted instead of served dotted.
    devices = map(str, shown.device[shown.source == "simulated"].unique())
    lines = dict(zip(devices, cycle(LINES), strict=False))
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
        ax.set_ylabel(look.units.get(panel, look.y))
    canvas.suptitle(look.title)
    if not look.is_bars:
        keys = [
            Line2D([], [], color=colour, marker=marker, linewidth=1.0, label=look.series_name(name))
            for name, (colour, marker) in styles.items()
        ]
        canvas.legend(handles=keys, loc="outside right center", title=look.legend)
    sources = _source_bars(shown) if look.is_bars else _source_lines(shown, lines)
    canvas.legend(handles=sources, loc="outside lower center", ncols=2)
    return finished(canvas)


def _shown(points: pd.DataFrame, look: Look) -> pd.DataFrame:
    shown = points[points.y.notna() & ~points.panel.isin(look.left_out)]
    if look.series:
        shown = shown[shown.series.isin(look.series)]
    swapped = shown.panel.isin(look.is_swapped)
    return shown.assign(x=shown.x.where(~swapped, shown.y), y=shown.y.where(~swapped, shown.x))


def _rows(points: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Points of the rows of panels by title, the paper and its GPUs first; a measured device, whose
    panels and sizes are its own, gets a row for itself.
    """
    is_own = points.source == "measured"
    rows = {"paper and simulated": points[~is_own]} if (~is_own).any() else {}
    for device, own in points[is_own].groupby("device", sort=False):
        rows["\n".join(textwrap.wrap(f"measured on {device}", 40))] = own
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
    elif len(xs := np.unique(points.x)) <= MOST_TICKS and not _collide(xs):
        ax.set_xticks(xs, [f"{x:g}" for x in xs])
    if look.log_y and points.y.min() > 0:
        ax.set_yscale("log")
        tick_in_steps(ax.yaxis)
    elif points.y.min() > 0 and points.y.max() > 3:
        ax.set_ylim(bottom=0)  # heights are read; ratios near 1 are not


def _collide(xs: np.ndarray) -> bool:
    """Whether their names would lie over each other."""
    return len(xs) > 1 and float(np.diff(xs).min()) < NEAREST * float(np.ptp(xs))


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
