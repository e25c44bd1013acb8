"""The line that a search for the capacity ends with."""

from __future__ import annotations

from collections.abc import Mapping

from sarathi_lab import report
from sarathi_lab.capacity.trials import Capacities
from sarathi_lab.intervals import FEWEST_PAIRS
from sarathi_lab.plan import Plan
from sarathi_lab.slo import Slo


def print_capacity(plan: Plan, slo: Slo, found: Capacities, summary: Mapping[str, float]) -> None:
    """The rate with its interval and objective, what kept seeds from one, and how it felt at that rate."""
    out, num_seeds = report.console(), len(found.brackets)
    of = f"{num_seeds} seed{'s' * (num_seeds > 1)}"
    interval = f"{summary['capacity_low']:.3g} to {summary['capacity_high']:.3g}, {of}"
    if num_seeds < FEWEST_PAIRS:
        interval += ", too few for an interval of more than the grid"
    out.print(
        f"  capacity {summary['capacity']:.3g} requests/s ({interval}) under {slo.name}: {slo.describe()}",
        style="bold",
        soft_wrap=True,
    )
    if found.remark:
        out.print(f"  {found.remark}", soft_wrap=True)
    trials = f"  {summary['capacity_trials']:.0f} runs of {len(plan.load.requests)} requests"
    felt = "".join(
        f", {words} {1e3 * summary[name]:.0f} ms"
        for name, words in (("ttft_p50", "TTFT P50"), ("tbt_p99", "TBT P99"), ("tpot_p99", "TPOT P99"))
        if name in summary
    )
    felt = f"; at the capacity{felt}" if felt else ""
    out.print(f"{trials}; all at once {summary['closed_rate']:.3g} requests/s{felt}", soft_wrap=True)
