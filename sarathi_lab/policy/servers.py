"""Servers of one scheduler: DeepSpeed, FastDeploy, OpenVINO, llama.cpp and TensorRT-LLM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from sarathi_lab.config.checked import one_of, require_order, whole
from sarathi_lab.engine.policy import Policy
from sarathi_lab.engine.request import Batch, Request, SequenceState
from sarathi_lab.engine.scheduler import Scheduler
from sarathi_lab.policy import systems
from sarathi_lab.policy.vllm import (
    fits_whole,
    partial_prefills,
)

ContextChunking = Literal["FIRST_COME_FIRST_SERVED", "EQUAL_PROGRESS", "FORCE_CHUNK"]
CapacityScheduler = Literal["GUARANTEED_NO_EVICT", "MAX_UTILIZATION", "STATIC_BATCH"]


@dataclass(frozen=True)
class SplitFuse(Policy):
    """Dynamic SplitFuse: all decodes, then prompts in their order, the last one cut at
    `max_ragged_batch_size` tokens.

    A prompt continues only if the cache has room for all the rest; else later ones wait, too. A
    decode without a block waits instead of evicting. If nothing can run, the newest running
    sequence is flushed, and recomputed with its generated tokens.

    The default is that of DeepSpeed's `DSStateManagerConfig`, whose `max_ragged_sequence_count` is
    `batch` here. MII counts a prompt that lacks one token as a decode, and flushes every request.
    """

    name = "splitfuse"
    system = systems.DEEPSPEED
    budget_field = "max_ragged_batch_size"
    max_ragged_batch_size: int = 768
    reserve = "chunk"

    def fill(self, batch: Batch, scheduler: Scheduler) -> None:
        self._schedule(batch, scheduler)
        running = scheduler.running
        while running and not batch.chunks:
            # What is in flight may free blocks when it comes back.
            if any(sequence.in_flight for sequence in running):
                return
            newest = max(running, key=running.rank)
            scheduler.preempt(newest)
            self._schedule(batch, scheduler)

    def _schedule(self, batch: Batch, scheduler: Scheduler) -> None:
        budget = self.max_ragged_batch_size
        fits = fits_whole(scheduler)
        grow = scheduler.blocks.grow  # evicting none
        for sequence in scheduler.idle_decodes[: scheduler.batch_size]:
            scheduler.take(batch, sequence, 1, grow)
        for sequence in scheduler.idle_prefills[: scheduler.batch_size - len(batch)]:
            num_tokens = min(sequence.num_pending, budget - batch.num_tokens)
            if not fits(sequence) or not scheduler.take(batch, sequence, num_tokens, grow):
                return
        scheduler.admit(batch, budget, may_enter=fits)


@dataclass(frozen=True)
class FastDeploy(Policy):
    """FastDeploy's V1 scheduler: decodes, then prompts within `max_num_batched_tokens`.

    Running prompts go first, then waiting ones, except after a preemption; at most
    `max_num_partial_prefills` prompts are in an iteration. A decode takes `static_decode_blocks`
    blocks at once when at most `prealloc_dec_block_slot_num_threshold` of its slots are left, and a
    prompt enters if blocks for it and as many more are free; never more than the request needs,
    which is unknown to FastDeploy.

    Names and defaults are those of FastDeploy 2 (with cache.block_size=64). The limit on partial
    prefills acts before its scheduler there; its limit on long ones among several
    (`max_long_partial_prefills`) and the reserve of newer versions after a preemption are not
    modelled.
    """

    name = "fastdeploy"
    system = systems.FASTDEPLOY
    budget_field = "max_num_batched_tokens"
    max_num_batched_tokens: int = 8192
    max_num_partial_prefills: int = partial_prefills()
    static_decode_blocks: int = whole(2, minimum=0, fix="use 2, or 0 to take blocks one by one")
    prealloc_dec_block_slot_num_threshold: int = whole(
        12, minimum=0, fix="use the free slots at which a decode takes more, such as 12"
    )
    reserve = "chunk"

    def fill(self, batch: Batch, scheduler: Scheduler) -> None:
        self._extend_decodes(scheduler)
        for_prompts = self.max_num_batched_tokens - len(scheduler.idle_decodes)

        def size(sequence: SequenceState, budget_left: int) -> int:
            if sequence.is_decoding:
                return budget_left
            return min(budget_left, for_prompts - batch.num_prefill_tokens)

        def fits(sequence: SequenceState) -> bool:
            wanted = self._with_decode_blocks(sequence, sequence.num_known, scheduler)
            return scheduler.blocks.can_hold(wanted)

        scheduler.share(batch, scheduler.running.idle, self.max_num_batched_tokens, size)
        if not scheduler.has_preempted:
            limit = self.max_num_partial_prefills
            scheduler.admit(batch, self.max_num_batched_tokens, limit, may_enter=fits)

    def _extend_decodes(self, scheduler: Scheduler) -> None:
        blocks = scheduler.blocks
        for sequence in scheduler.idle_decodes:
            if not sequence.is_running:
                continue  # evicted for an earlier one
            slots = blocks.tokens_of(len(sequence.block_ids))
            num_free = slots - sequence.num_known
            if num_free <= self.prealloc_dec_block_slot_num_threshold:
                wanted = self._with_decode_blocks(sequence, slots, scheduler)
                scheduler.make_room(sequence, wanted)

    def _with_decode_blocks(
        self, sequence: SequenceState, num_tokens: int, scheduler: Scheduler
    ) -> int:
        """`num_tokens` and a decode's blocks, but no more than the request needs."""
        num_tokens += self.static_decode_blocks * scheduler.blocks.block_size
        return min(num_tokens, sequence.request.total_len)


