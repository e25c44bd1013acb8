"""What goes where in a sweep's picture: settings along x, as colours and as panels; quantities."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import pandas as pd

from sarathi_lab.config.errors import UserError, require_one_of
from sarathi_lab.results import sweep_analysis as analysis
from sarathi_lab.results.conclusion import arrive_over_time
from sarathi_lab.results.quantities import is_quantity
from sarathi_lab.results.sweep_analysis import is_numeric, values_of
from sarathi_lab.results.table import HEADINGS

Kind = Literal["line", "heat"]
KINDS: tuple[Kind, ...] = ("line", "heat")
MARGINAL = "decode_time_marginal"
# Where all requests wait from the start. TTFT is not there: it states how long the queue is.
CLOSED_PANELS = (
    "capacity",
    "throughput",
    "tbt_p99",
    "throughput_vs_{reference}",
    "decode_time_alone",
    MARGINAL,
    "kv_reread_factor",
)
# Where requests arrive over time. Both in the order in which panels are kept.
LOADED_PANELS = (
    "capacity",
    "slo_attainment",
    "goodput",
    "request_gap_p99",
    "ttft_p99",
    "tbt_p99",
    "throughput",
    "ttft_p50",
)
MOST_PANELS = 6  # of lines by a number
MOST_BESIDE = 4  # panels with names in rows
MOST_ROWS = 3  # of quantities, where a setting has panels or all is in heat maps
MOST_FACETS = 6
MOST_COLOURS = 10  # that can be distinguished
MOST_CELLS = 20  # beside each other
RATE = "workload.rate"  # is along x wherever it is swept


@dataclass(frozen=True)
class PlotAxes:
    """Settings of a sweep's picture.

    Attributes:
        kind: lines (points, where `x` has names) or heat maps.
        x: setting along x.
        hue: setting with a colour a value; in a heat map it is upwards.
        col: setting with a panel a value.
        others: settings that vary, too; they have markers, in heat maps rows of panels.
    """

    kind: Kind
    x: str
    hue: str | None = None
    col: str | None = None
    others: tuple[str, ...] = ()


def choose_axes(
    runs: pd.DataFrame,
    *,
    x: str | None = None,
    hue: str | None = None,
    col: str | None = None,
    kind: str | None = None,
) -> PlotAxes:
    """Choose the settings that are not named, and the kind: lines for up to two swept settings or
    where colours are named, else heat maps.

    The rate or the number with the most values is along x, and policies have colours. Of the
    others the setting with the most values has colours, and the one with the fewest has panels.

    Raises:
        UserError: for an unknown name, or a heat map of a single setting.
    """
    if kind is not None:
        require_one_of("kind", kind, KINDS)
    stated = {}
    for axis, name in {"x": x, "hue": hue, "col": col}.items():
        if name:
            stated[axis] = analysis.find_column(runs, name)
    swept = analysis.without_baselines(runs)
    varied = analysis.varied(runs)
    free = analysis.independent(swept, varied, num_chosen=1)
    remaining = [name for name in free if name not in stated.values()]
    remaining.sort(key=lambda name: swept[name].nunique(), reverse=True)
    along = stated.get("x") or _best_x(swept, remaining)
    remaining = _without(remaining, along)
    colours = stated.get("hue")
    if colours is None and "policy" in remaining:
        colours = "policy"
    elif colours is None and remaining:
        colours = remaining[0]
    remaining = _without(remaining, colours)
    panels = stated.get("col")

    num_shown = len({*free, *stated.values()})
    if kind == "heat" and num_shown < 2:
        raise UserError("kind=heat needs two settings that vary; use kind=line")
    is_left_open = kind is None and hue is None
    is_map = kind == "heat" or (is_left_open and _is_crowded(runs, num_shown, colours))
    most_facets = MOST_FACETS
    if is_map:
        num_along = len(values_of(swept, along))
        most_facets = MOST_CELLS // num_along
        if colours is None:  # a map needs a setting upwards more than one with panels
            colours = panels
            panels = None
    elif colours is None and "policy" not in (along, panels) and runs.policy.nunique() > 1:
        colours = "policy"  # of the baselines
    if panels is None and remaining:
        fewest_values = remaining[-1]
        if len(values_of(swept, fewest_values)) <= most_facets:
            panels = fewest_values
    others = _without(remaining, panels)
    return PlotAxes(
        kind="heat" if is_map else "line",
        x=along,
        hue=colours,
        col=panels,
        others=tuple(others),
    )


def _best_x(swept: pd.DataFrame, names: Sequence[str]) -> str:
    """Return the request rate, else the first number, else the first name; policies at last."""
    numbers = [name for name in names if is_numeric(swept, name)]
    if RATE in numbers:
        return RATE
    without_policy = _without(names, "policy")
    in_order_of_choice = [*numbers, *without_policy, "policy"]
    return in_order_of_choice[0]


def _is_crowded(runs: pd.DataFrame, num_shown: int, hue: str | None) -> bool:
    """Return whether lines would need more panels and colours than a reader tells apart."""
    if num_shown > 2:
        return True
    if hue is None:
        return False
    num_colours = len(values_of(runs, hue))
    return num_colours > MOST_COLOURS


def _without(names: Sequence[str], left_out: str | None) -> list[str]:
    return [name for name in names if name != left_out]


def check_stated(
    axes: Mapping[str, Any], settings: Collection[str], swept: Sequence[str], own: Collection[str]
) -> None:
    """Refuse axes of a sweep's picture that none of its runs can have.

    Args:
        axes: Those of the group `plot`; None where one is left open.
        settings: Names of the runs' settings and labels.
        swept: Those of the settings that the sweep varies.
        own: Names of a user's quantities.

    Raises:
        UserError: for an unknown name or kind.
    """
    if axes["kind"] is not None:
        require_one_of("plot.kind", axes["kind"], KINDS)
    columns = list(dict.fromkeys([*settings, *own, *HEADINGS]))
    for axis in ("x", "hue", "col", "y"):
        names = axes[axis] or []
        if isinstance(names, str):
            names = [names]
        for name in map(str, names):
            if is_quantity(name):
                continue
            matching = analysis.columns_named(name, columns)
            if len(matching) != 1:
                problem = analysis.no_column(name, columns, swept)
                raise UserError(f"plot.{axis}={problem}")


def choose_quantities(runs: pd.DataFrame, axes: PlotAxes) -> list[str]:
    """Return quantities in which the runs differ, as many as fill the picture's rows."""
    measured = []
    differing = []
    for name in _judged(runs):
        if not _is_measured(runs, name):
            continue
        measured.append(name)
        if runs[name].nunique() > 1:
            differing.append(name)
    # Where none differs, that is what the sweep found.
    chosen = differing or measured
    if axes.kind == "heat":
        rows_of_quantity = analysis.group_keys(runs, axes.others).nunique()
        return chosen[: math.ceil(MOST_ROWS / rows_of_quantity)]
    if axes.col:
        return chosen[:MOST_ROWS]
    if not is_numeric(runs, axes.x):
        return chosen[:MOST_BESIDE]
    return chosen[:MOST_PANELS]


def _judged(runs: pd.DataFrame) -> list[str]:
    """Return the quantities that such runs are judged by, the first ones first."""
    if arrive_over_time(runs):
        return list(LOADED_PANELS)
    reference = analysis.reference(runs)
    return [name.format(reference=reference) for name in CLOSED_PANELS]


def _is_measured(runs: pd.DataFrame, name: str) -> bool:
    if name not in runs:
        return False
    if name == MARGINAL:
        return bool((runs[name] > 0).any())  # else below the noise
    return bool(runs[name].notna().any())
