"""The drafts of one request: placeholders that are right by chance, or looked-up tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from sarathi_lab.engine.executor import NO_TOKEN
from sarathi_lab.engine.request import SequenceState


class Drafts(ABC):
    """The drafts of one request."""

    @abstractmethod
    def propose(self, sequence: SequenceState, limit: int) -> Sequence[int]:
        """Up to `limit` tokens that may follow those of `sequence`, which is decoding."""

    def num_accepted(self, sequence: SequenceState, sampled: Sequence[int]) -> int:
        """Count the right drafts of `sequence`, whose rows sample `sampled` (simulated: empty)."""
        number = 0
        # Not strict: there is a sampled token more, that behind the last draft.
        for draft, token in zip(sequence.draft_token_ids, sampled, strict=False):
            if draft != token:
                break
            number += 1
        return number


class LookedUp(Drafts):
    """What followed earlier occurrences of a request's last tokens, which are indexed once.

    Args:
        tokens: Those of the prompt; the output's are appended as they are computed.
        sizes: Lengths of the n-grams that are looked up, the preferred one first.
    """

    def __init__(self, tokens: list[int], sizes: Sequence[int]) -> None:
        self._tokens = tokens
        self._sizes = sizes
        self._prompt_len = len(tokens)
        self._num_indexed = 0  # tokens whose n-grams, those that end before them, are indexed
        # The position of the token behind the last occurrence of each n-gram.
        self._follows: dict[tuple[int, ...], int] = {}

    def propose(self, sequence: SequenceState, limit: int) -> Sequence[int]:
        self._index(sequence)
        tokens = self._tokens
        if tokens[-1] == NO_TOKEN:
            return ()
        end = len(tokens)
        for size in self._sizes:
            if size > end:
                continue
            ngram = tuple(tokens[end - size :])
            position = self._follows.get(ngram)
            if position is None:
                continue
            drafts = tokens[position : position + limit]
            period = end - position  # at the end of the tokens the drafts repeat themselves
            while len(drafts) < limit:
                drafts.append(drafts[-period])
            return drafts
        return ()

    def _index(self, sequence: SequenceState) -> None:
        """Add the output of `sequence` since the last call."""
        tokens = self._tokens
        num_outputs = len(tokens) - self._prompt_len
        tokens += sequence.output_token_ids[num_outputs:]
        for position in range(self._num_indexed, len(tokens)):
            for size in self._sizes:
                start = position - size
                if start >= 0:
                    ngram = tuple(tokens[start:position])
                    self._follows[ngram] = position
        self._num_indexed = len(tokens)


@dataclass
class Drawn(Drafts):
    """Placeholders, and for each output token whether its draft is right."""

    are_right: list[bool]

    def propose(self, sequence: SequenceState, limit: int) -> Sequence[int]:
        return [NO_TOKEN] * limit

    def num_accepted(self, sequence: SequenceState, sampled: Sequence[int]) -> int:
        start = len(sequence.output_token_ids)
        end = start + len(sequence.draft_token_ids)
        right = self.are_right[start:end]
        if all(right):
            return len(right)
        return right.index(False)
