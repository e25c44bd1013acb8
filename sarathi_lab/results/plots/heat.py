"""Heat maps: a number a cell by two settings, a panel for each value of a third.

Gains over another policy are blue where it gains and red where it loses, fully from `STRONGEST`
percent on; amounts are the darker the better. Grey cells were not run.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
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
    every = pd.concat([row.cells for row in rows])
    columns = _in_order(every[col]) if col else [None]
    along, upwards = _in_order(every[x]), _in_order(every[y])
    has_names = not _is_number(every[y])
    if has_names:
        upwards = upwards[::-1]  # names read from above
    lines = [_text(value).split("\n") for value in upwards]
    letters = max(len(line) for name in lines for line in name)
    cell_height = CELL_HEIGHT + LINE * (max(map(len, lines)) - 1)
    panel_width = CELL_WIDTH * len(along)
    width = 1.0 + style.LETTER * letters + max(1.2, panel_width) * len(columns)
    height = 0.5 + cell_height * len(upwards)
    size = min(style.WIDTH, max(LEAST_WIDTH, width)), height * len(rows) + 0.8
    figure, axes = style.panels(len(rows), len(columns), size)
    has_gaps = False
    for i, row in enumerate(rows):
        for j, value in enumerate(columns):
            ax = axes[i * len(columns) + j]
            cells = row.cells[row.cells[col] == value] if col else row.cells
            matrix, texts = _matrices(cells, x, y, along, upwards)
            has_gaps |= bool(np.isnan(matrix).any())
            _draw_cells(ax, matrix, texts, row.scale)
            _label_panel(ax, along, upwards, is_left=j == 0, is_low=i == len(rows) - 1)
            has_title = i == 0 and col is not None
            title = f"{style.short_name(str(col))} {_text(value)}" if has_title else ""
            ax.set_title(title, fontsize=9)
            if j == 0:  # above the titles of the first row's panels
                blank = "\n" if has_title else ""
                ax.set_title(f"{row.label}{blank}", loc="left", fontsize=9, linespacing=1.5)
    room = int(panel_width / style.LETTER)
    for ax in axes[-len(columns) :]:
        ax.set_xlabel(_setting(x, room))
    for ax in axes[:: len(columns)]:
        ax.set_ylabel("" if has_names else _setting(y, int(height / style.LETTER)))
    _add_colour_bars(figure, axes, rows, len(columns))
    keys = _gain_keys() if any(row.scale.is_gain for row in rows) else []
    if has_gaps:
        keys.append(Patch(facecolor=GREY, edgecolor="0.6", label=not_run))
    keys += [Patch(facecolor="none", edgecolor="none", label=note) for note in notes]
    style.legend_below(figure, keys)
    return figure


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
    cells: pd.DataFrame, x: str, y: str, along: Sequence[Hashable], upwards: Sequence[Hashable]
) -> tuple[np.ndarray[Any, np.dtype[np.float64]], np.ndarray[Any, Any]]:
    """Return the cells' shades (NaN where nothing ran) and texts, a row for each value of `y`."""
    matrix = np.full((len(upwards), len(along)), np.nan)
    texts = np.full(matrix.shape, "", dtype=object)
    for _, cell in cells.iterrows():
        place = upwards.index(cell[y]), along.index(cell[x])
        matrix[place] = cell["shade"]
        texts[place] = cell["text"]
    return matrix, texts


def _draw_cells(ax: Axes, matrix: Any, texts: Any, scale: HeatScale) -> None:
    ax.grid(False)
    ax.set_facecolor(GREY)
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


def _label_panel(
    ax: Axes, along: Sequence[Any], upwards: Sequence[Any], *, is_left: bool, is_low: bool
) -> None:
    """Name the values of both settings at the edge of the picture."""
    for spine in ax.spines.values():
        spine.set_visible(False)
    ax.tick_params(length=0)
    names = [_text(value) for value in along] if is_low else []
    is_wide = style.LETTER * max(map(len, names), default=0) > CELL_WIDTH
    ax.set_xticks(np.arange(len(names)) + 0.5, names, rotation=90 if is_wide else 0)
    names = [_text(value) for value in upwards] if is_left else []
    ax.set_yticks(np.arange(len(names)) + 0.5, names)


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
