"""Heat maps: a number a cell by two settings, a panel for each value of a third.

Gains over another policy are blue where it gains and red where it loses, fully from `STRONGEST`
percent on; amounts are the darker the better. Grey cells were not run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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

GREY = "0.82"
GAINS = "RdBu"  # red loses, blue gains, for the colour-blind, too
AMOUNTS = "Blues"
STRONGEST = 30  # percent of gain or loss from which a colour is full
NEUTRAL = 2  # percent up to which a gain has no colour
NOT_RUN = "not run"
FEW_ROWS = 3  # of panels, of which the last alone has the values along x
DARK = 0.45  # luminance below which a cell's text is white
LUMINANCE = (0.2126, 0.7152, 0.0722)  # of red, green and blue
CELL_HEIGHT, CELL_WIDTH, LEAST_WIDTH = 0.24, 0.55, 6.0  # inches
LINE = 0.13  # inches, a further line of a name
FONT, NARROW_FONT = 8.0, 6.5  # points; a letter is about 0.6 of them wide


@dataclass(frozen=True)
class HeatScale:
    """What a cell's colour stands for; `label` names the quantity in the rows' labels."""

    label: str
    norm: Normalize
    cmap: str
    is_gain: bool = False


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
    low, high = float(values.min()), float(values.max())
    if low > 0 and high / low > WIDE_RANGE:
        return HeatScale(f"{label}, {LOG_SCALE}", LogNorm(low, high), cmap)
    # Paler than half the map, so that equal amounts do not look extreme.
    spread = max(high - low, 0.25 * abs(high)) or 1.0
    return HeatScale(label, Normalize(low, low + spread), cmap)


@dataclass(frozen=True)
class Layout:
    """The settings of a map with their values: `along` x, `upwards` y and a panel for each of
    `columns` ([None] without `col`).
    """

    x: str
    y: str
    col: str | None
    along: Sequence[Any]
    upwards: Sequence[Any]
    columns: Sequence[Any]
    has_names: bool

    @classmethod
    def of(cls, cells: pd.DataFrame, x: str, y: str, col: str | None) -> Layout:
        upwards = _in_order(cells[y])
        has_names = not _is_number(cells[y])
        if has_names:
            upwards.reverse()  # they are read from above
        columns = _in_order(cells[col]) if col else [None]
        return cls(x, y, col, _in_order(cells[x]), upwards, columns, has_names)

    @property
    def panel_width(self) -> float:
        """Return inches."""
        return CELL_WIDTH * len(self.along)

    @property
    def panel_height(self) -> float:
        """Return inches, with the label above a row of panels."""
        num_lines = max(_text(value).count("\n") for value in self.upwards)
        return 0.5 + (CELL_HEIGHT + LINE * num_lines) * len(self.upwards)

    @property
    def upright(self) -> float:
        """Return the inches of names along x that are written upright, being wider than a cell."""
        longest = style.LETTER * max(len(_text(value)) for value in self.along)
        return longest if longest > CELL_WIDTH else 0.0

    @property
    def width(self) -> float:
        """Return the inches of the picture."""
        lines = [line for value in self.upwards for line in _text(value).split("\n")]
        names = style.LETTER * max(map(len, lines))
        width = 1.0 + names + max(1.2, self.panel_width) * len(self.columns)
        return min(style.WIDTH, max(LEAST_WIDTH, width))


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
    layout = Layout.of(pd.concat([row.cells for row in rows]), x, y, col)
    num_columns = len(layout.columns)
    height = layout.panel_height * len(rows) + layout.upright + 0.8
    figure, axes = style.panels(len(rows), num_columns, (layout.width, height))
    has_gaps = False
    for i, row in enumerate(rows):
        beside = axes[i * num_columns : (i + 1) * num_columns]
        has_gaps |= _draw_row(beside, row, layout)
        _label_row(beside, row, layout, has_titles=i == 0 and col is not None)
    # Where there are many rows the last one is far away.
    num_ticked = len(axes) if len(rows) > FEW_ROWS else num_columns
    for ax in axes[-num_ticked:]:
        _tick_along(ax, layout)
    _add_colour_bars(figure, axes, rows, num_columns)
    keys = _gain_keys() if any(row.scale.is_gain for row in rows) else []
    if has_gaps:
        keys.append(Patch(facecolor=GREY, edgecolor="0.6", label=not_run))
    for note in notes:
        keys.append(Patch(facecolor="none", edgecolor="none", label=note))
    style.legend_below(figure, keys)
    return figure


def _draw_row(axes: Sequence[Axes], row: HeatRow, layout: Layout) -> bool:
    """Draw the panels of a row; returns whether a cell was not run."""
    has_gaps = False
    for ax, value in zip(axes, layout.columns, strict=True):
        cells = row.cells
        if layout.col:
            cells = cells[cells[layout.col] == value]
        matrix, texts = _matrices(cells, layout)
        has_gaps |= bool(np.isnan(matrix).any())
        _draw_cells(ax, matrix, texts, row.scale)
    return has_gaps


def _label_row(axes: Sequence[Axes], row: HeatRow, layout: Layout, *, has_titles: bool) -> None:
    """Write the row's label, the values upwards, and over the first row those of its columns."""
    for ax, value in zip(axes, layout.columns, strict=True):
        ax.set_xticks([])
        ax.set_yticks([])
        if has_titles:
            ax.set_title(f"{style.short_name(str(layout.col))} {_text(value)}", fontsize=9)
    blank = "\n" if has_titles else ""  # the label is above the titles of the columns
    axes[0].set_title(f"{row.label}{blank}", loc="left", fontsize=9, linespacing=1.5)
    names = [_text(value) for value in layout.upwards]
    axes[0].set_yticks(np.arange(len(names)) + 0.5, names)
    if not layout.has_names:
        room = int(layout.panel_height / style.LETTER)
        axes[0].set_ylabel(_setting(layout.y, room))


