"""LMDeploy's two engines."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from sarathi_lab.config.checked import whole
from sarathi_lab.engine.policy import Policy
from sarathi_lab.engine.request import Batch, SequenceState
from sarathi_lab.engine.scheduler import Scheduler


@dataclass(frozen=True)
class LMDeploy(Policy):
    """TurboMind: all decodes, then up to `max_prefill_token_num` tokens of prompts on top; the last
    one may be cut.

    So an iteration has at most `max_prefill_token_num` plus the batch, the size of the engine's
    buffers (`max_forward_token_num`). Blocks are reserved for whole prompts. Its default is 8192.
    Deviation: the newest sequence is evicted; the engine also keeps blocks of idle sessions.
    """

    name = "lmdeploy"
    budget_field = "max_prefill_token_num"
    decodes_on_top = True
    max_prefill_token_num: int = whole(256, minimum=1, fix="use a number of tokens such as 256")
    reserve = "prompt"

    def check_budget(self, batch_size: int, max_model_len: int) -> None:
        """Any number of tokens is valid, as decodes don't count."""

    def fill(self, batch: Batch, scheduler: Scheduler) -> None:
        scheduler.sort_running()
        scheduler.add_decodes(batch)
        budget = batch.num_tokens + self.max_prefill_token_num
        scheduler.continue_prefills(batch, budget)
        scheduler.admit(batch, budget)


@dataclass
class _Steps:
    num_decodes: int = 0  # steps in a row while others wait
    was_piece: bool = False  # whether the last iteration was a piece of a long prompt


@dataclass(frozen=True)
class LMDeployPytorch(Policy):
    """LMDeploy's PyTorch engine: prompts or decodes, never both.

    While requests wait, decodes go on until `prefill_interval` steps have passed, or the waiting
    ones have `max_prefill_token_num` tokens together, or less than half of the batch is running;
    then whole prompts run, up to `max_prefill_token_num` tokens. A longer prompt is cut into pieces
    of that size, which run alone and by turns with decode steps; its end may share an iteration
    with others, and one such prompt is under way at a time.

    Read in `pytorch/engine/inputs_maker.py` (`do_prefill_default`) of 2026, whose interval is 16.
    Deviation: no shorter prompt overtakes a long one that is under way or next.
    """

    name = "lmdeploy_pytorch"
    budget_field = "max_prefill_token_num"
    max_prefill_token_num: int = 256
    prefill_interval: int = whole(16, minimum=0, fix="use a number of decode steps such as 16")
    reserve = "prompt"

    def fill(self, batch: Batch, scheduler: Scheduler) -> None:
        state = scheduler.state(_Steps)
        if self._is_turn_of_prompts(scheduler):
            self._add_prompts(batch, scheduler)
        if not batch.chunks:
            scheduler.add_decodes(batch)
            scheduler.swap_in(batch, self.max_prefill_token_num)
            if batch.chunks:
                state.num_decodes = state.num_decodes + 1 if scheduler.waiting else 0
                state.was_piece = False
                return
            self._add_prompts(batch, scheduler)
        if batch.chunks:
            state.num_decodes, state.was_piece = 0, not batch.num_emits

    def _is_turn_of_prompts(self, scheduler: Scheduler) -> bool:
        budget, state = self.max_prefill_token_num, scheduler.state(_Steps)
        if under_way := scheduler.idle_prefills:
            return under_way[0].num_pending <= budget or not state.was_piece
        if not scheduler.waiting or scheduler.swapped:
            return False
        if state.num_decodes >= self.prefill_interval:
            return True
        if len(scheduler.running) < scheduler.batch_size / 2:
            return True
        totals = accumulate(sequence.num_pending for sequence in scheduler.waiting)
        return any(total >= budget for total in totals)

    def _add_prompts(self, batch: Batch, scheduler: Scheduler) -> None:
        budget = self.max_prefill_token_num

        def size(sequence: SequenceState, left: int) -> int:
            """All of a prompt, or the first piece of one that is too long for any batch, alone."""
            is_alone = sequence.num_pending > budget and not batch.chunks
            return left if left == sequence.num_pending or is_alone else 0

        scheduler.continue_prefills(batch, budget, max_prefills=1)
        if not scheduler.swapped:
            scheduler.admit(batch, budget, size=size)
