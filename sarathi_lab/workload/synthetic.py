"""Requests with made-up prompts: the paper's fixed grid, uniform and Zipf lengths."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from sarathi_lab.config.checked import number, refuse_unread, require_order, whole
from sarathi_lab.config.errors import require_one_of
from sarathi_lab.workload.arriving import MOST_REQUESTS, READS, Arriving
from sarathi_lab.workload.base import Encode, LoadedRequests, random_prompt

# For prompts that nobody computes: prefixes are told apart by their tokens all the same.
ANY_VOCAB_SIZE = 1 << 15
MOST_TOKENS = 10_000_000  # of a request of a drawn length
_TOKENS = "use at least one prompt and one output token"


def split_length(total_len: int, pd_ratio: float) -> tuple[int, int]:
    """P and D, each at least 1, of P + D = total_len and P : D nearest to `pd_ratio`."""
    prompt_len = total_len - 1
    if pd_ratio < 2 * total_len:
        prompt_len = min(prompt_len, max(1, round(total_len * pd_ratio / (pd_ratio + 1))))
    return prompt_len, total_len - prompt_len


@dataclass(frozen=True, kw_only=True)
class MadeUp(Arriving, ABC):
    """`num_requests` requests with random prompts, all from one seed.

    Every prompt begins with one of `num_prefixes` texts (None: one) of `shared_prefix_len` tokens,
    which count as part of its length; a shorter prompt is the text's beginning.
    """

    name: ClassVar[str]
    shared_prefix_len: int = whole(0, minimum=0, fix="use 0 for prompts that share nothing")
    num_prefixes: int | None = whole(
        None, minimum=1, fix="use null for one prefix that all prompts share"
    )
    num_requests: int = whole(
        minimum=1, maximum=MOST_REQUESTS, fix="use the number of requests to serve, such as 16"
    )

    def __post_init__(self) -> None:
        if self.arrivals is None:
            require_one_of("workload.arrivals", self.arrivals, READS)
        super().__post_init__()
        if not self.shared_prefix_len:
            why = " without a prefix; add workload.shared_prefix_len=512"
            refuse_unread(self, ["num_prefixes"], why, "workload.")

    @abstractmethod
    def lengths(self) -> Iterable[tuple[int, int]]:
        """Prompt and output tokens of each request, or of more; the same seed gives the same."""

    def generate(self, vocab_size: int | None, encode: Encode | None = None) -> LoadedRequests:
        """`num_requests` requests, whose lengths no setting of arrivals changes."""
        lengths = enumerate(self.lengths())
        shapes = ((*own, self._prompt(i, own[0], vocab_size), ()) for i, own in lengths)
        return self.loaded(self.name, self.times(self.num_requests), shapes)

    def _prompt(
        self, request_id: int, prompt_len: int, vocab_size: int | None
    ) -> NDArray[np.int32] | None:
        """Token ids [prompt_len] by seed and request only; None if nobody needs them."""
        if not self.shared_prefix_len:
            return random_prompt(request_id, prompt_len, vocab_size, self.seed)
        vocab_size = vocab_size or ANY_VOCAB_SIZE
        dice = np.random.default_rng([self.seed, 10, request_id])
        texts = np.random.default_rng([self.seed, 11, int(dice.integers(self.num_prefixes or 1))])
        shared = min(self.shared_prefix_len, prompt_len)
        prefix = texts.integers(0, vocab_size, shared, dtype=np.int32)
        own = random_prompt(request_id, prompt_len, vocab_size, self.seed)
        assert own is not None, "there is a vocabulary"
        return np.concatenate([prefix, own[len(prefix) :]])


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

    min_len: int = whole(minimum=2, maximum=MOST_TOKENS, fix=_TOKENS)
    max_len: int = whole(minimum=2, maximum=MOST_TOKENS, fix=_TOKENS)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_order(self, "min_len", "max_len", "; exchange them", "workload.")

    def _generator(self) -> np.random.Generator:
        return np.random.default_rng([self.seed, 2])


@dataclass(frozen=True, kw_only=True)
class Uniform(_Varied):
    name = "uniform"

    def total_lens(self) -> Sequence[int]:
        ends = (self.min_len, self.max_len + 1)
        return self._generator().integers(*ends, self.num_requests).tolist()


@dataclass(frozen=True, kw_only=True)
class Zipf(_Varied):
    """Total lengths with P(min_len + k - 1) proportional to k^-theta, so that short ones are
    likely; the paper's pipelines take theta = 0.4 over 1K to 4K tokens (section 5.3).
    """

    name = "zipf"
    theta: float = number(0.4, above=0, fix="use an exponent such as 0.4")

    def total_lens(self) -> Sequence[int]:
        ranks = np.arange(1, self.max_len - self.min_len + 2)
        weights = ranks ** -float(self.theta)
        drawn = self._generator().choice(ranks, self.num_requests, p=weights / weights.sum())
        return (self.min_len + drawn - 1).tolist()