def _tick_along(ax: Axes, layout: Layout) -> None:
    """Write the values along x."""
    names = [_text(value) for value in layout.along]
    rotation = 90 if layout.upright else 0
    ax.set_xticks(np.arange(len(names)) + 0.5, names, rotation=rotation)
    ax.set_xlabel(_setting(layout.x, int(layout.panel_width / style.LETTER)))


def _setting(name: str, room: int) -> str:
    """Return the label of a setting's axis that has room for so many letters."""
    label = style.AXIS_NAMES.get(name, style.short_name(name))
    return label if len(label) <= room else style.short_name(name)


def _is_number(values: pd.Series) -> bool:
    return pd.api.types.is_numeric_dtype(values)


def _in_order(values: pd.Series) -> list[Any]:
    """Return the values of a setting once: numbers sorted, names as they come."""
    once = values.drop_duplicates()
    return list(once.sort_values() if _is_number(values) else once)


def _text(value: object) -> str:
    is_number = isinstance(value, int | float | np.number)
    return f"{value:g}" if is_number else str(value)


def _matrices(
    cells: pd.DataFrame, layout: Layout
) -> tuple[np.ndarray[Any, np.dtype[np.float64]], np.ndarray[Any, Any]]:
    """Return the cells' shades (NaN where nothing ran) and texts, a row for each value upwards."""
    shades = np.full((len(layout.upwards), len(layout.along)), np.nan)
    texts = np.full(shades.shape, "", dtype=object)
    for _, cell in cells.iterrows():
        row = layout.upwards.index(cell[layout.y])
        column = layout.along.index(cell[layout.x])
        shades[row, column] = cell["shade"]
        texts[row, column] = cell["text"]
    return shades, texts


def _draw_cells(ax: Axes, matrix: Any, texts: Any, scale: HeatScale) -> None:
    ax.grid(False)
    ax.set_facecolor(GREY)
    ax.tick_params(length=0)
    for spine in ax.spines.values():
        spine.set_visible(False)
    cmap = plt.get_cmap(scale.cmap)
    shades = np.ma.masked_invalid(matrix)
    ax.pcolormesh(shades, cmap=cmap, norm=scale.norm, edgecolors="white", linewidth=0.5)
    num_rows, num_columns = matrix.shape
    width = style.inches_wide(ax) / num_columns
    letters = max((len(text) for text in texts.flat), default=1) or 1
    font = min(FONT, max(NARROW_FONT, 72 * width / letters / 0.62))
    for row, column in np.ndindex(num_rows, num_columns):
        if np.isnan(matrix[row, column]):
            continue
        red, green, blue, _ = cmap(scale.norm(matrix[row, column]))
        luminance = float(np.dot((red, green, blue), LUMINANCE))
        look: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": font}
        look["color"] = "white" if luminance < DARK else "black"
        ax.text(column + 0.5, row + 0.5, texts[row, column], **look)


def _add_colour_bars(
    figure: Figure, axes: Sequence[Axes], rows: Sequence[HeatRow], num_columns: int
) -> None:
    """Add a bar for each scale of amounts, beside all rows that have it."""
    for scale in dict.fromkeys(id(row.scale) for row in rows):
        places = [i for i, row in enumerate(rows) if id(row.scale) == scale]
        shown = rows[places[0]].scale
        if shown.is_gain:
            continue
        beside = [ax for i in places for ax in axes[i * num_columns : (i + 1) * num_columns]]
        mappable = ScalarMappable(norm=shown.norm, cmap=shown.cmap)
        bar = figure.colorbar(mappable, ax=beside, aspect=20 * len(places), pad=0.01)
        bar.outline.set_visible(False)
        if isinstance(shown.norm, LogNorm):
            style.tick_in_steps(bar.ax.yaxis)


def _gain_keys() -> list[Artist]:
    """Explain the colours of gains."""
    words = {
        f"worse by {STRONGEST} % or more": 0.0,
        f"within {NEUTRAL} %": 0.5,
        f"better by {STRONGEST} % or more": 1.0,
    }
    cmap = plt.get_cmap(GAINS)
    return [
        Patch(facecolor=cmap(share), edgecolor="0.6", label=label) for label, share in words.items()
    ]
