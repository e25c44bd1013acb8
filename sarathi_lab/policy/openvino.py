"""OpenVINO GenAI's continuous batching."""

from __future__ import annotations

from dataclasses import dataclass

from sarathi_lab.config.checked import flag
from sarathi_lab.engine.policy import Policy
from sarathi_lab.engine.request import Batch, Request, SequenceState
from sarathi_lab.engine.scheduler import Scheduler


@dataclass(frozen=True)
class OpenVINO(Policy):
    """With `dynamic_split_fuse`, decodes and then prompts in order, within
    `max_num_batched_tokens`.

    A prompt takes no more tokens than the free cache has slots, so prompts evict no sequence.
    Without `dynamic_split_fuse`, whole prompts go before decodes, never in one batch, and none may
    exceed the budget.

    Read in `continuous_batching/scheduler.hpp` of 2026; 256 tokens is the system's default.
    Deviations: an evicted sequence loses all of its cache, not only the needed blocks; where only
    prompts run and none has a slot, the newest is evicted, while the original drops the requests.
    """

    name = "openvino"
    budget_field = "max_num_batched_tokens"
    max_num_batched_tokens: int = 256
    dynamic_split_fuse: bool = flag(True)

    def reserved_tokens(self, request: Request, num_known: int, max_model_len: int) -> int:
        return 0 if self.dynamic_split_fuse else num_known

    def check(self, batch_size: int, max_model_len: int) -> None:
        if not self.dynamic_split_fuse:
            why = "without dynamic_split_fuse a longer prompt is an error; raise it, or use "
            why += "dynamic_split_fuse=true"
            self.check_longest("max_num_batched_tokens", max_model_len, why)

    def fill(self, batch: Batch, scheduler: Scheduler) -> None:
        budget = self.max_num_batched_tokens
        if not self.dynamic_split_fuse:
            if not scheduler.swapped:
                scheduler.admit(batch, budget, whole=True)
            if not batch.chunks:
                scheduler.add_decodes(batch)
                scheduler.swap_in(batch, budget)
            return

        def size(sequence: SequenceState, left: int) -> int:
            return min(left, scheduler.blocks.num_slots(sequence))

        scheduler.add_decodes(batch)
        scheduler.continue_prefills(batch, budget, size=size)
        scheduler.admit(batch, budget, size=size)
        if not batch.chunks:
            scheduler.continue_prefills(batch, budget)
