"""TensorRT-LLM's scheduler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from sarathi_lab.config.checked import one_of, require_order, whole
from sarathi_lab.engine.policy import Policy
from sarathi_lab.engine.request import Batch, Request
from sarathi_lab.engine.scheduler import Scheduler

ContextChunking = Literal["FIRST_COME_FIRST_SERVED", "EQUAL_PROGRESS", "FORCE_CHUNK"]
CapacityScheduler = Literal["GUARANTEED_NO_EVICT", "MAX_UTILIZATION", "STATIC_BATCH"]


@dataclass(frozen=True)
class TensorRTLLM(Policy):
    """All decodes, then every prompt that the cache has room for shares the rest of
    `max_num_tokens`.

    `context_chunking_policy` applies where not all fit whole. FIRST_COME_FIRST_SERVED gives each
    the rest, rounded down to `chunk_unit_size` unless it ends the prompt. EQUAL_PROGRESS gives each
    one more unit in turn. FORCE_CHUNK gives each one unit, or its end, even where more would fit.

    `capacity_scheduler_policy` decides about room: GUARANTEED_NO_EVICT reserves a request's whole
    output, so none is ever paused; MAX_UTILIZATION reserves only the prompt and pauses the newest
    when the cache is short; STATIC_BATCH is the former, but begins nothing while anything runs.

    Read in `microBatchScheduler.cpp` and `capacityScheduler.cpp`; `max_num_tokens` is 8192 by
    default there. FORCE_CHUNK is known from its description only. Deviations: STATIC_BATCH
    continues prompts that it has begun; a waiting prompt without a token keeps no room beyond the
    iteration; `dynamicBatchTuner.cpp`, which changes no batch up to 128, is not modelled.
    """

    name = "trtllm"
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
        pauses = self.capacity_scheduler_policy == "MAX_UTILIZATION"
        return num_known if pauses else request.total_len

    def check(self, batch_size: int, max_model_len: int) -> None:
        why = ", so no prompt could be cut; lower it"
        require_order(self, "chunk_unit_size", "max_num_tokens", why)

    def fill(self, batch: Batch, scheduler: Scheduler) -> None:
        batch_size, budget = scheduler.batch_size, self.max_num_tokens
        is_static = self.capacity_scheduler_policy == "STATIC_BATCH"
        may_begin = not (is_static and scheduler.has_idle_running)
        scheduler.add_decodes(batch, min(batch_size, budget))
        scheduler.swap_in(batch, budget)
        prompts = scheduler.idle_prefills[: max(0, batch_size - len(batch))]
        if may_begin and not scheduler.swapped:
            prompts += scheduler.with_room(batch_size - len(batch) - len(prompts))
        sizes = self._sizes([one.num_pending for one in prompts], budget - batch.num_tokens)
        for sequence, num_tokens in zip(prompts, sizes, strict=True):
            if sequence.is_running:
                scheduler.take(batch, sequence, num_tokens)
            elif num_tokens:
                scheduler.enter(batch, sequence, num_tokens)

    def _sizes(self, pending: list[int], left: int) -> list[int]:
        """Share `left` tokens between prompts that lack `pending`."""
        unit = self.chunk_unit_size
        if self.context_chunking_policy == "FORCE_CHUNK":
            pending = [min(unit, wanted) for wanted in pending]
        if sum(pending) <= left:
            return pending
        if self.context_chunking_policy == "EQUAL_PROGRESS":
            return _by_turns(pending, left, unit)
        sizes = []
        for wanted in pending:
            size = wanted if wanted <= left else left // unit * unit
            sizes.append(size)
            left -= size
        return sizes


def _by_turns(pending: list[int], left: int, unit: int) -> list[int]:
    sizes = [0] * len(pending)
    has_progress = True
    while has_progress:
        has_progress = False
        for i, wanted in enumerate(pending):
            step = min(unit, wanted - sizes[i])
            if 0 < step <= left:
                sizes[i] += step
                left -= step
                has_progress = True
    return sizes
