"""FastDeploy (PaddlePaddle), whose documents name SARATHI (arXiv 2308.16369) as its source."""

from __future__ import annotations

from dataclasses import dataclass

from sarathi_lab.config.checked import whole
from sarathi_lab.engine.policy import Policy
from sarathi_lab.engine.request import Batch, SequenceState
from sarathi_lab.engine.scheduler import Scheduler
from sarathi_lab.policy.vllm import check_partial_prefills, check_threshold, long_from


@dataclass(frozen=True)
class FastDeploy(Policy):
    """FastDeploy's V1 scheduler: decodes, then prompts within `max_num_batched_tokens`.

    Running prompts go first, then waiting ones, except after a preemption. At most
    `max_num_partial_prefills` prompts are in an iteration, of them at most
    `max_long_partial_prefills` longer than `long_prefill_token_threshold` tokens (0: 4 % of the
    model length); a further one stops admission. A decode takes `static_decode_blocks` blocks at
    once when at most `prealloc_dec_block_slot_num_threshold` of its slots are left, and a prompt
    enters if blocks for it and as many more are free; never more than the request needs, which is
    unknown to FastDeploy.

    Names and defaults are those of FastDeploy 2 (with cache.block_size=64). The limits on partial
    prefills act before its scheduler there. The reserve of newer versions after a preemption is not
    modelled.
    """

    name = "fastdeploy"
    budget_field = "max_num_batched_tokens"
    max_num_batched_tokens: int = 8192
    max_num_partial_prefills: int = 1
    max_long_partial_prefills: int = 1
    long_prefill_token_threshold: int = 0
    static_decode_blocks: int = whole(2, minimum=0, fix="use 2, or 0 to take blocks one by one")
    prealloc_dec_block_slot_num_threshold: int = whole(
        12, minimum=0, fix="use the free slots at which a decode takes more, such as 12"
    )
    reserve = "chunk"

    def check(self, batch_size: int, max_model_len: int) -> None:
        check_partial_prefills(self.max_num_partial_prefills, self.max_long_partial_prefills)
        check_threshold(self.long_prefill_token_threshold, max_model_len)

    def fill(self, batch: Batch, scheduler: Scheduler) -> None:
        self._extend_decodes(scheduler)
        for_prompts = self.max_num_batched_tokens - len(scheduler.idle_decodes)

        def size(sequence: SequenceState, left: int) -> int:
            if sequence.is_decoding:
                return left
            return min(left, for_prompts - batch.num_prefill_tokens)

        scheduler.share(batch, scheduler.running.idle, self.max_num_batched_tokens, size)
        if not scheduler.has_preempted:
            self._admit(batch, scheduler)

    def _extend_decodes(self, scheduler: Scheduler) -> None:
        for sequence in scheduler.idle_decodes:
            slots = len(sequence.block_ids) * scheduler.blocks.block_size
            num_free = slots - sequence.num_known
            if sequence.is_running and num_free <= self.prealloc_dec_block_slot_num_threshold:
                scheduler.make_room(sequence, self._with_decode_blocks(sequence, slots, scheduler))

    def _admit(self, batch: Batch, scheduler: Scheduler) -> None:
        threshold = long_from(self.long_prefill_token_threshold, scheduler)

        def is_long(sequence: SequenceState) -> bool:
            return sequence.request.prompt_len > threshold

        def may_enter(sequence: SequenceState) -> bool:
            num_long = sum(is_long(chunk.sequence) for chunk in batch.chunks if not chunk.is_decode)
            if is_long(sequence) and num_long >= self.max_long_partial_prefills:
                return False
            wanted = self._with_decode_blocks(sequence, sequence.num_known, scheduler)
            return scheduler.blocks.can_hold(wanted)

        most = (self.max_num_batched_tokens, self.max_num_partial_prefills)
        scheduler.admit(batch, *most, may_enter=may_enter)

    def _with_decode_blocks(
        self, sequence: SequenceState, num_tokens: int, scheduler: Scheduler
    ) -> int:
        """`num_tokens` and a decode's blocks, but no more than the request needs."""
        num_tokens += self.static_decode_blocks * scheduler.blocks.block_size
        return min(num_tokens, sequence.request.total_len)
