"""What every workload gives, and the random prompts that they share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from sarathi_lab.config.errors import LAST_SECOND, UserError
from sarathi_lab.engine.arrivals import Arrivals, ClosedLoop, Sessions, Turn
from sarathi_lab.engine.request import Request

Encode = Callable[[str], list[int]]


@dataclass(frozen=True)
class LoadedRequests:
    """The requests of a run and, from a file, what became of every row: read = used + dropped.

    With `num_users` the requests have no times of their own: users send them in this order.
    """

    name: str
    requests: Sequence[Request]
    rows_read: int | None = None
    dropped: Mapping[str, int] = field(default_factory=dict)  # reason -> rows
    notes: Sequence[str] = ()  # what else there is to say of a file
    num_users: int | None = None
    think_time: float = 0.0  # seconds
    sessions: Sequence[Sequence[Turn]] = ()  # where requests wait for the answers of others

    def __post_init__(self) -> None:
        last = max((request.arrival_time for request in self.requests), default=0.0)
        if not last <= LAST_SECOND:
            raise UserError(
                f"workload {self.name}: a request arrives after {last:.3g} s, when no clock tells "
                f"iterations apart; bring it below {LAST_SECOND:g} s, such as by workload.rate"
            )

    def arrivals(self) -> Arrivals:
        if self.sessions:
            return Sessions(self.sessions)
        if self.num_users is None:
            return Arrivals(self.requests)
        return ClosedLoop(self.requests, self.num_users, self.think_time)

    @property
    def waits_for_answers(self) -> bool:
        """Whether when requests arrive is up to the answers before (a closed loop)."""
        return self.num_users is not None or bool(self.sessions)

    @property
    def has_times(self) -> bool:
        """Whether requests arrive over time by themselves (an open loop)."""
        has_gaps = any(request.arrival_time > 0 for request in self.requests)
        return has_gaps and not self.waits_for_answers

    def describe(self) -> str:
        """How many requests of which lengths there are, and which rows were left out why."""
        prompts = _range([request.prompt_len for request in self.requests])
        outputs = _range([request.output_len for request in self.requests])
        number, tokens = len(self.requests), f"{prompts} prompt + {outputs} output tokens"
        line = f"workload {self.name}: {number} requests of {tokens}"
        if self.num_users is not None:
            line += f" from {self.num_users} users who think {self.think_time:g} s"
        line += "".join(f", {note}" for note in self.notes)
        if self.rows_read is None:
            return line
        reasons = "".join(f", {count} {reason}" for reason, count in self.dropped.items() if count)
        num_dropped = sum(self.dropped.values())
        rows = f"{self.rows_read} rows read = {number} used + {num_dropped} dropped"
        return f"{line}; {rows}{reasons}"


@runtime_checkable
class Workload(Protocol):
    """Makes the requests of a run; see `conf/workload/`."""

    def generate(self, vocab_size: int | None, encode: Encode | None = None) -> LoadedRequests:
        """All requests, prompts None where they can be if nobody needs them (`vocab_size` None).

        `encode` turns text into token ids. Raises UserError for what gives no requests.
        """


def random_prompt(
    request_id: int, prompt_len: int, vocab_size: int | None, seed: int
) -> NDArray[np.int32] | None:
    """Uniform token ids [prompt_len] by seed and request only; None if nobody reads them."""
    if vocab_size is None:
        return None
    dice = np.random.default_rng([seed, 0, request_id])
    return dice.integers(0, vocab_size, prompt_len, dtype=np.int32)


def _range(lengths: Sequence[int]) -> str:
    low, high = min(lengths), max(lengths)
    return str(low) if low == high else f"{low}..{high}"
