"""Policies as a user writes them, in a module that is imported by its name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from sarathi_lab.engine.request import Batch
from sarathi_lab.engine.scheduler import Scheduler
from sarathi_lab.policy import Policy


@dataclass(frozen=True)
class DecodesThenOneChunk(Policy):
    name: ClassVar[str] = "decodes_then_one_chunk"
    budget_field: ClassVar[str] = "tokens"
    tokens: int = 256
    most: int = 1

    def fill(self, batch: Batch, scheduler: Scheduler) -> None:
        scheduler.add_decodes(batch)
        scheduler.continue_prefills(batch, self.tokens, self.most)
        scheduler.admit(batch, self.tokens, self.most)