@dataclass(frozen=True)
class OpenVINO(Policy):
    """OpenVINO GenAI with `dynamic_split_fuse`: decodes and then prompts in order, within
    `max_num_batched_tokens`.

    A prompt takes no more tokens than the free cache has slots, so prompts evict no sequence.
    Without `dynamic_split_fuse` it is policy=prefill_first with this budget.

    Read in `continuous_batching/scheduler.hpp` of 2026; 256 tokens is the system's default.
    Deviations: an evicted sequence loses all of its cache, not only the needed blocks; where only
    prompts run and none has a slot, the newest is evicted, while the original drops the requests.
    """

    name = "openvino"
    system = systems.OPENVINO
    budget_field = "max_num_batched_tokens"
    max_num_batched_tokens: int = 256
    reserve = "chunk"

    def fill(self, batch: Batch, scheduler: Scheduler) -> None:
        def size(sequence: SequenceState, budget_left: int) -> int:
            return min(budget_left, scheduler.blocks.num_slots(sequence))

        budget = self.max_num_batched_tokens
        scheduler.add_decodes(batch)
        scheduler.continue_prefills(batch, budget, size=size)
        scheduler.admit(batch, budget, size=size)
        # Prompts alone, none of which has a slot: without the limit the newest is evicted.
        if not batch.chunks:
            scheduler.continue_prefills(batch, budget)


@dataclass
class _Round:
    num_left: int = 0  # tokens of prompts


@dataclass(frozen=True)
class LlamaCpp(Policy):
    """Rounds of `n_batch` tokens: all decodes, then prompts in order, computed in iterations of
    `n_ubatch` tokens.

    A round is one `llama_decode`, fixed when it begins. Decodes are in its first piece and have
    their next token only in the next round, so they wait for up to `n_batch` tokens of prompts. The
    lab's batch is `--parallel`: each slot has cache for the longest request. Defaults are those of
    the server of 2026. Deviation: tokens are emitted at the end of their piece, not of their round,
    so first tokens are early; the time between tokens is the same.
    """

    name = "llama_cpp"
    system = systems.LLAMA_CPP
    budget_field = "n_ubatch"
    n_ubatch: int = 512
    n_batch: int = whole(2048, minimum=1, fix="use a number of tokens such as 2048")
    reserve = "max_model_len"

    def check(self, batch_size: int, max_model_len: int) -> None:
        require_order(self, "n_ubatch", "n_batch", ", of which it is a piece; raise n_batch")

    def fill(self, batch: Batch, scheduler: Scheduler) -> None:
        state = scheduler.state(_Round)
        if state.num_left:
            self._add_piece(batch, scheduler)
        if not batch.chunks:
            scheduler.add_decodes(batch)
            entering = scheduler.upcoming(scheduler.max_num_seqs - len(scheduler.running))
            prompts = [*scheduler.idle_prefills, *entering]
            wanted = sum(sequence.num_pending for sequence in prompts)
            # The round is fixed now: prompts that come meanwhile wait for the next.
            state.num_left = min(self.n_batch - batch.num_tokens, wanted)
            self._add_piece(batch, scheduler)

    def _add_piece(self, batch: Batch, scheduler: Scheduler) -> None:
        """Fill `batch` up to `n_ubatch` tokens with what is left of the round's prompts."""
        state = scheduler.state(_Round)
        budget = min(self.n_ubatch, batch.num_tokens + state.num_left)
        scheduler.continue_prefills(batch, budget)
        scheduler.admit(batch, budget)
        is_cut = batch.num_tokens == budget
        if is_cut:
            state.num_left -= batch.num_prefill_tokens
        else:
            state.num_left = 0


