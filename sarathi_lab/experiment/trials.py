"""Runs of the same requests at many rates, and searches among them, maybe several at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
    `share`, which has a search's runs served by several processes, whoever is free serves the one
    that will be asked for next if those under way end as they should. It finds the same.
    """

    engine: Engine
    policy: Policy
    loads: Mapping[int, Sequence[Request]]
    grid: Grid
    known: dict[Key, Trial] = field(default_factory=dict)
    share: Callable[[Ahead], None] | None = None
    spare: dict[Key, Trial] = field(default_factory=dict)  # that no search has asked for

    def at(self, seed: int, number: int, step: int) -> Trial:
        """The run of a seed's first `number` requests at a step of the grid, unless it is known."""
        key = (seed, number, step)
        if key not in self.known:
            is_spare = key in self.spare
            self.known[key] = self.spare.pop(key) if is_spare else self.serve(key)
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
        passes = cache(lambda key: is_met((self.known | self.spare)[key].requests, slo))
        if self.share is not None:
            self.share(Ahead(self, search, passes))
        return search(lambda key: bool(self.at(*key)) and passes(key))

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


@dataclass
class Ahead:
    """The runs that a search asks for, as work of a crew that guesses how those under way end."""

    trials: Trials
    search: Callable[[Passes], object]
    passes: Passes
    _under_way: set[Key] = field(default_factory=set)

    @property
    def is_done(self) -> bool:
        """Whether the search needs no other run."""
        return self._missing(set()) is None

    def take(self, *, is_own: bool) -> Key | None:
        """The run that the search asks for next, whoever serves it."""
        key = self._missing(self._under_way)
        if key is not None:
            self._under_way.add(key)
        return key

    def keep(self, key: Key, trial: Trial) -> None:
        self._under_way.remove(key)
        self.trials.spare[key] = trial
        lengths = trial.requests[["prompt_len", "output_len"]]
        self.trials.engine.on_iteration(int(lengths.to_numpy().sum()))

    def _missing(self, guessed: set[Key]) -> Key | None:
        """The first run that the search asks for and that is neither served nor `guessed`."""
        outcomes: dict[Key, bool] = {}

        def passes(key: Key) -> bool:
            if key in self.trials.known or key in self.trials.spare:
                outcomes[key] = self.passes(key)
                return outcomes[key]
            if key not in guessed:
                raise _MissingError(key)
            return likely(key, outcomes)

        try:
            self.search(passes)
        except _MissingError as missing:
            return missing.key
        return None


@dataclass
class _MissingError(Exception):
    """A search asks for a run that is not served."""

    key: Key


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
