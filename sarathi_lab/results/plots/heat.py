"""Heat maps: a number a cell by two settings, a panel for each value of a third.

Gains over another policy are blue where it gains and red where it loses, fully from `STRONGEST`
percent on; amounts are the darker the better. Grey cells were not run.
"""

from __future__ import annotations

from collections import Counter
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

from sarathi_lab.results.intervals import BAND
from sarathi_lab.results.plots import style
from sarathi_lab.results.plots.axes import LOG_SCALE, WIDE_RANGE
from sarathi_lab.results.plots.plot import HeatScale, PanelLayout, column_of, plot
from sarathi_lab.results.sweep_analysis import text

GREY = "0.82"  # of cells that were not run
GAINS = "RdBu"  # red loses, blue gains, for the colour-blind, too
AMOUNTS = "Blues"
STRONGEST = 30  # percent of gain or loss from which a colour is full
NOT_RUN = "not run"
FEW_ROWS = 3  # of panels, of which the last alone has the values along x
# Inches.
CELL_HEIGHT = 0.24
CELL_WIDTH = 0.55
LEAST_PANEL = 1.2  # width of a panel
LEAST_WIDTH = 6.0  # of the picture
LINE = 0.13  # height of a further line of a name
MARGIN = 1.0  # width of the colour bar and the labels


@dataclass(frozen=True)
class HeatRow:
    """A row of panels: `cells` with the settings, a `shade` and a `text`, and the `label` above."""

    cells: pd.DataFrame
    scale: HeatScale
    label: str = ""


def gain_scale(label: str) -> HeatScale:
    """Return the scale of gains in percent; what is worse is negative."""
    return HeatScale(label, Normalize(-STRONGEST, STRONGEST), GAINS, is_gain=True)


def amount_scale(
    values: pd.Series, label: str, *, is_less_better: bool, may_be_log: bool = True
) -> HeatScale:
    """Return the scale of amounts, logarithmic where they differ by more than `WIDE_RANGE` and it
    `may_be_log`.
    """
    cmap = f"{AMOUNTS}_r" if is_less_better else AMOUNTS
    low = float(values.min())
    high = float(values.max())
    if may_be_log and low > 0 and high / low > WIDE_RANGE:
        return HeatScale(f"{label}, {LOG_SCALE}", LogNorm(low, high), cmap)
    # Paler than half the map, so that equal amounts do not look extreme.
    spread = max(high - low, 0.25 * abs(high)) or 1.0
    return HeatScale(label, Normalize(low, low + spread), cmap)


@dataclass(frozen=True)
class _Layout:
    """The settings of a map with their values, and the sizes that follow, in inches.

    Attributes:
        x: setting along x.
        y: setting upwards.
        col: setting with a panel a value, None without one.
        along: values of x.
        upwards: values of y, from above.
        columns: values of `col`, [None] without it.
        has_named_rows: whether the values of y are names, which need no label.
    """

    x: str
    y: str
    col: str | None
    along: pd.Index
    upwards: pd.Index
    columns: Sequence[object]
    has_named_rows: bool

    @property
    def x_names(self) -> list[str]:
        """Return the texts of the values along x."""
        return list(map(text, self.along))

    @property
    def y_names(self) -> list[str]:
        """Return the texts of the values upwards, from above."""
        return list(map(text, self.upwards))

    @property
    def panel_width(self) -> float:
        """Return the width of a panel."""
        return CELL_WIDTH * len(self.along)

    @property
    def panel_height(self) -> float:
        """Return the height of a panel with the label above it."""
        num_further_lines = max(name.count("\n") for name in self.y_names)
        row_height = CELL_HEIGHT + LINE * num_further_lines
        return 0.5 + row_height * len(self.upwards)

    @property
    def upright_height(self) -> float:
        """Return the height of names along x that are written upright, being wider than a cell."""
        longest = style.LETTER * max(map(len, self.x_names))
        if longest <= CELL_WIDTH:
            return 0.0
        return longest

    @property
    def width(self) -> float:
        """Return the width of the picture."""
        lines = "\n".join(self.y_names).split("\n")
        names_width = style.LETTER * max(map(len, lines))
        panels_width = max(LEAST_PANEL, self.panel_width) * len(self.columns)
        width = MARGIN + names_width + panels_width
        return min(style.WIDTH, max(LEAST_WIDTH, width))


