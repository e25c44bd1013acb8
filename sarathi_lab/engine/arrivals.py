"""Sources of requests: a list with times, users who wait for each answer, or sessions of turns."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import islice, pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sarathi_lab.engine.prefix_cache import known_tokens
from sarathi_lab.engine.request import Request, SequenceState


class Arrivals:
    """Requests at fixed times (an open loop), for one run; `requests` are all of them.

    `cached` are prompts that are in the prefix cache before the first arrival, if there is one.
    """

    cached: Sequence[Request] = ()

    def __init__(self, requests: Iterable[Request]) -> None:
        self.requests = list(requests)
        # A heap of what is known to arrive, by time and then in order.
        self._due = [
            (request.arrival_time, number, request) for number, request in enumerate(self.requests)
        ]
        heapq.heapify(self._due)

    @property
    def next_time(self) -> float:
        """Seconds of the next arrival; infinity while none is known."""
        return self._due[0][0] if self._due else math.inf

    def pop(self) -> Request:
        """Take the next request, with its time of arrival."""
        return heapq.heappop(self._due)[-1]

    def finished(self, sequences: Sequence[SequenceState]) -> None:
        """Let sources that wait for these answers go on."""

    def _send(self, request: Request, time: float) -> None:
        sent = replace(request, arrival_time=time)
        heapq.heappush(self._due, (time, request.request_id, sent))


class ClosedLoop(Arrivals):
    """`num_users` users; each sends the next request of the list `think_time` seconds after its
    last one has finished.

    So at most `num_users` requests are unfinished at any time. All users start at time 0; arrival
    times of the requests are ignored, unless users wait for them too (`keeps_times`), as clients do
    that limit both the rate and the requests in flight.
    """

    def __init__(
        self,
        requests: Iterable[Request],
        num_users: int,
        think_time: float = 0.0,
        *,
        keeps_times: bool = False,
    ) -> None:
        super().__init__(())
        self.requests = list(requests)
        self._think_time = think_time
        self._keeps_times = keeps_times
        self._left = iter(self.requests)
        for request in islice(self._left, num_users):
            self._send_at(request, 0.0)

    def finished(self, sequences: Sequence[SequenceState]) -> None:
        for sequence, request in zip(sequences, self._left, strict=False):
            self._send_at(request, sequence.finish_time + self._think_time)

    def _send_at(self, request: Request, time: float) -> None:
        due = request.arrival_time if self._keeps_times else 0.0
        self._send(request, max(time, due))


class Turn(NamedTuple):
    """A request whose prompt ends in `new_tokens`, behind as much of the turn before and its answer
    as its length leaves room for, and which arrives `pause` seconds after that answer.
    """

    request: Request
    new_tokens: NDArray[np.int32]
    pause: float


class Sessions(Arrivals):
    """Sessions of turns: the first arrives at its request's time, each other one a pause after the
    answer of the one before, with whose prompt and answer its own begins.

    With `num_users` each user has a session at a time, and begins the next one `think_time` seconds
    after the last answer, but not before its time. In simulations a placeholder that is unique to
    the request stands for its answer, for the prefix cache.
    """

    def __init__(
        self,
        sessions: Sequence[Sequence[Turn]],
        num_users: int | None = None,
        think_time: float = 0.0,
    ) -> None:
        super().__init__(())
        self.requests = [turn.request for turns in sessions for turn in turns]
        self._think_time = think_time
        self._next: dict[int, Turn] = {}  # by the request before
        for turns in sessions:
            for before, after in pairwise(turns):
                self._next[before.request.request_id] = after
        self._first_turns = iter([turns[0] for turns in sessions])
        for turn in islice(self._first_turns, num_users):
            self._begin(turn, 0.0)

    def finished(self, sequences: Sequence[SequenceState]) -> None:
        for sequence in sequences:
            turn = self._next.get(sequence.request.request_id)
            if turn is not None:
                self._continue(turn, sequence)
                continue
            first_turn = next(self._first_turns, None)
            if first_turn is not None:
                self._begin(first_turn, sequence.finish_time + self._think_time)

    def _begin(self, turn: Turn, time: float) -> None:
        request = replace(turn.request, prompt_token_ids=turn.new_tokens)
        self._send(request, max(time, request.arrival_time))

    def _continue(self, turn: Turn, before: SequenceState) -> None:
        num_said = turn.request.prompt_len - len(turn.new_tokens)
        assert num_said <= before.num_known, "a prompt is what was said and new tokens"
        # Where it is too long its end is cut: what stays is a prefix, which the cache may have.
        said = known_tokens(before)[:num_said]
        prompt = np.concatenate([said, turn.new_tokens])
        request = replace(turn.request, prompt_token_ids=prompt)
        self._send(request, before.finish_time + turn.pause)


class FrontEnd(Arrivals):
    """The requests of `source` behind a server's front end, which takes `seconds` for each, one
    after the other: parsing, tokens and streams. Requests keep the times at which they were sent,
    so what they wait here counts.
    """

    def __init__(self, source: Arrivals, seconds: float) -> None:
        super().__init__(())
        self.requests = source.requests
        self.cached = source.cached
        self._source = source
        self._seconds = seconds
        self._free_at = 0.0

    @property
    def next_time(self) -> float:
        return max(self._source.next_time, self._free_at) + self._seconds

    def pop(self) -> Request:
        self._free_at = self.next_time
        return self._source.pop()

    def finished(self, sequences: Sequence[SequenceState]) -> None:
        self._source.finished(sequences)


def behind_front_end(source: Arrivals, seconds: float) -> Arrivals:
    """Return the requests as an engine gets them from a front end that takes `seconds` for each."""
    return FrontEnd(source, seconds) if seconds else source


def as_arrivals(requests: Iterable[Request] | Arrivals) -> Arrivals:
    """Let a plain list arrive at the times of its requests."""
    return requests if isinstance(requests, Arrivals) else Arrivals(requests)
