"""Where drafts of decodes come from (config group `speculation`): here nowhere; see
`extensions.speculation`.
"""

from __future__ import annotations

from typing import Any

import pandas as pd

from sarathi_lab.engine.executor import Backend, StepResult
from sarathi_lab.engine.request import Batch


class Drafter:
    """The drafts of one scheduler's decodes; this one has none."""

    def add_drafts(self, batch: Batch, first: int, scheduler: Any) -> None:
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

    def metrics(self, iterations: pd.DataFrame) -> dict[str, float]:
        """Return the quantities of a run that only drafts give (METRICS.md)."""
        return {}

    def check(self, backend: Backend) -> None:
        """Raise UserError for a device that has no use for the drafts."""


NO_SPECULATION = Speculation()
