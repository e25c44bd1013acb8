"""Runs of the same requests at many rates, and searches among them, maybe several at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import NamedTuple

import pandas as pd

from sarathi_lab.engine.request import Request
from sarathi_lab.experiment.capacity import Capacities, Engine, Grid, at_rate, highest_passing
from sarathi_lab.policy import Policy
from sarathi_lab.results.serving_metrics import is_met
from sarathi_lab.results.slo import Slo

Key = tuple[int, int, int]  # a run's seed, number of requests and step of the grid
Passes = Callable[[Key], bool]


class Trial(NamedTuple):
    """One run: its seed, its number of requests and their rate (1/s), and its tables."""

    seed: int
    num_requests: int
    rate: float
    iterations: pd.DataFrame
    requests: pd.DataFrame


@dataclass
class Trials:
    """Serves `loads`, the requests of each seed, under one policy on `engine`; keeps every run.

    A search takes up what is `known`. A seed's search begins where the one before it ended. With
    `serve_all`, which serves several runs at a time, a search that waits for one has others served
    that it will ask for if runs end as they should: `ahead` at a time. It finds the same.
    """

    engine: Engine
    policy: Policy
    loads: Mapping[int, Sequence[Request]]
    grid: Grid
    known: dict[Key, Trial] = field(default_factory=dict)
    serve_all: Callable[[Sequence[Key]], Sequence[Trial]] | None = None
    ahead: int = 1
    _spare: dict[Key, Trial] = field(default_factory=dict)  # that no search has asked for

    def at(self, seed: int, number: int, step: int) -> Trial:
        """The run of a seed's first `number` requests at a step of the grid, unless it is known."""
        key = (seed, number, step)
        if key not in self.known:
            is_spare = key in self._spare
            self.known[key] = self._spare.pop(key) if is_spare else self.serve(key)
        return self.known[key]

    def serve(self, key: Key) -> Trial:
        """The run of `key`, which is not kept."""
        seed, number, step = key
        rate = self.grid.rate(step)
        ledger = self.engine.serve(at_rate(self.loads[seed][:number], rate), self.policy)
        return Trial(seed, number, rate, ledger.iterations(), ledger.requests())

    def saturation_rate(self, number: int) -> float:
        """Requests per second of the first seed's first `number`, all arriving at once."""
        chosen = next(iter(self.loads.values()))[:number]
        ledger = self.engine.serve([replace(one, arrival_time=0.0) for one in chosen], self.policy)
        return len(chosen) / float(ledger.iterations().end.max())

    def capacity(
        self, slo: Slo, start: float, limits: tuple[float, float], lengths: Sequence[int]
    ) -> Capacities:
        """The highest rate of each seed that meets `slo`, from `start` within `limits` (1/s).

        A queue that grows is met by a run that is short enough, so runs of `lengths` requests are
        searched one after the other until the capacity stands still.
        """
        search = partial(self._search, start, limits, lengths)
        passes = cache(lambda key: is_met(self._found(key).requests, slo))
        while self.serve_all is not None and (due := self._due(search, passes)):
            self._spare |= zip(due, self.serve_all(due), strict=True)
        return search(lambda key: bool(self.at(*key)) and passes(key))

    def _found(self, key: Key) -> Trial:
        return self.known[key] if key in self.known else self._spare[key]

    def _search(
        self, start: float, limits: tuple[float, float], lengths: Sequence[int], passes: Passes
    ) -> Capacities:
        lowest, highest = map(self.grid.step, limits)
        at, found = self.grid.step(start), None
        for number in lengths:
            brackets = {}
            for seed in self.loads:
                own = partial(lambda *key: passes(key), seed, number)
                brackets[seed] = bracket = highest_passing(own, at, lowest, highest)
                at = lowest if bracket.passing is None else bracket.passing
            found = Capacities(self.grid, lowest, highest, brackets, number, found)
            if found.is_settled:
                break
        assert found is not None, "there is a length at least"
        return found

    def _due(self, search: Callable[[Passes], Capacities], passes: Passes) -> list[Key]:
        """The runs that `search` asks for next, so many as are served at a time; none if it has
        all.
        """
        outcomes: dict[Key, bool] = {}
        due: list[Key] = []

        def guess(key: Key) -> bool:
            if key in self.known or key in self._spare:
                outcomes[key] = passes(key)
                return outcomes[key]
            due.append(key)
            if len(due) == self.ahead:
                raise _EnoughError
            return likely(key, outcomes)

        with suppress(_EnoughError):
            search(guess)
        return due


class _EnoughError(Exception):
    """As many runs are due as are served at a time."""


def likely(key: Key, outcomes: Mapping[Key, bool]) -> bool:
    """Whether a run will pass, by the `outcomes` of others: a slower one's that passed, a faster
    one's that failed, else that of the nearest rate; of the same requests first, then of as many.
    """
    seed, number, step = key
    for alike in ((seed, number), (None, number), (None, None)):
        own = {
            other[2]: has_passed
            for other, has_passed in outcomes.items()
            if alike[0] in (None, other[0]) and alike[1] in (None, other[1])
        }
        passed = any(has_passed for other, has_passed in own.items() if other >= step)
        failed = any(not has_passed for other, has_passed in own.items() if other <= step)
        if passed != failed:
            return passed
    nearest = min(outcomes, key=lambda other: abs(other[2] - step), default=None)
    return nearest is not None and outcomes[nearest]
