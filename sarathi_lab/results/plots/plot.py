"""The one function that draws: panels of lines, points, bars or cells, from the rows of a table.

Sweeps, figures, maps, searches, boards and replays differ in how rows, looks and labels come about.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, Literal

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from sarathi_lab.results.plots import style

Kind = Literal["line", "bar", "heat"]
Dash = str | tuple[int, tuple[float, ...]]  # of matplotlib's line styles
MOST_MARKERS = 22  # on a line
BAND = 0.12  # opacity of the interval of a line across
UNSTEADY = "x"  # marker of runs that are not steady
UNSTEADY_RUNS = "not steady: waits depend on the length of the run"
FONT = 7.0  # points, of a cell's number
DARK = 0.45  # luminance below which a cell's text is white
LUMINANCE = (0.2126, 0.7152, 0.0722)  # of red, green and blue


@dataclass(frozen=True)
class Look:
    """How a series is drawn, and its name in the legend."""

    name: str
    colour: str
    dash: Dash = "-"
    marker: str = ""
    size: float = 6.0  # points, of the marker
    is_hollow: bool = False
    drawstyle: str = "default"  # or steps-pre and steps-post of matplotlib
    is_thinned: bool = False  # to some markers where points are dense

    def key(self) -> Line2D:
        """Return the series' key for a legend."""
        return Line2D([], [], label=self.name, **self.marks())

    def marks(self) -> dict[str, Any]:
        """Return matplotlib's settings of the line."""
        marks: dict[str, Any] = {
            "color": self.colour,
            "ls": self.dash,
            "marker": self.marker,
            "markersize": self.size,
            "drawstyle": self.drawstyle,
        }
        if self.is_hollow:
            marks["fillstyle"] = "none"
        return marks


@dataclass(frozen=True)
class HeatScale:
    """What a cell's colour stands for, in a colour map of matplotlib."""

    norm: Normalize
    cmap: str


@dataclass(frozen=True)
class PanelLayout:
    """Where panels are: `panels` row by row in `columns`, None for a place that stays empty.

    `size` is that of the picture in inches, and `shares` are options of `plt.subplots`.
    """

    panels: Sequence[Hashable | None]
    columns: int
    size: tuple[float, float]
    shares: Mapping[str, object] = field(default_factory=dict)


def plot(
    rows: pd.DataFrame,
    *,
    x: str,
    y: str = "value",
    hue: str = "look",
    col: str = "panel",
    kind: Kind = "line",
    grid: PanelLayout,
) -> tuple[Figure, dict[Hashable, Axes]]:
    """Draw a table, without titles, labels and legend.

    Args:
        rows: A row for each mark. Where they are there, `low` and `high` are the interval of the
            value, `is_unsteady` rows are crossed, and such that are not `is_decided` are hollow.
        x: Column of what is along x. A line crosses the panel where it is NaN.
        y: Column of what is upwards. If it is not "value", intervals are along x.
        hue: Column of the `Look` of each row; in a heat map of its `HeatScale`.
        col: Column that names the panel of each row.
        kind: A "line" (or points, by its look), a "bar" of the row's `width` (rows without one are
            points), or "heat": cells of categories x and y with a `shade` and a `text`.
        grid: The panels in their places.

    Returns:
        The figure, and its axes by panel.
    """
    num_rows = max(1, math.ceil(len(grid.panels) / grid.columns))
    figure, every_ax = style.panels(num_rows, grid.columns, grid.size, **grid.shares)
    axes = {}
    # The last row may have fewer panels than columns: it is filled with None.
    for ax, name in zip_longest(every_ax, grid.panels):
        if name is None:
            ax.set_axis_off()
            continue
        axes[name] = ax
        panel = _Panel(ax, x, y)
        is_in_panel = rows[col].isin([name])  # compares tuples as one value, which == does not
        in_panel = rows[is_in_panel]
        for _, marks in in_panel.groupby(hue, sort=False):
            look = marks[hue].iloc[0]
            panel.draw(kind, marks, look)
    return figure, axes


def column_of(values: Iterable[object], rows: pd.DataFrame) -> pd.Series:
    """Return objects, such as tuples, as a column of these rows."""
    return pd.Series(list(values), rows.index, dtype=object)


def styled(rows: pd.DataFrame, look: Look) -> pd.DataFrame:
    """Return rows that are all drawn by one `look`."""
    looks = [look] * len(rows)
    return rows.assign(look=column_of(looks, rows))


def distribution(values: pd.Series) -> pd.DataFrame:
    """Return the rows of a distribution: the share (`value`) of values up to each one (`at`).

    Their look should have `steps-post`.
    """
    in_order = values.dropna().sort_values()
    numbers = in_order.to_numpy(float)
    least = numbers[:1]
    at = np.concatenate([least, numbers])  # it rises from nothing at the first value
    counts = np.arange(len(at))
    num_values = max(1, len(numbers))
    shares = counts / num_values
    return pd.DataFrame({"at": at, "value": shares})


