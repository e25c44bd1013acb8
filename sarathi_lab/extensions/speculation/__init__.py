"""Speculative decoding (Leviathan et al., arXiv 2211.17192) of greedy tokens: a decode carries
drafts of the next ones, which are verified in the pass that it is in, beside a chunk or not.

A decode with k drafts is a chunk of 1 + k tokens with logits of every row. Drafts are right if the
rows before them sample the same tokens; the first row behind them gives one token more. The cache
of wrong drafts is overwritten, as positions are counted from computed tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import ClassVar

import numpy as np
import pandas as pd

from sarathi_lab.config.checked import check_fields, require_order, share, whole
from sarathi_lab.config.errors import UserError
from sarathi_lab.engine.executor import NO_TOKEN, Backend, StepResult
from sarathi_lab.engine.request import Batch, Request, SequenceState
from sarathi_lab.engine.scheduler import Scheduler
from sarathi_lab.engine.scheduler_state import Drafter, Speculation
from sarathi_lab.executor.simulated.backend import SimulatedBackend

TOKENS = "use a few drafts of a decode, such as 4, or speculation=none"
NGRAM = "use the tokens that must be equal, such as 3"


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
        return Proposer(self)

    def check(self, backend: Backend) -> None:
        named = f"speculation of {self.describe()}"
        if self.reads_tokens != backend.computes_tokens:
            why = "reads tokens, which a simulation does not compute; use speculation=assumed"
            if backend.computes_tokens:
                why = "is for a simulation; use speculation=prompt_lookup or add executor=simulated"
            raise UserError(f"{named} {why}")
        if fix := _without_overlap(backend):
            raise UserError(
                f"{named} needs a batch's tokens before the next batch is made, which here is "
                f"made while it runs; add {fix}"
            )

    def metrics(self, iterations: pd.DataFrame) -> dict[str, float]:
        """Return the share of right drafts and the tokens that a decode emits in an iteration."""
        if "num_draft_tokens" not in iterations:
            return {}
        drafts = float(iterations.num_draft_tokens.sum())
        accepted = float(iterations.num_accepted_tokens.sum())
        decodes = float(iterations.num_decode_tokens.sum()) - drafts
        return {
            "acceptance_rate": accepted / drafts,
            "num_draft_tokens": drafts,
            "tokens_per_decode": 1 + accepted / decodes,
        }


def _without_overlap(backend: Backend) -> str:
    """The setting that makes the next batch after the running one; empty where that is so."""
    if isinstance(backend, SimulatedBackend):
        return "host=none" if backend.host.overlaps else ""
    overlaps = getattr(backend, "uses_kernels", False) and getattr(backend, "overlap", False)
    return "executor.overlap=false" if overlaps else ""


class Drafts(ABC):
    """The drafts of one request."""

    @abstractmethod
    def propose(self, sequence: SequenceState, most: int) -> Sequence[int]:
        """Up to `most` tokens that may follow those of `sequence`, which is decoding."""

    def num_accepted(self, sequence: SequenceState, sampled: Sequence[int]) -> int:
        """Count the right drafts of `sequence`, whose rows sample `sampled` (simulated: empty)."""
        pairs = zip(sequence.draft_token_ids, sampled, strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


class Proposer(Drafter):
    """A drafter of at most `settings.tokens` drafts of a decode, each a token of the batch as in
    vLLM, so that less of the budget is left for prompts.
    """

    def __init__(self, settings: Drafting) -> None:
        self._settings = settings
        self._drafts: dict[int, Drafts] = {}  # of unfinished requests, by their ids

    def drafts_of(self, request: Request) -> Drafts:
        if request.request_id not in self._drafts:
            self._drafts[request.request_id] = self._settings.drafts(request)
        return self._drafts[request.request_id]

    def add_drafts(self, batch: Batch, first: int, scheduler: Scheduler) -> None:
        """Add drafts that leave a token of the budget to every sequence that may still join the
        batch, go no further than the request's last token, and evict no sequence.
        """
        budget = None if scheduler.policy.decodes_on_top else scheduler.policy.budget
        num_others = len(scheduler.running) + len(scheduler.waiting)
        reserved = max(0, min(scheduler.batch_size, num_others) - len(batch))
        for place in range(first, len(batch)):
            sequence, num_computed, _, is_decode, _ = batch.chunks[place]
            if not is_decode:
                continue
            most = sequence.request.output_len - len(sequence.output_token_ids) - 1
            most = min(most, self._settings.tokens, scheduler.blocks.num_slots(sequence) - 1)
            if budget is not None:
                most = min(most, budget - batch.num_tokens - reserved)
            drafts = self.drafts_of(sequence.request).propose(sequence, most) if most > 0 else ()
            if drafts and scheduler.blocks.grow(sequence, num_computed + 1 + len(drafts)):
                _append(batch, place, drafts)

    def verify(self, result: StepResult) -> list[int]:
        batch, tokens, row, last = result.batch, result.token_ids, 0, list[int]()
        if not batch.num_draft_tokens:
            return tokens
        for place, chunk in enumerate(batch.chunks):
            if not chunk.emits_token:
                continue
            sequence, sampled = chunk.sequence, tokens[row : row + chunk.num_rows]
            row += chunk.num_rows
            if chunk.num_rows > 1:
                number = self.drafts_of(sequence.request).num_accepted(sequence, sampled)
                sequence.output_token_ids += sampled[:number] or [NO_TOKEN] * number
                sequence.token_times += [result.end] * number
                sequence.draft_token_ids = ()
                batch.chunks[place] = chunk._replace(num_tokens=1 + number)
                batch.num_accepted_tokens += number
                sampled = sampled[number : number + 1]
            last += sampled
            if sequence.request.output_len - len(sequence.output_token_ids) <= 1:
                self._drafts.pop(sequence.request.request_id, None)  # it ends with this batch
        return last


def _append(batch: Batch, place: int, drafts: Sequence[int]) -> None:
    """Append `drafts` to the decode at `place`; they attend to one another and its context."""
    chunk, number = batch.chunks[place], len(drafts)
    chunk.sequence.draft_token_ids = drafts
    batch.chunks[place] = chunk._replace(num_tokens=1 + number)
    batch.num_draft_tokens += number
    batch.num_decode_tokens += number
    batch.decode_kv_tokens += number
    batch.num_emits += number


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
        sizes = range(self.max_ngram, self.min_ngram - 1, -1)
        return LookedUp(list(map(int, request.prompt_token_ids)), sizes)

    def describe(self) -> str:
        return f"up to {self.tokens} drafts a decode by prompt lookup"


class LookedUp(Drafts):
    """The tokens `known` of a request, indexed once, and what followed their n-grams of `sizes`."""

    def __init__(self, known: list[int], sizes: Sequence[int]) -> None:
        self._known = known
        self._sizes = sizes
        self._prompt_len = len(known)
        self._num_indexed = 0  # tokens whose n-grams, those that end before them, are indexed
        # Where the token behind the last occurrence of each n-gram is.
        self._follows: dict[tuple[int, ...], int] = {}

    def propose(self, sequence: SequenceState, most: int) -> Sequence[int]:
        self._index(sequence)
        known, end = self._known, len(self._known)
        for size in self._sizes if known[-1] != NO_TOKEN else ():
            at = self._follows.get(tuple(known[end - size :])) if size <= end else None
            if at is not None:
                drafts = known[at : at + most]
                while len(drafts) < most:
                    drafts.append(drafts[at - end])  # as many tokens back as there are behind `at`
                return drafts
        return ()

    def _index(self, sequence: SequenceState) -> None:
        """Add the output of `sequence` since the last call."""
        known = self._known
        known += sequence.output_token_ids[len(known) - self._prompt_len :]
        for at in range(self._num_indexed, len(known)):
            for size in self._sizes:
                if size <= at:
                    self._follows[tuple(known[at - size : at])] = at
        self._num_indexed = len(known)


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
        dice = np.random.default_rng([self.seed, 5, request.request_id])
        return Drawn((dice.random(request.output_len) < self.acceptance).tolist())

    def describe(self) -> str:
        return f"{self.tokens} drafts a decode, each right with probability {self.acceptance:g}"


@dataclass
class Drawn(Drafts):
    """Placeholders, and for each output token whether its draft is right."""

    are_right: list[bool]

    def propose(self, sequence: SequenceState, most: int) -> Sequence[int]:
        return [NO_TOKEN] * most

    def num_accepted(self, sequence: SequenceState, sampled: Sequence[int]) -> int:
        at = len(sequence.output_token_ids)
        right = self.are_right[at : at + len(sequence.draft_token_ids)]
        return len(right) if all(right) else right.index(False)
