"""Sources of requests: a list with times, users who wait for each answer, or sessions of turns."""

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
    """Requests at fixed times (an open loop), for one run.

    `next_time` is the next arrival in seconds; infinity while none is known.
    """

    def __init__(self, requests: Iterable[Request]) -> None:
        self.requests = deque(sorted(requests, key=lambda request: request.arrival_time))
        self._look_ahead()

    def pop(self) -> Request:
        """Take the next request, with its time of arrival."""
        request = self.requests.popleft()
        self._look_ahead()
        return request

    def finished(self, sequences: Sequence[SequenceState]) -> None:
        """Let sources that wait for these answers go on."""

    def _look_ahead(self) -> None:
        self.next_time = self.requests[0].arrival_time if self.requests else math.inf


class ClosedLoop(Arrivals):
    """`num_users` users; each sends the next request of the list `think_time` seconds after its
    last one has finished.

    So at most `num_users` requests are unfinished at any time. All users start at time 0; arrival
    times of the requests are ignored.
    """

    def __init__(
        self, requests: Iterable[Request], num_users: int, think_time: float = 0.0
    ) -> None:
        self.requests = deque(requests)
        self._think_time = think_time
        self._due = [0.0] * num_users  # heap: when each user without a request sends the next
        self._look_ahead()

    def pop(self) -> Request:
        time = heapq.heappop(self._due)
        return replace(super().pop(), arrival_time=time)

    def finished(self, sequences: Sequence[SequenceState]) -> None:
        for sequence in sequences:
            heapq.heappush(self._due, sequence.finish_time + self._think_time)
        self._look_ahead()

    def _look_ahead(self) -> None:
        self.next_time = self._due[0] if self._due and self.requests else math.inf


class Turn(NamedTuple):
    """A request whose prompt is the turn before, its answer and `new_tokens`, and which arrives
    `pause` seconds after that answer.
    """

    request: Request
    new_tokens: NDArray[np.int32]
    pause: float


class Sessions(Arrivals):
    """Sessions of turns: the first arrives at its request's time, each other one a pause after the
    answer of the one before, whose prompt and answer precede its new tokens.

    In simulations a placeholder that is unique to the request stands for its answer, for the prefix
    cache.
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
        for sequence in sequences:
            turn = self._next.pop(sequence.request.request_id, None)
            if turn is not None:
                prompt = np.concatenate([_known_tokens(sequence), turn.new_tokens])
                self._send(sequence.finish_time + turn.pause, turn.request, prompt)
        self._look_ahead()

    def _send(self, time: float, request: Request, prompt: NDArray[np.int32]) -> None:
        assert len(prompt) == request.prompt_len, "a prompt is the turns before and new tokens"
        sent = replace(request, arrival_time=time, prompt_token_ids=prompt)
        heapq.heappush(self._due, (time, request.request_id, sent))

    def _look_ahead(self) -> None:
        self.next_time = self._due[0][0] if self._due else math.inf


def _known_tokens(sequence: SequenceState) -> NDArray[np.int32]:
    """Prompt and answer; uncomputed tokens as `PrefixCache` represents them."""
    placeholder = NO_TOKEN - 1 - sequence.request.request_id
    answer = [placeholder if token == NO_TOKEN else token for token in sequence.output_token_ids]
    prompt = sequence.request.prompt_token_ids
    return np.concatenate([np.asarray(prompt, dtype=np.int32), np.asarray(answer, dtype=np.int32)])


def as_arrivals(requests: Iterable[Request] | Arrivals) -> Arrivals:
    """Let a plain list arrive at the times of its requests."""
    return requests if isinstance(requests, Arrivals) else Arrivals(requests)
