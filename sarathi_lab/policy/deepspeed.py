"""DeepSpeed-FastGen (arXiv 2401.08671), the scheduler of DeepSpeed-MII."""

from __future__ import annotations

from dataclasses import dataclass

from sarathi_lab.engine.policy import Policy
from sarathi_lab.engine.request import Batch, SequenceState
from sarathi_lab.engine.scheduler import Scheduler


@dataclass(frozen=True)
class SplitFuse(Policy):
    """Dynamic SplitFuse: all decodes, then prompts in their order, the last one cut at
    `max_ragged_batch_size` tokens.

    Blocks are taken chunk by chunk, but a prompt continues only if the cache has room for all the
    rest; else later ones wait, too. A decode without a block waits instead of evicting. If nothing
    can run, the newest running sequence is flushed, and recomputed with its generated tokens.

    The default is that of DeepSpeed's `DSStateManagerConfig`, whose `max_ragged_sequence_count` is
    `batch` here. MII counts a prompt that lacks one token as a decode; its code of 2024 flushes
    every request in that case.
    """

    name = "splitfuse"
    budget_field = "max_ragged_batch_size"
    max_ragged_batch_size: int = 768
    reserve = "chunk"

    def fill(self, batch: Batch, scheduler: Scheduler) -> None:
        self._schedule(batch, scheduler)
        running = scheduler.running
        while not batch.chunks and running and not any(one.in_flight for one in running):
            scheduler.preempt(max(running, key=running.rank))
            self._schedule(batch, scheduler)

    def _schedule(self, batch: Batch, scheduler: Scheduler) -> None:
        budget = self.max_ragged_batch_size

        def fits(sequence: SequenceState) -> bool:
            missing = scheduler.blocks.blocks_for(sequence.num_known) - len(sequence.block_ids)
            return missing <= scheduler.blocks.num_free

        for sequence in scheduler.idle_decodes[: scheduler.batch_size]:
            scheduler.take(batch, sequence, 1, evict=False)
        for sequence in scheduler.idle_prefills[: scheduler.batch_size - len(batch)]:
            num_tokens = min(sequence.num_pending, budget - batch.num_tokens)
            if not fits(sequence) or not scheduler.take(batch, sequence, num_tokens, evict=False):
                return
        scheduler.admit(batch, budget, may_enter=fits)
