"""The search for a capacity: the highest rate of the same requests that meets an objective."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import pandas as pd

from sarathi_lab.config.errors import UserError
from sarathi_lab.engine.config import EngineConfig
from sarathi_lab.engine.executor import Executor
from sarathi_lab.engine.ledger import Ledger
from sarathi_lab.engine.loop import serve
from sarathi_lab.engine.request import Request
from sarathi_lab.results.intervals import ends_of_median
from sarathi_lab.results.load_trend import load_trend
from sarathi_lab.results.serving_metrics import Slo, is_met

ROUNDING = 1e-9  # of the logarithm, so that rate and step are inverse
# Limits of a search, in saturation rates. Above, only a short run meets an objective.
LIMITS = (1 / 64, 2.0)
WAITS = {"ttft", "scheduling_delay"}  # bounds that a growing queue exceeds


def mean_rate(requests: Sequence[Request]) -> float:
    """Compute (R - 1) / (a_R - a_1) requests per second; infinite if all arrive at once."""
    times = [request.arrival_time for request in requests]
    span = max(times) - min(times)
    return (len(times) - 1) / span if span > 0 else math.inf


def at_rate(requests: Sequence[Request], rate: float) -> list[Request]:
    """Stretch the arrivals to `rate` a second, from 0. Raises UserError if they have no gaps."""
    present = mean_rate(requests)
    if not math.isfinite(present):
        raise UserError(
            f"the workload's {len(requests)} requests come all at once, so there is no rate to "
            "change; use a workload with arrivals, such as workload.arrivals=poisson, and at least "
            "2 requests"
        )
    first = min(request.arrival_time for request in requests)
    return [
        replace(request, arrival_time=(request.arrival_time - first) * present / rate)
        for request in requests
    ]


@dataclass(frozen=True)
class Grid:
    """Rates (1 + `precision`)^k requests/s for whole k, shared by policies and objectives."""

    precision: float

    def rate(self, step: int) -> float:
        return (1 + self.precision) ** step

    def step(self, rate: float) -> int:
        """Find the highest step whose rate is not above `rate`."""
        return math.floor(math.log(rate) / math.log1p(self.precision) + ROUNDING)


def highest_passing(passes: Callable[[int], bool], start: int, lowest: int, highest: int) -> int:
    """Search the highest step from `lowest` to `highest` that passes; `lowest` - 1 if none does.

    Steps 1, 2, 4, ... from `start` up while steps pass, or down while they fail, then bisects. If
    passing is not monotone, the result is one of its ends.
    """
    step, stride = min(max(start, lowest), highest), 1
    is_up = passes(step)
    end = highest if is_up else lowest
    while step != end:
        other = min(step + stride, end) if is_up else max(step - stride, end)
        if passes(other) != is_up:
            passing, failing = sorted((step, other))
            while failing - passing > 1:
                middle = (passing + failing) // 2
                passing, failing = (middle, failing) if passes(middle) else (passing, middle)
            return passing
        step, stride = other, 2 * stride
    return step if is_up else step - 1


def is_sustained(requests: pd.DataFrame, slo: Slo) -> bool:
    """Return whether a run meets `slo`. One that bounds no waits is met by any queue, so that
    requests must not wait the longer the longer it runs.
    """
    if not is_met(requests, slo):
        return False
    trend = None if WAITS & slo.bounds.keys() else load_trend(requests)
    return trend is None or not trend.is_overloaded


def run_lengths(num_requests: int, doublings: int) -> list[int]:
    """List the numbers of requests per run, doubling from 2 or more to `num_requests`."""
    return sorted({max(2, num_requests >> shift) for shift in range(doublings + 1)})


@dataclass(frozen=True)
class Capacity:
    """Highest passing steps by seed, below `lowest` where none passes, in runs of as many requests
    as the last of `medians`.
    """

    grid: Grid
    lowest: int
    highest: int
    steps: Mapping[int, int]
    medians: Mapping[int, float]  # 1/s, over the seeds, by requests per run

    @property
    def values(self) -> list[float]:
        """Highest passing rate of each seed; 0 where even the lowest fails."""
        return _rates(self.grid, self.lowest, self.steps)

    @property
    def num_requests(self) -> int:
        return max(self.medians)

    @property
    def median(self) -> float:
        return self.medians[self.num_requests]

    @property
    def is_settled(self) -> bool:
        """Whether doubling the requests moved the median by at most a step of the grid."""
        low, high = sorted([math.inf, *self.medians.values()][-2:])
        return high <= low * (1 + self.grid.precision) * (1 + ROUNDING)

    @property
    def is_lower_bound(self) -> bool:
        """Whether the median is the highest rate of the search."""
        return self.median >= self.grid.rate(self.highest)

    @property
    def summary(self) -> dict[str, float]:
        """Median over the seeds and its interval, up to the grid's next rate (infinite if the
        highest rate passed). NaN without convergence.
        """
        if not self.is_settled:
            ends = (f"capacity_{name}" for name in ("low", "high", "confidence"))
            return dict.fromkeys(("capacity", *ends), math.nan)
        low, high, confidence = ends_of_median(self.values, is_series=False)
        bracketed = [self.lowest <= step < self.highest for step in self.steps.values()]
        return {
            "capacity": self.median,
            "capacity_low": low,
            "capacity_high": math.inf if self.is_lower_bound else high * (1 + self.grid.precision),
            "capacity_confidence": confidence,
            "capacity_seeds": float(sum(bracketed)),
        }

    @property
    def history(self) -> str:
        """Median by length of run, the shortest first."""
        return ", ".join(f"{m:.3g}/s in runs of {n:,}" for n, m in self.medians.items())

    @property
    def remark(self) -> str:
        """Why there is no capacity, or seeds have no bracket; else empty."""
        if not self.is_settled:
            return f"no capacity: did not converge ({self.history})"
        steps = list(self.steps.values())
        ends = (
            (self.lowest, "lowest rate tried, fails", steps.count(self.lowest - 1)),
            (self.highest, "highest rate tried, passes", steps.count(self.highest)),
        )
        parts = [
            f"even {self.grid.rate(step):.3g}/s, the {words} with {count}"
            for step, words, count in ends
            if count
        ]
        return f"{' and '.join(parts)} of {len(steps)} seeds" if parts else ""


def _rates(grid: Grid, lowest: int, steps: Mapping[int, int]) -> list[float]:
    return [grid.rate(step) if step >= lowest else 0.0 for step in steps.values()]


class Trial(NamedTuple):
    """One run: its seed, number of requests and their rate (1/s), and its tables."""

    seed: int
    num_requests: int
    rate: float
    iterations: pd.DataFrame
    requests: pd.DataFrame


@dataclass
class Trials:
    """Runs of `loads`, the requests of each seed, under `engine` on `executor`, all kept.

    A seed's search begins at the result of the one before.
    """

    engine: EngineConfig
    executor: Executor
    loads: Mapping[int, Sequence[Request]]
    grid: Grid
    on_iteration: Callable[[int], None] = lambda num_tokens: None
    known: dict[tuple[int, int, int], Trial] = field(default_factory=dict)  # seed, number, step

    def serve(self, requests: Sequence[Request]) -> Ledger:
        ledger = Ledger()
        ledger.on_iteration = self.on_iteration
        return serve(requests, self.engine, self.executor, ledger)

    def at(self, seed: int, number: int, step: int) -> Trial:
        """Serve a seed's first `number` requests at a step of the grid, unless it is known."""
        key = (seed, number, step)
        if key not in self.known:
            rate = self.grid.rate(step)
            ledger = self.serve(at_rate(self.loads[seed][:number], rate))
            self.known[key] = Trial(seed, number, rate, ledger.iterations(), ledger.requests())
        return self.known[key]

    def saturation_rate(self, number: int) -> float:
        """Measure requests per second of the first seed's first `number`, arriving all at once."""
        chosen = next(iter(self.loads.values()))[:number]
        ledger = self.serve([replace(one, arrival_time=0.0) for one in chosen])
        return len(chosen) / float(ledger.iterations().end.max())

    def capacity(
        self, slo: Slo, start: float, saturation: float, lengths: Sequence[int]
    ) -> Capacity:
        """Search each seed's highest rate (1/s) that meets `slo`, from `start` within `LIMITS` of
        the `saturation` rate.

        A short run meets an objective despite a growing queue, so runs of `lengths` requests are
        searched in turn until the capacity converges.
        """
        step, (lowest, highest) = (
            self.grid.step(start),
            (self.grid.step(share * saturation) for share in LIMITS),
        )
        medians: dict[int, float] = {}
        for number in lengths:
            steps = {}
            for seed in self.loads:

                def passes(step: int, seed: int = seed, number: int = number) -> bool:
                    return is_sustained(self.at(seed, number, step).requests, slo)

                steps[seed] = step = highest_passing(passes, step, lowest, highest)
            medians[number] = float(np.median(_rates(self.grid, lowest, steps)))
            result = Capacity(self.grid, lowest, highest, steps, medians)
            if result.is_settled:
                break
        return result
