"""Whether a run whose requests arrive over time has come to a steady state, and if not, why."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sarathi_lab.results.kendall import rising_pvalue
from sarathi_lab.results.table import Quantities, Requests
from sarathi_lab.results.window import NUM_BATCHES, Trend, batch_means, delay_trend

LEVEL = 0.01  # of both tests for a trend, one-sided
# Standard deviations by which a server at its limit grows in 5 % of its runs, by chance: Student's
# t with NUM_BATCHES - 1 degrees of freedom, as they are estimated from so many changes.
CHANCE = 1.833
FEWEST_BATCHES = 5  # of the second half of a short run: the fewest that can pass at LEVEL
LEAST_EXCESS = 1 / 3  # of the requests in service, beyond what the first ones' latency explains
LEAST_REQUESTS = 5  # of such: fewer are chance
FEWEST_COMPARED = 2 * NUM_BATCHES  # requests whose number in service is tested for a trend
# A server that keeps up fills for several latencies, the longer the more these differ. Shorter runs
# are often all of that.
LONG_ENOUGH = 1_000  # requests
LONGER = 8  # times the requests may tell a server that keeps up from one that does not
Floats = NDArray[np.float64]


class Crowd(NamedTuple):
    """Requests in service at arrivals, in the mean of the first and the last batch of them.

    `expected_last` is what would be in service then if requests took as long as the early ones.
    With `is_growing` the excess over that grows to a third of it; with `still_grows` it does so in
    the second half of the run too, when a server that keeps up has filled, and in the last quarter
    by more than chance. A run `is_short` if it
    ends before that can be judged, while ever more requests are in service.
    """

    first: float
    last: float
    expected_last: float
    is_growing: bool
    still_grows: bool
    is_short: bool

    @property
    def is_in_doubt(self) -> bool:
        """Return whether the growth may be that of a server that fills."""
        return self.is_growing and not self.still_grows


class LoadTrend(NamedTuple):
    """The trend of the scheduling delay, and that of the requests in service, in a run of so many
    requests.
    """

    delay: Trend
    crowd: Crowd
    num_requests: int

    @property
    def is_overloaded(self) -> bool:
        """Return whether more seems to arrive than is served. In a short run this may be chance."""
        return self.delay.is_growing or self.crowd.is_growing

    @property
    def is_short(self) -> bool:
        """Return whether the run is too short to tell that more arrives than is served."""
        if self.delay.is_growing:
            return False
        has_few = self.crowd.is_growing and self.num_requests < LONG_ENOUGH
        return has_few or self.crowd.is_in_doubt or self.crowd.is_short

    @property
    def is_steady(self) -> bool:
        return not (self.is_overloaded or self.crowd.is_short)

    def metrics(self) -> Quantities:
        """Return the quantities of metrics.md."""
        return {
            "is_steady": float(self.is_steady),
            "is_overloaded": float(self.is_overloaded and not self.is_short),
            "scheduling_delay_slope": self.delay.slope,
            "in_service_first": self.crowd.first,
            "in_service_last": self.crowd.last,
        }

    def caution(self) -> str | None:
        """Explain why the run is not steady; None for one that is."""
        if self.delay.is_growing:
            return self.delay.caution()
        numbers = f"from {self.crowd.first:.0f} to {self.crowd.last:.0f}"
        if self.crowd.is_growing:
            growth = (
                f"the requests in service grew {numbers}, where {self.crowd.expected_last:.0f} "
                "would be if they took as long as early ones"
            )
            if self.is_short:
                return (
                    f"too short to judge: {growth}, which may be chance in {self.num_requests} "
                    f"requests; workload.num_requests={longer_than(self.num_requests)} may show "
                    "whether the server keeps up"
                )
            return (
                f"not steady: {growth}, so times depend on the length of the run; lower the load, "
                "or count later"
            )
        if self.crowd.is_short:
            return (
                f"not steady: the requests in service grew {numbers} until the last one came, so "
                "the run is too short for its load; raise workload.num_requests"
            )
        return None


def load_trend(requests: Requests) -> LoadTrend | None:
    """Return the trends over `requests`; None where `delay_trend` has none.

    The delay shows a queue before the first chunk. A server that takes prompts at once has none,
    and lets all wait between tokens: there more and more requests are in service. Their number at
    each arrival is compared with the number of arrivals in the time that the second tenth of the
    requests took (median), so that a burst of arrivals is no overload. The first tenth met an empty
    server: all later ones take longer, in a steady run too. Batches, test and level are those of
    `delay_trend`.
    """
    delay = delay_trend(requests)
    if delay is None:
        return None
    ordered = requests.sort_values("arrival_time", kind="stable")
    arrivals = ordered.arrival_time.to_numpy(dtype=float)
    ends = ordered.finish_time.to_numpy(dtype=float)
    return LoadTrend(delay, _crowd(arrivals, ends), len(ordered))


def _crowd(arrivals: Floats, ends: Floats) -> Crowd:
    """Return the requests in service by their `arrivals`, ascending, and `ends` [R]."""
    num_arrived = np.arange(1.0, len(arrivals) + 1)
    num_finished = np.searchsorted(np.sort(ends), arrivals, side="right")
    in_service = num_arrived - num_finished
    num_first = max(2, len(arrivals) // NUM_BATCHES)
    latencies = ends - arrivals
    first_latency = float(np.median(latencies[:num_first]))
    # Before the first requests are done, their number can only grow.
    has_filled = arrivals >= arrivals[0] + first_latency
    has_filled[:num_first] = False
    if has_filled.sum() < FEWEST_COMPARED:
        second_half = batch_means(in_service[len(arrivals) // 2 :], FEWEST_BATCHES)
        return Crowd(
            first=second_half[0],
            last=second_half[-1],
            expected_last=second_half[-1],
            is_growing=False,
            still_grows=False,
            is_short=_ascends(second_half),
        )
    early_latency = float(np.median(latencies[num_first : 2 * num_first]))
    # Were all as fast as the early ones, those would be in service that came in their latency.
    num_earlier = np.searchsorted(arrivals, arrivals - early_latency, side="right")
    num_recent = num_arrived - num_earlier
    counts = np.array(batch_means(in_service[has_filled], NUM_BATCHES))
    expected = np.array(batch_means(num_recent[has_filled], NUM_BATCHES))
    excess = counts - expected
    least = max(LEAST_EXCESS * expected[-1], LEAST_REQUESTS)
    is_large = bool(excess[-1] >= least)
    late_excess = (in_service - num_recent)[len(arrivals) // 2 :]
    late_means = batch_means(late_excess, FEWEST_BATCHES)
    return Crowd(
        first=float(counts[0]),
        last=float(counts[-1]),
        expected_last=float(expected[-1]),
        is_growing=is_large and _ascends(excess),
        still_grows=_ascends(late_means) and _grows_at_the_end(in_service),
        is_short=False,
    )


def _grows_at_the_end(in_service: Floats) -> bool:
    """Return whether the requests in service [R] grow over the last quarter of the arrivals by more
    than chance explains where exactly as many come as are served.

    There they are a Brownian motion without drift (Iglehart and Whitt, 1970). Over n arrivals with
    a variance of v each, the means of the first and the last of b batches differ by a variance of
    n v (1 - 4 / 3b). v is that of changes over many arrivals (batch means: Law and Carson, 1979):
    answers that end in one iteration, and times that hang together, are in it. A server that keeps
    up varies less, and a server that fills is nearly done by then.
    """
    number = len(in_service)
    last_quarter = in_service[3 * number // 4 :]
    means = batch_means(last_quarter, FEWEST_BATCHES)
    growth = means[-1] - means[0]
    middle = number // 2
    last = number - 1
    edges = np.linspace(middle, last, NUM_BATCHES + 1, dtype=int)
    changes = np.diff(in_service[edges])
    arrivals_of_change = (last - middle) / NUM_BATCHES
    variance_of_arrival = changes.var(ddof=1) / arrivals_of_change
    share = 1 - 4 / (3 * FEWEST_BATCHES)
    variance = len(last_quarter) * variance_of_arrival * share
    deviation = math.sqrt(variance)
    return bool(growth > CHANCE * deviation)


def longer_than(num_requests: int) -> int:
    """Return how many requests may show whether a server keeps up, where so many do not."""
    return max(LONGER * num_requests, LONG_ENOUGH)


def _ascends(means: Sequence[float] | Floats) -> bool:
    """Return whether batch means have an upward trend, by the test of Mann and Kendall."""
    return rising_pvalue(means) < LEVEL
