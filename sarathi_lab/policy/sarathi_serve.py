"""Sarathi-Serve (OSDI '24, arXiv 2403.02310), SARATHI's successor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from sarathi_lab.policy.base import Policy, Reserve, check_budget

if TYPE_CHECKING:
    from sarathi_lab.request import Batch
    from sarathi_lab.scheduler import Scheduler


@dataclass(frozen=True)
class SarathiServe(Policy):
    """Stall-free batching: decodes first, then running prompts, then new ones, within `chunk` tokens."""

    name: ClassVar[str] = "sarathi_serve"
    budget_field: ClassVar[str] = "chunk"
    chunk: int = 256
    watermark: float = 0.01
    reserve: Reserve = "prompt"

    def validate(self, batch_size: int, max_model_len: int) -> None:
        super().validate(batch_size, max_model_len)
        check_budget("chunk", self.chunk, batch_size)

    def fill(self, batch: Batch, scheduler: Scheduler) -> None:
        scheduler.sort_running()
        scheduler.add_decodes(batch)
        scheduler.continue_prefills(batch, self.chunk)
        scheduler.admit(batch, self.chunk)
