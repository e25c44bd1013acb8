"""Requests of a real run, sent again: at their times, by users who wait for answers, or as turns of
conversations, with what of their prompts was cached.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from sarathi_lab.engine.arrivals import Arrivals, ClosedLoop, Sessions
from sarathi_lab.engine.request import Request
from sarathi_lab.extensions.replay.clients import Loop
from sarathi_lab.extensions.replay.real_run import RealRun
from sarathi_lab.workload.sessions import SessionRow, placeholders, turns_of

CACHED_TEXT = -1  # request id of the prompt that cached tokens are taken for


def requests_of(run: RealRun, loop: Loop | None = None) -> list[Request]:
    """Return a run's requests at their recorded times, or when they are due in a closed loop. Those
    with cached tokens begin with one text, which is in the cache from the start (`cached_text`), as
    the file does not say what they had in common.
    """
    table = run.requests
    times = table.arrival_time if loop is None else loop.due
    columns = zip(times, table.prompt_len, table.output_len, strict=True)
    requests = []
    for request_id, (time, prompt_len, output_len) in enumerate(columns):
        requests.append(Request(request_id, time, prompt_len, output_len))
    text = _common_text(run)
    if len(text) == 0:
        return requests
    with_text = []
    for request, num_cached in zip(requests, run.conversation.cached_len, strict=True):
        num_shared = min(int(num_cached), request.prompt_len, len(text))
        num_own = request.prompt_len - num_shared
        shared_text = text[:num_shared]
        own_text = placeholders(request.request_id, num_own)
        prompt = np.concatenate([shared_text, own_text])
        with_text.append(replace(request, prompt_token_ids=prompt))
    return with_text


def cached_text(run: RealRun) -> list[Request]:
    """Return the prompt that is cached before the first arrival, if requests had cached tokens."""
    text = _common_text(run)
    if len(text) == 0:
        return []
    return [Request(CACHED_TEXT, 0.0, len(text), 1, text)]


def arrivals_of(run: RealRun, loop: Loop | None) -> Arrivals:
    """Return a run's requests at their recorded times, or sent again in a closed loop; later turns
    of conversations wait for the answers before.
    """
    requests = requests_of(run, loop)
    if run.has_conversations:
        arrivals: Arrivals = _sessions(run, requests, loop)
    elif loop is not None:
        arrivals = ClosedLoop(requests, loop.users, loop.think_time, keeps_times=True)
    else:
        arrivals = Arrivals(requests)
    arrivals.cached = cached_text(run)
    return arrivals


def num_conversations(run: RealRun) -> int:
    """Count the conversations that have later turns."""
    continued = run.conversation[run.conversation.delay.notna()]
    return int(continued.session.nunique())


def _sessions(run: RealRun, requests: list[Request], loop: Loop | None) -> Sessions:
    """Return conversations, each of whose turns has the tokens of those before."""
    rows = []
    sessions = run.conversation.session
    delays = run.conversation.delay
    for request, session, delay in zip(requests, sessions, delays, strict=True):
        sent = request
        if not np.isnan(delay):
            # What a later turn has in common with the one before are the tokens of that one.
            sent = replace(request, prompt_token_ids=None)
        rows.append(SessionRow(sent, session, delay))
    turns = turns_of(rows, placeholders)
    if loop is None:
        return Sessions(turns)
    return Sessions(turns, loop.users, loop.think_time)


def _common_text(run: RealRun) -> NDArray[np.int32]:
    """Return what requests with cached tokens begin with: ids that no other prompt has, as many as
    the most cached tokens of a request that continues no other.
    """
    table = run.conversation
    is_first = table.delay.isna()
    first_turns = table[is_first]
    num_tokens = 0
    if len(first_turns):
        num_tokens = int(first_turns.cached_len.max())
    return np.arange(1, num_tokens + 1, dtype=np.int32)
