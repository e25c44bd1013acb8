"""Heat maps of a sweep: a row of panels for each quantity and each value of further settings."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
from matplotlib.figure import Figure

from sarathi_lab.config.console import amount
from sarathi_lab.results import sweep_analysis as analysis
from sarathi_lab.results.plots.axes import is_ratio
from sarathi_lab.results.plots.choice import PlotAxes
from sarathi_lab.results.plots.heat import NEUTRAL, HeatRow, amount_scale, gain_scale, heat_map
from sarathi_lab.results.plots.plot import UNSTEADY_RUNS, HeatScale
from sarathi_lab.results.plots.series import equal_names_once, named, names_in_rows
from sarathi_lab.results.sweep_analysis import is_numeric

CROSS = "\N{MULTIPLICATION SIGN}"  # after the number of a run that is not steady


def draw_maps(
    rows: pd.DataFrame, axes: PlotAxes, quantities: Sequence[str], *, undecided: str
) -> Figure:
    """Draw medians (`sweeps.long_rows`); `undecided` explains the mark of such ratios."""
    rows = _cells(rows, axes)
    heat_rows = []
    for quantity in quantities:
        shown = rows[rows["quantity"] == quantity].dropna(subset="value")
        scale = _scale_of(shown, quantity)
        shades = [_shade(row) for _, row in shown.iterrows()]
        texts = [_in_cell(row) for _, row in shown.iterrows()]
        shown = shown.assign(shade=shades, text=texts)
        for _, cells in shown.groupby(analysis.group_keys(shown, axes.others), sort=False):
            others = named(cells.iloc[0], axes.others)
            label = ", ".join(filter(None, [scale.label, others]))
            heat_rows.append(HeatRow(cells, scale, label))
    notes = []
    if not rows["is_decided"].all():
        notes.append(f"~: {undecided}")
    if rows["is_unsteady"].any():
        notes.append(f"{CROSS}: {UNSTEADY_RUNS}")
    return heat_map(heat_rows, x=axes.x, y=str(axes.hue), col=axes.col, notes=notes)


def _cells(rows: pd.DataFrame, axes: PlotAxes) -> pd.DataFrame:
    """Return a row for each cell, whose settings are the names that are written."""
    upwards = str(axes.hue)
    along = [axes.x, *axes.others]
    if axes.col:
        along.append(axes.col)
    settings = [*along, upwards]
    if "policy" not in settings:
        rows = rows[~rows["is_baseline"].astype(bool)]  # only ratios to them are shown
    for setting in settings:
        rows = _at_each_value(rows, setting)
    if "policy" in along:
        rows = rows.assign(policy=names_in_rows(rows, "policy"))
    if is_numeric(rows, upwards):
        return rows
    names = names_in_rows(rows, upwards, axes.bound)
    rows = equal_names_once(rows, names, along)
    return rows.assign(**{upwards: rows["name"]})


def _at_each_value(rows: pd.DataFrame, setting: str) -> pd.DataFrame:
    """Repeat runs without a setting, such as Orca's without a chunk, at each of its values."""
    is_missing = rows[setting].isna()
    if not is_missing.any():
        return rows
    has_numbers = is_numeric(rows, setting)
    copies = [rows[~is_missing]]
    for value in rows[setting].dropna().unique():
        copies.append(rows[is_missing].assign(**{setting: value}))
    every = pd.concat(copies)
    return every.astype({setting: float}) if has_numbers else every


def _scale_of(rows: pd.DataFrame, quantity: str) -> HeatScale:
    heading = str(rows["heading"].iloc[0])
    if is_ratio(quantity):
        ratio = heading.partition(" (")[0].replace(" / ", " over ")
        return gain_scale(f"{ratio} [%]")
    is_less_better = bool(rows["is_less_better"].iloc[0])
    return amount_scale(rows["value"], heading, is_less_better=is_less_better)


def _shade(row: pd.Series) -> float:
    """Return what a cell's colour stands for: of a ratio the gain in percent."""
    if not is_ratio(row["quantity"]):
        return float(row["value"])
    percent = float(100 * (row["value"] - 1))
    if abs(percent) <= NEUTRAL or not row["is_decided"]:
        return 0.0
    return -percent if row["is_less_better"] else percent


def _in_cell(row: pd.Series) -> str:
    cross = CROSS if row["is_unsteady"] else ""
    if not is_ratio(row["quantity"]):
        return f"{amount(row['value'])}{cross}"
    mark = "" if row["is_decided"] else "~"
    return f"{mark}{100 * (row['value'] - 1):+.0f}{cross}"
