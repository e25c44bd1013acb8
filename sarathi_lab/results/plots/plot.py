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
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from sarathi_lab.results.plots import style

Kind = Literal["line", "bar", "heat"]
Dash = str | tuple[int, tuple[float, ...]]  # of matplotlib's line styles
MOST_MARKERS = 22  # on a line
BAND = 0.12  # opacity of the interval of a line across
UNSTEADY = "x"  # marker of runs that are not steady
UNSTEADY_RUNS = "not steady: waits depend on the length of the run"
FONT, NARROW_FONT = 8.0, 6.5  # points
LETTER_SHARE = 0.62  # of a font's height that a letter is wide
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
    is_filled: bool = False  # from the axis up to the line

    def key(self) -> Artist:
        """Return the series' key for a legend."""
        if self.is_filled:
            return Patch(color=self.colour, label=self.name)
        return Line2D([], [], label=self.name, **self.marks())

    def marks(self) -> dict[str, Any]:
        """Return matplotlib's settings of the line."""
        marks: dict[str, Any] = {"color": self.colour, "ls": self.dash, "marker": self.marker}
        marks |= {"markersize": self.size, "drawstyle": self.drawstyle}
        if self.is_hollow:
            marks["fillstyle"] = "none"
        return marks


@dataclass(frozen=True)
class HeatScale:
    """What a cell's colour stands for; `label` names the quantity in the rows' labels."""

    label: str
    norm: Normalize
    cmap: str
    is_gain: bool = False


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
    figure, places = style.panels(num_rows, grid.columns, grid.size, **grid.shares)
    axes: dict[Hashable, Axes] = {}
    for ax, panel in zip_longest(places, grid.panels):
        if panel is None:
            ax.set_axis_off()
            continue
        axes[panel] = ax
        shown = rows[rows[col].isin([panel])]
        for _, marks in shown.groupby(hue, sort=False):
            look = marks[hue].iloc[0]
            if kind == "heat":
                _draw_cells(ax, marks, x, y, look)
            elif kind == "bar":
                _draw_bars(ax, marks, x, y, look)
            else:
                _draw_line(ax, marks, x, y, look)
    return figure, axes


def column_of(values: Iterable[object], rows: pd.DataFrame) -> pd.Series:
    """Return objects, such as tuples, as a column of these rows."""
    return pd.Series(list(values), rows.index, dtype=object)


def styled(rows: pd.DataFrame, look: Look) -> pd.DataFrame:
    """Return rows that are all drawn by one `look`."""
    return rows.assign(look=column_of([look] * len(rows), rows))


def distribution(values: pd.Series) -> pd.DataFrame:
    """Return the rows of a distribution: the share (`value`) of values up to each one (`at`).

    Their look should have `steps-post`.
    """
    ordered = values.dropna().sort_values().to_numpy(float)
    at = np.concatenate([ordered[:1], ordered])  # it rises from nothing at the first value
    shares = np.arange(len(at)) / max(1, len(ordered))
    return pd.DataFrame({"at": at, "value": shares})


def _draw_line(ax: Axes, rows: pd.DataFrame, x: str, y: str, look: Look) -> None:
    is_across = rows[x].isna() & rows[y].notna()
    _draw_across(ax, rows[is_across], y, look)
    _draw_points(ax, rows[~is_across], x, y, look)


def _draw_bars(ax: Axes, rows: pd.DataFrame, x: str, y: str, look: Look) -> None:
    bars = rows.dropna(subset="width")
    ax.bar(bars[x], bars[y], bars["width"], color=look.colour)
    ax.vlines(bars[x], bars["low"], bars["high"], color="black", linewidth=0.9)
    _draw_points(ax, rows[rows["width"].isna()], x, y, look)


def _draw_across(ax: Axes, rows: pd.DataFrame, y: str, look: Look) -> None:
    """Draw lines of what has no place along x, with the bands of their intervals."""
    for _, row in rows.iterrows():
        ax.axhline(row[y], color=look.colour, ls=look.dash)
        if row.get("is_unsteady", False):
            ax.plot([0.97], [row[y]], transform=ax.get_yaxis_transform(), **crosses())
        if not math.isnan(row.get("low", math.nan)):
            ax.axhspan(row["low"], row["high"], color=look.colour, alpha=BAND, lw=0)


def _draw_points(ax: Axes, rows: pd.DataFrame, x: str, y: str, look: Look) -> None:
    """Draw a line through points with their intervals."""
    if rows.empty:
        return
    marks = look.marks()
    if not look.marker and len(rows) == 1:
        marks["marker"] = "o"  # a line of one point cannot be seen
    marks |= {"zorder": 3, "label": look.name}
    if look.is_thinned:
        marks["markevery"] = math.ceil(len(rows) / MOST_MARKERS)
    along = rows[x].to_numpy(float)
    upwards = rows[y].to_numpy(float)
    if look.is_filled:
        ax.fill_between(along, upwards, color=look.colour, linewidth=0)
        return
    if "low" in rows and rows["low"].notna().any():
        values = rows["value"]
        below = (values - rows["low"]).clip(lower=0.0)
        above = (rows["high"] - values).clip(lower=0.0)
        side = "yerr" if y == "value" else "xerr"
        marks |= {side: [below, above], "elinewidth": 0.8}
    ax.errorbar(along, upwards, capsize=2, **marks)
    if "is_unsteady" in rows and rows["is_unsteady"].any():
        is_unsteady = rows["is_unsteady"].to_numpy(bool)
        ax.plot(along[is_unsteady], upwards[is_unsteady], **crosses())
    if "is_decided" in rows and not rows["is_decided"].all():
        is_open = ~rows["is_decided"].to_numpy(bool)
        hollow: dict[str, Any] = {"color": look.colour, "markerfacecolor": "w", "zorder": 4}
        ax.plot(along[is_open], upwards[is_open], look.marker or "o", **hollow)


def crosses() -> dict[str, Any]:
    """Return matplotlib's settings of the marks of runs that are not steady."""
    return {"color": "black", "marker": UNSTEADY, "ls": "", "zorder": 5}


def _draw_cells(ax: Axes, cells: pd.DataFrame, x: str, y: str, scale: HeatScale) -> None:
    """Draw a number in each cell, the first category of y above.

    Seaborn's heat map would lay out the whole picture again for every panel.
    """
    cmap = plt.get_cmap(scale.cmap)
    num_columns = len(cells[x].cat.categories)
    shades = np.full((len(cells[y].cat.categories), num_columns), np.nan)
    letters = max(1, cells["text"].str.len().max())
    width = 72 * style.inches_wide(ax) / num_columns  # points
    font = min(FONT, max(NARROW_FONT, width / letters / LETTER_SHARE))
    for column, row, shade, number in zip(
        cells[x].cat.codes, cells[y].cat.codes, cells["shade"], cells["text"], strict=True
    ):
        shades[row, column] = shade
        red, green, blue, _ = cmap(scale.norm(shade))
        luminance = float(np.dot((red, green, blue), LUMINANCE))
        look: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": font}
        look["color"] = "white" if luminance < DARK else "black"
        ax.text(column + 0.5, row + 0.5, number, **look)
    drawn = np.ma.masked_invalid(shades)
    ax.pcolormesh(drawn, cmap=cmap, norm=scale.norm, edgecolors="white", linewidth=0.5)
