"""A run held against an objective: what it misses, and by how much, to rank runs by."""

from __future__ import annotations

import math
from collections.abc import Sequence

from sarathi_lab.results.load_trend import load_trend
from sarathi_lab.results.serving_metrics import Slo, bounded_of, quantiles, waits
from sarathi_lab.results.table import Quantities, Requests

OF_GAPS = ("tbt", "tpot")  # bounds of times between tokens, which the chunk decides, not the rate


def outcome(requests: Requests, slo: Slo) -> Quantities:
    """Hold a run against an objective.

    Returns:
        The quantities that it bounds (seconds, by metrics.md's names), `bounds_missed` (how many
        exceed their bounds), `gap_bounds_missed` (of them those of times between tokens),
        `stall_class` (how often the largest of these quantities, and of the gaps below, is to be
        halved to be within its bound; 0 within),
        `request_gap_p99` (the longest gap between tokens of a request, of 99 % of them: a P99 over
        all gaps hides a stall a request), `bound_use` (the largest quantity over its bound),
        `worst_use` (the same, with that gap against the bound between tokens), `is_steady`,
        `is_too_short` (not steady, and too short to tell overload from chance) and `slo_met`. A run
        whose waits grow is not within an objective, as a longer one would exceed any bound.
    """
    times = waits(requests)
    held: Quantities = {}
    uses: list[float] = []
    gap_uses: list[float] = []
    for name, value in bounded_of(times, slo).items():
        held[slo.quantity_of(name)] = value
        use = value / slo.bounds[name]
        uses.append(use)
        if name in OF_GAPS:
            gap_uses.append(use)
    gaps = quantiles("request_gap", times["request_gap"])
    longest_gap = gaps.get("request_gap_p99", math.nan)
    stall_use = math.nan
    if slo.tbt is not None:
        stall_use = longest_gap / slo.tbt
    largest_gap_use = _largest([*gap_uses, stall_use])
    halvings = math.log2(max(1.0, largest_gap_use))
    trend = load_trend(requests)
    is_steady = trend is None or not trend.is_overloaded
    is_too_short = trend is not None and not is_steady and trend.is_short
    bounds_missed = _num_missed(uses)
    return {
        **held,
        "bounds_missed": bounds_missed,
        "gap_bounds_missed": _num_missed(gap_uses),
        "stall_class": math.ceil(halvings),
        "request_gap_p99": longest_gap,
        "bound_use": _largest(uses),
        "worst_use": _largest([*uses, stall_use]),
        "is_steady": is_steady,
        "is_too_short": is_too_short,
        "slo_met": is_steady and not bounds_missed,
    }


def _num_missed(uses: Sequence[float]) -> int:
    """Count the bounds that are exceeded; a quantity that no request has (NaN) exceeds none."""
    return sum(use > 1 for use in uses)


def _largest(uses: Sequence[float]) -> float:
    known_uses = [use for use in uses if not math.isnan(use)]
    return max(known_uses, default=0.0)
