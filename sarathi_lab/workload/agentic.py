"""Sessions of agents: turns that share a growing prefix, with pauses for their tools."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from sarathi_lab.config.checked import number, whole
from sarathi_lab.config.errors import UserError
from sarathi_lab.engine.arrivals import Turn
from sarathi_lab.engine.request import Request
from sarathi_lab.workload.base import Encode, LoadedRequests, random_prompt
from sarathi_lab.workload.synthetic import ANY_VOCAB_SIZE, NORMAL, Lognormal

P90 = NORMAL.inv_cdf(0.9)
PAUSE = "use the seconds of a tool such as 1.0"


@dataclass(frozen=True, kw_only=True)
class Agentic(Lognormal):
    """`num_requests` turns in sessions of `turns` each, the last as many as are left; a session
    ends earlier where its next turn would exceed `max_len` tokens.

    A first prompt is the `shared_prefix_len` tokens of a system prompt and new tokens; each turn
    adds new ones. These, the answers and the seconds between an answer and the next turn are drawn
    from lognormals of the stated median and P90. Sessions arrive by `arrivals`.
    """

    name = "agentic"
    kinds = ("prompt", "output", "pause")
    turns: int = whole(12, minimum=1, fix="use the requests of a session such as 12")
    pause_p50: float = number(1.0, above=0, fix=PAUSE)
    pause_p90: float = number(10.0, above=0, fix=PAUSE)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.users is not None:
            raise UserError(
                "workload.arrivals=users has no effect on sessions, whose turns wait for answers "
                "anyway; use workload.arrivals=closed or poisson"
            )
        if self.shared_prefix_len + self.prompt_p90 + self.output_p90 >= self.max_len:
            raise UserError(
                f"workload.max_len={self.max_len} has no room for a first turn behind a system "
                f"prompt of workload.shared_prefix_len={self.shared_prefix_len} tokens; raise it"
            )

    def generate(self, vocab_size: int | None, encode: Encode | None = None) -> LoadedRequests:
        sessions = self._lengths()
        flat = [turn for turns in sessions for turn in turns]
        times = np.repeat(self.times(len(sessions)), [len(turns) for turns in sessions])
        shapes = ((prompt_len, output_len, None, ()) for prompt_len, _, output_len in flat)
        load = self.loaded(self.name, times, shapes)
        requests = iter(load.requests)
        turns = [
            [self._turn(next(requests), new_len, vocab_size) for _, new_len, _ in session]
            for session in sessions
        ]
        note = f"{len(sessions)} sessions, whose turns wait for their answers"
        return replace(load, sessions=turns, notes=[note])

    def _lengths(self) -> list[list[tuple[int, int, int]]]:
        """Tokens of the prompt, new ones among them, and of the answer of each session's turns."""
        sessions: list[list[tuple[int, int, int]]] = [[]]
        context, drawn = self.shared_prefix_len, self.lengths()
        for _ in range(self.num_requests):
            new_len, output_len = next(drawn)
            if len(sessions[-1]) == self.turns or context + new_len + output_len > self.max_len:
                if sessions[-1]:
                    sessions.append([])
                context = self.shared_prefix_len
                new_len = min(new_len, self.max_len - context - output_len)
            if not sessions[-1]:
                new_len += context
                context = 0
            sessions[-1].append((context + new_len, new_len, output_len))
            context += new_len + output_len
        return sessions

    def _turn(self, request: Request, new_len: int, vocab_size: int | None) -> Turn:
        number, size = request.request_id, vocab_size or ANY_VOCAB_SIZE
        if new_len == request.prompt_len:  # the first turn
            tokens = self.prompt(number, new_len, size)
        else:
            tokens = random_prompt(number, new_len, size, self.seed)
        assert tokens is not None, "there is a vocabulary"
        rng = np.random.default_rng([self.seed, 12, number])
        deviation = math.log(self.pause_p90 / self.pause_p50) / P90
        pause = self.pause_p50 * math.exp(deviation * float(rng.standard_normal()))
        return Turn(request, tokens, pause)
