"""Heat maps of a sweep: a row of panels for each quantity and each value of further settings."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
from matplotlib.figure import Figure

from sarathi_lab.config.console import amount
from sarathi_lab.results import sweep_analysis as analysis
from sarathi_lab.results.intervals import BAND
from sarathi_lab.results.plots.axes import is_ratio
from sarathi_lab.results.plots.choice import PlotAxes
from sarathi_lab.results.plots.heat import HeatRow, amount_scale, gain_scale, heat_map
from sarathi_lab.results.plots.plot import UNSTEADY_RUNS, HeatScale
from sarathi_lab.results.plots.series import equal_names_once, named, names_in_rows
from sarathi_lab.results.sweep_analysis import is_numeric
from sarathi_lab.results.table import is_share

EXCLAMATION = " !"  # after the number of a run that is not steady, as in a sweep's table


def draw_maps(
    rows: pd.DataFrame, axes: PlotAxes, quantities: Sequence[str], *, undecided: str
) -> Figure:
    """Draw medians (`sweeps.long_rows`); `undecided` explains the mark of such ratios."""
    cells = _cells(rows, axes)
    heat_rows = []
    for quantity in quantities:
        has_value = cells["value"].notna()
        shown = cells[has_value & (cells["quantity"] == quantity)]
        scale = _scale_of(shown, quantity)
        shown = shown.assign(
            shade=[_shade(cell) for _, cell in shown.iterrows()],
            text=[_text_in_cell(cell) for _, cell in shown.iterrows()],
        )
        setting_values = analysis.group_keys(shown, axes.others)
        for _, cells_of_row in shown.groupby(setting_values, sort=False):
            label = scale.label
            if axes.others:
                label += f", {named(cells_of_row.iloc[0], axes.others)}"
            heat_rows.append(HeatRow(cells_of_row, scale, label))
    notes = []
    if not cells["is_decided"].all():
        notes.append(f"~: {undecided}")
    if cells["is_unsteady"].any():
        notes.append(f"{EXCLAMATION.strip()}: {UNSTEADY_RUNS}")
    return heat_map(heat_rows, x=axes.x, y=str(axes.hue), col=axes.col, notes=notes)


def _cells(rows: pd.DataFrame, axes: PlotAxes) -> pd.DataFrame:
    """Return a row for each cell, whose settings are the names that are written."""
    upwards = str(axes.hue)
    along = [axes.x, *axes.others]
    if axes.col:
        along.append(axes.col)
    settings = [*along, upwards]
    cells = rows
    if "policy" not in settings:
        # Of the baselines only the ratios to them are shown.
        is_baseline = rows["is_baseline"].astype(bool)
        cells = rows[~is_baseline]
    for setting in settings:
        cells = _at_each_value(cells, setting)
    if "policy" in along:
        cells = cells.assign(policy=names_in_rows(cells, "policy"))
    if is_numeric(cells, upwards):
        return cells
    names = names_in_rows(cells, upwards, axes.bound)
    cells = equal_names_once(cells, names, along)
    return cells.assign(**{upwards: cells["name"]})


def _at_each_value(rows: pd.DataFrame, setting: str) -> pd.DataFrame:
    """Repeat runs without a setting, such as Orca's without a chunk, at each of its values."""
    is_missing = rows[setting].isna()
    if not is_missing.any():
        return rows
    copies = [rows[~is_missing]]
    for value in rows[setting].dropna().unique():
        at_value = rows[is_missing].assign(**{setting: value})
        copies.append(at_value)
    repeated = pd.concat(copies)
    if is_numeric(rows, setting):  # a mixed column would be drawn as names
        repeated = repeated.astype({setting: float})
    return repeated


def _scale_of(rows: pd.DataFrame, quantity: str) -> HeatScale:
    heading = str(rows["heading"].iloc[0])
    if is_ratio(quantity):
        ratio = heading.partition(" (")[0].replace(" / ", " over ")
        return gain_scale(f"{ratio} [%]")
    is_less_better = bool(rows["is_less_better"].iloc[0])
    may_be_log = not is_share(quantity)  # the shares that matter are near to all
    return amount_scale(
        rows["value"], heading, is_less_better=is_less_better, may_be_log=may_be_log
    )


def _shade(cell: pd.Series) -> float:
    """Return what a cell's colour stands for: of a ratio the gain in percent."""
    if not is_ratio(cell["quantity"]):
        return float(cell["value"])
    percent = _percent(cell)
    if abs(percent) <= 100 * BAND or not cell["is_decided"]:
        return 0.0
    if cell["is_less_better"]:
        return -percent
    return percent


def _text_in_cell(cell: pd.Series) -> str:
    """Return an amount, or the change in percent, with the marks that the notes explain."""
    before = ""
    number = amount(cell["value"])
    after = ""
    if is_ratio(cell["quantity"]):
        number = f"{_percent(cell):+.0f}"
        if not cell["is_decided"]:
            before = "~"
    if cell["is_unsteady"]:
        after = EXCLAMATION
    return f"{before}{number}{after}"


def _percent(cell: pd.Series) -> float:
    return float(100 * (cell["value"] - 1))
