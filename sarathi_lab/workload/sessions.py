"""Conversations of recorded requests: each turn's prompt begins with what was said before."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from sarathi_lab.engine.arrivals import Turn
from sarathi_lab.engine.executor import NO_TOKEN
from sarathi_lab.engine.request import Request
from sarathi_lab.workload.base import Tokens


class SessionRow(NamedTuple):
    """A request, the conversation that it belongs to ("": none), and the seconds between the answer
    before and it (NaN: not recorded).
    """

    request: Request
    session: str
    delay: float


def turns_of(
    rows: Iterable[SessionRow], new_tokens: Callable[[int, int], Tokens]
) -> list[list[Turn]]:
    """Group requests, ordered by their time, into conversations, in the order of their first turns.

    Args:
        rows: The requests; those with token ids keep them.
        new_tokens: Makes token ids that a request has not in common with the turn before, of its
            number and their number.

    Returns:
        The turns of each conversation; a request without one is a conversation of its own.
    """
    sessions = dict[str, list[Turn]]()
    for row in rows:
        request = row.request
        name = row.session or f"request {request.request_id}"
        turns = sessions.setdefault(name, [])
        num_said = 0
        if turns:
            num_said = turns[-1].request.total_len
        pause = 0.0 if math.isnan(row.delay) else row.delay
        if request.prompt_token_ids is not None:
            tokens = np.asarray(request.prompt_token_ids, dtype=np.int32)
        else:
            # A prompt may leave out some of what was said, such as a model's reasoning; it has at
            # least a token of its own.
            num_new = max(1, request.prompt_len - num_said)
            tokens = new_tokens(request.request_id, num_new)
        turns.append(Turn(request, tokens, pause))
    return list(sessions.values())


def placeholders(request_id: int, num_tokens: int) -> Tokens:
    """Make token ids of a simulated request that no other one has."""
    return np.full(num_tokens, NO_TOKEN - 1 - request_id, dtype=np.int32)
