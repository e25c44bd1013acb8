"""Runs of the same requests at many rates, each served once, and the highest rate that meets an
objective.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import pandas as pd

from sarathi_lab.config.errors import UserError
from sarathi_lab.engine.block_manager import BlockManager
from sarathi_lab.engine.executor import Executor
from sarathi_lab.engine.ledger import Ledger
from sarathi_lab.engine.loop import run_engine
from sarathi_lab.engine.request import Request
from sarathi_lab.engine.scheduler import Scheduler
from sarathi_lab.policy import Policy
from sarathi_lab.results.intervals import bootstrap
from sarathi_lab.results.serving_metrics import is_met
from sarathi_lab.results.slo import Slo


@dataclass(frozen=True)
class Engine:
    """An executor and the sizes of its schedulers: sequences of a batch, tokens of the longest,
    blocks of the cache.
    """

    executor: Executor
    batch_size: int
    max_model_len: int
    num_blocks: int
    block_size: int
    num_stages: int = 1
    on_iteration: Callable[[int], None] = lambda num_tokens: None

    def serve(self, requests: Sequence[Request], policy: Policy) -> Ledger:
        """Serve `requests` to the end with an empty cache and a clock at zero; returns the
        record.
        """
        scheduler = Scheduler(
            policy,
            BlockManager(self.num_blocks, self.block_size),
            batch_size=self.batch_size,
            max_model_len=self.max_model_len,
            num_micro_batches=self.num_stages,
        )
        ledger = Ledger()
        ledger.on_iteration = self.on_iteration
        run_engine(requests, scheduler, self.executor, ledger)
        return ledger


def mean_rate(requests: Sequence[Request]) -> float:
    """(R - 1) / (a_R - a_1), the rate at which `requests` arrive; infinite if all are there at
    once.
    """
    times = [request.arrival_time for request in requests]
    span = max(times) - min(times)
    return (len(times) - 1) / span if span > 0 else float("inf")


def at_rate(requests: Sequence[Request], rate: float) -> list[Request]:
    """The same requests with their gaps stretched so that they arrive at `rate` a second, the first
    one at 0.

    Raises UserError for requests that have no gaps.
    """
    own = mean_rate(requests)
    if not np.isfinite(own) or not own:
        raise UserError(
            f"the workload's {len(requests)} requests come all at once, so there is no rate to "
            "change; use a workload "
            "with arrivals, such as workload.arrivals=poisson, and at least 2 requests"
        )
    first = min(request.arrival_time for request in requests)
    return [
        replace(request, arrival_time=(request.arrival_time - first) * own / rate)
        for request in requests
    ]


def all_at_once(requests: Sequence[Request]) -> list[Request]:
    """The same requests, all there at 0."""
    return [replace(request, arrival_time=0.0) for request in requests]


ROUNDING = 1e-9  # of the logarithm, so that a rate of the grid is its own step


@dataclass(frozen=True)
class Grid:
    """Rates (1 + `precision`)^k requests per second for whole k: the same ones for every policy,
    seed and objective.
    """

    precision: float

    def rate(self, step: int) -> float:
        """Requests per second of a step."""
        return (1 + self.precision) ** step

    def step(self, rate: float) -> int:
        """The highest step whose rate is not above `rate`."""
        return math.floor(math.log(rate) / math.log1p(self.precision) + ROUNDING)


@dataclass(frozen=True)
class Bracket:
    """Neighbouring steps of which one passes and the next does not; None where the limits were
    reached.
    """

    passing: int | None
    failing: int | None

    @property
    def is_whole(self) -> bool:
        return self.passing is not None and self.failing is not None


def highest_passing(
    passes: Callable[[int], bool], start: int, lowest: int, highest: int
) -> Bracket:
    """The bracket found from `start` within `lowest` to `highest`, both included.

    Goes 1, 2, 4, ... steps up while steps pass, or down while they do not, and halves what is
    between. Whether steps pass need not be monotone: then it is one of the places where passing
    ends.
    """
    start = min(max(start, lowest), highest)
    bracket = (
        _upwards(passes, start, highest) if passes(start) else _downwards(passes, start, lowest)
    )
    passing, failing = bracket.passing, bracket.failing
    if passing is None or failing is None:
        return bracket
    while failing - passing > 1:
        middle = (passing + failing) // 2
        passing, failing = (middle, failing) if passes(middle) else (passing, middle)
    return Bracket(passing, failing)


def _upwards(passes: Callable[[int], bool], passing: int, highest: int) -> Bracket:
    stride = 1
    while passing < highest:
        step = min(passing + stride, highest)
        if not passes(step):
            return Bracket(passing, step)
        passing, stride = step, 2 * stride
    return Bracket(passing, None)


def _downwards(passes: Callable[[int], bool], failing: int, lowest: int) -> Bracket:
    stride = 1
    while failing > lowest:
        step = max(failing - stride, lowest)
        if passes(step):
            return Bracket(step, failing)
        failing, stride = step, 2 * stride
    return Bracket(None, failing)


# Where a search ends, in saturation rates, unless told. Above, only the shortness of a run lets it
# meet an objective.
BELOW, ABOVE = 1 / 64, 2.0


@dataclass(frozen=True)
class Trial:
    """One run: its seed and requests per second, and the tables that it left."""

    seed: int
    rate: float
    iterations: pd.DataFrame
    requests: pd.DataFrame

    @property
    def duration(self) -> float:
        """Seconds until the last token."""
        return float(self.iterations.end.max())


@dataclass
class Trials:
    """Serves `loads`, the requests of each seed, under one policy on `engine`; every run is kept.

    The rates are those of `grid`; a seed's search begins where the one before it ended.
    """

    engine: Engine
    policy: Policy
    loads: Mapping[int, Sequence[Request]]
    grid: Grid
    known: dict[tuple[int, int], Trial] = field(default_factory=dict)

    def at(self, seed: int, step: int) -> Trial:
        """The run of a seed at a step of the grid, served unless it was before."""
        if (seed, step) not in self.known:
            rate = self.grid.rate(step)
            ledger = self.engine.serve(at_rate(self.loads[seed], rate), self.policy)
            self.known[seed, step] = Trial(seed, rate, ledger.iterations(), ledger.requests())
        return self.known[seed, step]

    def saturation_rate(self) -> float:
        """Requests per second of the first seed's, all there at once."""
        requests = next(iter(self.loads.values()))
        ledger = self.engine.serve(all_at_once(requests), self.policy)
        return len(requests) / float(ledger.iterations().end.max())

    def meets(self, slo: Slo, seed: int, step: int) -> bool:
        """Whether the run of a seed at a step meets `slo`."""
        return is_met(self.at(seed, step).requests, slo)

    def capacity(self, slo: Slo, start: float, limits: tuple[float, float]) -> Capacities:
        """The highest rate of each seed that meets `slo`, looked for from `start` within `limits`
        (per second).
        """
        lowest, highest = (self.grid.step(rate) for rate in limits)
        step, brackets = self.grid.step(start), {}
        for seed in self.loads:
            bracket = highest_passing(partial(self.meets, slo, seed), step, lowest, highest)
            brackets[seed] = bracket
            step = lowest if bracket.passing is None else bracket.passing
        return Capacities(self.grid, lowest, highest, brackets)