def _error_bars(rows: pd.DataFrame, y: str) -> dict[str, Any]:
    """Return matplotlib's settings of the intervals, along the axis that has the value."""
    if "low" not in rows or rows["low"].isna().all():
        return {}
    # A length is not negative: a median may lie outside of its interval by rounding.
    below = rows["value"] - rows["low"]
    above = rows["high"] - rows["value"]
    lengths = [
        below.clip(lower=0.0),
        above.clip(lower=0.0),
    ]
    side = "xerr"
    if y == "value":
        side = "yerr"
    return {side: lengths, "elinewidth": 0.8}


@dataclass(frozen=True)
class _Panel:
    """A panel, and the columns of what is along x and upwards."""

    ax: Axes
    x: str
    y: str

    def draw(self, kind: Kind, rows: pd.DataFrame, look: Any) -> None:
        """Draw rows by their `Look`, in a heat map by their `HeatScale`."""
        if kind == "heat":
            self._draw_cells(rows, look)
        elif kind == "bar":
            self._draw_bars(rows, look)
        else:
            is_across = rows[self.x].isna()
            self._draw_across(rows[is_across], look)
            self._draw_points(rows[~is_across], look)

    def _draw_bars(self, rows: pd.DataFrame, look: Look) -> None:
        is_point = rows["width"].isna()
        bars = rows[~is_point]
        at = bars[self.x]
        height = bars[self.y]
        self.ax.bar(at, height, bars["width"], color=look.colour)
        low = bars["low"]
        high = bars["high"]
        self.ax.vlines(at, low, high, color="black", linewidth=0.9)
        points = rows[is_point]
        self._draw_points(points, look)

    def _draw_across(self, rows: pd.DataFrame, look: Look) -> None:
        """Draw lines of what has no place along x, with the bands of their intervals."""
        for row in rows.to_dict("records"):
            value = row[self.y]
            self.ax.axhline(value, color=look.colour, ls=look.dash)
            low = row.get("low", math.nan)
            if not math.isnan(low):
                self.ax.axhspan(
                    low,
                    row["high"],
                    color=look.colour,
                    alpha=BAND,
                    lw=0,
                )

    def _draw_points(self, rows: pd.DataFrame, look: Look) -> None:
        """Draw a line through points with their intervals, and the marks of some points."""
        if rows.empty:
            return
        marks = look.marks()
        if not look.marker and len(rows) == 1:
            marks["marker"] = "o"  # a line of one point cannot be seen
        if look.is_thinned:
            marks["markevery"] = math.ceil(len(rows) / MOST_MARKERS)
        marks |= _error_bars(rows, self.y)
        self.ax.errorbar(
            rows[self.x],
            rows[self.y],
            label=look.name,
            capsize=2,
            zorder=3,
            **marks,
        )
        if "is_unsteady" in rows:
            is_unsteady = rows["is_unsteady"]
            self._mark(rows[is_unsteady], color="black", marker=UNSTEADY, zorder=5)
        if "is_decided" in rows:
            is_decided = rows["is_decided"]
            self._mark(
                rows[~is_decided],
                color=look.colour,
                marker=look.marker or "o",
                markerfacecolor="w",
                zorder=4,
            )

    def _mark(self, rows: pd.DataFrame, **marks: Any) -> None:
        """Draw markers over points, if there are any."""
        if len(rows):
            self.ax.plot(rows[self.x], rows[self.y], ls="", **marks)

    def _draw_cells(self, cells: pd.DataFrame, scale: HeatScale) -> None:
        """Draw a number in each cell, the first category of y above.

        Seaborn's heat map would lay out the whole picture again for every panel.
        """
        columns = cells[self.x].cat
        rows = cells[self.y].cat
        size = (len(rows.categories), len(columns.categories))
        shades = np.full(size, np.nan)
        shades[rows.codes, columns.codes] = cells["shade"]
        cmap = plt.get_cmap(scale.cmap)
        self.ax.pcolormesh(
            np.ma.masked_invalid(shades),
            cmap=cmap,
            norm=scale.norm,
            edgecolors="white",
            linewidth=0.5,
        )
        shade_of_cell = cells["shade"].to_numpy(float)
        rgba = cmap(scale.norm(shade_of_cell))
        luminance = rgba[:, :3] @ LUMINANCE
        colours = np.where(luminance < DARK, "white", "black")
        cell_texts = zip(columns.codes, rows.codes, cells["text"], colours, strict=True)
        for column, row, text, colour in cell_texts:
            self.ax.text(
                column + 0.5,
                row + 0.5,
                text,
                color=str(colour),
                ha="center",
                va="center",
                fontsize=FONT,
            )
