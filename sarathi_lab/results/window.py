"""The part of a run that its metrics count, and the test for a steady state."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from sarathi_lab.config.errors import RunError, UserError, require_number
from sarathi_lab.results.kendall import median_slope, rising_pvalue
from sarathi_lab.results.metrics import rates
from sarathi_lab.results.table import Iterations, Quantities, Requests
from sarathi_lab.workload import LoadedRequests

ROUNDING = 1e-9  # 29 % of 100 are 29, not 28.999999999999996
FIX = "use seconds such as 30, a share of the requests such as 10%, or null"
NUM_BATCHES = 10  # of requests, whose mean delays are tested for a trend
LEAST_SLOPE = 0.01  # seconds of delay a second: a load of 1 % above capacity
# Columns by which a request is in a part of a run, or before it.
ARRIVAL = "arrival_time"
ADMISSION = "first_scheduled_time"  # where all wait from the start
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Window:
    """A run without its first `warmup` and last `cooldown`: seconds, a share of requests ("10%"),
    or None for no cut. Symbols: metrics.md.
    """

    warmup: float | str | None = None
    cooldown: float | str | None = None

    def __post_init__(self) -> None:
        warmup = _cut("warmup", self.warmup)
        cooldown = _cut("cooldown", self.cooldown)
        are_shares = warmup.is_share and cooldown.is_share
        amount = warmup.amount + cooldown.amount
        if are_shares and amount >= 1:
            raise UserError(f"{self._describe()} leave nothing; lower one")

    @property
    def is_whole(self) -> bool:
        """Return whether nothing is cut off."""
        return self.warmup is None and self.cooldown is None

    def check(self, load: LoadedRequests) -> None:
        """Raise UserError if no request arrives after the warm-up."""
        if self.is_whole or not load.has_times:
            return
        warmup = _cut("warmup", self.warmup)
        arrivals = [request.arrival_time for request in load.requests]
        last = max(arrivals)
        if not warmup.is_share and warmup.amount > last:
            raise UserError(
                f"window.warmup={self.warmup} is longer than the {last:.1f} s in which requests "
                "arrive; lower it or raise workload.num_requests"
            )

    def of(self, iterations: Iterations, requests: Requests, column: str = ARRIVAL) -> RunPart:
        """Return the part that counts, from the ledger's tables; `column` is `ARRIVAL` or
        `ADMISSION`. Raises RunError if it is empty.
        """
        duration = float(iterations.end.max())
        arrivals = np.sort(requests[column].to_numpy(dtype=float))
        warmup = _cut("warmup", self.warmup)
        cooldown = _cut("cooldown", self.cooldown)
        start = warmup.amount
        if warmup.is_share:
            num_first = warmup.number_of(len(arrivals))
            start = arrivals[num_first]
        end = duration
        if cooldown.is_share:
            num_last = cooldown.number_of(len(arrivals))
            if num_last:  # of none, the index -0 would be the first
                end = arrivals[-num_last]
        else:
            end -= cooldown.amount
        part = RunPart(float(start), float(end), column)
        counted = part.requests(requests)
        spans = part.spans(iterations)
        if counted.empty or spans.empty:
            raise RunError(
                f"{self._describe()} leave nothing of a run of {duration:.1f} s; lower them or "
                "raise workload.num_requests"
            )
        return part

    def _describe(self) -> str:
        return f"window.warmup={self.warmup} and window.cooldown={self.cooldown}"


class _Cut(NamedTuple):
    """What is cut off at one end of a run: seconds, or a share of the requests."""

    amount: float
    is_share: bool

    def number_of(self, num_requests: int) -> int:
        """Return the number of requests that a share is."""
        number = self.amount * num_requests
        return math.floor(number + ROUNDING)


def _cut(name: str, value: float | str | None) -> _Cut:
    """Read a setting of the window. Raises UserError."""
    if value is None:
        return _Cut(0.0, is_share=False)
    if not isinstance(value, str):
        seconds = require_number(f"window.{name}", value, minimum=0, fix=FIX)
        return _Cut(seconds, is_share=False)
    if re.fullmatch(r"\d+(\.\d+)?\s*%", value):
        share = float(value.rstrip("% ")) / 100
        if share < 1:
            return _Cut(share, is_share=True)
    raise UserError(f"window.{name}={value} is neither seconds nor a share below 100%; {FIX}")


class RunPart(NamedTuple):
    """A part of a run, in seconds, and the time of a request that decides whether it is in it."""

    start: float
    end: float
    column: str = ARRIVAL

    def requests(self, requests: Requests) -> Requests:
        """Return the requests that arrived, or were admitted, in it."""
        times = requests[self.column]
        is_in_part = times.between(self.start, self.end, inclusive="left")
        return requests[is_in_part]

    def spans(self, table: pd.DataFrame) -> pd.DataFrame:
        """Return the iterations, or bubbles of a pipeline, that count.

        In a window of time they began and ended in it. In a steady state they began in it, which is
        as many as ended in it.
        """
        if self.column == ADMISSION:
            begins_in_part = table.start.between(self.start, self.end, inclusive="left")
            return table[begins_in_part]
        has_begun = table.start >= self.start
        has_ended = table.end <= self.end
        return table[has_begun & has_ended]

    def throughput(self, requests: Requests) -> Quantities:
        """Return counts and rates (metrics.md) of tokens emitted in this part by all `requests`."""
        token_times = np.concatenate([np.empty(0), *requests.token_times])
        first_token_times = requests.first_token_time.to_numpy(dtype=float)
        finish_times = requests.finish_time.to_numpy(dtype=float)
        is_in_part = self._came_in(token_times)
        # A prompt counts at once with its first token, in whichever part its chunks were computed.
        is_first = self._came_in(first_token_times)
        is_finished = self._came_in(finish_times)
        prompt_lens = requests.prompt_len.to_numpy()
        rates_of_part = rates(
            num_prompt_tokens=float(prompt_lens[is_first].sum()),
            num_output_tokens=float(is_in_part.sum()),
            num_requests=float(is_finished.sum()),
            duration=self.end - self.start,
        )
        return {
            "window_start": self.start,
            "window_end": self.end,
            **rates_of_part,
        }

    def _came_in(self, times: Floats) -> NDArray[np.bool_]:
        """Mark the tokens of the iterations in it. Tokens come at the end of their iteration."""
        # The iteration that ends when the part starts did its work before the part.
        is_after_start = times > self.start
        is_before_end = times <= self.end
        return np.logical_and(is_after_start, is_before_end)


class Trend(NamedTuple):
    """The scheduling delay in a run's first and last tenth (seconds), and its slope (s/s)."""

    first: float
    last: float
    slope: float
    is_growing: bool

    def caution(self) -> str:
        return (
            f"not steady: the scheduling delay grew from {self.first:.2f} to {self.last:.2f} s "
            f"({self.slope:.3f} s a second), so it depends on the length of the run; lower the "
            "load, or count later"
        )


