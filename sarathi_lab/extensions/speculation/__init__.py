"""Speculative decoding (Leviathan et al., arXiv 2211.17192) of greedy tokens: a decode carries
drafts of the next ones, which are verified in the pass that it is in, beside a chunk or not.

A decode with k drafts is a chunk of 1 + k tokens with logits of every row. Drafts are right if the
rows before them sample the same tokens; the first row behind them gives one token more. The cache
of wrong drafts is overwritten, as positions are counted from computed tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, ClassVar

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

    def check(self, backend: Backend) -> None:
        named = f"speculation of {self.describe()}"
        if self.reads_tokens and not backend.computes_tokens:
            raise UserError(
                f"{named} reads tokens, which a simulation does not compute; use "
                "speculation=assumed, which assumes how many drafts are right"
            )
        if backend.computes_tokens and not self.reads_tokens:
            raise UserError(
                f"{named} is for a simulation, here tokens are computed; use speculation="
                "prompt_lookup, or add executor=simulated"
            )
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
        found = {"acceptance_rate": accepted / drafts, "num_draft_tokens": drafts}
        return {**found, "tokens_per_decode": 1 + accepted / decodes}


def _without_overlap(backend: Backend) -> str:
    """The setting that makes the next batch after the running one; empty where that is so."""
    if isinstance(backend, SimulatedBackend):
        return "host=none" if backend.host.overlaps else ""
    overlaps = getattr(backend, "uses_kernels", False) and getattr(backend, "overlap", False)
    return "executor.overlap=false" if overlaps else ""


class Proposer(Drafter, ABC):
    """A drafter of at most `tokens` drafts of a decode, each a token of the batch as in vLLM, so
    that less of the budget is left for prompts.
    """

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self._known: dict[int, Any] = {}  # of unfinished requests, by their ids

    @abstractmethod
    def propose(self, sequence: SequenceState, most: int) -> Sequence[int]:
        """Up to `most` tokens that may follow those of `sequence`, which is decoding."""

    @abstractmethod
    def num_accepted(self, sequence: SequenceState, sampled: Sequence[int]) -> int:
        """Count the right drafts of `sequence`; its rows sample `sampled` (simulated: empty)."""

    def add_drafts(self, batch: Batch, first: int, scheduler: Scheduler) -> None:
        """Add drafts that leave a token of the budget to every sequence that may still join the
        batch, go no further than the request's last token, and evict no sequence.
        """
        policy: Any = scheduler.policy
        is_on_top = getattr(policy, "decodes_on_top", False)
        budget = None if is_on_top else getattr(policy, "budget", None)
        num_others = len(scheduler.running) + len(scheduler.waiting) + len(scheduler.swapped)
        reserved = max(0, min(scheduler.batch_size, num_others) - len(batch))
        for place in range(first, len(batch)):
            sequence, num_computed, _, is_decode, _ = batch.chunks[place]
            if not is_decode:
                continue
            most = sequence.request.output_len - len(sequence.output_token_ids) - 1
            most = min(most, self.tokens, scheduler.blocks.num_slots(sequence) - 1)
            if budget is not None:
                most = min(most, budget - batch.num_tokens - reserved)
            drafts = self.propose(sequence, most) if most > 0 else ()
            if drafts and scheduler.blocks.grow(sequence, num_computed + 1 + len(drafts)):
                _append(batch, place, drafts)

    def verify(self, result: StepResult) -> list[int]:
        batch, tokens, row, last = result.batch, result.token_ids, 0, list[int]()
        for place, chunk in enumerate(batch.chunks if batch.num_draft_tokens else ()):
            if not chunk.emits_token:
                continue
            sequence, sampled = chunk.sequence, tokens[row : row + chunk.num_rows]
            row += chunk.num_rows
            if chunk.num_rows > 1:
                number = self.num_accepted(sequence, sampled)
                sequence.output_token_ids += sampled[:number] or [NO_TOKEN] * number
                sequence.token_times += [result.end] * number
                sequence.draft_token_ids = ()
                batch.chunks[place] = chunk._replace(num_tokens=1 + number)
                batch.num_accepted_tokens += number
                sampled = sampled[number : number + 1]
            last += sampled
            if sequence.request.output_len - len(sequence.output_token_ids) <= 1:
                self._known.pop(sequence.request.request_id, None)  # it ends with this batch
        return last if batch.num_draft_tokens else tokens


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

    def drafter(self) -> Drafter:
        return LookupDrafter(self)

    def describe(self) -> str:
        return f"up to {self.tokens} drafts a decode by prompt lookup"


@dataclass
class _Text:
    """The tokens of a request, and where the token behind the last occurrence of each n-gram is."""

    known: list[int]
    follows: dict[tuple[int, ...], int] = field(default_factory=dict)
    num_indexed: int = 0  # tokens whose n-grams, those that end before them, are in `follows`


class LookupDrafter(Proposer):
    """The drafter of `PromptLookup`, which indexes each token once."""

    def __init__(self, settings: PromptLookup) -> None:
        super().__init__(settings.tokens)
        self._sizes = range(settings.max_ngram, settings.min_ngram - 1, -1)

    def propose(self, sequence: SequenceState, most: int) -> Sequence[int]:
        text = self._text(sequence)
        known, end = text.known, len(text.known)
        for size in self._sizes if known[-1] != NO_TOKEN else ():
            at = text.follows.get(tuple(known[end - size :])) if size <= end else None
            if at is not None:
                drafts = known[at : at + most]
                while len(drafts) < most:
                    drafts.append(drafts[at - end])  # as many tokens back as there are behind `at`
                return drafts
        return ()

    def num_accepted(self, sequence: SequenceState, sampled: Sequence[int]) -> int:
        pairs = zip(sequence.draft_token_ids, sampled, strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

    def _text(self, sequence: SequenceState) -> _Text:
        """The indexed tokens of `sequence`."""
        request = sequence.request
        if request.request_id not in self._known:
            if request.prompt_token_ids is None:
                raise ValueError(f"request {request.request_id} has no tokens to look up")
            self._known[request.request_id] = _Text(list(map(int, request.prompt_token_ids)))
        text: _Text = self._known[request.request_id]
        known = text.known
        known += sequence.output_token_ids[len(known) - request.prompt_len :]
        for at in range(text.num_indexed, len(known)):
            for size in self._sizes:
                if size <= at:
                    text.follows[tuple(known[at - size : at])] = at
        text.num_indexed = len(known)
        return text


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

    def drafter(self) -> AssumedDrafter:
        return AssumedDrafter(self)

    def describe(self) -> str:
        return f"{self.tokens} drafts a decode, each right with probability {self.acceptance:g}"

    def known(self, request: Request) -> list[bool]:
        """Draw for each output token whether its draft would be right."""
        dice = np.random.default_rng([self.seed, 5, request.request_id])
        return (dice.random(request.output_len) < self.acceptance).tolist()


class AssumedDrafter(Proposer):
    """The drafter of `Assumed`, whose drafts are placeholders."""

    def __init__(self, settings: Assumed) -> None:
        super().__init__(settings.tokens)
        self._settings = settings

    def known(self, sequence: SequenceState, most: int) -> list[bool]:
        """`Assumed.known` of the `most` tokens that `sequence` generates next."""
        request, at = sequence.request, len(sequence.output_token_ids)
        if request.request_id not in self._known:
            self._known[request.request_id] = self._settings.known(request)
        known: list[bool] = self._known[request.request_id]
        return known[at : at + most]

    def propose(self, sequence: SequenceState, most: int) -> Sequence[int]:
        return [NO_TOKEN] * most

    def num_accepted(self, sequence: SequenceState, sampled: Sequence[int]) -> int:
        known = self.known(sequence, len(sequence.draft_token_ids))
        return len(known) if all(known) else known.index(False)
