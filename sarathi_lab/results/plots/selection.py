"""Which of a figure's rows are drawn: its panels and series, without what has too few points."""

from __future__ import annotations

import fnmatch
from collections import Counter

import pandas as pd

from sarathi_lab.results.plots.spec import PlotSpec, in_tokens
from sarathi_lab.results.table import COMPOSED, MEASURED, PAPER

LABELS = ("panel", "hardware", "model", "method", "dataset", "slo")
# Of a simulated GPU the first of these is drawn that there is.
BEST_LEVEL = "profiled"


def is_simulated(rows: pd.DataFrame) -> pd.Series:
    """Mark what is computed by a cost model."""
    return ~rows.level.isin([PAPER, MEASURED, COMPOSED])


def selected(rows: pd.DataFrame, spec: PlotSpec) -> pd.DataFrame:
    """Return what the spec draws, with its `panel` and the `key` of its series."""
    shown = rows.reindex(columns=list(dict.fromkeys([*rows, *LABELS]))).reset_index(drop=True)
    shown = shown.fillna(dict.fromkeys(LABELS, ""))
    for pattern in spec.left_out:
        matching = fnmatch.filter(shown.panel, pattern)
        shown = shown[~shown.panel.isin(matching)]
    if spec.series:
        shown = shown[shown.series.isin(spec.series)]
    if spec.unit:
        shown = shown[shown.unit == spec.unit]
    if spec.quantities:
        shown = shown[shown["quantity"].isin(spec.quantities)]
        shown = shown.assign(panel=_panels_of(shown, spec))
    if spec.kind == "pair":  # a point has a coordinate of each quantity
        points = shown.groupby(["device", "panel", "series", "x"])
        is_complete = points["quantity"].transform("nunique") == len(spec.quantities)
        shown = shown[is_complete]
    shown = _swapped(shown, spec)
    if spec.hue == "x":
        return shown.assign(key=shown.x.map("{:g}".format))
    return shown.assign(key=shown.series.map(in_tokens))


def _panels_of(rows: pd.DataFrame, spec: PlotSpec) -> pd.Series:
    """Return a panel for each data set and objective, and for each of several quantities."""
    dataset = rows.dataset.where(rows.slo == "", rows.dataset + ", " + rows.slo)
    if len(spec.quantities) > 1 and spec.kind != "pair":
        return dataset + ": " + rows["quantity"]
    return dataset


def _swapped(rows: pd.DataFrame, spec: PlotSpec) -> pd.DataFrame:
    """Return rows whose x and value change places in the panels that are to be swapped."""
    is_swapped = rows.panel.isin(spec.is_swapped)
    x = rows.x.where(~is_swapped, rows.value)
    value = rows.value.where(~is_swapped, rows.x)
    return rows.assign(x=x, value=value)


def without_sparse(rows: pd.DataFrame, spec: PlotSpec) -> tuple[pd.DataFrame, str]:
    """Return the rows that are drawn, and a note on what is left out.

    These have a value, and are of no sparse panel; of each simulated GPU and model they are of the
    best level, and of GPUs with measured kernels of one.
    """
    sparse = _sparse_panels(rows, spec)
    shown = rows[_is_best_level(rows) & _is_of_chosen_kernels(rows)]
    panels = []
    for points in sparse:
        shown = shown.drop(index=points.index, errors="ignore")
        device, panel = points[["device", "panel"]].iloc[0]
        name = spec.panel_name(panel)
        if device not in name:
            name = f"{device}, {name}"
        panels.append(f"{points.value.count()} of {len(points)} points on {name}")
    shown = shown.dropna(subset="value")
    if shown.empty:
        shown = rows.dropna(subset="value")
    if not panels:
        return shown, ""
    return shown, f"Left out, too few measured to draw: {'; '.join(panels)}"


def _sparse_panels(rows: pd.DataFrame, spec: PlotSpec) -> list[pd.DataFrame]:
    """Return the measured rows of each panel with too few of them."""
    panels = []
    for _, panel in rows.groupby(["device", "panel"], sort=False):
        measured = panel[panel.level == MEASURED]
        if len(measured) and _is_sparse(panel, spec):
            panels.append(measured)
    return panels


def _is_sparse(panel: pd.DataFrame, spec: PlotSpec) -> bool:
    """Return whether less than half have a value, one of several has, or no line has two."""
    has_value = panel.value.notna()
    num_points = has_value.sum()
    if spec.kind == "line":  # of the longest
        num_points = has_value.groupby(panel.key).sum().max()
    is_short = num_points < 2 and len(panel) > 1
    return bool(is_short or has_value.mean() < 0.5)


def _is_best_level(rows: pd.DataFrame) -> pd.Series:
    """Mark what is not simulated, and of a simulated GPU the best level that it has."""
    rank = 2 * (rows.method != "") + (rows.level != BEST_LEVEL)
    best = rank.groupby([rows.hardware, rows.model, rows.panel]).transform("min")
    return ~is_simulated(rows) | (rank == best)


def _is_of_chosen_kernels(rows: pd.DataFrame) -> pd.Series:
    """Mark all but composed rows, and of these the GPU of which the most series are composed, in
    panels where it has two of them, or all that there are.
    """
    is_composed = rows.level == COMPOSED
    num_drawn = rows.groupby("panel").key.nunique()  # by any device
    panels_of: dict[str, list[str]] = {}
    num_series: Counter[str] = Counter()
    for _, group in rows[is_composed].groupby(["device", "panel"]):
        device, panel = group[["device", "panel"]].iloc[0]
        number = group.key.nunique()
        if number >= min(2, num_drawn[panel]):
            panels_of.setdefault(device, []).append(panel)
            num_series[device] += number
    if not num_series:
        return ~is_composed
    device = max(num_series, key=lambda name: num_series[name])
    return ~is_composed | ((rows.device == device) & rows.panel.isin(panels_of[device]))
