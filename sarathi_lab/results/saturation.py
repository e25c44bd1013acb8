"""Overload: a test for a steady state, and limits that stop a saturated run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from sarathi_lab.config.checked import check_fields, number, whole
from sarathi_lab.config.errors import RunError, UserError
from sarathi_lab.engine.executor import StepResult
from sarathi_lab.engine.loop import Recorder
from sarathi_lab.engine.request import SequenceState
from sarathi_lab.workload import LoadedRequests

NUM_BATCHES = 10  # of requests, whose mean delays are tested for a trend
MIN_REQUESTS = 2 * NUM_BATCHES  # for a test
SETTING = "stop_when_saturated"
LEAST_SLOPE = 0.01  # seconds of delay a second: a load of 1 % above capacity
RECENT = 100  # arrivals that define the rate of a saturated run


@dataclass(frozen=True)
class Trend:
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


def delay_trend(requests: pd.DataFrame) -> Trend | None:
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
    if len(ordered) < MIN_REQUESTS or arrivals[-1] <= arrivals[0]:
        return None
    from scipy.stats import kendalltau, theilslopes  # takes a second, and most runs do not need it

    delays = (ordered.first_scheduled_time - ordered.arrival_time).to_numpy(dtype=float)
    times, means = (
        [float(batch.mean()) for batch in np.array_split(values, NUM_BATCHES)]
        for values in (arrivals, delays)
    )
    slope = float(theilslopes(means, times).slope)
    test = kendalltau(times, means, alternative="greater")
    return Trend(means[0], means[-1], slope, test.pvalue < 0.01 and slope >= LEAST_SLOPE)


class Saturated(RunError):
    """Error of a run stopped at `time` [s] that is overloaded at `rate` [requests/s]."""

    def __init__(self, message: str, time: float, rate: float | None) -> None:
        super().__init__(message)
        self.time, self.rate = time, rate


@dataclass(frozen=True)
class SaturationLimits:
    """Limits beyond which a run is stopped, None for no limit: the longest `scheduling_delay` [s]
    of a request in a batch, and the waiting requests, preempted ones included.
    """

    scheduling_delay: float | None = number(
        None, above=0, fix="use seconds such as 30, or null to go on"
    )
    num_waiting: int | None = whole(
        None, minimum=1, fix="use a number of requests such as 1000, or null to go on"
    )

    def __post_init__(self) -> None:
        check_fields(self, f"{SETTING}.")

    @property
    def are_set(self) -> bool:
        return self.scheduling_delay is not None or self.num_waiting is not None

    def check(self, load: LoadedRequests) -> None:
        """Raise UserError if the requests have no arrival times that could overload."""
        if not self.are_set or load.has_times:
            return
        waits = load.waits_for_answers
        why = "users wait for their answers" if waits else "all requests arrive at once"
        raise UserError(
            f"{SETTING} has no effect: {why}; drop it, or add workload.arrivals=poisson and "
            "workload.rate"
        )

    def guard(self, recorder: Recorder, load: LoadedRequests) -> Recorder:
        """Return `recorder`, wrapped to stop the run at a limit if any is set."""
        if not self.are_set:
            return recorder
        arrivals = np.sort([request.arrival_time for request in load.requests])
        return _Guard(recorder, self, arrivals)


@dataclass(frozen=True)
class _Guard:
    """Recorder that passes iterations on and raises `Saturated` after the first beyond a limit."""

    recorder: Recorder
    limits: SaturationLimits
    arrivals: NDArray[np.float64]

    def record(self, result: StepResult, finished: list[SequenceState]) -> None:
        self.recorder.record(result, finished)
        most, longest = self.limits.num_waiting, self.limits.scheduling_delay
        queues = result.batch.queues
        assert queues is not None, "the scheduler has booked the batch"
        if most is not None and queues.num_waiting > most:
            self._stop(result.end, f"{queues.num_waiting} requests wait", f"num_waiting={most}")
        if longest is not None:
            delay = max(_delay(chunk.sequence) for chunk in result.batch.chunks)
            if delay > longest:
                limit = f"scheduling_delay={longest:g}"
                self._stop(result.end, f"a request waited {delay:.2f} s", limit)

    def _stop(self, time: float, what: str, limit: str) -> NoReturn:
        recent = self.arrivals[self.arrivals <= time][-RECENT:]
        duration = float(np.ptp(recent)) if len(recent) else 0.0
        rate = (len(recent) - 1) / duration if duration > 0 else None  # none if all came at once
        at = "" if rate is None else f" at {rate:.3g} requests/s"
        message = (
            f"saturated after {time:.1f} s{at}: {what}, more than {SETTING}.{limit}; lower the "
            "rate or raise the limit"
        )
        raise Saturated(message, time, rate)


def _delay(sequence: SequenceState) -> float:
    assert sequence.first_scheduled_time is not None, "it is in a batch"
    return sequence.first_scheduled_time - sequence.request.arrival_time
