"""Where requests come from: a list with times, users who each wait for their last answer, or
sessions of turns that do.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sarathi_lab.engine.executor import NO_TOKEN
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


class Turn(NamedTuple):
    """A request without its prompt, which is known when the turn before has been answered: what
    was there, and `new_tokens`. It comes `pause` seconds after that.
    """

    request: Request
    new_tokens: NDArray[np.int32]
    pause: float


class Sessions(Arrivals):
    """Sessions of turns: the first turn comes at its request's time, each other one a pause after
    the one before was answered, with its prompt and its answer in front of the new tokens.

    Where nobody computes answers, a stand-in of the request's own is in their place, by which the
    prefix cache knows them, too.
    """

    def __init__(self, sessions: Sequence[Sequence[Turn]]) -> None:
        pairs = (pair for turns in sessions for pair in pairwise(turns))
        self._next = {before.request.request_id: after for before, after in pairs}
        self._due: list[tuple[float, int, Request]] = []
        for first, *_ in sessions:
            self._send(first.request.arrival_time, first.request, first.new_tokens)
        super().__init__(turn.request for turns in sessions for turn in turns)

    def pop(self) -> Request:
        request = heapq.heappop(self._due)[-1]
        self._look_ahead()
        return request

    def finished(self, sequences: Sequence[SequenceState]) -> None:
        """Let the tools of these answers run."""
        for sequence in sequences:
            turn = self._next.pop(sequence.request.request_id, None)
            if turn is not None:
                prompt = np.concatenate([_known_tokens(sequence), turn.new_tokens])
                self._send(sequence.finish_time + turn.pause, turn.request, prompt)
        self._look_ahead()

    def _send(self, time: float, request: Request, prompt: NDArray[np.int32]) -> None:
        assert len(prompt) == request.prompt_len, "a prompt is all that was said, and what is new"
        sent = replace(request, arrival_time=time, prompt_token_ids=prompt)
        heapq.heappush(self._due, (time, request.request_id, sent))

    def _look_ahead(self) -> None:
        self.next_time = self._due[0][0] if self._due else math.inf


def _known_tokens(sequence: SequenceState) -> NDArray[np.int32]:
    """Prompt and answer; for tokens that nobody computed what `PrefixCache` takes them for."""
    own = NO_TOKEN - 1 - sequence.request.request_id
    answer = [own if token == NO_TOKEN else token for token in sequence.output_token_ids]
    prompt = sequence.request.prompt_token_ids
    return np.concatenate([np.asarray(prompt, dtype=np.int32), np.asarray(answer, dtype=np.int32)])


def as_arrivals(requests: Iterable[Request] | Arrivals) -> Arrivals:
    """A plain list comes at the times of its requests."""
    return requests if isinstance(requests, Arrivals) else Arrivals(requests)