def delay_trend(requests: Requests) -> Trend | None:
    """Return the trend of the scheduling delay over `requests`; None for fewer than 20, or if all
    arrive at once.

    The means of 10 batches of requests in the order of arrival (batch means, which are nearly
    independent: Law and Carson, 1979) are tested for a monotone trend (Mann, 1945; Kendall, 1975),
    one-sided at 1 %, and must grow by at least 0.01 seconds a second in Sen's median slope (1968).
    With an offered load of rho > 1 times what is served, the delay grows by rho - 1 seconds a
    second.
    """
    ordered = requests.sort_values("arrival_time", kind="stable")
    arrivals = ordered.arrival_time.to_numpy(dtype=float)
    is_short = len(ordered) < 2 * NUM_BATCHES
    if is_short:
        return None
    come_at_once = arrivals[-1] <= arrivals[0]
    if come_at_once:
        return None
    starts = ordered.first_scheduled_time.to_numpy(dtype=float)
    delays = starts - arrivals
    times = batch_means(arrivals, NUM_BATCHES)
    means = batch_means(delays, NUM_BATCHES)
    slope = median_slope(times, means)
    is_rising = rising_pvalue(means) < 0.01
    is_growing = is_rising and slope >= LEAST_SLOPE
    return Trend(
        first=means[0],
        last=means[-1],
        slope=slope,
        is_growing=is_growing,
    )


def batch_means(values: Floats, num_batches: int) -> list[float]:
    """Return the means of batches of about as many values each."""
    batches = np.array_split(values, num_batches)
    return [float(batch.mean()) for batch in batches]
