"""Heat maps: a number a cell by two settings, a panel for each value of a third.

Gains over another policy are blue where it gains and red where it loses, fully from `STRONGEST`
percent on; amounts are the darker the better. Grey cells were not run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from sarathi_lab.results.plots import style
from sarathi_lab.results.plots.axes import LOG_SCALE, WIDE_RANGE
from sarathi_lab.results.plots.plot import HeatScale, PanelLayout, column_of, plot
from sarathi_lab.results.sweep_analysis import text

GREY = "0.82"  # of cells that were not run
GAINS = "RdBu"  # red loses, blue gains, for the colour-blind, too
AMOUNTS = "Blues"
STRONGEST = 30  # percent of gain or loss from which a colour is full
NEUTRAL = 2  # percent up to which a gain has no colour
NOT_RUN = "not run"
FEW_ROWS = 3  # of panels, of which the last alone has the values along x
CELL_HEIGHT, CELL_WIDTH, LEAST_PANEL, LEAST_WIDTH = 0.24, 0.55, 1.2, 6.0  # inches
LINE = 0.13  # inches, a further line of a name
MARGIN = 1.0  # inches, of the colour bar and the labels


@dataclass(frozen=True)
class HeatRow:
    """A row of panels: `cells` with the settings, a `shade` and a `text`, and the `label` above."""

    cells: pd.DataFrame
    scale: HeatScale
    label: str = ""


def gain_scale(label: str) -> HeatScale:
    """Return the scale of gains in percent; what is worse is negative."""
    return HeatScale(label, Normalize(-STRONGEST, STRONGEST), GAINS, is_gain=True)


def amount_scale(values: pd.Series, label: str, *, is_less_better: bool) -> HeatScale:
    """Return the scale of amounts, logarithmic where they differ by more than `WIDE_RANGE`."""
    cmap = f"{AMOUNTS}_r" if is_less_better else AMOUNTS
    low = float(values.min())
    high = float(values.max())
    if low > 0 and high / low > WIDE_RANGE:
        return HeatScale(f"{label}, {LOG_SCALE}", LogNorm(low, high), cmap)
    # Paler than half the map, so that equal amounts do not look extreme.
    spread = max(high - low, 0.25 * abs(high)) or 1.0
    return HeatScale(label, Normalize(low, low + spread), cmap)


@dataclass(frozen=True)
class _Layout:
    """The settings of a map with their values: `along` x, `upwards` from above, and a panel for
    each of `columns` ([None] without `col`).
    """

    x: str
    y: str
    col: str | None
    along: pd.Index
    upwards: pd.Index
    columns: Sequence[object]
    has_names: bool

    @property
    def panel_width(self) -> float:
        """Return inches."""
        return CELL_WIDTH * len(self.along)

    @property
    def panel_height(self) -> float:
        """Return inches, with the label above a row of panels."""
        num_lines = max(text(value).count("\n") for value in self.upwards)
        return 0.5 + (CELL_HEIGHT + LINE * num_lines) * len(self.upwards)

    @property
    def upright(self) -> float:
        """Return the inches of names along x that are written upright, being wider than a cell."""
        longest = style.LETTER * max(len(text(value)) for value in self.along)
        return longest if longest > CELL_WIDTH else 0.0

    @property
    def width(self) -> float:
        """Return the inches of the picture."""
        lines = "\n".join(map(text, self.upwards)).split("\n")
        names = style.LETTER * max(map(len, lines))
        width = MARGIN + names + max(LEAST_PANEL, self.panel_width) * len(self.columns)
        return min(style.WIDTH, max(LEAST_WIDTH, width))


def _layout_of(cells: pd.DataFrame, x: str, y: str, col: str | None) -> _Layout:
    has_names = not pd.api.types.is_numeric_dtype(cells[y])
    upwards = _in_order(cells[y])
    if not has_names:
        upwards = upwards[::-1]  # the largest is above
    columns = list(_in_order(cells[col])) if col else [None]
    return _Layout(x, y, col, _in_order(cells[x]), upwards, columns, has_names)


def heat_map(
    rows: Sequence[HeatRow],
    *,
    x: str,
    y: str,
    col: str | None = None,
    not_run: str = NOT_RUN,
    notes: Sequence[str] = (),
) -> Figure:
    """Draw `rows` of panels by the settings `x` (along), `y` (upwards) and `col` (a panel each).

    `not_run` explains grey cells and `notes` what else is in the cells, both in the legend.
    """
    layout = _layout_of(pd.concat([row.cells for row in rows]), x, y, col)
    table = _table(rows, layout)
    panels_in_order = list(product(range(len(rows)), layout.columns))
    height = layout.panel_height * len(rows) + layout.upright + 0.8
    grid = PanelLayout(panels_in_order, len(layout.columns), (layout.width, height))
    figure, axes_of = plot(table, x=x, y=y, hue="scale", kind="heat", grid=grid)
    axes = list(axes_of.values())
    for ax in axes:  # also where nothing ran
        ax.grid(False)
        ax.spines[:].set_visible(False)
        ax.tick_params(length=0)
        ax.set(facecolor=GREY, xlim=(0, len(layout.along)), ylim=(len(layout.upwards), 0))
    for number, row in enumerate(rows):
        beside = axes[number * grid.columns :][: grid.columns]
        _label_row(beside, row, layout, has_titles=number == 0 and col is not None)
    # Where there are many rows the last one is far away.
    num_ticked = len(axes) if len(rows) > FEW_ROWS else grid.columns
    for ax in axes[-num_ticked:]:
        _tick_along(ax, layout)
    _add_colour_bars(figure, axes, rows, grid.columns)
    keys = _gain_keys() if any(row.scale.is_gain for row in rows) else []
    num_cells = len(axes) * len(layout.along) * len(layout.upwards)
    if len(table) < num_cells:
        keys.append(Patch(facecolor=GREY, edgecolor="0.6", label=not_run))
    for note in notes:
        keys.append(Patch(facecolor="none", edgecolor="none", label=note))
    style.legend_below(figure, keys)
    return figure


def _table(rows: Sequence[HeatRow], layout: _Layout) -> pd.DataFrame:
    """Return the cells of all panels, each named by its row, from 0, and its column's value."""
    tables = []
    for number, row in enumerate(rows):
        columns: Sequence[object] = [None] * len(row.cells)
        if layout.col:
            columns = list(row.cells[layout.col])
        panels = column_of([(number, column) for column in columns], row.cells)
        scales = column_of([row.scale] * len(row.cells), row.cells)
        tables.append(row.cells.assign(panel=panels, scale=scales))
    table = pd.concat(tables, ignore_index=True)
    table = table.drop_duplicates(["panel", layout.x, layout.y], keep="last")
    table[layout.x] = pd.Categorical(table[layout.x], layout.along)
    table[layout.y] = pd.Categorical(table[layout.y], layout.upwards)
    return table


