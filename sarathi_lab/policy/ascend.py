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
            self._admit(batch, scheduler)
        if not batch.chunks:
            self._decode(batch, scheduler)

    def _admit(self, batch: Batch, scheduler: Scheduler) -> None:
        scheduler.admit(batch, pass_over=self._is_barred(batch, scheduler))

    def _decode(self, batch: Batch, scheduler: Scheduler) -> None:
        scheduler.add_decodes(batch)
        scheduler.swap_in(batch)

    def _is_barred(self, batch: Batch, scheduler: Scheduler) -> Test:
        budget = budget_for_whole(self.max_num_batched_tokens, scheduler.max_model_len)
        fits = fits_whole(scheduler)
        return lambda one: batch.num_tokens + one.num_pending > budget or not fits(one)


@dataclass
class _Filling:
    is_over: bool = False  # the phase without decodes has passed


@dataclass(frozen=True)
class Ascend(AscendV09):
    """AscendScheduler of vLLM-Ascend 0.11: as 0.9.1, with a limit on long prompts and a phase of
    prefills first.

    An iteration takes at most `max_long_partial_prefills` prompts longer than
    `long_prefill_token_threshold` tokens (0: 4 % of the model length); others overtake them. With
    `enable_pd_transfer` there are no decodes until no prompt waits (or none fits); then at most
    max(`max_num_seqs`, `decode_max_num_seqs`) sequences run. `max_num_seqs` (None: `batch`) limits
    running sequences otherwise, and iterations of that first phase, which would hang on a full
    cache there; here it ends. All are for whole prompts, except the threshold, which is vLLM v1's
    with `enable_chunked_prefill`.
    """

    name = "ascend"
    max_long_partial_prefills: int | None = whole(
        None, minimum=1, fix="use null for no limit (0 would never run a long prompt)"
    )
    long_prefill_token_threshold: int = threshold()
    max_num_seqs: int | None = whole(None, minimum=1, fix="use null for batch")
    enable_pd_transfer: bool = flag(False)
    decode_max_num_seqs: int = whole(0, minimum=0, fix="use 0 for max_num_seqs")

    def check(self, batch_size: int, max_model_len: int) -> None:
        check_threshold(self.long_prefill_token_threshold, max_model_len)
        if self.enable_chunked_prefill:
            of_whole = ("max_num_seqs", "enable_pd_transfer", "decode_max_num_seqs")
            why = " with enable_chunked_prefill=true; drop one of them"
            refuse_unread(self, ("max_long_partial_prefills", *of_whole), why)
        else:
            self._check_whole(batch_size)

    def _check_whole(self, batch_size: int) -> None:
        """Raise UserError for parameters without effect."""
        limited, decoding = self.max_num_seqs or batch_size, self.decode_max_num_seqs
        if not self.max_long_partial_prefills:
            why = " without max_long_partial_prefills; add it"
            refuse_unread(self, ["long_prefill_token_threshold"], why)
        if (most := max(limited, decoding)) > batch_size:
            raise UserError(
                f"max_num_seqs or decode_max_num_seqs={most} exceeds batch={batch_size}; raise "
                "batch"
            )
        if decoding and not (self.enable_pd_transfer and decoding > limited):
            raise UserError(
                f"decode_max_num_seqs={decoding} has no effect unless enable_pd_transfer=true and "
                f"max_num_seqs={limited} is below it; change one of them"
            )

    @cached_property
    def _chunked(self) -> VllmV1:
        limit = self.long_prefill_token_threshold
        return replace(super()._chunked, long_prefill_token_threshold=limit)

    def _admit(self, batch: Batch, scheduler: Scheduler) -> None:
        is_filling, most = self._is_filling(scheduler), self._most_running(scheduler)
        num_batches = scheduler.max_num_seqs // scheduler.batch_size

        def has_slot(_: SequenceState) -> bool:
            return len(batch) < most if is_filling else len(scheduler.running) < most * num_batches

        scheduler.admit(batch, pass_over=self._is_barred(batch, scheduler), may_enter=has_slot)
        if is_filling and not batch.chunks:
            scheduler.state(_Filling).is_over = True

    def _decode(self, batch: Batch, scheduler: Scheduler) -> None:
        most = self._most_running(scheduler)
        scheduler.add_decodes(batch, most)
        if len(batch) < most:
            scheduler.swap_in(batch)

    def _is_filling(self, scheduler: Scheduler) -> bool:
        """Whether it is the phase without decodes."""
        return self.enable_pd_transfer and not scheduler.state(_Filling).is_over

    def _most_running(self, scheduler: Scheduler) -> int:
        most = self.max_num_seqs or scheduler.batch_size
        return most if self._is_filling(scheduler) else max(most, self.decode_max_num_seqs)

    def _is_barred(self, batch: Batch, scheduler: Scheduler) -> Test:
        does_not_fit, most = super()._is_barred(batch, scheduler), self.max_long_partial_prefills
        if most is None:
            return does_not_fit
        above = max(1, long_from(self.long_prefill_token_threshold, scheduler))

        def is_barred(sequence: SequenceState) -> bool:
            if does_not_fit(sequence):
                return True
            if sequence.num_pending <= above:
                return False
            return sum(chunk.num_tokens > above for chunk in batch.chunks) >= most

        return is_barred
