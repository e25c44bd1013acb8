"""Which of an experiment's rows its picture shows: panels, series, and the best source of each."""

from __future__ import annotations

import fnmatch

import pandas as pd

from sarathi_lab.results.load import COMPOSED_SOURCE, with_texts
from sarathi_lab.results.plots.spec import PlotSpec, in_tokens
from sarathi_lab.results.table import SIMULATED

# Of a simulated GPU the first of these is drawn that there is.
BEST_LEVEL = "profiled"


def is_simulated(rows: pd.DataFrame) -> pd.Series:
    """Mark what is computed by a cost model."""
    return rows.source == SIMULATED


def selected(rows: pd.DataFrame, spec: PlotSpec) -> pd.DataFrame:
    """Return the points that are drawn, with their `panel`, `value` and `key` of their series."""
    # Points of several files may share a number.
    numbered = rows.reset_index(drop=True)
    with_names = with_texts(numbered)
    shown = _of_stated_names(with_names, spec)
    if spec.quantities:
        panel = _panels_of_quantities(shown, spec)
        shown = shown.assign(panel=panel)
    # Rows of these have a quantile by its share: the picture has the share upwards.
    is_swapped = shown.panel.isin(spec.swapped)
    x = shown.x
    y = shown.y
    return shown.assign(
        x=x.mask(is_swapped, y),
        value=y.mask(is_swapped, x),
        key=shown.series.map(in_tokens),
    )


def _of_stated_names(rows: pd.DataFrame, spec: PlotSpec) -> pd.DataFrame:
    """Return the rows whose panel, series, unit and quantity the spec draws."""
    panels_left_out = []
    for pattern in spec.left_out:
        matching = fnmatch.filter(rows.panel, pattern)
        panels_left_out += matching
    is_left_out = rows.panel.isin(panels_left_out)
    is_shown = ~is_left_out
    if spec.series:
        is_shown &= rows.series.isin(spec.series)
    if spec.unit:
        is_shown &= rows.unit == spec.unit
    if spec.quantities:
        is_shown &= rows.quantity.isin(spec.quantities)
    return rows[is_shown]


def _panels_of_quantities(rows: pd.DataFrame, spec: PlotSpec) -> pd.Series:
    """Return a panel for each data set and objective, and for each of several quantities."""
    dataset = rows.dataset
    has_slo = rows.slo != ""
    dataset_and_slo = dataset + ", " + rows.slo
    panel = dataset.mask(has_slo, dataset_and_slo)
    if len(spec.quantities) == 1:
        return panel
    ending = ": " + rows.quantity
    return panel + ending


def best_sources(rows: pd.DataFrame) -> pd.DataFrame:
    """Return all but the simulations and measured kernels that better ones stand for.

    Of each simulated GPU and model the best level stays, and of the GPUs with measured kernels the
    one with the most series.
    """
    is_composed = rows.source == COMPOSED_SOURCE
    is_chosen = _is_of_chosen_kernels(rows, is_composed)
    is_other_gpu = is_composed & ~is_chosen
    is_best_level = _is_best_level(rows)
    is_worse_level = is_simulated(rows) & ~is_best_level
    is_left_out = is_worse_level | is_other_gpu
    return rows[~is_left_out]


def _is_best_level(rows: pd.DataFrame) -> pd.Series:
    """Mark the best level that there is of each simulated GPU, model and panel."""
    is_other_level = rows.level != BEST_LEVEL
    rank = is_other_level.astype(int)  # lower is better
    # A method, such as counting FLOPs alone, is worse than any level of the model.
    has_method = rows.method != ""
    rank += 2 * has_method
    gpu_and_panel = [rows.hardware, rows.model, rows.panel]
    ranks_in_panel = rank.groupby(gpu_and_panel)
    best_rank = ranks_in_panel.transform("min")
    return rank == best_rank


def _is_of_chosen_kernels(rows: pd.DataFrame, is_composed: pd.Series) -> pd.Series:
    """Mark the kernels of one GPU, in the panels of which it has two series, or all there are."""
    in_panel = rows.groupby("panel")
    num_in_panel = in_panel.key.transform("nunique")
    num_needed = num_in_panel.clip(upper=2)
    in_panel_of_device = rows.groupby(["device", "panel"])
    num_of_device = in_panel_of_device.key.transform("nunique")
    has_needed = num_of_device >= num_needed
    is_comparable = is_composed & has_needed
    comparable = rows[is_comparable]
    if comparable.empty:
        return is_comparable
    series = comparable.drop_duplicates(["device", "panel", "key"])
    # Of several with as many series it is the first by name.
    devices_with_most = series.device.mode()
    chosen_device = devices_with_most[0]
    return is_comparable & (rows.device == chosen_device)