def _label_row(axes: Sequence[Axes], row: HeatRow, layout: _Layout, *, has_titles: bool) -> None:
    """Write the row's label, the values upwards, and over the first row names of its columns."""
    for ax, value in zip(axes, layout.columns, strict=True):
        ax.set_xticks([])
        ax.set_yticks([])
        if has_titles:
            ax.set_title(f"{style.short_name(str(layout.col))} {text(value)}", fontsize=9)
    blank = "\n" if has_titles else ""  # the label is above the titles of the columns
    axes[0].set_title(f"{row.label}{blank}", loc="left", fontsize=9, linespacing=1.5)
    names = list(map(text, layout.upwards))
    axes[0].set_yticks(np.arange(len(names)) + 0.5, names, rotation=0)
    if not layout.has_names:
        letters = int(layout.panel_height / style.LETTER)
        axes[0].set_ylabel(_setting(layout.y, letters))


def _tick_along(ax: Axes, layout: _Layout) -> None:
    """Write the values along x."""
    names = list(map(text, layout.along))
    rotation = 90 if layout.upright else 0
    ax.set_xticks(np.arange(len(names)) + 0.5, names, rotation=rotation)
    ax.set_xlabel(_setting(layout.x, int(layout.panel_width / style.LETTER)))


def _setting(name: str, letters: int) -> str:
    """Return the label of a setting's axis that has room for so many letters."""
    label = style.AXIS_NAMES.get(name, style.short_name(name))
    return label if len(label) <= letters else style.short_name(name)


def _in_order(values: pd.Series) -> pd.Index:
    """Return the values of a setting once: numbers sorted, names as they come."""
    once = values.drop_duplicates()
    if pd.api.types.is_numeric_dtype(once):
        once = once.sort_values()
    return pd.Index(once)


def _add_colour_bars(
    figure: Figure, axes: Sequence[Axes], rows: Sequence[HeatRow], num_columns: int
) -> None:
    """Add a bar for each scale of amounts, beside all rows that have it."""
    axes_of: dict[HeatScale, list[Axes]] = {}
    for number, row in enumerate(rows):
        beside = axes[number * num_columns :][:num_columns]
        axes_of.setdefault(row.scale, []).extend(beside)
    for scale, beside in axes_of.items():
        if scale.is_gain:
            continue
        mappable = ScalarMappable(norm=scale.norm, cmap=scale.cmap)
        num_rows = len(beside) // num_columns
        bar = figure.colorbar(mappable, ax=beside, aspect=20 * num_rows, pad=0.01)
        bar.outline.set_visible(False)
        if isinstance(scale.norm, LogNorm):
            style.tick_in_steps(bar.ax.yaxis)


def _gain_keys() -> list[Artist]:
    """Explain the colours of gains."""
    labels = {
        0.0: f"worse by {STRONGEST} % or more",
        0.5: f"within {NEUTRAL} %",
        1.0: f"better by {STRONGEST} % or more",
    }
    cmap = plt.get_cmap(GAINS)
    keys: list[Artist] = []
    for share, label in labels.items():
        keys.append(Patch(facecolor=cmap(share), edgecolor="0.6", label=label))
    return keys
