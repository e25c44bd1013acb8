"""What every workload gives, and the arrival times and random prompts that they share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from sarathi_lab.errors import UserError, require_number
from sarathi_lab.request import Request

Encode = Callable[[str], list[int]]
Arrivals = Literal["closed", "poisson"]


@dataclass(frozen=True)
class LoadedRequests:
    """The requests of a run and, for those from a file, what became of every row: read = used + dropped."""

    name: str
    requests: Sequence[Request]
    rows_read: int | None = None
    dropped: Mapping[str, int] = field(default_factory=dict)  # reason -> rows

    def describe(self) -> str:
        """One line for people: how many requests of which lengths, and which rows were left out why."""
        prompts = _range([request.prompt_len for request in self.requests])
        outputs = _range([request.output_len for request in self.requests])
        line = f"workload {self.name}: {len(self.requests)} requests of {prompts} prompt + {outputs} output tokens"
        if self.rows_read is None:
            return line
        reasons = "".join(f", {count} {reason}" for reason, count in self.dropped.items() if count)
        num_dropped = sum(self.dropped.values())
        return f"{line}; {self.rows_read} rows read = {len(self.requests)} used + {num_dropped} dropped{reasons}"


class Workload(Protocol):
    """Makes the requests of a run; see `conf/workload/`."""

    def generate(self, vocab_size: int | None, encode: Encode | None = None) -> LoadedRequests:
        """All requests. Without `vocab_size` only lengths are wanted, and prompts stay None where they can.

        `encode` turns text into token ids. Raises UserError for parameters or files that give no requests.
        """
        ...


def arrival_times(arrivals: Arrivals, rate: float | None, num_requests: int, seed: int) -> NDArray[np.float64]:
    """Seconds at which requests arrive: all at 0 (closed), or with exponential gaps of mean 1 / rate (poisson).

    Raises UserError for an unknown kind, a missing rate, or a rate that would have no effect.
    """
    if arrivals == "closed":
        if rate is not None:
            raise UserError(f"workload.rate={rate} has no effect on closed arrivals; add workload.arrivals=poisson")
        return np.zeros(num_requests)
    if arrivals != "poisson":
        raise UserError(f"workload.arrivals={arrivals} is unknown; use closed or poisson")
    if rate is None:
        raise UserError("workload.arrivals=poisson needs workload.rate, in requests per second, such as 2.0")
    require_number("workload.rate", rate, above=0, fix="use requests per second such as 2.0")
    # A stream of its own: the same seed gives the same prompts at every rate.
    gaps = np.random.default_rng([seed, 1]).exponential(1 / rate, num_requests)
    return np.cumsum(gaps) - gaps[0]  # the clock starts with the first request


def random_prompt(request_id: int, prompt_len: int, vocab_size: int | None, seed: int) -> NDArray[np.int32] | None:
    """Uniform token ids [prompt_len] that depend on seed and request only; None if nobody reads them."""
    if vocab_size is None:
        return None
    return np.random.default_rng([seed, 0, request_id]).integers(0, vocab_size, prompt_len, dtype=np.int32)


def _range(lengths: Sequence[int]) -> str:
    low, high = min(lengths), max(lengths)
    return str(low) if low == high else f"{low}..{high}"
