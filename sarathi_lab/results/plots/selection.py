"""Which of an experiment's rows its picture shows: panels, series, and the best source of each."""

from __future__ import annotations

import fnmatch

import pandas as pd

from sarathi_lab.results.load import COMPOSED_SOURCE, with_texts
from sarathi_lab.results.plots.spec import PlotSpec, in_tokens
from sarathi_lab.results.table import MEASURED, SIMULATED

# Of a simulated GPU the first of these is drawn that there is.
BEST_LEVEL = "profiled"
LEAST_SHARE = 0.5  # of a panel's points, that must have a value for the panel to be drawn


def is_simulated(rows: pd.DataFrame) -> pd.Series:
    """Mark what is computed by a cost model."""
    return rows.source == SIMULATED


def selected(rows: pd.DataFrame, spec: PlotSpec) -> pd.DataFrame:
    """Return the points that are drawn, with their `panel`, `value` and `key` of their series."""
    # Points of several files may share a number, and `without_sparse` drops points by number.
    numbered = rows.reset_index(drop=True)
    shown = _of_stated_names(with_texts(numbered), spec)
    if spec.quantities:
        panel = _panels_of_quantities(shown, spec)
        shown = shown.assign(panel=panel)
    if spec.kind == "pair":
        shown = _with_both_quantities(shown, spec)
    shown = _with_axes_swapped(shown, spec)
    key = shown.series.map(in_tokens)
    if spec.hue == "x":
        key = shown.x.map("{:g}".format)
    return shown.assign(key=key)


def _of_stated_names(rows: pd.DataFrame, spec: PlotSpec) -> pd.DataFrame:
    """Return the rows whose panel, series, unit and quantity the spec draws."""
    panels_left_out: list[str] = []
    for pattern in spec.left_out:
        panels_left_out += fnmatch.filter(rows.panel, pattern)
    is_shown = ~rows.panel.isin(panels_left_out)
    if spec.series:
        is_shown &= rows.series.isin(spec.series)
    if spec.unit:
        is_shown &= rows.unit == spec.unit
    if spec.quantities:
        is_shown &= rows.quantity.isin(spec.quantities)
    return rows[is_shown]


def _panels_of_quantities(rows: pd.DataFrame, spec: PlotSpec) -> pd.Series:
    """Return a panel for each data set and objective, and for each of several quantities."""
    has_slo = rows.slo != ""
    dataset_and_slo = rows.dataset + ", " + rows.slo
    panel = rows.dataset.mask(has_slo, dataset_and_slo)
    has_several_quantities = len(spec.quantities) > 1
    # A pair has its two quantities in one panel.
    if has_several_quantities and spec.kind != "pair":
        return panel + ": " + rows.quantity
    return panel


def _with_both_quantities(rows: pd.DataFrame, spec: PlotSpec) -> pd.DataFrame:
    """Return the rows of points that have a coordinate of each quantity."""
    points = rows.groupby(["device", "panel", "series", "x"])
    num_coordinates = points.quantity.transform("nunique")
    return rows[num_coordinates == len(spec.quantities)]


def _with_axes_swapped(rows: pd.DataFrame, spec: PlotSpec) -> pd.DataFrame:
    """Exchange x and value in the panels that are drawn as a distribution."""
    is_swapped = rows.panel.isin(spec.swapped)
    x = rows.x.mask(is_swapped, rows.y)
    value = rows.y.mask(is_swapped, rows.x)
    return rows.assign(x=x, value=value)


# -- what has too few points -----------------------------------------------------------------------


