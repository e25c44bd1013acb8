"""The rows of a sweep's picture: medians in displayed units, and the names of settings' values."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pandas as pd

from sarathi_lab.results import sweep_analysis as analysis
from sarathi_lab.results.plots import style
from sarathi_lab.results.plots.choice import MARGINAL, PlotAxes
from sarathi_lab.results.sweep_analysis import is_numeric, text
from sarathi_lab.results.table import UNITS, display_unit, is_share, less_is_better

VALUES = ["value", "low", "high"]
PERCENT = 100.0
MOST_ROUNDS = 0.5  # share of rounds or seeds that are not steady, from which a median is marked
WITHOUT_NAME = ("policy", "model", "device", "hardware")  # settings whose values need no name
BASELINE = " (baseline)"
MISSING = "-"  # text of a setting that a run lacks


def long_rows(runs: pd.DataFrame, axes: PlotAxes, quantities: Sequence[str]) -> pd.DataFrame:
    """Return medians in their displayed units: a row per quantity and combination of settings.

    Beside them is the `heading` of the quantity, whether it `is_less_better`, and whether the runs
    are not steady (`is_unsteady`).
    """
    if "is_baseline" not in runs:
        runs = runs.assign(is_baseline=False)
    stated = [
        axes.x,
        axes.hue,
        axes.col,
        *axes.others,
    ]
    settings = filter(None, stated)
    each_once = dict.fromkeys([*settings, "policy", "is_baseline"])
    grouped_by = list(each_once)
    rows = analysis.medians(runs, grouped_by, *quantities)
    # A difference of times that may be equal.
    is_marginal = rows["quantity"] == MARGINAL
    is_below_noise = is_marginal & (rows["value"] <= 0)
    rows.loc[is_below_noise, VALUES] = math.nan
    is_single_run = rows["num_samples"] == 1
    rows.loc[is_single_run, ["low", "high"]] = math.nan
    displayed = _displayed(rows, runs, quantities)
    # Rounds and seeds of a row are in one group of runs.
    groups_of_runs = analysis.group_keys(runs, grouped_by)
    groups_of_rows = analysis.group_keys(rows, grouped_by)
    unsteady = analysis.unsteady(runs)
    share_of_group = unsteady.groupby(groups_of_runs).mean()
    share = groups_of_rows.map(share_of_group)
    return displayed.assign(is_unsteady=share >= MOST_ROUNDS)


def _displayed(rows: pd.DataFrame, runs: pd.DataFrame, quantities: Sequence[str]) -> pd.DataFrame:
    """Convert values from SI to the units that their headings state."""
    factors = {}
    headings = {}
    is_less_better = {}
    for name in quantities:
        quantity, _, _ = name.partition("_vs_")
        largest = float(runs[name].max())
        factor, heading = display_unit(name, largest)
        if is_share(name):
            factor = PERCENT
            heading += " [%]"
        is_less_better[name] = less_is_better(quantity)
        if quantity in UNITS:  # of others, such as a user's, nobody knows what is better
            arrow = "↓" if is_less_better[name] else "↑"
            heading += f" ({arrow}\N{NO-BREAK SPACE}better)"
        factors[name] = factor
        headings[name] = heading
    names = rows["quantity"]
    displayed = rows.assign(
        heading=names.map(headings),
        is_less_better=names.map(is_less_better),
    )
    factor_of_row = names.map(factors)
    displayed[VALUES] = rows[VALUES].mul(factor_of_row, axis=0)
    return displayed


def at_each_value(rows: pd.DataFrame, setting: str) -> pd.DataFrame:
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


def named(row: pd.Series, settings: Sequence[str]) -> str:
    """Name the values of settings that a run has: policies, models and devices by themselves."""
    values = []
    for setting in settings:
        value = text(row[setting])
        if value == MISSING:
            continue
        if setting not in WITHOUT_NAME:
            value = f"{style.short_name(setting)} {value}"
        values.append(value)
    return ", ".join(values)


def names_of(rows: pd.DataFrame, setting: str) -> pd.Series:
    """Return the values of a setting as texts, in which policies that are baselines are marked."""
    names = rows[setting].map(text)
    if setting != "policy":
        return names
    is_baseline = rows["is_baseline"].astype(bool)
    marked = names + BASELINE
    return names.mask(is_baseline, marked)
