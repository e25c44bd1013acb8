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
from itertools import cycle
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator, NullFormatter

from sarathi_lab.results.plots.look import Look
from sarathi_lab.results.plots.sweeps import MARKERS, use_style

MOST_MARKERS = 22  # of a line: where the paper's points are dense, they would hide each other
LINES: Sequence[Any] = ("-", "--", (0, (1, 1)), "-.", (0, (5, 1, 1, 1, 1, 1)))
# for the colour-blind, and from dark to light without colour; its lightest is lost on white
COLOURS = "viridis"
HATCHES = ("", "//", "..", "xx", "\\\\", "++")
MOST_TICKS = 9  # values along x that are each named
PANEL = (3.3, 2.7)  # inches

Styles = Mapping[str, tuple[Any, str]]  # colour and marker by series


class Row(NamedTuple):
    """Panels that stand in a row: a device's own, or the paper's with what is simulated for its
    GPUs.
    """

    title: str
    points: pd.DataFrame


def draw(look: Look, points: pd.DataFrame) -> Figure:
    """One figure of the paper from its points in the columns of `figure.parquet`, one axes a panel.

    Columns `low` and `high`, where there are any, are the interval around y of what was measured.
    """
    use_style()
    shown = _shown(points, look)
    rows = _rows(shown)
    widest = max(row.points.panel.nunique() for row in rows)
    columns = min(look.columns, widest)
    places = [(row, panel) for row in rows for panel in _padded(row, columns)]
    size = (max(PANEL[0] * columns, 4.2) + 2.0, PANEL[1] * len(places) / columns + 0.9)
    canvas, grid = plt.subplots(
        len(places) // columns, columns, figsize=size, squeeze=False, layout="constrained"
    )
    styles = _styles(shown)
    lines = _lines(shown)
    for ax, (row, panel) in zip(grid.flat, places, strict=True):
        if panel is None:
            ax.set_axis_off()
            continue
        chosen = row.points[row.points.panel == panel]
        if look.is_bars:
            _bars(ax, chosen, list(dict.fromkeys(shown.device)))
        else:
            _panel(ax, chosen, panel, look, styles, lines)
        ax.set_title(
            "\n".join(filter(None, [row.title if len(rows) > 1 else "", look.panel(panel)]))
        )
        ax.set_xlabel(look.xs.get(panel, look.x))
        ax.set_ylabel(look.units.get(panel, look.y))
    canvas.suptitle(look.title)
    if not look.is_bars:
        keys = [_series_key(look.series_name(name), *style) for name, style in styles.items()]
        canvas.legend(handles=keys, loc="outside right center", title=look.legend)
    sources = _source_bars(shown) if look.is_bars else _source_lines(shown, lines)
    canvas.legend(handles=sources, loc="outside lower center", ncols=2)
    plt.close(canvas)  # callers hold it; an open figure would be drawn once more by a notebook
    return canvas


def _shown(points: pd.DataFrame, look: Look) -> pd.DataFrame:
    shown = points[points.y.notna() & ~points.panel.isin(look.left_out)]
    if look.series:
        shown = shown[shown.series.isin(look.series)]
    swapped = shown.panel.isin(look.is_swapped)
    return shown.assign(x=shown.x.where(~swapped, shown.y), y=shown.y.where(~swapped, shown.x))


def _rows(points: pd.DataFrame) -> list[Row]:
    """The paper and its GPUs first; a measured device, whose panels and sizes are its own, gets a
    row for itself.
    """
    is_own = points.source == "measured"
    rows = [Row("paper and simulated", points[~is_own])] if (~is_own).any() else []
    for device, own in points[is_own].groupby("device", sort=False):
        rows.append(Row("\n".join(textwrap.wrap(f"measured on {device}", 40)), own))
    return rows


def _padded(row: Row, columns: int) -> list[str | None]:
    """The row's panels, and None for the places that are left in its last line."""
    panels: list[str | None] = list(dict.fromkeys(row.points.panel))
    return panels + [None] * (-len(panels) % columns)


def _styles(points: pd.DataFrame) -> Styles:
    names = list(dict.fromkeys(points.series))
    colours = plt.get_cmap(COLOURS)(np.linspace(0.0, 0.85, max(2, len(names))))
    return {
        name: (colours[i], marker)
        for i, (name, marker) in enumerate(zip(names, cycle(MARKERS), strict=False))
    }


