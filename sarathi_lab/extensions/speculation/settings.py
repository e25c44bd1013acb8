"""Speculative decoding (Leviathan et al., arXiv 2211.17192) of greedy tokens: a decode carries
drafts of the next ones, which are verified in the pass that it is in, with or without a chunk.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from sarathi_lab.config.checked import check_fields, require_order, share, whole
from sarathi_lab.config.errors import UserError
from sarathi_lab.engine.executor import Backend
from sarathi_lab.engine.request import Request
from sarathi_lab.engine.speculation import Drafter, Speculation
from sarathi_lab.extensions.speculation.drafts import Drafts, Drawn, LookedUp
from sarathi_lab.extensions.speculation.proposer import Proposer

TOKENS = "use a few drafts of a decode, such as 4, or speculation=none"
NGRAM = "use the tokens that must be equal, such as 3"
STREAM = 5  # of random numbers, other than those of workloads by the same seed


@dataclass(frozen=True, kw_only=True)
class Drafting(Speculation, ABC):
    """Settings of up to `tokens` drafts of a decode."""

    reads_tokens: ClassVar[bool]  # drafts come from tokens, which a simulation does not compute
    tokens: int = whole(4, minimum=1, fix=TOKENS)

    def __post_init__(self) -> None:
        check_fields(self, "speculation.")

    @abstractmethod
    def drafts(self, request: Request) -> Drafts:
        """Make what drafts the tokens of `request`."""

    def drafter(self) -> Drafter:
        return Proposer(self.tokens, self.drafts)

    def check(self, backend: Backend) -> None:
        subject = f"speculation of {self.describe()}"
        if self.reads_tokens and not backend.computes_tokens:
            raise UserError(
                f"{subject} reads tokens, which a simulation does not compute; use "
                "speculation=assumed"
            )
        if backend.computes_tokens and not self.reads_tokens:
            raise UserError(
                f"{subject} is for a simulation; use speculation=prompt_lookup or add "
                "executor=simulated"
            )
        # Drafts begin with the token that the batch before computes.
        setting = backend.without_overlap
        if setting:
            raise UserError(
                f"{subject} needs a batch's tokens before the next batch is made, which here is "
                f"made while it runs; add {setting}"
            )


@dataclass(frozen=True, kw_only=True)
class PromptLookup(Drafting):
    """Up to `tokens` drafts: those behind an earlier occurrence of the last tokens in prompt or
    output (prompt lookup decoding; vLLM's `ngram` method).

    The longest match of the last `max_ngram` to `min_ngram` tokens counts, and its last occurrence.
    At the end the drafts continue with themselves.
    """

    reads_tokens = True
    max_ngram: int = whole(3, minimum=1, fix=NGRAM)
    min_ngram: int = whole(1, minimum=1, fix=NGRAM)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_order(self, "min_ngram", "max_ngram", "; exchange them", "speculation.")

    def drafts(self, request: Request) -> Drafts:
        if request.prompt_token_ids is None:
            raise ValueError(f"request {request.request_id} has no tokens to look up")
        tokens = [int(token) for token in request.prompt_token_ids]
        sizes = range(self.max_ngram, self.min_ngram - 1, -1)
        return LookedUp(tokens, sizes)

    def describe(self) -> str:
        return f"up to {self.tokens} drafts a decode by prompt lookup"


@dataclass(frozen=True, kw_only=True)
class Assumed(Drafting):
    """`tokens` drafts of each decode; each is right with probability `acceptance` if those before
    it are.

    The output tokens that would be drafted right are drawn by `seed` and request only, so they are
    equal for every policy and number of drafts. Drafting takes no time.
    """

    reads_tokens = False
    acceptance: float = share(0.7, fix="use the share of drafts that are right, such as 0.7")
    seed: int = whole(0, minimum=0, fix="use a number such as 0", name="seed")

    def drafts(self, request: Request) -> Drawn:
        key = [self.seed, STREAM, request.request_id]
        dice = np.random.default_rng(key)
        draws = dice.random(request.output_len)
        are_right = draws < self.acceptance
        return Drawn(are_right.tolist())

    def describe(self) -> str:
        return f"{self.tokens} drafts a decode, each right with probability {self.acceptance:g}"