@dataclass(frozen=True)
class TensorRTLLM(Policy):
    """All decodes, then every prompt that the cache has room for shares the rest of
    `max_num_tokens`.

    Where not all fit whole, FIRST_COME_FIRST_SERVED gives each the rest, rounded down to
    `chunk_unit_size` unless it ends the prompt, EQUAL_PROGRESS each one more unit in turn;
    FORCE_CHUNK gives each one unit, or its end, even where more would fit. GUARANTEED_NO_EVICT
    reserves a request's whole output, so none is ever paused; MAX_UTILIZATION reserves only the
    prompt and pauses the newest when the cache is short; STATIC_BATCH is the former, but begins
    nothing while anything runs.

    Read in `microBatchScheduler.cpp` and `capacityScheduler.cpp`, FORCE_CHUNK in its description
    only; `max_num_tokens` is 8192 by default there. Deviations: STATIC_BATCH continues prompts that
    it has begun; a waiting prompt without a token keeps no room beyond the iteration;
    `dynamicBatchTuner.cpp`, which changes no batch up to 128, is not modelled.
    """

    name = "trtllm"
    system = systems.TENSORRT_LLM
    budget_field = "max_num_tokens"
    max_num_tokens: int = 256
    context_chunking_policy: ContextChunking = one_of(
        "FIRST_COME_FIRST_SERVED", valid=get_args(ContextChunking)
    )
    chunk_unit_size: int = whole(32, minimum=1, fix="use a number of tokens such as 32")
    capacity_scheduler_policy: CapacityScheduler = one_of(
        "GUARANTEED_NO_EVICT", valid=get_args(CapacityScheduler)
    )

    def reserved_tokens(self, request: Request, num_known: int, max_model_len: int) -> int:
        # Requests that may be paused reserve no cache for their answers.
        pauses = self.capacity_scheduler_policy == "MAX_UTILIZATION"
        return num_known if pauses else request.total_len

    def check(self, batch_size: int, max_model_len: int) -> None:
        reason = ", so no prompt could be cut; lower it"
        require_order(self, "chunk_unit_size", "max_num_tokens", reason)

    def fill(self, batch: Batch, scheduler: Scheduler) -> None:
        batch_size = scheduler.batch_size
        budget = self.max_num_tokens
        # A static batch is served to its end before another begins.
        is_static = self.capacity_scheduler_policy == "STATIC_BATCH"
        may_begin = not (is_static and scheduler.running.idle)
        scheduler.add_decodes(batch, min(batch_size, budget))
        prompts = scheduler.idle_prefills[: max(0, batch_size - len(batch))]
        if may_begin:
            prompts += scheduler.with_room(batch_size - len(batch) - len(prompts))
        pending = [sequence.num_pending for sequence in prompts]
        sizes = self._sizes(pending, budget - batch.num_tokens)
        for sequence, num_tokens in zip(prompts, sizes, strict=True):
            if sequence.is_running:
                scheduler.take(batch, sequence, num_tokens)
            elif num_tokens:
                scheduler.enter(batch, sequence, num_tokens)

    def _sizes(self, pending: list[int], budget_left: int) -> list[int]:
        """Share `budget_left` tokens between prompts that lack `pending`."""
        unit = self.chunk_unit_size
        if self.context_chunking_policy == "FORCE_CHUNK":
            pending = [min(unit, wanted) for wanted in pending]
        if sum(pending) <= budget_left:
            return pending
        if self.context_chunking_policy == "EQUAL_PROGRESS":
            return _by_turns(pending, budget_left, unit)
        sizes = []
        for wanted in pending:
            size = wanted
            if wanted > budget_left:  # a cut chunk has whole units
                size = budget_left // unit * unit
            sizes.append(size)
            budget_left -= size
        return sizes


def _by_turns(pending: list[int], budget_left: int, unit: int) -> list[int]:
    sizes = [0] * len(pending)
    has_progress = True
    while has_progress:
        has_progress = False
        for i, wanted in enumerate(pending):
            step = min(unit, wanted - sizes[i])
            if 0 < step <= budget_left:
                sizes[i] += step
                budget_left -= step
                has_progress = True
    return sizes
