"""Speculative decoding (Leviathan et al., arXiv 2211.17192) of greedy tokens: a decode carries
drafts of the next ones, which are verified in the pass that it is in, beside a chunk or not.

A decode with k drafts is a chunk of 1 + k tokens that wants the logits of every row. Of the drafts
those are right that the rows before them sample; the first row behind them gives one token more.
The cache of the others is overwritten, as positions are counted from what is computed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from sarathi_lab.config.checked import check_fields, require_order, whole
from sarathi_lab.config.errors import UserError
from sarathi_lab.engine.executor import NO_TOKEN, StepResult
from sarathi_lab.engine.request import SequenceState

TOKENS = "use a few drafts of a decode, such as 4, or speculation=none"
NGRAM = "use the tokens that must be equal, such as 3"


class Drafter(ABC):
    """Makes and judges the drafts of one scheduler's sequences, at most `tokens` of a decode."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self._known: dict[int, Any] = {}  # of requests, by their ids

    @abstractmethod
    def propose(self, sequence: SequenceState, most: int) -> Sequence[int]:
        """Up to `most` tokens that may follow what is known of `sequence`, which is decoding."""

    @abstractmethod
    def num_accepted(self, sequence: SequenceState, sampled: Sequence[int]) -> int:
        """How many of its drafts are right, where its rows sample `sampled` (none: nobody did)."""

    def forget(self, sequences: Iterable[SequenceState]) -> None:
        """Hear that these are done."""
        for sequence in sequences:
            self._known.pop(sequence.request.request_id, None)


class Speculation:
    """Where drafts come from (config group `speculation`); here from nowhere."""

    reads_tokens = False  # where nobody computes these, it has nothing to go by
    tokens: int = 0  # the most drafts of a decode

    def drafter(self) -> Drafter | None:
        """A new one, for a scheduler; None: there are no drafts."""
        return None

    def describe(self) -> str:
        """In words; empty without drafts."""
        return ""

    def check(self, *, computes_tokens: bool, ahead: str) -> None:
        """Raise UserError for a device that has no use for it; `ahead` is the fix where the next
        batch is made while one runs, else empty.
        """
        if not self.tokens:
            return
        own = f"speculation of {self.describe()}"
        if self.reads_tokens and not computes_tokens:
            raise UserError(
                f"{own} reads tokens, which nobody computes in a simulation; use "
                "speculation=assumed, which assumes how many drafts are right"
            )
        if computes_tokens and not self.reads_tokens:
            raise UserError(
                f"{own} is for a simulation, here tokens are computed; use speculation="
                "prompt_lookup, or add executor=simulated"
            )
        if ahead:
            raise UserError(
                f"{own} must know a batch's tokens before the next one is made, which here is made "
                f"while it runs; add {ahead}"
            )


NO_SPECULATION = Speculation()


@dataclass(frozen=True, kw_only=True)
class PromptLookup(Speculation):
    """Up to `tokens` drafts: what followed the last tokens where they stood before, in prompt or
    output (prompt lookup decoding; vLLM's `ngram` method).

    Of the last `max_ngram` to `min_ngram` tokens the longest that stood there count, and where they
    stood last. Where that runs into the end, it goes on with itself.
    """

    reads_tokens = True
    tokens: int = whole(4, minimum=1, fix=TOKENS)
    max_ngram: int = whole(3, minimum=1, fix=NGRAM)
    min_ngram: int = whole(1, minimum=1, fix=NGRAM)

    def __post_init__(self) -> None:
        check_fields(self, "speculation.")
        require_order(self, "min_ngram", "max_ngram", "; exchange them", "speculation.")

    def drafter(self) -> Drafter:
        return LookupDrafter(self)

    def describe(self) -> str:
        return f"up to {self.tokens} drafts a decode by prompt lookup"


@dataclass
class _Text:
    """What is known of a request, and by its n-grams where what follows the newest one begins."""

    known: list[int]
    follows: dict[tuple[int, ...], int] = field(default_factory=dict)
    num_indexed: int = 0  # tokens whose n-grams, those that end before them, are in `follows`


class LookupDrafter(Drafter):
    """The drafter of a `PromptLookup`; it goes through each token once."""

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
        """All that is known of `sequence`, indexed."""
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


def verify(drafter: Drafter, result: StepResult) -> list[int]:
    """Cut the decodes of a finished batch with drafts to what was right of them, and book the
    tokens but the last of each; returns one token for each emitting chunk, as without drafts (none
    where nobody computes them).
    """
    batch, tokens, row, last = result.batch, result.token_ids, 0, []
    for place, chunk in enumerate(batch.chunks):
        if not chunk.emits_token:
            continue
        sampled = tokens[row : row + chunk.num_rows]
        row += chunk.num_rows
        if chunk.num_rows > 1:
            sequence = chunk.sequence
            number = drafter.num_accepted(sequence, sampled)
            sequence.output_token_ids += sampled[:number] or [NO_TOKEN] * number
            sequence.token_times += [result.end] * number
            sequence.draft_token_ids = ()
            batch.chunks[place] = chunk._replace(num_tokens=1 + number)
            batch.num_accepted_tokens += number
            sampled = sampled[number : number + 1]
        last += sampled
    return last