def _lines(points: pd.DataFrame) -> dict[str, Any]:
    """Line style by device that is not the paper; profiled solid, analytic dashed, counted instead
    of served dotted.
    """
    devices = [str(device) for device in dict.fromkeys(points.device[points.source == "simulated"])]
    return dict(zip(devices, cycle(LINES), strict=False))


def _panel(
    ax: Axes, points: pd.DataFrame, panel: str, look: Look, styles: Styles, lines: Mapping[str, Any]
) -> None:
    has_paper = (points.source == "paper").any()
    for (series, device), rows in points.groupby(["series", "device"], sort=False):
        colour, marker = styles[str(series)]
        ordered = rows.sort_values("x")
        look_of: dict[str, Any] = {
            "color": colour,
            "marker": marker,
            "markevery": math.ceil(len(rows) / MOST_MARKERS),
        }
        match str(rows.source.iloc[0]):
            case "paper":
                look_of |= {"linestyle": "", "fillstyle": "none", "zorder": 3}
            case "simulated":
                is_told_apart = (
                    has_paper and len(rows) > 1
                )  # by the paper's markers that it runs through
                look_of |= {
                    "linestyle": lines[str(device)],
                    "marker": "" if is_told_apart else marker,
                }
                look_of["linewidth"] = 0.8 if rows.get("method", pd.Series([""])).iloc[0] else 1.3
            case _:
                _intervals(ax, ordered, colour)
        ax.plot(ordered.x, ordered.y, **look_of)
    _scales(ax, points, look)


def _intervals(ax: Axes, rows: pd.DataFrame, colour: Any) -> None:
    if {"low", "high"} <= set(rows):
        ax.vlines(rows.x, rows.low, rows.high, color=colour, linewidth=0.8)


def _scales(ax: Axes, points: pd.DataFrame, look: Look) -> None:
    if look.log_x and points.x.min() > 0:
        ax.set_xscale("log", base=2)
        ax.xaxis.set_major_formatter("{x:g}")
    elif points.x.nunique() <= MOST_TICKS:
        ax.set_xticks(sorted(points.x.unique()), [f"{x:g}" for x in sorted(points.x.unique())])
    if look.log_y and points.y.min() > 0:
        ax.set_yscale("log")
        ax.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        ax.yaxis.set_major_formatter("{x:g}")
        ax.yaxis.set_minor_formatter(NullFormatter())
    elif points.y.min() > 0 and points.y.max() > 3:
        ax.set_ylim(bottom=0)  # heights are read; ratios near 1 are not


def _bars(ax: Axes, points: pd.DataFrame, devices: Sequence[str]) -> None:
    """A group of bars a series, one bar a device; hatches tell them apart without colour."""
    names = list(dict.fromkeys(points.series))
    own = [device for device in devices if device in set(points.device)]
    width = 0.8 / len(own)
    for i, device in enumerate(own):
        rows = (
            points[points.device == device]
            .drop_duplicates("series")
            .set_index("series")
            .reindex(names)
        )
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


def _series_key(name: str, colour: Any, marker: str) -> Artist:
    return Line2D([], [], color=colour, marker=marker, linestyle="-", linewidth=1.0, label=name)


def _source_lines(points: pd.DataFrame, lines: Mapping[str, Any]) -> list[Artist]:
    """What the kinds of line and marker mean."""
    keys: list[Artist] = []
    if (points.source == "paper").any():
        keys.append(
            Line2D([], [], color="black", marker="o", fillstyle="none", linestyle="", label="paper")
        )
    keys += [
        Line2D([], [], color="black", linestyle=style, label=device)
        for device, style in lines.items()
    ]
    if (points.source == "measured").any():
        keys.append(
            Line2D(
                [],
                [],
                color="black",
                marker="o",
                linestyle="-",
                label="measured, with its interval",
            )
        )
    return keys


def _source_bars(points: pd.DataFrame) -> list[Artist]:
    devices = [str(device) for device in dict.fromkeys(points.device)]
    sources = points.drop_duplicates("device").set_index("device").source
    names = {
        device: f"measured on {device}" if sources[device] == "measured" else device
        for device in devices
    }
    return [Patch(label=names[device], **_bar_look(device, devices)) for device in devices]
