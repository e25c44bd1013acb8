"""P-PAS, prefill-pressure adaptive scheduling over vLLM v1 (vLLM RFC 52906)."""

from __future__ import annotations

from dataclasses import dataclass

from sarathi_lab.config.checked import whole
from sarathi_lab.config.errors import UserError
from sarathi_lab.engine.request import Batch, SequenceState
from sarathi_lab.engine.scheduler import Scheduler, Size
from sarathi_lab.policy.vllm import VllmV1


@dataclass(frozen=True)
class PPas(VllmV1):
    """P-PAS, prefill-pressure adaptive scheduling over vLLM v1 (vLLM RFC 52906).

    While at least `min_active_prefills` prompts run or wait beside running decodes, the prompts of
    an iteration take at most `prefill_cap` tokens together; else all that `max_num_batched_tokens`
    leaves. Decodes are not capped.

    The paper's N_th, B_cap and B_max are 2, 2,048 and 16,384; `prefill_cap=None` is the same eighth
    of the budget. Its patch for vLLM 0.22.1 has the numbers in the code and no names. It also drops
    the clamp of a chunk to the model length that its baseline keeps, which no request here is long
    enough for.
    """

    name = "p_pas"
    max_num_batched_tokens: int = 16384
    prefill_cap: int | None = whole(
        None, minimum=1, fix="use null for an eighth of max_num_batched_tokens"
    )
    min_active_prefills: int = whole(2, minimum=1, fix="use 2, as the paper does")

    def check(self, batch_size: int, max_model_len: int) -> None:
        super().check(batch_size, max_model_len)
        if self.prefill_cap is not None and self.prefill_cap >= self.max_num_batched_tokens:
            raise UserError(
                f"prefill_cap={self.prefill_cap} has no effect, as max_num_batched_tokens="
                f"{self.max_num_batched_tokens}; use a smaller cap, or policy=vllm_v1"
            )

    def _size(self, batch: Batch, scheduler: Scheduler) -> Size:
        take, cap = super()._size(batch, scheduler), self._cap(scheduler)

        def size(sequence: SequenceState, left: int) -> int:
            wanted = take(sequence, left)
            return wanted if sequence.is_decoding else min(wanted, cap - batch.num_prefill_tokens)

        return size

    def _cap(self, scheduler: Scheduler) -> int:
        num_decodes = sum(sequence.is_decoding for sequence in scheduler.running)
        num_prefills = len(scheduler.running) - num_decodes + len(scheduler.waiting)
        if num_decodes == 0 or num_prefills < self.min_active_prefills:
            return self.max_num_batched_tokens
        return self.prefill_cap or max(1, self.max_num_batched_tokens // 8)
