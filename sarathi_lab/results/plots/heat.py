"""Heat maps: a number a cell by two settings, a panel for each value of a third.

Gains over another policy are blue where it gains and red where it loses, fully from `STRONGEST`
percent on; amounts are the darker the better. Grey cells were not run.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from itertools import product
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from sarathi_lab.results.intervals import BAND
from sarathi_lab.results.plots import style
from sarathi_lab.results.plots.axes import is_wide
from sarathi_lab.results.plots.plot import HeatScale, PanelLayout, column_of, plot
from sarathi_lab.results.sweep_analysis import text

GREY = "0.82"  # of cells that were not run
GAINS = "RdBu"  # red loses, blue gains, for the colour-blind, too
AMOUNTS = "Blues"
STRONGEST = 30  # percent of gain or loss from which a colour is full
GAIN = HeatScale(Normalize(-STRONGEST, STRONGEST), GAINS)  # in percent; what is worse is negative
NOT_RUN = "not run"
# Inches.
CELL_HEIGHT = 0.24
CELL_WIDTH = 0.55
LABELS = 0.9  # height of a panel's title and of the names along x
LEAST_WIDTH = 6.0  # of the picture
MARGIN = 0.6  # width of a label upwards


def amount_scale(values: pd.Series, *, is_less_better: bool, may_be_log: bool) -> HeatScale:
    """Return the scale of amounts, logarithmic where they differ by more than `WIDE_RANGE` and it
    `may_be_log`.
    """
    cmap = AMOUNTS
    if is_less_better:
        cmap = f"{AMOUNTS}_r"
    low = float(values.min())
    high = float(values.max())
    if may_be_log and is_wide(values):
        return HeatScale(LogNorm(low, high), cmap)
    # Paler than half the map, so that equal amounts do not look extreme.
    least_spread = 0.25 * abs(high)
    spread = max(high - low, least_spread) or 1.0
    norm = Normalize(low, low + spread)
    return HeatScale(norm, cmap)


def heat_map(
    cells: pd.DataFrame,
    *,
    x: str,
    y: str,
    col: str | None = None,
    not_run: str = NOT_RUN,
    notes: Sequence[str] = (),
) -> Figure:
    """Draw a row of panels for each `row` of the cells, with a panel for each value of `col`.

    Args:
        cells: The settings of each cell, its `shade` and `text`, its `scale`, and the `row` of
            panels that it is in, by the label above these.
        x: Setting along x.
        y: Setting upwards.
        col: Setting with panels beside each other.
        not_run: Explains grey cells.
        notes: Explain what else is in the cells.
    """
    labels = list(cells["row"].unique())
    along = _in_order(cells[x])
    upwards = _in_order(cells[y])
    is_number_upwards = pd.api.types.is_numeric_dtype(cells[y])
    if is_number_upwards:
        upwards = upwards[::-1]  # the largest is above
    columns: Sequence[object] = [""]
    column_of_cell: Sequence[object] = [""] * len(cells)
    if col:
        columns = list(_in_order(cells[col]))
        column_of_cell = list(cells[col])
    panels = list(product(labels, columns))
    num_cells = len(panels) * len(along) * len(upwards)
    panel_of_cell = zip(cells["row"], column_of_cell, strict=True)
    table = cells.assign(panel=column_of(panel_of_cell, cells))
    # Repetitions share a cell, which can show only one of them.
    table = table.drop_duplicates(["panel", x, y], keep="last")
    table[x] = pd.Categorical(table[x], along)
    table[y] = pd.Categorical(table[y], upwards)
    x_names = list(map(text, along))
    y_names = list(map(text, upwards))
    size = _size(x_names, y_names, len(labels), len(columns))
    grid = PanelLayout(panels, len(columns), size)
    figure, ax_of_panel = plot(
        table,
        x=x,
        y=y,
        hue="scale",
        kind="heat",
        grid=grid,
    )

    for label, column in panels:
        ax = ax_of_panel[label, column]
        _label_cells(ax, x_names, y_names)
        letters = style.inches_wide(ax) / style.LETTER
        x_label = style.axis_name(x)
        in_lines = textwrap.fill(x_label, int(letters))
        ax.set_xlabel(in_lines)
        if col:
            setting = style.short_name(col)
            ax.set_title(f"{setting} {text(column)}", fontsize=9)
            label += "\n"  # it is above the titles of the columns
        if column != columns[0]:
            ax.set_yticks([])
            continue
        ax.set_title(label, loc="left", fontsize=9, linespacing=1.5)
        if is_number_upwards:  # names need no label
            y_label = style.short_name(y)
            ax.set_ylabel(y_label)
    if len(table) == num_cells:
        not_run = ""
    keys = _keys(table, notes, not_run)
    style.legend_below(figure, keys)
    return figure


def _in_order(values: pd.Series) -> pd.Index:
    """Return the values of a setting once: numbers sorted, names as they come."""
    once = values.drop_duplicates()
    if pd.api.types.is_numeric_dtype(once):
        once = once.sort_values()
    return pd.Index(once)


def _size(
    along: Sequence[str], upwards: Sequence[str], num_rows: int, num_columns: int
) -> tuple[float, float]:
    """Return the inches of a picture whose panels have cells for these names."""
    width_of_names = _inches(upwards)
    num_cells_beside = num_columns * len(along)
    width_of_cells = CELL_WIDTH * num_cells_beside
    width = MARGIN + width_of_names + width_of_cells
    width = max(LEAST_WIDTH, width)
    width = min(style.WIDTH, width)  # of a page, where cells get narrower
    height_of_cells = CELL_HEIGHT * len(upwards)
    height_of_panel = LABELS + height_of_cells
    if _are_upright(along):
        height_of_panel += _inches(along)
    height = num_rows * height_of_panel + 0.5
    return width, height


def _inches(names: Sequence[str]) -> float:
    """Return the length of the longest name."""
    letters = max(map(len, names))
    return style.LETTER * letters


def _are_upright(names: Sequence[str]) -> bool:
    """Return whether names along x are written upright, being wider than a cell."""
    return _inches(names) > CELL_WIDTH


def _label_cells(ax: Axes, along: Sequence[str], upwards: Sequence[str]) -> None:
    """Write the values of both settings beside the cells, which are grey where nothing ran."""
    ax.grid(False)
    ax.spines[:].set_visible(False)
    ax.tick_params(length=0)
    ax.set_facecolor(GREY)
    ax.set_xlim(0, len(along))
    ax.set_ylim(len(upwards), 0)
    rotation = 0
    if _are_upright(along):
        rotation = 90
    middles = np.arange(len(along)) + 0.5
    ax.set_xticks(middles, along, rotation=rotation)
    middles = np.arange(len(upwards)) + 0.5
    ax.set_yticks(middles, upwards)


def _keys(cells: pd.DataFrame, notes: Sequence[str], not_run: str) -> list[Artist]:
    """Explain the colours of gains, grey cells (`not_run`, "" without any) and what is noted."""
    colours: dict[str, Any] = {}  # of matplotlib
    is_gain = cells["scale"] == GAIN
    if is_gain.any():
        shades = plt.get_cmap(GAINS)
        band = 100 * BAND
        colours[f"worse by {STRONGEST} % or more"] = shades(0.0)
        colours[f"within {band:g} %"] = shades(0.5)
        colours[f"better by {STRONGEST} % or more"] = shades(1.0)
    if not_run:
        colours[not_run] = GREY
    keys: list[Artist] = []
    for label, colour in colours.items():
        square = Patch(facecolor=colour, edgecolor="0.6", label=label)
        keys.append(square)
    for note in notes:
        text_alone = Patch(facecolor="none", edgecolor="none", label=note)
        keys.append(text_alone)
    return keys
