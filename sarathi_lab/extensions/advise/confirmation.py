"""Longer runs of what would be advised, as waits that grow show in a long run only."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd

from sarathi_lab.experiment.advise import AS_GOOD, CLOSE, Row, choose, ranked
from sarathi_lab.extensions.advise.leader import Leader
from sarathi_lab.extensions.advise.options import PolicyRuns


def confirmed(runs: PolicyRuns, leader: Leader | None = None) -> pd.DataFrame:
    """Return what longer runs of a policy give, for the chunks among which it is chosen.

    These are the chunks within all bounds in their short runs, the best first, until none that is
    left was better in its short run than a longer one within the objective. A chunk that a longer
    run makes unlikely to be within it comes after the others, where none of these is. Where no
    longer run is within it, also the chunk that comes nearest of all others. Whether waits grow
    only the longer run tells: filling and draining are a large part of a short one.

    Args:
        runs: The policy.
        leader: The best policy so far. By its runs it is estimated how much nearer to its bounds a
            longer run comes. A policy that it beats has none after one within the objective.
    """
    is_beaten = leader is not None and leader.beats(runs.table)
    rows: list[dict[str, Any]] = []
    least_use = math.inf  # of a longer run within the objective
    overload = 0.0  # tokens/s of a short run; what serves less does not keep up, either
    unlikely: list[pd.Series] = []
    is_within = runs.table["bounds_missed"] == 0
    for _, row in _best_first(runs.table[is_within], leader).iterrows():
        is_behind = math.isfinite(least_use) and row["is_behind"]
        if is_behind or row["expected_use"] >= least_use:
            break
        # Longer runs are costly: rows that would miss as those near them did are passed over.
        if row["throughput"] < overload or _is_close_to_missed(row, rows):
            unlikely.append(row)
            continue
        longer = runs.longer(row)
        rows.append(longer)
        if longer["slo_met"]:
            least_use = min(least_use, longer["worst_use"])
            if is_beaten:
                break
        elif not longer["is_steady"]:
            overload = max(overload, (1 - AS_GOOD) * row["throughput"])
    for row in unlikely:
        # Each, before it is said that none meets the objective: bursts strike chunks by chance.
        if math.isfinite(least_use):
            break
        longer = runs.longer(row)
        rows.append(longer)
        if longer["slo_met"]:
            least_use = longer["worst_use"]
    others = runs.table[~is_within]
    # Without a run within the objective the answer says how near one comes.
    needs_nearest = math.isinf(least_use) and not (rows and is_beaten)
    if needs_nearest and not others.empty:
        rows.append(runs.longer(choose(others)))
    return pd.DataFrame(rows)


def _best_first(within: pd.DataFrame, leader: Leader | None) -> pd.DataFrame:
    """Return rows that differ in their margins to the bounds, those with the most tokens/s first;
    the others `is_behind`. `expected_use` is the least of the bounds that a longer run may take.
    """
    least = (1 - AS_GOOD) * within["throughput"].max()
    is_behind = within["throughput"] < least
    growths = [1.0 if leader is None else leader.growth(chunk) for chunk in within["chunk"]]
    expected_use = growths * within["worst_use"]
    ranks = within.assign(is_behind=is_behind, expected_use=expected_use)
    return ranked(ranks, "is_behind", "expected_use")


def _is_close_to_missed(row: Row, longer_rows: list[dict[str, Any]]) -> bool:
    """Return whether a longer run of nearly the same chunk exceeds a bound."""
    for longer in longer_rows:
        larger = max(row["chunk"], longer["chunk"])
        smaller = min(row["chunk"], longer["chunk"])
        if longer["bounds_missed"] and larger <= (1 + CLOSE) * smaller:
            return True
    return False
