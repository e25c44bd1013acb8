"""vLLM's schedulers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from sarathi_lab.errors import UserError, require_int, require_number
from sarathi_lab.policy.base import Policy, Reserve

if TYPE_CHECKING:
    from sarathi_lab.request import Batch
    from sarathi_lab.scheduler import Scheduler


@dataclass(frozen=True)
class PrefillFirst(Policy):
    """vLLM v0's default: a batch is whole prompts only, as long as any fit and none is swapped out, else decodes only.

    `max_num_batched_tokens=None` is that system's max(max_model_len, 2048). With `delay_factor` f > 0, prompts wait
    until the oldest has waited f times the last prompt iteration's duration, or nothing is running.
    """

    name: ClassVar[str] = "prefill_first"
    max_num_batched_tokens: int | None = None
    delay_factor: float = 0.0
    watermark: float = 0.01
    reserve: Reserve = "prompt"

    def validate(self, batch_size: int, max_model_len: int) -> None:
        super().validate(batch_size, max_model_len)
        require_number("delay_factor", self.delay_factor, minimum=0, fix="use 0 to never delay prompts")
        if self.max_num_batched_tokens is None:
            return
        require_int("max_num_batched_tokens", self.max_num_batched_tokens, 1, "use null for max(max_model_len, 2048)")
        if self.max_num_batched_tokens < max_model_len:
            raise UserError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is below max_model_len={max_model_len}: a "
                "prompt that is never cut may not fit; raise it, or use a policy that chunks"
            )

    def fill(self, batch: Batch, scheduler: Scheduler) -> None:
        if not scheduler.swapped and self._may_admit(scheduler):
            budget = self.max_num_batched_tokens or max(scheduler.max_model_len, 2048)
            scheduler.admit(batch, budget, whole=True)
        if not batch.chunks:
            scheduler.add_decodes(batch)
            scheduler.swap_in(batch)

    def _may_admit(self, scheduler: Scheduler) -> bool:
        if not scheduler.waiting or not scheduler.running or self.delay_factor == 0:
            return True
        waited = scheduler.now - min(sequence.request.arrival_time for sequence in scheduler.waiting)
        return waited > self.delay_factor * scheduler.last_prompt_latency
