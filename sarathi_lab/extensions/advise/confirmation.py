"""Longer runs of what would be advised, as waits that grow show in a long run only."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pandas as pd

from sarathi_lab.experiment.advise import AS_GOOD, CLOSE, Row, choose, is_overloaded, ranked
from sarathi_lab.extensions.advise.leader import Leader
from sarathi_lab.extensions.advise.options import PolicyRuns, is_same_run


def confirmed(runs: PolicyRuns, leader: Leader | None = None) -> pd.DataFrame:
    """Return what longer runs of a policy give, for the chunks among which it is chosen.

    These are the chunks within all bounds in their short runs, the best first, until none that is
    left was better in its short run than a longer one within the objective. A chunk that a longer
    run makes unlikely to be within it comes after the others, where none of these is. Where no
    longer run is within it, also the chunk that comes nearest of all others; but none at all where
    that one is surely overloaded and none is within its bounds. Whether waits grow that are within
    them only the longer run tells: filling and draining are a large part of a short one.

    Args:
        runs: The policy.
        leader: The best policy so far. By its runs it is estimated how much nearer to its bounds a
            longer run comes. A policy that it beats has none after one within the objective.
    """
    is_beaten = leader is not None and leader.beats(runs.table)
    longer_runs = _LongerRuns(runs)
    unlikely: list[pd.Series] = []
    is_within = runs.table["bounds_missed"] == 0
    for _, row in _best_first(runs.table[is_within], leader).iterrows():
        is_behind = longer_runs.has_met and row["is_behind"]
        if is_behind or row["expected_use"] >= longer_runs.least_use:
            break
        # Longer runs are costly: rows that would miss as those near them did are passed over.
        if longer_runs.predict_miss(row):
            unlikely.append(row)
            continue
        longer_runs.add(row)
        if is_beaten and longer_runs.has_met:
            break
    for row in unlikely:
        # Each, before it is said that none meets the objective: bursts strike chunks by chance.
        if longer_runs.has_met:
            break
        longer_runs.add(row)
    others = runs.table[~is_within]
    is_decided = longer_runs.has_met or (is_beaten and longer_runs.rows)
    if is_decided or others.empty:
        return pd.DataFrame(longer_runs.rows)
    # Without a run within the objective the answer says how near one comes. An overloaded run comes
    # no nearer: its waits are as long as the run.
    nearest = choose(others)
    if longer_runs.rows or not is_overloaded(nearest):
        longer_runs.add(nearest)
    return pd.DataFrame(longer_runs.rows)


def with_longer_runs(compared: Mapping[str, PolicyRuns]) -> dict[str, PolicyRuns]:
    """Return the runs of policies with a longer one of each that is to be judged without one: those
    that `confirmed` left out as overloaded.
    """
    with_longer = dict(compared)
    for label in _to_repeat(compared):
        runs = compared[label]
        longer = runs.longer(choose(runs.table))
        with_longer[label] = replace(runs, confirmed=pd.DataFrame([longer]))
    return with_longer


def _to_repeat(compared: Mapping[str, PolicyRuns]) -> list[str]:
    """Return the labels of overloaded policies that are to have longer runs.

    If all are overloaded, it is those that stall requests nearly as short as the one that does so
    the shortest; none where that is one alone, or its twins.
    """
    overloaded = {}
    for label, runs in compared.items():
        if runs.has_longer and runs.confirmed.empty:
            overloaded[label] = choose(runs.table)
    if len(overloaded) < len(compared):
        return list(overloaded)
    shortest = min(overloaded.values(), key=_stall_class)
    rivals = []
    is_alone = True
    for label, row in overloaded.items():
        if _stall_class(row) <= _stall_class(shortest) + 1:
            rivals.append(label)
            is_alone = is_alone and is_same_run(row, shortest)
    return [] if is_alone else rivals


def _stall_class(row: Row) -> int:
    return int(row["stall_class"])


@dataclass
class _LongerRuns:
    """Longer runs of a policy so far.

    Attributes:
        runs: The policy.
        rows: The outcome of each.
        least_use: Of the bounds by one that meets the objective; infinite without one.
        overload: Tokens/s of a short run; what serves less does not keep up, either.
    """

    runs: PolicyRuns
    rows: list[dict[str, Any]] = field(default_factory=list)
    least_use: float = math.inf
    overload: float = 0.0

    @property
    def has_met(self) -> bool:
        """Whether one meets the objective."""
        return math.isfinite(self.least_use)

    def add(self, row: Row) -> None:
        """Simulate a longer run of the chunk in a row of a short one."""
        longer = self.runs.longer(row)
        self.rows.append(longer)
        if longer["slo_met"]:
            self.least_use = min(self.least_use, longer["worst_use"])
        elif not longer["is_steady"]:
            served = (1 - AS_GOOD) * row["throughput"]
            self.overload = max(self.overload, served)

    def predict_miss(self, row: Row) -> bool:
        """Return whether they let expect that a longer run of a row's chunk exceeds a bound."""
        is_overload = row["throughput"] < self.overload
        return is_overload or _is_close_to_missed(row, self.rows)


def _best_first(within: pd.DataFrame, leader: Leader | None) -> pd.DataFrame:
    """Return rows that differ in their margins to the bounds, those with the most tokens/s first;
    the others `is_behind`. `expected_use` is the least of the bounds that a longer run may take.
    """
    least = (1 - AS_GOOD) * within["throughput"].max()
    is_behind = within["throughput"] < least
    expected_use = within["worst_use"]
    if leader is not None:
        expected_use = expected_use * within["chunk"].map(leader.growth)
    ranks = within.assign(is_behind=is_behind, expected_use=expected_use)
    return ranked(ranks, "is_behind", "expected_use")


def _is_close_to_missed(row: Row, longer_rows: list[dict[str, Any]]) -> bool:
    """Return whether a longer run of nearly the same chunk exceeds a bound."""
    for longer in longer_rows:
        chunks = row["chunk"], longer["chunk"]
        is_close = max(chunks) <= (1 + CLOSE) * min(chunks)
        if is_close and longer["bounds_missed"]:
            return True
    return False
