"""SGLang's scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sarathi_lab.config.checked import flag, number, share, whole
from sarathi_lab.config.errors import UserError
from sarathi_lab.engine.policy import Policy
from sarathi_lab.engine.request import Batch, SequenceState
from sarathi_lab.engine.scheduler import Scheduler
from sarathi_lab.policy import systems


@dataclass
class _Estimate:
    new_token_ratio: float = 1.0  # share of their output that decodes are expected to take


@dataclass(frozen=True)
class SGLang(Policy):
    """Prompts first, in chunks and without decodes, or with them by `enable_mixed_chunk`.

    A batch of prompts is the partial one, then waiting ones until `chunked_prefill_size` tokens
    (rounded up to `page_size`, less the decodes in a mixed batch) or `max_prefill_tokens` are
    spent. The last prompt is cut to whole pages, and no other begins before it is done.

    A prompt enters if it, its whole output and a page fit beside the growth of running requests,
    the new-token ratio times their output left (at most `clip_max_new_tokens` each). The ratio
    starts at `init_new_token_ratio` x `schedule_conservativeness` (1 at most) and falls to
    `min_new_token_ratio_factor` of that in `new_token_ratio_decay_steps` decode iterations. When
    decodes do not fit, those with the least output are retracted until `retract_decode_steps` more
    tokens of each fit, and the ratio is estimated from the others.

    Read in `schedule_policy.py`, `schedule_batch.py` and `environ.py` of mid-2026, whose
    `chunked_prefill_size` depends on GPU memory (2048 to 16384). Deviations: retracted requests
    return first, not last; nothing is estimated while nothing runs, so that a request as large as
    the cache starts; admission is tried in every iteration, without the flag for a full batch.
    """

    name = "sglang"
    system = systems.SGLANG
    budget_field = "chunked_prefill_size"
    chunked_prefill_size: int = 256
    max_prefill_tokens: int = whole(16384, minimum=1, fix="use a number of tokens such as 16384")
    page_size: int = whole(1, minimum=1, fix="use a number of tokens such as 1 or 16")
    enable_mixed_chunk: bool = flag(False)
    schedule_conservativeness: float = number(
        1.0, minimum=0, fix="use a number such as 1.0; more admits fewer at a time"
    )
    init_new_token_ratio: float = share(0.7, fix="use a share from 0 to 1")
    min_new_token_ratio_factor: float = share(0.14, fix="use a share from 0 to 1")
    new_token_ratio_decay_steps: int = whole(600, minimum=1, fix="use a number such as 600")
    retract_decode_steps: int = whole(20, minimum=0, fix="use a number of tokens such as 20")
    clip_max_new_tokens: int = whole(4096, minimum=1, fix="use a number of tokens such as 4096")
    # Tokens of a pool for layers with a window, for each token of the others.
    swa_full_tokens_ratio: float = number(0.8, above=0, fix="use a share above 0 up to 1")
    reserve = "chunk"

    def check(self, batch_size: int, max_model_len: int) -> None:
        if self.swa_full_tokens_ratio > 1:
            raise UserError(
                f"swa_full_tokens_ratio={self.swa_full_tokens_ratio} exceeds 1; layers with a "
                "window need no more tokens than the others: use a share above 0 up to 1"
            )
        if self.chunked_prefill_size % self.page_size:
            raise UserError(
                f"chunked_prefill_size={self.chunked_prefill_size} is not a multiple of page_size="
                f"{self.page_size}; prompts are cut to whole pages, so change one of them"
            )

    @property
    def window_pool(self) -> float | None:
        return self.swa_full_tokens_ratio

    @property
    def smallest_budget(self) -> int | None:
        """None without mixed chunks: decodes run by themselves there, and no chunk bounds them."""
        return self.budget if self.enable_mixed_chunk else None

    def check_budget(self, batch_size: int, max_model_len: int) -> None:
        """Without mixed chunks any budget has room for prompts, as no decode takes of it."""
        if self.enable_mixed_chunk:
            super().check_budget(batch_size, max_model_len)
        else:
            super().check_budget(1, max_model_len)

    def fill(self, batch: Batch, scheduler: Scheduler) -> None:
        # An idle server forgets what it has learned of the lengths of answers.
        if not scheduler.running:
            scheduler.state(_Estimate).new_token_ratio = self._initial_ratio
        budget = self.chunked_prefill_size
        decodes, prompts = scheduler.running.by_phase(only_idle=True)
        if self.enable_mixed_chunk:  # with decodes
            budget -= min(len(decodes), scheduler.batch_size)
        if prompts:
            scheduler.continue_prefills(batch, budget)
        self._admit(batch, scheduler, budget)
        if batch.chunks and not self.enable_mixed_chunk:
            return
        if not batch.chunks:
            if prompts:  # for which room was made
                decodes = scheduler.idle_decodes
            self._retract(scheduler, decodes)
        scheduler.add_decodes(batch)

    def _admit(self, batch: Batch, scheduler: Scheduler, budget: int) -> None:
        blocks = scheduler.blocks
        waiting = scheduler.waiting
        promised: float = 0
        if waiting:
            promised = self._promised(batch, scheduler)
        used = sum(self._in_pages(chunk.num_tokens) for chunk in batch.chunks)
        while waiting and used < min(budget, self.max_prefill_tokens):
            sequence = waiting[0]
            pending = sequence.num_pending
            num_tokens = pending
            wanted = pending + self._output_left(sequence)
            wanted += self.page_size + blocks.extra_tokens(wanted)
            if scheduler.running and wanted >= blocks.num_free * blocks.block_size - promised:
                return
            begun = (chunk.sequence for chunk in batch.chunks)
            if scheduler.running and not blocks.window_pool.has_room_for_window(begun):
                return
            if self._in_pages(pending) > budget - used:
                whole_pages = (budget - used) // self.page_size
                num_tokens = whole_pages * self.page_size
            if not num_tokens or not scheduler.enter(batch, sequence, num_tokens):
                return
            used += self._in_pages(num_tokens)
            promised += self.page_size
            if num_tokens == pending:
                promised += self._output_left(sequence)

    def _promised(self, batch: Batch, scheduler: Scheduler) -> float:
        """Tokens of cache that running requests, and `batch`, are expected to take in addition."""
        ratio = scheduler.state(_Estimate).new_token_ratio
        decodes, _ = scheduler.running.by_phase()
        of_decodes = self._outputs_left(decodes)
        # What enters now is expected to take its whole output: the ratio is of those that decode.
        begun = [chunk.sequence for chunk in batch.chunks if chunk.emits_token]
        of_begun = self._outputs_left(begun)
        of_pages = self.page_size * len(batch)
        return of_decodes * ratio + of_begun + of_pages

    def _retract(self, scheduler: Scheduler, decodes: list[SequenceState]) -> None:
        """While all `decodes` fit, let the ratio decay; else retract the least advanced."""
        if not decodes:
            return
        blocks = scheduler.blocks
        state = scheduler.state(_Estimate)
        if blocks.has_room_for_all(len(decodes)) or blocks.have_room(decodes):
            lowest = self._initial_ratio * self.min_new_token_ratio_factor
            step = (self._initial_ratio - lowest) / self.new_token_ratio_decay_steps
            state.new_token_ratio = max(lowest, state.new_token_ratio - step)
            return
        decodes.sort(key=_advanced_first)
        steps = self.retract_decode_steps
        while len(decodes) > 1:
            scheduler.preempt(decodes.pop())
            has_steps = blocks.num_free * blocks.block_size >= len(decodes) * steps
            if has_steps and blocks.have_room_in_windows(decodes, steps):
                break
        decoded = len(decodes) * steps
        decoded += sum(len(sequence.output_token_ids) for sequence in decodes)
        wanted = sum(sequence.request.output_len for sequence in decodes)
        state.new_token_ratio = min(1.0, decoded / wanted)

    @property
    def _initial_ratio(self) -> float:
        return min(1.0, self.init_new_token_ratio * self.schedule_conservativeness)

    def _in_pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size) * self.page_size

    def _output_left(self, sequence: SequenceState) -> int:
        num_left = sequence.request.output_len - len(sequence.output_token_ids)
        return min(self.clip_max_new_tokens, num_left)

    def _outputs_left(self, sequences: Sequence[SequenceState]) -> int:
        """Sum `_output_left`, inlined, as all decodes are asked while a request waits."""
        limit = self.clip_max_new_tokens
        total = 0
        for sequence in sequences:
            num_left = sequence.request.output_len - len(sequence.output_token_ids)
            if num_left > limit:
                num_left = limit
            total += num_left
        return total


def _advanced_first(sequence: SequenceState) -> tuple[int, int]:
    """Sort sequences by their output, most first, then by their prompt, shortest first."""
    return -len(sequence.output_token_ids), sequence.request.prompt_len
