"""Requests with made-up prompts: the paper's fixed grid, uniform and Zipf lengths."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from sarathi_lab.config.checked import number, whole
from sarathi_lab.config.errors import UserError, require_one_of
from sarathi_lab.engine.request import Request
from sarathi_lab.workload.arriving import READS, Arriving
from sarathi_lab.workload.base import Encode, LoadedRequests
from sarathi_lab.workload.prefixes import SharedPrefixes

_TOKENS = "use at least one prompt and one output token"


def split_length(total_len: int, pd_ratio: float) -> tuple[int, int]:
    """P and D, each at least 1, of P + D = total_len and P : D nearest to `pd_ratio`."""
    prompt_len = (
        total_len - 1 if pd_ratio >= 2 * total_len else round(total_len * pd_ratio / (pd_ratio + 1))
    )
    prompt_len = min(max(prompt_len, 1), total_len - 1)
    return prompt_len, total_len - prompt_len


@dataclass(frozen=True, kw_only=True)
class MadeUp(SharedPrefixes, Arriving, ABC):
    """`num_requests` requests with random prompts, all from one seed."""

    name: ClassVar[str]
    num_requests: int = whole(minimum=1, fix="use the number of requests to serve, such as 16")
    seed: int = whole(minimum=0, fix="use a number such as 0", name="seed")

    def __post_init__(self) -> None:
        if self.arrivals is None:
            require_one_of("workload.arrivals", self.arrivals, READS)
        super().__post_init__()
        self.check_prefixes()

    @abstractmethod
    def lengths(self) -> Iterable[tuple[int, int]]:
        """Prompt and output tokens of each request, or of more; the same seed gives the same."""

    def generate(self, vocab_size: int | None, encode: Encode | None = None) -> LoadedRequests:
        """`num_requests` requests, whose lengths no setting of arrivals changes."""
        assert self.arrivals is not None, "checked above"
        times = self.times(self.arrivals, self.num_requests, self.seed).tolist()
        priorities = self.dealt_priorities(self.num_requests, self.seed)
        requests = []
        for i, (time, priority, (prompt_len, output_len)) in enumerate(
            zip(times, priorities, self.lengths(), strict=False)
        ):
            prompt = self.prompt(i, prompt_len, vocab_size, self.seed)
            requests.append(Request(i, time, prompt_len, output_len, prompt, priority))
        return LoadedRequests(
            self.name, requests, num_users=self.users, think_time=self.think_time or 0.0
        )


@dataclass(frozen=True, kw_only=True)
class _Synthetic(MadeUp):
    """Those whose total lengths are drawn, and split at one ratio."""

    pd_ratio: float = number(
        above=0, fix="use prompt tokens per output token such as 31", name="pd_ratio"
    )

    @abstractmethod
    def total_lens(self) -> Sequence[int]:
        """Tokens of each request, prompt and output together."""

    def lengths(self) -> Iterable[tuple[int, int]]:
        return [split_length(total_len, self.pd_ratio) for total_len in self.total_lens()]


@dataclass(frozen=True, kw_only=True)
class PaperGrid(_Synthetic):
    """The paper's workload (section 5): every request has the same P and D with P + D = seq_len."""

    name = "paper_grid"
    seq_len: int = whole(minimum=2, fix=f"{_TOKENS}, such as 1024", name="seq_len")

    def total_lens(self) -> Sequence[int]:
        return [self.seq_len] * self.num_requests


@dataclass(frozen=True, kw_only=True)
class _Varied(_Synthetic):
    """Total lengths drawn from min_len to max_len, both included."""

    min_len: int = whole(minimum=2, fix=_TOKENS)
    max_len: int = whole(minimum=2, fix=_TOKENS)

    def __post_init__(self) -> None:
        super().__post_init__()
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

    name = "uniform"

    def total_lens(self) -> Sequence[int]:
        drawn = self._generator().integers(
            self.min_len, self.max_len, self.num_requests, endpoint=True
        )
        return drawn.tolist()


@dataclass(frozen=True, kw_only=True)
class Zipf(_Varied):
    """Total lengths by rank: P(min_len + k - 1) proportional to k^-theta, so that short ones are
    likely.

    The paper's pipeline simulation uses theta = 0.4 over 1K to 4K tokens (section 5.3).
    """

    name = "zipf"
    theta: float = number(0.4, above=0, fix="use an exponent such as 0.4")

    def total_lens(self) -> Sequence[int]:
        ranks = np.arange(1, self.max_len - self.min_len + 2)
        weights = ranks ** -float(self.theta)
        drawn = self._generator().choice(ranks, self.num_requests, p=weights / weights.sum())
        return (self.min_len + drawn - 1).tolist()
