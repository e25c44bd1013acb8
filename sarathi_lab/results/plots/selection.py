"""Which of a figure's rows are drawn: its panels and series, without what has too few points."""

from __future__ import annotations

import fnmatch

import pandas as pd

from sarathi_lab.results.plots.spec import PlotSpec, in_tokens
from sarathi_lab.results.table import COMPOSED, MEASURED, PAPER

LABELS = ("panel", "hardware", "model", "method", "dataset", "slo")
# Of a simulated GPU the first of these is drawn that there is.
BEST_LEVEL = "profiled"


def selected(rows: pd.DataFrame, spec: PlotSpec) -> pd.DataFrame:
    """Return what the spec draws, with its `panel` and the `key` of its series."""
    shown = rows.reindex(columns=list(dict.fromkeys([*rows, *LABELS])))
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


def without_sparse(rows: pd.DataFrame, spec: PlotSpec) -> pd.DataFrame:
    """Return rows with a value, without sparse panels, all but the best level of each simulated GPU
    and model, and all but one of the GPUs with measured kernels.
    """
    has_value = rows.value.notna()
    rank = 2 * (rows.method != "") + (rows.level != BEST_LEVEL)
    best = rank.groupby([rows.hardware, rows.model, rows.panel]).transform("min")
    is_best = rows.level.isin([PAPER, MEASURED, COMPOSED]) | (rank == best)
    is_chosen = (rows.level != COMPOSED) | _is_most_composed(rows)
    shown = rows[has_value & is_best & is_chosen & ~_is_sparse(rows, spec)]
    return shown if len(shown) else rows[has_value]


def note_on_sparse(rows: pd.DataFrame, spec: PlotSpec) -> str:
    """Name each panel that is left out, and how many of its points were measured."""
    sparse = rows[_is_sparse(rows, spec)]
    panels = []
    for _, points in sparse.groupby(["device", "panel"], sort=False):
        device, panel = points[["device", "panel"]].iloc[0]
        name = spec.panel_name(panel)
        if device not in name:
            name = f"{device}, {name}"
        panels.append(f"{points.value.count()} of {len(points)} points on {name}")
    if not panels:
        return ""
    return f"Left out, too few measured to draw: {'; '.join(panels)}"


def _is_sparse(rows: pd.DataFrame, spec: PlotSpec) -> pd.Series:
    """Mark measured rows of panels with less than half their values, one of several, or no line."""
    has_value = rows.value.notna()
    panel_of = [rows.device, rows.panel]
    panels = has_value.groupby(panel_of)
    num_points = panels.transform("sum")
    if spec.kind == "line":  # the points of the longest
        of_series = has_value.groupby([*panel_of, rows.key]).transform("sum")
        num_points = of_series.groupby(panel_of).transform("max")
    is_short = (num_points < 2) & (panels.transform("size") > 1)
    return (rows.level == MEASURED) & (is_short | (panels.transform("mean") < 0.5))


def _is_most_composed(rows: pd.DataFrame) -> pd.Series:
    """Mark the GPU of whose measured kernels the most series are composed, in panels where these
    are several, or all that there are.
    """
    is_composed = rows.level == COMPOSED
    num_drawn = rows.groupby("panel").key.nunique()  # by any device
    num_series = rows[is_composed].groupby(["device", "panel"]).key.nunique().reset_index()
    enough = num_drawn.reindex(num_series.panel).clip(upper=2).to_numpy()
    shown = num_series[num_series.key >= enough]
    if shown.empty:
        return pd.Series(False, rows.index)
    device = shown.groupby("device").key.sum().idxmax()
    panels = shown.panel[shown.device == device]
    return is_composed & (rows.device == device) & rows.panel.isin(panels)