@dataclass(frozen=True)
class Capacities:
    """What the seeds of one search found; `lowest` and `highest` are the steps at its limits."""

    grid: Grid
    lowest: int
    highest: int
    brackets: Mapping[int, Bracket]

    @property
    def values(self) -> list[float]:
        """The highest passing rate of each seed; 0 where even the lowest fails."""
        return [
            0.0 if b.passing is None else self.grid.rate(b.passing) for b in self.brackets.values()
        ]

    @property
    def summary(self) -> dict[str, float]:
        """The median over the seeds and its interval; the next rate of the grid is the upper end of
        each seed's.
        """
        low, high = bootstrap(self.values)
        num_whole = sum(bracket.is_whole for bracket in self.brackets.values())
        return {
            "capacity": float(np.median(self.values)),
            "capacity_low": low,
            "capacity_high": high * (1 + self.grid.precision),
            "capacity_seeds": float(num_whole),
        }

    @property
    def remark(self) -> str:
        """What kept seeds from a bracket; empty if all have one."""
        failing = sum(bracket.passing is None for bracket in self.brackets.values())
        passing = sum(bracket.failing is None for bracket in self.brackets.values())
        parts = []
        if failing:
            parts.append(
                f"even {self.grid.rate(self.lowest):.3g}/s, the lowest rate tried, fails with "
                f"{failing}"
            )
        if passing:
            parts.append(
                f"even {self.grid.rate(self.highest):.3g}/s, the highest rate tried, passes "
                f"with {passing}"
            )
        return f"{' and '.join(parts)} of {len(self.brackets)} seeds" if parts else ""


def limits_around(
    saturation: float, lowest: float | None, highest: float | None
) -> tuple[float, float]:
    """Where a search ends: as told, else far below and above the saturation rate."""
    low = saturation * BELOW if lowest is None else lowest
    high = saturation * ABOVE if highest is None else highest
    return min(low, high), max(low, high)
