"""The schedulers of vLLM-Ascend, for Huawei's NPUs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from sarathi_lab.config.checked import flag, refuse_unread, whole
from sarathi_lab.config.errors import UserError, require_int
from sarathi_lab.engine.policy import Policy
from sarathi_lab.engine.queues import Test
from sarathi_lab.engine.request import Batch, Request, SequenceState
from sarathi_lab.engine.scheduler import Scheduler
from sarathi_lab.policy.vllm import (
    VllmV1,
    budget_for_whole,
    check_threshold,
    check_whole_prompts,
    fits_whole,
    long_from,
    threshold,
    whole_budget,
)

BUDGET_MULTIPLE = 256  # tokens, required by ModelArts


@dataclass(frozen=True)
class AscendV09(Policy):
    """AscendScheduler of vLLM-Ascend 0.9.1: whole prompts first, else decodes; with chunks it is
    vLLM v1's.

    A waiting prompt that does not fit the rest of `max_num_batched_tokens` (None:
    max(max_model_len, 2048)) or of the cache above the `watermark` is passed over.
    `enable_chunked_prefill` (off by default there) turns this off; then the budget is a multiple of
    256 tokens, as ModelArts requires.

    Of waiting prompts the next `queues.LOOKAHEAD` are tried, not all. Without swapping there; here
    swapped sequences return beside the decodes, before any is admitted.
    """

    name = "ascend_v0_9"
    budget_field = "max_num_batched_tokens"
    max_num_batched_tokens: int | None = whole_budget()
    enable_chunked_prefill: bool = flag(False)
    watermark: float = 0.01
    reserve = "prompt"

    def reserved_tokens(self, request: Request, num_known: int, max_model_len: int) -> int:
        return 0 if self.enable_chunked_prefill else num_known

    def check_budget(self, batch_size: int, max_model_len: int) -> None:
        if not self.enable_chunked_prefill:
            check_whole_prompts(self, max_model_len)
            return
        fix = f"use a multiple of {BUDGET_MULTIPLE}"
        budget = self.max_num_batched_tokens
        if require_int("max_num_batched_tokens", budget, BUDGET_MULTIPLE, fix) % BUDGET_MULTIPLE:
            raise UserError(
                f"max_num_batched_tokens={budget} is refused by the NPU's kernels; {fix}"
            )
        self._chunked.validate(batch_size, max_model_len)

    @cached_property
    def _chunked(self) -> VllmV1:
        budget = self.max_num_batched_tokens
        assert budget is not None
        return VllmV1(budget, scheduler_reserve_full_isl=False, watermark=self.watermark)

    def fill(self, batch: Batch, scheduler: Scheduler) -> None:
        if self.enable_chunked_prefill:
            self._chunked.fill(batch, scheduler)
            return
        if not scheduler.swapped:
            scheduler.admit(batch, pass_over=self._is_barred(batch, scheduler))
        if not batch.chunks:
            scheduler.add_decodes(batch)
            scheduler.swap_in(batch)

    def _is_barred(self, batch: Batch, scheduler: Scheduler) -> Test:
        budget = budget_for_whole(self.max_num_batched_tokens, scheduler.max_model_len)
        fits = fits_whole(scheduler)
        return lambda one: batch.num_tokens + one.num_pending > budget or not fits(one)


@dataclass(frozen=True)
class Ascend(AscendV09):
    """AscendScheduler of vLLM-Ascend 0.11: as 0.9.1, with a limit on long prompts.

    An iteration takes at most `max_long_partial_prefills` whole prompts longer than
    `long_prefill_token_threshold` tokens (0: 4 % of the model length); others overtake them. With
    `enable_chunked_prefill` the threshold is vLLM v1's. Its phase of prefills before any decode
    (`enable_pd_transfer`), which is off by default there, is not modelled.
    """

    name = "ascend"
    max_long_partial_prefills: int | None = whole(
        None, minimum=1, fix="use null for no limit (0 would never run a long prompt)"
    )
    long_prefill_token_threshold: int = threshold()

    def check(self, batch_size: int, max_model_len: int) -> None:
        check_threshold(self.long_prefill_token_threshold, max_model_len)
        if self.enable_chunked_prefill:
            why = " with enable_chunked_prefill=true; drop one of them"
            refuse_unread(self, ["max_long_partial_prefills"], why)
        elif not self.max_long_partial_prefills:
            why = " without max_long_partial_prefills; add it"
            refuse_unread(self, ["long_prefill_token_threshold"], why)

    @cached_property
    def _chunked(self) -> VllmV1:
        limit = self.long_prefill_token_threshold
        return replace(super()._chunked, long_prefill_token_threshold=limit)

    def _is_barred(self, batch: Batch, scheduler: Scheduler) -> Test:
        does_not_fit, most = super()._is_barred(batch, scheduler), self.max_long_partial_prefills
        if most is None:
            return does_not_fit
        above = max(1, long_from(self.long_prefill_token_threshold, scheduler))

        def is_too_long(sequence: SequenceState) -> bool:
            num_long = sum(chunk.num_tokens > above for chunk in batch.chunks)
            return num_long >= most and sequence.num_pending > above

        return lambda one: does_not_fit(one) or is_too_long(one)
