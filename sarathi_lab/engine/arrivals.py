"""Where requests come from: a list with times, or users who each wait for their last answer."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Protocol, runtime_checkable

from sarathi_lab.engine.request import Request, SequenceState


@runtime_checkable
class Arrivals(Protocol):
    """Gives requests in the order of their arrival. Made for one run: what was taken is gone."""

    next_time: float  # seconds at which the next one arrives; infinity while none is known to come

    @property
    def requests(self) -> Sequence[Request]:
        """All still to come; those that wait for others to finish have no times yet."""

    def pop(self) -> Request:
        """Take the next one, with its time of arrival."""

    def finished(self, sequences: Sequence[SequenceState]) -> None:
        """Hear that these are done."""


class TimedArrivals:
    """Requests that come at their own times, whatever becomes of those before (an open loop)."""

    def __init__(self, requests: Iterable[Request]) -> None:
        self._left = deque(sorted(requests, key=lambda request: request.arrival_time))
        self.next_time = self._left[0].arrival_time if self._left else math.inf

    @property
    def requests(self) -> Sequence[Request]:
        """Those to come, in the order of arrival."""
        return self._left

    def pop(self) -> Request:
        """Take the next one."""
        request = self._left.popleft()
        self.next_time = self._left[0].arrival_time if self._left else math.inf
        return request

    def finished(self, sequences: Sequence[SequenceState]) -> None:
        """Nobody waits for an answer."""


class ClosedLoop:
    """`num_users` users; each sends the next request of the list `think_time` seconds after its
    last has finished.

    So at most `num_users` requests are unfinished at any time. All users start at time 0; the times
    that the requests bring are not read.
    """

    def __init__(
        self, requests: Iterable[Request], num_users: int, think_time: float = 0.0
    ) -> None:
        self._left = deque(requests)
        self._think_time = think_time
        self._due = [
            0.0
        ] * num_users  # a heap: when each user who waits for no answer sends its next request
        self._look_ahead()

    @property
    def requests(self) -> Sequence[Request]:
        """Those that nobody has sent yet, in the order that they will be sent in."""
        return self._left

    def pop(self) -> Request:
        """The next one, sent by the user who is due first."""
        request = replace(self._left.popleft(), arrival_time=heapq.heappop(self._due))
        self._look_ahead()
        return request

    def finished(self, sequences: Sequence[SequenceState]) -> None:
        """Let the users who got these answers think."""
        for sequence in sequences:
            heapq.heappush(self._due, sequence.token_times[-1] + self._think_time)
        self._look_ahead()

    def _look_ahead(self) -> None:
        self.next_time = self._due[0] if self._due and self._left else math.inf


def as_arrivals(requests: Iterable[Request] | Arrivals) -> Arrivals:
    """A plain list comes at the times of its requests."""
    return requests if isinstance(requests, Arrivals) else TimedArrivals(requests)
