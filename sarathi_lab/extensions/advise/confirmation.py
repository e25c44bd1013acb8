"""Longer runs of what would be advised, as waits that grow show in a long run only."""

from __future__ import annotations

import math
from dataclasses import replace

import pandas as pd

from sarathi_lab.experiment.advise import AS_GOOD, choose, is_overloaded, ranked
from sarathi_lab.extensions.advise.options import PolicyRuns


def with_longer_runs(runs: PolicyRuns) -> PolicyRuns:
    """Return the runs of a policy with longer ones of the chunks among which it is chosen, where
    its requests may be more.

    These are the chunks within all bounds in their short runs, the best first, until none that is
    left was better in its short run than a longer one within the objective; each of them, before it
    is said that none meets it, as bursts strike chunks by chance. Where no longer run is within the
    objective, also the chunk that comes nearest of all others, and where that one is overloaded
    those after it that serve more.
    """
    if not runs.has_longer:
        return runs
    longer_rows = []
    least_use = math.inf  # of the bounds, by a longer run within the objective
    is_within = runs.table["bounds_missed"] == 0
    within = runs.table[is_within]
    # Less tokens/s than the most comes after all others.
    rates = within["throughput"]
    least_as_good = (1 - AS_GOOD) * rates.max()
    is_behind = rates < least_as_good
    best_first = ranked(within.assign(is_behind=is_behind), "is_behind", "worst_use")
    for _, row in best_first.iterrows():
        is_worse = row["is_behind"] or row["worst_use"] >= least_use
        if math.isfinite(least_use) and is_worse:
            break
        longer = runs.longer(row)
        longer_rows.append(longer)
        if longer["slo_met"]:
            least_use = min(least_use, longer["worst_use"])
    is_decided = math.isfinite(least_use)
    others = runs.table[~is_within]
    while not is_decided and not others.empty:
        nearest = choose(others)
        longer = runs.longer(nearest)
        longer_rows.append(longer)
        is_decided = not is_overloaded(longer) or is_overloaded(nearest)
        # What serves less in a short run does not keep up, either.
        others = others[others["throughput"] > nearest["throughput"]]
    return replace(runs, confirmed=pd.DataFrame(longer_rows))
