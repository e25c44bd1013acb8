"""What goes where in a sweep's picture: settings along x, as colours and as panels; quantities."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

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
    "throughput_vs_{}",
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
MOST_PANELS = 6
WITHOUT_GAPS = {5: 4}  # of so many panels those that fill their rows
MOST_ROWS = 3  # of quantities, where a setting has panels or all is in heat maps
MANY_NAMES = 8  # in rows, from which all panels stand beside each other
MOST_BESIDE = 4  # panels, then
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
        bound: settings that follow from others, as a device from its hardware.
    """

    kind: Kind
    x: str
    hue: str | None = None
    col: str | None = None
    others: tuple[str, ...] = ()
    bound: tuple[str, ...] = ()


class _StatedAxes(NamedTuple):
    """The settings that a user named, None where one is left open; `hue` is upwards in a map."""

    x: str | None
    hue: str | None
    col: str | None

    @property
    def names(self) -> set[str]:
        """Return those that are stated."""
        return set(filter(None, self))


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

    Raises:
        UserError: for an unknown name, or a heat map of a single setting.
    """
    if kind is not None:
        require_one_of("kind", kind, KINDS)
    stated = _StatedAxes(
        x=_column(runs, x),
        hue=_column(runs, hue),
        col=_column(runs, col),
    )
    swept = analysis.without_baselines(runs)
    free = analysis.independent(swept, analysis.varied(runs), num_chosen=1)
    shown = {*free, *stated.names}
    if kind == "heat" and len(shown) < 2:
        raise UserError("kind=heat needs two settings that vary; use kind=line")
    lines = _line_axes(runs, free, stated)
    is_left_open = kind is None and hue is None
    if kind == "heat" or (is_left_open and _is_crowded(runs, free, lines)):
        return _heat_axes(runs, free, stated)
    return lines


def _column(runs: pd.DataFrame, name: str | None) -> str | None:
    if not name:
        return None
    return analysis.find_column(runs, name)


def _is_crowded(runs: pd.DataFrame, free: Sequence[str], lines: PlotAxes) -> bool:
    """Return whether lines would need more panels and colours than a reader tells apart."""
    if len(free) == 2 and lines.hue:
        return len(values_of(runs, lines.hue)) > MOST_COLOURS
    return len(free) > 2


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
        stated = axes[axis] or []
        names = [stated] if isinstance(stated, str) else stated
        for name in map(str, names):
            if is_quantity(name):
                continue
            if len(analysis.columns_named(name, columns)) != 1:
                raise UserError(f"plot.{axis}={analysis.no_column(name, columns, swept)}")


def _best_x(swept: pd.DataFrame, names: Sequence[str]) -> str:
    """Return the request rate, else the number with the most values, else such a name."""
    numbers = [name for name in names if is_numeric(swept, name)]
    if RATE in numbers:
        return RATE
    return max(numbers or names, key=lambda name: swept[name].nunique())


def _line_axes(runs: pd.DataFrame, free: Sequence[str], stated: _StatedAxes) -> PlotAxes:
    """Choose the axes of lines: policies have colours wherever several were swept."""
    x, hue, col = stated
    remaining = _without(free, stated.names)
    if x is None:
        swept = analysis.without_baselines(runs)
        x = _best_x(swept, remaining or ["policy"])
        remaining = _without(remaining, {x})
    if hue is None and remaining:
        hue = remaining[0]
        if "policy" in remaining:
            hue = "policy"
        remaining.remove(hue)
    has_baselines = runs.policy.nunique() > 1
    if hue is None and has_baselines and "policy" not in (x, col):
        hue = "policy"
    if col is None and remaining:
        num_facets = len(values_of(runs, remaining[0]))
        if num_facets <= MOST_FACETS:
            col = remaining.pop(0)
    bound = _bound(runs, x, hue, col, *remaining)
    return PlotAxes("line", x, hue, col, tuple(remaining), bound)


def _bound(runs: pd.DataFrame, *shown: str | None) -> tuple[str, ...]:
    """Return the settings that vary with those that are shown."""
    return tuple(_without(analysis.varied(runs), shown))


def _without(names: Sequence[str], left_out: Collection[str | None]) -> list[str]:
    return [name for name in names if name not in left_out]


def _heat_axes(runs: pd.DataFrame, free: Sequence[str], stated: _StatedAxes) -> PlotAxes:
    """Choose the axes of heat maps.

    The rate or the most numbers are along x, policies or else the most values upwards, and the
    setting with the fewest values has panels beside each other.
    """
    x, upwards, col = stated
    swept = analysis.without_baselines(runs)
    num_values = {}
    for name in free:
        num_values[name] = len(values_of(swept, name))
    remaining = _without(free, stated.names)
    if x is None:
        # Policies are upwards, unless nothing else is left for x.
        without_policy = _without(remaining, {"policy"})
        x = _best_x(swept, without_policy or remaining)
        remaining = _without(remaining, {x})
    if upwards is None and not remaining:
        # A map needs a setting upwards more than one with panels.
        upwards = col
        col = None
    if upwards is None:
        upwards = max(remaining, key=num_values.__getitem__)
        if "policy" in remaining:
            upwards = "policy"
        remaining.remove(upwards)
    if col is None and remaining:
        fewest = min(remaining, key=num_values.__getitem__)
        num_cells_beside = num_values[fewest] * len(values_of(swept, x))
        if num_cells_beside <= MOST_CELLS:
            col = fewest
    others = tuple(_without(remaining, {col}))
    bound = _bound(runs, x, upwards, col, *others)
    if is_numeric(runs, str(upwards)):
        # Bound settings follow the names upwards. Numbers have none: they get rows of panels.
        return PlotAxes("heat", x, upwards, col, (*others, *bound))
    return PlotAxes("heat", x, upwards, col, others, bound)


def choose_quantities(runs: pd.DataFrame, axes: PlotAxes) -> list[str]:
    """Return quantities in which the runs differ, as many as fill the picture's rows."""
    names = _judged(runs, axes)
    measured = []
    differing = []
    for name in names:
        if not _is_measured(runs, name):
            continue
        measured.append(name)
        values = runs[name]
        if values.max() > values.min():
            differing.append(name)
    # Where none differs, that is what the sweep found.
    chosen = differing or measured
    if axes.kind == "heat":
        if not axes.others:
            return chosen[:MOST_ROWS]
        rows_of_quantity = analysis.group_keys(runs, axes.others).nunique()
        num_quantities = (MOST_ROWS + 1) // rows_of_quantity
        return chosen[: max(1, num_quantities)]
    if axes.col:
        return chosen[:MOST_ROWS]
    has_names = not is_numeric(runs, axes.x)
    if has_names and len(values_of(runs, axes.x)) > MANY_NAMES:
        return chosen[:MOST_BESIDE]
    num_panels = min(len(chosen), MOST_PANELS)
    return chosen[: WITHOUT_GAPS.get(num_panels, num_panels)]


def _judged(runs: pd.DataFrame, axes: PlotAxes) -> list[str]:
    """Return the quantities that such runs are judged by, the first ones first."""
    if arrive_over_time(runs):
        return list(LOADED_PANELS)
    bases = analysis.references(runs)
    if not bases:
        return [name for name in CLOSED_PANELS if "{}" not in name]
    if axes.kind == "heat":
        gains = [f"throughput_vs_{name}" for name in reversed(bases)]
        return [*gains, "tbt_p99", "throughput"]
    return [name.format(bases[0]) for name in CLOSED_PANELS]


def _is_measured(runs: pd.DataFrame, name: str) -> bool:
    if name not in runs or runs[name].isna().all():
        return False
    if name == MARGINAL:
        return bool((runs[name] > 0).any())  # else below the noise
    return True
