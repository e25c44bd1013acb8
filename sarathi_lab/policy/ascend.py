"""The schedulers of vLLM-Ascend, for Huawei's NPUs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

from sarathi_lab.config.checked import flag, number, refuse_unread, whole
from sarathi_lab.config.errors import UserError, require_int
from sarathi_lab.engine.executor import Predictor
from sarathi_lab.engine.policy import Policy
from sarathi_lab.engine.queues import Test
from sarathi_lab.engine.request import Batch, Request, SequenceState
from sarathi_lab.engine.scheduler import Scheduler
from sarathi_lab.policy.profile_table import ProfileTable, make_profile_table, read_profile_table
from sarathi_lab.policy.vllm import (
    VllmV1,
    at_most,
    budget_for_whole,
    check_threshold,
    check_whole_prompts,
    fits_whole,
    long_from,
)

BUDGET_MULTIPLE = 256  # tokens: ModelArts asks for a multiple of it


@dataclass(frozen=True)
class AscendV09(Policy):
    """AscendScheduler of vLLM-Ascend 0.9.1: whole prompts first, else decodes; with chunks it is
    vLLM v1's.

    A waiting prompt that does not fit what is left of `max_num_batched_tokens` (None:
    max(max_model_len, 2048)) or of the cache beside the `watermark` is passed over, so those behind
    it may go first. `enable_chunked_prefill` (off by default there) turns all of that off; then the
    budget is, as ModelArts asks, a multiple of 256 tokens.

    Of the waiting prompts the next `queues.LOOKAHEAD` are looked at rather than all. It has no
    swapping; what is swapped out comes back beside the decodes, and before anyone is admitted.
    """

    name = "ascend_v0_9"
    budget_field = "max_num_batched_tokens"
    max_num_batched_tokens: int | None = None
    enable_chunked_prefill: bool = flag(False)
    watermark: float = 0.01
    reserve = "prompt"

    def reserved_tokens(self, request: Request, num_known: int, max_model_len: int) -> int:
        return 0 if self.enable_chunked_prefill else num_known

    def check_budget(self, batch_size: int, max_model_len: int) -> None:
        if not self.enable_chunked_prefill:
            check_whole_prompts(self, self.max_num_batched_tokens, max_model_len)
            return
        fix = f"use a multiple of {BUDGET_MULTIPLE}"
        budget = self.max_num_batched_tokens
        if require_int("max_num_batched_tokens", budget, BUDGET_MULTIPLE, fix) % BUDGET_MULTIPLE:
            raise UserError(
                f"max_num_batched_tokens={budget} is none that the NPU's kernels take; {fix}"
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
    is_over: bool = False  # whether the phase in which nobody decodes has passed


@dataclass(frozen=True)
class Ascend(AscendV09):
    """AscendScheduler of vLLM-Ascend 0.11: as 0.9.1, with a limit on long prompts and a phase of
    prefills first.

    An iteration takes at most `max_long_partial_prefills` prompts longer than
    `long_prefill_token_threshold` tokens (0: 4 % of the model length); others pass them. With
    `enable_pd_transfer` nobody decodes until nobody waits (or nobody fits any more); then at most
    max(`max_num_seqs`, `decode_max_num_seqs`) sequences run. `max_num_seqs` (None: `batch`) is the
    most that run otherwise, and in an iteration of that first phase. All are for whole prompts, but
    the threshold is vLLM v1's with `enable_chunked_prefill`.

    Its phase of prefills would hang on a full cache; here it ends.
    """

    name = "ascend"
    max_long_partial_prefills: int | None = whole(
        None, minimum=1, fix="use null for no limit (0 would never run a long prompt)"
    )
    long_prefill_token_threshold: int = 0
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
        """Raise UserError for a parameter that others leave without effect."""
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
        threshold = self.long_prefill_token_threshold
        return replace(super()._chunked, long_prefill_token_threshold=threshold)

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
        """Whether it is the phase in which nobody decodes."""
        return self.enable_pd_transfer and not scheduler.state(_Filling).is_over

    def _most_running(self, scheduler: Scheduler) -> int:
        most = self.max_num_seqs or scheduler.batch_size
        return most if self._is_filling(scheduler) else max(most, self.decode_max_num_seqs)

    def _is_barred(self, batch: Batch, scheduler: Scheduler) -> Test:
        does_not_fit, most = super()._is_barred(batch, scheduler), self.max_long_partial_prefills
        if most is None:
            return does_not_fit
        threshold = max(1, long_from(self.long_prefill_token_threshold, scheduler))

        def is_barred(sequence: SequenceState) -> bool:
            if does_not_fit(sequence):
                return True
            if sequence.num_pending <= threshold:
                return False
            return sum(chunk.num_tokens > threshold for chunk in batch.chunks) >= most

        return is_barred


@dataclass(frozen=True)
class AscendDynamic(Policy):
    """Ascend's dynamic batch (vLLM-Ascend 0.13 to 0.18): the budget whose iteration a table says to
    meet an SLO.

    Decodes first, then prompts in strict order of arrival. Beside decodes the budget is the largest
    `chunk_size` (tokens, decodes included) of `profile_table` whose cost is at most
    `slo_limits_for_dynamic_batch` (milliseconds), in the rows of the first mean context and number
    of decodes that the table has at or above the running ones. `max_num_batched_tokens` holds
    without decodes, where the table has no such rows, or where none of them meets the SLO.

    `profile_table` is a CSV file with the columns chunk_size, d_num, ctx_len and cost, such as that
    system has for Ascend 910B3, and as task=profile_table writes; None is made from the cost model
    of the device. The keys of the table are searched in ascending order, where there they are in
    Python's order of a set; and `max_num_batched_tokens` is never exceeded, where there a larger
    row of the table is taken.
    """

    name = "ascend_dynamic"
    budget_field = "max_num_batched_tokens"
    max_num_batched_tokens: int = 2048
    slo_limits_for_dynamic_batch: float = number(
        50.0,
        above=0,
        fix="use the milliseconds that an iteration may take, or policy=vllm_v1 for no limit",
    )
    profile_table: str | ProfileTable | None = None
    long_prefill_token_threshold: int = 0
    watermark: float = 0.0
    reserve = "chunk"

    def check(self, batch_size: int, max_model_len: int) -> None:
        check_threshold(self.long_prefill_token_threshold, max_model_len)
        if self.profile_table is None:
            raise UserError(_NO_TABLE)
        _ = self._table  # read it before anything runs

    def on_device(
        self, predictor: Callable[[], Predictor | None], batch_size: int, max_model_len: int
    ) -> AscendDynamic:
        if self.profile_table is not None:
            return self
        iteration_time = predictor()
        if iteration_time is None:
            raise UserError(_NO_TABLE)
        table = make_profile_table(iteration_time, batch_size, max_model_len)
        return replace(self, profile_table=table)

    @property
    def _table(self) -> ProfileTable:
        table = self.profile_table
        return table if isinstance(table, ProfileTable) else read_profile_table(str(table))

    def fill(self, batch: Batch, scheduler: Scheduler) -> None:
        budget = self._budget(scheduler)
        size = at_most(self.long_prefill_token_threshold or self.max_num_batched_tokens)
        scheduler.add_decodes(batch, budget)
        scheduler.continue_prefills(batch, budget, size=size)
        if not scheduler.has_preempted:
            scheduler.admit(batch, budget, size=size, may_enter=fits_whole(scheduler))

    def _budget(self, scheduler: Scheduler) -> int:
        most = self.max_num_batched_tokens
        contexts = [sequence.num_known for sequence in scheduler.running if sequence.is_decoding]
        if not contexts:
            return most
        mean = sum(contexts) / len(contexts)
        refined = self._table.budget(mean, len(contexts), self.slo_limits_for_dynamic_batch)
        return most if refined is None else min(refined, most)


_NO_TABLE = (
    "policy=ascend_dynamic needs profile_table here, as a device that is measured has no cost "
    "model; write one by `python -m sarathi_lab.run task=profile_table`, with hardware= as "
    "task=calibrate measured it, and name the file"
)
