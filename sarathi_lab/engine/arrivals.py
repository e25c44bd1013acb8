"""Where requests come from: a list with times, or users who each wait for their last answer."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace

from sarathi_lab.engine.request import Request, SequenceState


class Arrivals:
    """Requests that come at their own times, whatever becomes of those before (an open loop).

    Made for one run: what was taken is gone. `next_time` is when the next one arrives, in seconds;
    infinity while none is known to come.
    """

    def __init__(self, requests: Iterable[Request]) -> None:
        self.requests = deque(sorted(requests, key=lambda request: request.arrival_time))
        self._look_ahead()

    def pop(self) -> Request:
        """Take the next one, with its time of arrival."""
        request = self.requests.popleft()
        self._look_ahead()
        return request

    def finished(self, sequences: Sequence[SequenceState]) -> None:
        """Hear that these are done."""

    def _look_ahead(self) -> None:
        self.next_time = self.requests[0].arrival_time if self.requests else math.inf


class ClosedLoop(Arrivals):
    """`num_users` users; each sends the next request of the list `think_time` seconds after its
    last has finished.

    So at most `num_users` requests are unfinished at any time. All users start at time 0; the times
    that the requests bring are not read.
    """

    def __init__(
        self, requests: Iterable[Request], num_users: int, think_time: float = 0.0
    ) -> None:
        self.requests = deque(requests)
        self._think_time = think_time
        # A heap: when each user who waits for no answer sends its next request.
        self._due = [0.0] * num_users
        self._look_ahead()

    def pop(self) -> Request:
        """The next one, sent by the user who is due first."""
        time = heapq.heappop(self._due)
        return replace(super().pop(), arrival_time=time)

    def finished(self, sequences: Sequence[SequenceState]) -> None:
        """Let the users who got these answers think."""
        for sequence in sequences:
            heapq.heappush(self._due, sequence.finish_time + self._think_time)
        self._look_ahead()

    def _look_ahead(self) -> None:
        self.next_time = self._due[0] if self._due and self.requests else math.inf


def as_arrivals(requests: Iterable[Request] | Arrivals) -> Arrivals:
    """A plain list comes at the times of its requests."""
    return requests if isinstance(requests, Arrivals) else Arrivals(requests)
