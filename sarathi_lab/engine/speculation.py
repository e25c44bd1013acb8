"""Speculative decoding as the engine sees it: drafts that decodes carry, here none."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sarathi_lab.engine.executor import Backend, StepResult
from sarathi_lab.engine.request import Batch

if TYPE_CHECKING:  # which imports this module
    from sarathi_lab.engine.scheduler import Scheduler


class Drafter:
    """The drafts of one scheduler's decodes; this one has none."""

    def add_drafts(self, batch: Batch, first: int, scheduler: Scheduler) -> None:
        """Let decodes of `batch` from chunk `first` on carry drafts, of the tokens that its policy
        and the cache of `scheduler` have left.
        """

    def verify(self, result: StepResult) -> list[int]:
        """Cut the decodes of a finished batch to their right drafts; returns one token for each
        emitting chunk (none where they are not computed).
        """
        return result.token_ids


class Speculation:
    """Settings of speculative decoding; this one is without drafts."""

    tokens: int = 0  # the most drafts of a decode

    def drafter(self) -> Drafter:
        """Make the drafter of a new scheduler."""
        return Drafter()

    def describe(self) -> str:
        """Describe the drafts; empty without any."""
        return ""

    def check(self, backend: Backend) -> None:
        """Raise UserError for a device that has no use for the drafts."""


NO_SPECULATION = Speculation()