def _layout_of(cells: pd.DataFrame, x: str, y: str, col: str | None) -> _Layout:
    along = _in_order(cells[x])
    upwards = _in_order(cells[y])
    columns: Sequence[object] = [None]
    if col:
        columns = list(_in_order(cells[col]))
    has_named_rows = not pd.api.types.is_numeric_dtype(cells[y])
    if not has_named_rows:
        upwards = upwards[::-1]  # the largest is above
    return _Layout(x, y, col, along, upwards, columns, has_named_rows)


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
    every_cell = pd.concat([row.cells for row in rows])
    layout = _layout_of(every_cell, x, y, col)
    table = _table(rows, layout)
    num_columns = len(layout.columns)
    panels = list(product(range(len(rows)), layout.columns))
    height = layout.panel_height * len(rows) + layout.upright_height + 0.8
    grid = PanelLayout(panels, num_columns, (layout.width, height))
    figure, ax_of_panel = plot(table, x=x, y=y, hue="scale", kind="heat", grid=grid)
    axes = list(ax_of_panel.values())
    for ax in axes:  # also where nothing ran
        ax.grid(False)
        ax.spines[:].set_visible(False)
        ax.tick_params(length=0)
        ax.set(facecolor=GREY, xlim=(0, len(layout.along)), ylim=(len(layout.upwards), 0))

    axes_of_row = []
    for start in range(0, len(axes), num_columns):
        end = start + num_columns
        axes_of_row.append(axes[start:end])
    has_titles = col is not None
    for row, axes_beside in zip(rows, axes_of_row, strict=True):
        _label_row(axes_beside, row, layout, has_titles=has_titles)
        has_titles = False  # the columns are named above the first row
    ticked = axes_of_row[-1]
    if len(rows) > FEW_ROWS:  # the last row is far away
        ticked = axes
    for ax in ticked:
        _tick_along(ax, layout)
    _add_colour_bars(figure, rows, axes_of_row)

    keys: list[Artist] = []
    if any(row.scale.is_gain for row in rows):
        keys = _gain_keys()
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
        panels = [(number, column) for column in columns]
        scales = [row.scale] * len(row.cells)
        named = row.cells.assign(
            panel=column_of(panels, row.cells),
            scale=column_of(scales, row.cells),
        )
        tables.append(named)
    table = pd.concat(tables, ignore_index=True)
    # Repetitions share a cell, which can show only one of them.
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
            setting = style.short_name(str(layout.col))
            ax.set_title(f"{setting} {text(value)}", fontsize=9)
    first_ax = axes[0]
    label = row.label
    if has_titles:
        label += "\n"  # it is above the titles of the columns
    first_ax.set_title(label, loc="left", fontsize=9, linespacing=1.5)
    middles = np.arange(len(layout.upwards)) + 0.5
    first_ax.set_yticks(middles, layout.y_names, rotation=0)
    if not layout.has_named_rows:
        letters = int(layout.panel_height / style.LETTER)
        first_ax.set_ylabel(_setting(layout.y, letters))


def _tick_along(ax: Axes, layout: _Layout) -> None:
    """Write the values along x."""
    middles = np.arange(len(layout.along)) + 0.5
    rotation = 90 if layout.upright_height else 0
    ax.set_xticks(middles, layout.x_names, rotation=rotation)
    letters = int(layout.panel_width / style.LETTER)
    ax.set_xlabel(_setting(layout.x, letters))


def _setting(name: str, letters: int) -> str:
    """Return the label of a setting's axis that has room for so many letters."""
    label = style.axis_name(name)
    if len(label) > letters:
        return style.short_name(name)
    return label


def _in_order(values: pd.Series) -> pd.Index:
    """Return the values of a setting once: numbers sorted, names as they come."""
    once = values.drop_duplicates()
    if pd.api.types.is_numeric_dtype(once):
        once = once.sort_values()
    return pd.Index(once)


def _add_colour_bars(
    figure: Figure, rows: Sequence[HeatRow], axes_of_row: Sequence[Sequence[Axes]]
) -> None:
    """Add a bar for each scale of amounts, beside all rows that have it."""
    axes_of_scale: dict[HeatScale, list[Axes]] = {}
    num_rows: Counter[HeatScale] = Counter()
    for row, axes in zip(rows, axes_of_row, strict=True):
        if row.scale.is_gain:  # the legend explains its colours
            continue
        axes_of_scale.setdefault(row.scale, []).extend(axes)
        num_rows[row.scale] += 1
    for scale, axes in axes_of_scale.items():
        mappable = ScalarMappable(norm=scale.norm, cmap=scale.cmap)
        aspect = 20 * num_rows[scale]  # equally wide beside one row and several
        bar = figure.colorbar(mappable, ax=axes, aspect=aspect, pad=0.01)
        bar.outline.set_visible(False)
        if isinstance(scale.norm, LogNorm):
            style.tick_in_steps(bar.ax.yaxis)


def _gain_keys() -> list[Artist]:
    """Explain the colours of gains."""
    labels = {
        0.0: f"worse by {STRONGEST} % or more",
        0.5: f"within {100 * BAND:g} %",
        1.0: f"better by {STRONGEST} % or more",
    }
    cmap = plt.get_cmap(GAINS)
    keys: list[Artist] = []
    for share, label in labels.items():
        keys.append(Patch(facecolor=cmap(share), edgecolor="0.6", label=label))
    return keys
