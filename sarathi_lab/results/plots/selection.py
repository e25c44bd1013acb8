"""Which of an experiment's rows its picture shows: panels, series, and the best source of each."""

from __future__ import annotations

import fnmatch
from collections import Counter

import pandas as pd

from sarathi_lab.results.plots.spec import PlotSpec, in_tokens
from sarathi_lab.results.table import COMPOSED, MEASURED, PAPER

LABELS = ("panel", "hardware", "model", "method", "dataset", "slo")
# Of a simulated GPU the first of these is drawn that there is.
BEST_LEVEL = "profiled"
LEAST_SHARE = 0.5  # of a panel's points, that must have a value for the panel to be drawn


def is_simulated(rows: pd.DataFrame) -> pd.Series:
    """Mark what is computed by a cost model."""
    return ~rows.level.isin([PAPER, MEASURED, COMPOSED])


def selected(rows: pd.DataFrame, spec: PlotSpec) -> pd.DataFrame:
    """Return what the spec draws, with its `panel` and the `key` of its series."""
    shown = _of_stated_names(_with_all_labels(rows), spec)
    if spec.quantities:
        panel = _panels_of_quantities(shown, spec)
        shown = shown.assign(panel=panel)
    if spec.kind == "pair":
        shown = _with_both_quantities(shown, spec)
    shown = _with_axes_swapped(shown, spec)
    if spec.hue == "x":
        return shown.assign(key=shown.x.map("{:g}".format))
    return shown.assign(key=shown.series.map(in_tokens))


def _with_all_labels(rows: pd.DataFrame) -> pd.DataFrame:
    """Add those of `LABELS` that a recording lacks, as empty text."""
    columns = dict.fromkeys([*rows, *LABELS])
    labelled = rows.reindex(columns=list(columns))
    labelled = labelled.reset_index(drop=True)
    return labelled.fillna(dict.fromkeys(LABELS, ""))


def _of_stated_names(rows: pd.DataFrame, spec: PlotSpec) -> pd.DataFrame:
    """Return the rows whose panel, series, unit and quantity the spec draws."""
    is_shown = pd.Series(True, rows.index)
    for pattern in spec.left_out:
        matching = fnmatch.filter(rows.panel, pattern)
        is_shown &= ~rows.panel.isin(matching)
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
    if spec.kind == "pair" or len(spec.quantities) == 1:
        return panel
    return panel + ": " + rows.quantity


def _with_both_quantities(rows: pd.DataFrame, spec: PlotSpec) -> pd.DataFrame:
    """Return the rows of points that have a coordinate of each quantity."""
    points = rows.groupby(["device", "panel", "series", "x"])
    num_coordinates = points.quantity.transform("nunique")
    return rows[num_coordinates == len(spec.quantities)]


def _with_axes_swapped(rows: pd.DataFrame, spec: PlotSpec) -> pd.DataFrame:
    """Exchange x and value in the panels that are drawn as a distribution."""
    is_swapped = rows.panel.isin(spec.swapped)
    x = rows.x.mask(is_swapped, rows.value)
    value = rows.value.mask(is_swapped, rows.x)
    return rows.assign(x=x, value=value)


# -- what has too few points -----------------------------------------------------------------------


def without_sparse(rows: pd.DataFrame, spec: PlotSpec) -> tuple[pd.DataFrame, str]:
    """Leave out panels with few measured points, and all but the best source of the others.

    Of each simulated GPU and model the best level stays, and of the GPUs with measured kernels the
    one with the most series. Rows without a value are not drawn at all.

    Returns:
        The rows that are drawn, and a note on the sparse panels, "" without one.
    """
    is_best = _is_best_level(rows) & _is_of_chosen_kernels(rows)
    shown = rows[is_best]
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
    device = points.device.iloc[0]
    name = spec.panel_name(points.panel.iloc[0])
    if device not in name:
        name = f"{device}, {name}"
    num_with_value = points.value.count()
    return f"{num_with_value} of {len(points)} points on {name}"


def _sparse_panels(rows: pd.DataFrame, spec: PlotSpec) -> list[pd.DataFrame]:
    """Return the measured rows of each panel with too few of them."""
    sparse = []
    for _, panel in rows.groupby(["device", "panel"], sort=False):
        measured = panel[panel.level == MEASURED]
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
    is_single_point = num_points < 2 and len(panel) > 1
    return bool(is_single_point or has_value.mean() < LEAST_SHARE)


def _is_best_level(rows: pd.DataFrame) -> pd.Series:
    """Mark what is not simulated, and of a simulated GPU the best level that it has."""
    # Lower is better. A method, such as counting FLOPs alone, is worse than any level of the model.
    has_method = (rows.method != "").astype(int)
    is_other_level = (rows.level != BEST_LEVEL).astype(int)
    rank = 2 * has_method + is_other_level
    same_gpu = rank.groupby([rows.hardware, rows.model, rows.panel])
    best_rank = same_gpu.transform("min")
    return ~is_simulated(rows) | (rank == best_rank)


def _is_of_chosen_kernels(rows: pd.DataFrame) -> pd.Series:
    """Mark all but composed rows, and the composed ones of the GPU with the most series.

    A panel counts where the GPU has two of its series, or all that any device has.
    """
    is_composed = rows.level == COMPOSED
    num_of_any_device = rows.groupby("panel").key.nunique()
    panels_of: dict[str, list[str]] = {}
    num_series: Counter[str] = Counter()
    composed_panels = rows[is_composed].groupby(["device", "panel"])
    for _, points in composed_panels:
        device = points.device.iloc[0]
        panel = points.panel.iloc[0]
        num_of_device = points.key.nunique()
        num_needed = min(2, num_of_any_device[panel])
        if num_of_device >= num_needed:
            panels_of.setdefault(device, []).append(panel)
            num_series[device] += num_of_device
    if not num_series:
        return ~is_composed
    [(chosen_device, _)] = num_series.most_common(1)
    is_of_device = rows.device == chosen_device
    is_in_its_panels = rows.panel.isin(panels_of[chosen_device])
    return ~is_composed | (is_of_device & is_in_its_panels)