def without_sparse(rows: pd.DataFrame, spec: PlotSpec) -> tuple[pd.DataFrame, str]:
    """Leave out panels with few measured points, and all but the best source of the others.

    Of each simulated GPU and model the best level stays, and of the GPUs with measured kernels the
    one with the most series. Rows without a value are not drawn at all.

    Returns:
        The rows that are drawn, and a note on the sparse panels, "" without one.
    """
    is_best_level = _is_best_level(rows)
    is_of_chosen_kernels = _is_of_chosen_kernels(rows)
    shown = rows[is_best_level & is_of_chosen_kernels]
    notes = []
    for sparse in _sparse_panels(rows, spec):
        shown = shown.drop(index=sparse.index, errors="ignore")
        notes.append(_note_on(sparse, spec))
    shown = shown.dropna(subset="value")
    if shown.empty:
        # A picture of few points says more than an empty one.
        shown = rows.dropna(subset="value")
    if not notes:
        return shown, ""
    panels = "; ".join(notes)
    return shown, f"Left out, too few measured to draw: {panels}"


def _note_on(points: pd.DataFrame, spec: PlotSpec) -> str:
    """State how many points a sparse panel has, and where."""
    first = points.iloc[0]
    name = spec.panel_name(first.panel)
    if first.device not in name:
        name = f"{first.device}, {name}"
    num_points = len(points)
    num_with_value = points.value.count()
    return f"{num_with_value} of {num_points} points on {name}"


def _sparse_panels(rows: pd.DataFrame, spec: PlotSpec) -> list[pd.DataFrame]:
    """Return the measured rows of each panel with too few of them."""
    sparse = []
    for _, panel in rows.groupby(["device", "panel"], sort=False):
        measured = panel[panel.source == MEASURED]
        if len(measured) and _is_sparse(panel, spec):
            sparse.append(measured)
    return sparse


def _is_sparse(panel: pd.DataFrame, spec: PlotSpec) -> bool:
    """Return whether less than half have a value, one of several has, or no line has two."""
    has_value = panel.value.notna()
    num_points = has_value.sum()
    if spec.kind == "line":
        points_of_line = has_value.groupby(panel.key).sum()
        num_points = points_of_line.max()
    is_one_of_several = num_points < 2 and len(panel) > 1
    is_mostly_empty = has_value.mean() < LEAST_SHARE
    return bool(is_one_of_several or is_mostly_empty)


def _is_best_level(rows: pd.DataFrame) -> pd.Series:
    """Mark what is not simulated, and of a simulated GPU the best level that it has."""
    # Lower is better. A method, such as counting FLOPs alone, is worse than any level of the model.
    has_method = rows.method != ""
    is_other_level = rows.level != BEST_LEVEL
    rank = 2 * has_method.astype(int) + is_other_level.astype(int)
    ranks = rows.assign(rank=rank)
    ranks_of_gpu = ranks.groupby(["hardware", "model", "panel"])["rank"]
    best_rank = ranks_of_gpu.transform("min")
    is_best = rank == best_rank
    return is_best | ~is_simulated(rows)


def _is_of_chosen_kernels(rows: pd.DataFrame) -> pd.Series:
    """Mark all but composed rows, and the composed ones of the GPU with the most series."""
    is_composed = rows.source == COMPOSED_SOURCE
    panels = _panels_of_kernels(rows)
    if panels.empty:
        return ~is_composed
    num_series = panels.groupby("device").num_series.sum()
    device = num_series.idxmax()
    of_device = panels[panels.device == device]
    is_chosen = rows.panel.isin(of_device.panel) & (rows.device == device)
    return is_chosen | ~is_composed


def _panels_of_kernels(rows: pd.DataFrame) -> pd.DataFrame:
    """Return `device`, `panel` and `num_series` of composed rows, of the panels of which a GPU has
    two series, or all that any device has.
    """
    num_in_panel = rows.groupby("panel").key.transform("nunique")
    with_number = rows.assign(num_needed=num_in_panel.clip(upper=2))
    composed = with_number[rows.source == COMPOSED_SOURCE]
    panels = composed.groupby(["device", "panel"], as_index=False).agg(
        num_series=("key", "nunique"),
        num_needed=("num_needed", "first"),
    )
    return panels[panels.num_series >= panels.num_needed]
