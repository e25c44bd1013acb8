"""Requests with made-up prompts: the paper's fixed grid, uniform and Zipf lengths."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from sarathi_lab.config.errors import UserError, require_int, require_number, require_one_of
from sarathi_lab.engine.request import Request
from sarathi_lab.workload.arriving import READS, Arriving
from sarathi_lab.workload.base import Encode, LoadedRequests
from sarathi_lab.workload.prefixes import SharedPrefixes


def split_length(total_len: int, pd_ratio: float) -> tuple[int, int]:
    """P and D, each at least 1, of P + D = total_len and P : D nearest to `pd_ratio`."""
    prompt_len = (
        total_len - 1 if pd_ratio >= 2 * total_len else round(total_len * pd_ratio / (pd_ratio + 1))
    )
    prompt_len = min(max(prompt_len, 1), total_len - 1)
    return prompt_len, total_len - prompt_len


@dataclass(frozen=True, kw_only=True)
class MadeUp(SharedPrefixes, Arriving):
    """`num_requests` requests with random prompts, all from one seed."""

    num_requests: int
    seed: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.arrivals is None:
            require_one_of("workload.arrivals", self.arrivals, READS)
        require_int(
            "workload.num_requests",
            self.num_requests,
            1,
            "use the number of requests to serve, such as 16",
        )
        require_int("seed", self.seed, 0, "use a number such as 0")
        self.check_prefixes()

    def made(
        self, name: str, lengths: Iterable[tuple[int, int]], vocab_size: int | None
    ) -> LoadedRequests:
        """Requests of these (prompt, output) lengths, of which there may be too many."""
        assert self.arrivals is not None, "checked above"
        times = self.times(self.arrivals, self.num_requests, self.seed).tolist()
        priorities = self.dealt_priorities(self.num_requests, self.seed)
        requests = []
        for i, (time, priority, (prompt_len, output_len)) in enumerate(
            zip(times, priorities, lengths, strict=False)
        ):
            prompt = self.prompt(i, prompt_len, vocab_size, self.seed)
            requests.append(Request(i, time, prompt_len, output_len, prompt, priority))
        return LoadedRequests(
            name, requests, num_users=self.users, think_time=self.think_time or 0.0
        )


@dataclass(frozen=True, kw_only=True)
class _Synthetic(MadeUp):
    """Those whose total lengths are drawn, and split at one ratio."""

    pd_ratio: float

    def __post_init__(self) -> None:
        super().__post_init__()
        require_number(
            "pd_ratio", self.pd_ratio, above=0, fix="use prompt tokens per output token such as 31"
        )

    def _load(self, name: str, lengths: Iterable[int], vocab_size: int | None) -> LoadedRequests:
        return self.made(
            name, [split_length(int(total_len), self.pd_ratio) for total_len in lengths], vocab_size
        )


@dataclass(frozen=True, kw_only=True)
class PaperGrid(_Synthetic):
    """The paper's workload (section 5): every request has the same P and D with P + D = seq_len."""

    name: ClassVar[str] = "paper_grid"
    seq_len: int

    def __post_init__(self) -> None:
        super().__post_init__()
        require_int(
            "seq_len", self.seq_len, 2, "use at least one prompt and one output token, such as 1024"
        )

    def generate(self, vocab_size: int | None, encode: Encode | None = None) -> LoadedRequests:
        """`num_requests` requests of equal lengths."""
        return self._load(self.name, [self.seq_len] * self.num_requests, vocab_size)


@dataclass(frozen=True, kw_only=True)
class _Varied(_Synthetic):
    """Total lengths drawn from min_len to max_len, both included."""

    min_len: int
    max_len: int

    def __post_init__(self) -> None:
        super().__post_init__()
        require_int(
            "workload.min_len", self.min_len, 2, "use at least one prompt and one output token"
        )
        require_int(
            "workload.max_len", self.max_len, 2, "use at least one prompt and one output token"
        )
        if self.min_len > self.max_len:
            raise UserError(
                f"workload.min_len={self.min_len} exceeds workload.max_len={self.max_len}; "
                "exchange them"
            )

    def _generator(self) -> np.random.Generator:
        return np.random.default_rng([self.seed, 2])


@dataclass(frozen=True, kw_only=True)
class Uniform(_Varied):
    """Total lengths uniform from min_len to max_len."""

    name: ClassVar[str] = "uniform"

    def generate(self, vocab_size: int | None, encode: Encode | None = None) -> LoadedRequests:
        """`num_requests` requests; the same seed gives the same lengths."""
        lengths = self._generator().integers(
            self.min_len, self.max_len, self.num_requests, endpoint=True
        )
        return self._load(self.name, lengths.tolist(), vocab_size)


@dataclass(frozen=True, kw_only=True)
class Zipf(_Varied):
    """Total lengths by rank: P(min_len + k - 1) proportional to k^-theta, so that short ones are
    likely.

    The paper's pipeline simulation uses theta = 0.4 over 1K to 4K tokens (section 5.3).
    """

    name: ClassVar[str] = "zipf"
    theta: float = 0.4

    def __post_init__(self) -> None:
        super().__post_init__()
        require_number("workload.theta", self.theta, above=0, fix="use an exponent such as 0.4")

    def generate(self, vocab_size: int | None, encode: Encode | None = None) -> LoadedRequests:
        """`num_requests` requests; the same seed gives the same lengths."""
        ranks = np.arange(1, self.max_len - self.min_len + 2)
        weights = ranks ** -float(self.theta)
        drawn = self._generator().choice(ranks, self.num_requests, p=weights / weights.sum())
        return self._load(self.name, (self.min_len + drawn - 1).tolist(), vocab_size)
