"""Requests served at a rate, and the highest rate that meets an objective: one search for
`task=capacity` and for experiments under load.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import pandas as pd

from sarathi_lab.config.errors import UserError
from sarathi_lab.engine import loop
from sarathi_lab.engine.arrivals import Arrivals, as_arrivals, behind_front_end
from sarathi_lab.engine.config import EngineConfig
from sarathi_lab.engine.executor import Executor, StepResult
from sarathi_lab.engine.ledger import Ledger
from sarathi_lab.engine.request import Chunk, Request, SequenceState
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
    if span == 0:
        return math.inf
    return (len(times) - 1) / span


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
    stretched = []
    for request in requests:
        time = (request.arrival_time - first) * present / rate
        stretched.append(replace(request, arrival_time=time))
    return stretched


@dataclass(frozen=True)
class Server:
    """An engine on its executor, behind a front end that takes `request_time` seconds for each
    request.
    """

    engine: EngineConfig
    executor: Executor
    request_time: float = 0.0

    def serve(self, requests: Sequence[Request] | Arrivals, ledger: Ledger | None = None) -> Ledger:
        """Serve `requests`, recorded by `ledger` where it is stated."""
        arrivals = behind_front_end(as_arrivals(requests), self.request_time)
        return loop.serve(arrivals, self.engine, self.executor, ledger or Ledger())

    def saturation_rate(self, requests: Sequence[Request]) -> float:
        """Return the requests per second that it serves of `requests`, all there at once."""
        at_once = [replace(request, arrival_time=0.0) for request in requests]
        ledger = self.serve(at_once)
        table = ledger.requests()
        seconds = float(table.finish_time.max())
        return len(at_once) / seconds


@dataclass(frozen=True)
class RateGrid:
    """Rates (1 + `precision`)^k requests/s for whole k, shared by policies and objectives."""

    precision: float

    def rate(self, step: int) -> float:
        return (1 + self.precision) ** step

    def step(self, rate: float) -> int:
        """Find the highest step whose rate is not above `rate`."""
        power = math.log(rate) / math.log1p(self.precision)
        return math.floor(power + ROUNDING)


def highest_passing(passes: Callable[[int], bool], start: int, lowest: int, highest: int) -> int:
    """Search the highest step from `lowest` to `highest` that passes; `lowest` - 1 if none does.

    Steps 1, 2, 4, ... from `start` up while steps pass, or down while they fail, then bisects. If
    passing is not monotone, the result is one of its ends.
    """
    step = min(max(start, lowest), highest)
    is_passing = passes(step)
    end = lowest
    stride = -1
    if is_passing:
        end = highest
        stride = 1
    while step != end:
        next_step = min(max(step + stride, lowest), highest)
        if passes(next_step) != is_passing:
            return bisected(passes, *sorted((step, next_step)))
        step = next_step
        stride *= 2
    return highest if is_passing else lowest - 1


def bisected(passes: Callable[[int], bool], passing: int, failing: int) -> int:
    """Return a step that passes, above `passing` or this, the next above which fails."""
    while failing - passing > 1:
        middle = (passing + failing) // 2
        if passes(middle):
            passing = middle
        else:
            failing = middle
    return passing


def is_sustained(requests: pd.DataFrame, slo: Slo) -> bool:
    """Return whether a run meets `slo`. One that bounds no waits is met by any queue, so that
    requests must not wait the longer the longer it runs.
    """
    if not is_met(requests, slo):
        return False
    if WAITS & slo.bounds.keys():
        return True
    trend = load_trend(requests)
    return trend is None or not trend.is_overloaded


def run_lengths(num_requests: int, doublings: int) -> list[int]:
    """List the numbers of requests per run, doubling from 2 or more to `num_requests`."""
    lengths = set()
    for halvings in range(doublings + 1):
        shorter = num_requests // 2**halvings
        lengths.add(max(2, shorter))
    return sorted(lengths)


@dataclass(frozen=True)
class Capacity:
    """The highest step of `grid` between `lowest` and `highest` that passed, by requests per run
    (`lowest` - 1 if none did); what counts is that of the longest runs.
    """

    grid: RateGrid
    lowest: int
    highest: int
    steps: Mapping[int, int]

    @property
    def num_requests(self) -> int:
        return max(self.steps)

    @property
    def step(self) -> int:
        return self.steps[self.num_requests]

    @property
    def rate(self) -> float:
        """Requests per second; 0 where even the lowest rate fails."""
        return self._rate_of(self.step)

    @property
    def is_settled(self) -> bool:
        """Whether doubling the requests moved the rate by at most a step of the grid."""
        if len(self.steps) < 2:
            return False
        # By the number of requests, ascending.
        rates = [self._rate_of(step) for step in self.steps.values()]
        low, high = sorted(rates[-2:])
        step_above = low * (1 + self.grid.precision)
        return high <= step_above * (1 + ROUNDING)

    @property
    def is_lower_bound(self) -> bool:
        """Whether the highest rate of the search passed."""
        return self.step >= self.highest

    @property
    def next_rate(self) -> float:
        """The lowest rate that fails; infinite if the highest rate passed."""
        if self.is_lower_bound:
            return math.inf
        return self.grid.rate(self.step + 1)

    @property
    def history(self) -> str:
        """Rates by length of run, the shortest first."""
        rates = []
        for number, step in self.steps.items():
            rate = self._rate_of(step)
            rates.append(f"{rate:.3g}/s in runs of {number:,}")
        return ", ".join(rates)

    @property
    def remark(self) -> str:
        """Why there is no capacity, or no bracket around it; else empty."""
        if not self.is_settled:
            return f"no capacity: did not converge ({self.history})"
        if self.step < self.lowest:
            return f"even {self.grid.rate(self.lowest):.3g}/s, the lowest rate tried, fails"
        if self.is_lower_bound:
            return f"even {self.rate:.3g}/s, the highest rate tried, passes"
        return ""

    def _rate_of(self, step: int) -> float:
        if step < self.lowest:
            return 0.0
        return self.grid.rate(step)


class RunAtRate(NamedTuple):
    """One run of a search: its number of requests and their rate (1/s), its table of requests, and
    its record.
    """

    num_requests: int
    rate: float
    requests: pd.DataFrame
    ledger: Ledger

    @property
    def iterations(self) -> pd.DataFrame:
        """The table of iterations, made when it is asked for, as most runs only tell a rate."""
        return self.ledger.iterations()


class ObjectiveMissed(Exception):
    """Ends a run whose outcome is decided."""


class LateTokens(Ledger):
    """A ledger that ends the run of `requests` by ObjectiveMissed as soon as so many first tokens,
    or so many others, were surely late that the quantile of all is.

    A decode waits for all of its iteration at least, so that one longer than the bound between
    tokens makes all of its decodes late.
    """

    def __init__(self, slo: Slo, requests: Sequence[Request]) -> None:
        super().__init__()
        self._first_bound = math.inf if slo.ttft is None else slo.ttft
        self._gap_bound = math.inf if slo.tbt is None else slo.tbt
        num_gaps = sum(request.output_len - 1 for request in requests)
        self._allowed_first = most_late(len(requests), slo.quantile)
        self._allowed_gaps = most_late(num_gaps, slo.quantile)
        self._num_late_first = 0
        self._num_late_gaps = 0

    def record(self, result: StepResult, finished: list[SequenceState]) -> None:
        super().record(result, finished)
        batch = result.batch
        if result.end - result.start > self._gap_bound:
            self._num_late_gaps += batch.num_decodes
        if batch.num_prefills:
            self._count_first_tokens(batch.chunks, result.end)
        if self._num_late_first > self._allowed_first or self._num_late_gaps > self._allowed_gaps:
            raise ObjectiveMissed

    def _count_first_tokens(self, chunks: Sequence[Chunk], end: float) -> None:
        for sequence, _, _, is_decode, emits_token in chunks:
            # What is computed again after an eviction emits a later token.
            if is_decode or not emits_token or len(sequence.token_times) != 1:
                continue
            self._num_late_first += end - sequence.request.arrival_time > self._first_bound


def most_late(number: int, quantile: float) -> int:
    """Return how many of `number` times may exceed a bound that their quantile is within."""
    # The quantile is not below the value of this rank, from 0.
    rank = math.floor(quantile * (number - 1) - ROUNDING)
    return number - rank - 1


@dataclass
class RateSearch:
    """Searches for the highest rate at which `server` meets an objective with `requests`. What was
    served for one objective is not served again for another, unless it `ends_early`: then a run
    ends, without tables, as soon as it surely misses the only objective that is searched for.
    """

    server: Server
    requests: Sequence[Request]
    grid: RateGrid
    ends_early: bool = False
    on_length: Callable[[int], None] = lambda num_lengths: None  # as runs of one were searched
    # By number of requests and step of the grid; None: it ended early.
    runs: dict[tuple[int, int], RunAtRate | None] = field(default_factory=dict)

    def passes(self, slo: Slo, number: int, step: int) -> bool:
        """Return whether the first `number` requests meet `slo` at a step of the grid."""
        key = (number, step)
        if key not in self.runs:
            self.runs[key] = self._run(slo, number, step)
        run = self.runs[key]
        return run is not None and is_sustained(run.requests, slo)

    def _run(self, slo: Slo, number: int, step: int) -> RunAtRate | None:
        """Serve the first `number` requests at a step; None where the run ended early."""
        rate = self.grid.rate(step)
        arriving = at_rate(self.requests[:number], rate)
        ledger = LateTokens(slo, arriving) if self.ends_early else Ledger()
        try:
            self.server.serve(arriving, ledger)
        except ObjectiveMissed:
            return None
        return RunAtRate(number, rate, ledger.requests(), ledger)

    def capacity(
        self,
        slo: Slo,
        start: float,
        saturation: float,
        lengths: Sequence[int],
        *,
        is_confirmed: bool = False,
        least: float = 0.0,
    ) -> Capacity:
        """Search the highest rate (1/s) that meets `slo`.

        A short run meets an objective despite a growing queue, so runs of `lengths` requests are
        searched in turn until the capacity converges.

        Args:
            slo: The objective, in seconds.
            start: The rate (1/s) of the first run.
            saturation: The rate (1/s) of which `LIMITS` are shares.
            lengths: Requests per run, ascending.
            is_confirmed: Whether a capacity must also pass in a run of the longest of `lengths`,
                and the lowest rate fail there if none passes: two short runs may agree on what no
                long one does.
            least: The lowest rate (1/s) that is asked for, where it is above that of `LIMITS`.
        """
        least_share, most_share = LIMITS
        highest = self.grid.step(most_share * saturation)
        lowest_rate = max(least, least_share * saturation)
        lowest = min(highest, self.grid.step(lowest_rate))
        step = self.grid.step(start)
        steps: dict[int, int] = {}
        for number in lengths:
            passes = partial(self.passes, slo, number)
            step = highest_passing(passes, step, lowest, highest)
            steps[number] = step
            self.on_length(1)
            capacity = Capacity(self.grid, lowest, highest, dict(steps))
            if not capacity.is_settled:
                continue
            if not is_confirmed:
                break
            # Of few requests one late one may fail every rate.
            is_none = step < lowest
            passes_longest = self.passes(slo, lengths[-1], max(step, lowest))
            if passes_longest != is_none:
                break
        return capacity
