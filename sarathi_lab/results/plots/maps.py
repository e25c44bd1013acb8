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
    upwards = str(axes.hue)
    settings = [axes.x, upwards, axes.col, *axes.others]
    if "policy" not in settings:
        rows = rows[~rows["is_baseline"].astype(bool)]  # only ratios to them are shown
    for setting in filter(None, settings):
        rows = _at_each_value(rows, setting)
    if "policy" in settings and upwards != "policy":
        rows = rows.assign(policy=names_in_rows(rows, "policy"))
    if not is_numeric(rows, upwards):
        keys = [setting for setting in settings if setting not in (None, upwards)]
        names = names_in_rows(rows, upwards, axes.bound)
        rows = equal_names_once(rows, names, list(map(str, keys)))
        rows = rows.assign(**{upwards: rows["name"]})
    others = list(axes.others)
    heat_rows = []
    for quantity in quantities:
        shown = rows[(rows["quantity"] == quantity) & rows["value"].notna()]
        scale = _scale_of(shown, quantity)
        shades = [_shade(row) for _, row in shown.iterrows()]
        texts = [_in_cell(row) for _, row in shown.iterrows()]
        shown = shown.assign(shade=shades, text=texts)
        for _, cells in shown.groupby(analysis.group_keys(shown, others), sort=False):
            label = ", ".join(filter(None, [scale.label, named(cells.iloc[0], others)]))
            heat_rows.append(HeatRow(cells, scale, label))
    notes = [] if rows["is_decided"].all() else [f"~: {undecided}"]
    if rows["is_unsteady"].any():
        notes.append(f"{CROSS}: {UNSTEADY_RUNS}")
    return heat_map(heat_rows, x=axes.x, y=upwards, col=axes.col, notes=notes)


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
    percent = 100 * (row["value"] - 1)
    if abs(percent) <= NEUTRAL or not row["is_decided"]:
        return 0.0
    return float(-percent if row["is_less_better"] else percent)


def _in_cell(row: pd.Series) -> str:
    cross = CROSS if row["is_unsteady"] else ""
    if not is_ratio(row["quantity"]):
        return f"{amount(row['value'])}{cross}"
    mark = "" if row["is_decided"] else "~"
    return f"{mark}{100 * (row['value'] - 1):+.0f}{cross}"
