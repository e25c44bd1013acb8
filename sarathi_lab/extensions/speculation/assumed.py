"""Which drafts of a simulated run are right: drawn in advance, like prompts and times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sarathi_lab.config.checked import share, whole
from sarathi_lab.engine.executor import NO_TOKEN
from sarathi_lab.engine.request import Request, SequenceState
from sarathi_lab.extensions.speculation.prompt_lookup import Drafting, Proposer


@dataclass(frozen=True, kw_only=True)
class Assumed(Drafting):
    """`tokens` drafts of each decode, of which every one is right with probability `acceptance`, if
    those before it are.

    Which of a request's output tokens a drafter would know is drawn by `seed` and request alone: so
    it is the same under every policy and number of drafts. Making drafts takes no time.
    """

    reads_tokens = False
    acceptance: float = share(0.7, fix="use the share of drafts that are right, such as 0.7")
    seed: int = whole(0, minimum=0, fix="use a number such as 0", name="seed")

    def drafter(self) -> AssumedDrafter:
        return AssumedDrafter(self)

    def describe(self) -> str:
        return f"{self.tokens} drafts a decode, each right with probability {self.acceptance:g}"

    def known(self, request: Request) -> list[bool]:
        """By output token, whether a draft in its place would be right."""
        dice = np.random.default_rng([self.seed, 5, request.request_id])
        return (dice.random(request.output_len) < self.acceptance).tolist()


class AssumedDrafter(Proposer):
    """The drafter of an `Assumed`: its drafts are no tokens."""

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
