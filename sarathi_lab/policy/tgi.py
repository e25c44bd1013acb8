"""Text Generation Inference's router (TGI v3)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sarathi_lab.config.checked import flag, number, whole
from sarathi_lab.engine.policy import Policy
from sarathi_lab.engine.request import Batch, SequenceState
from sarathi_lab.engine.scheduler import Scheduler

_NO_TOTAL = "use null for what the cache holds"


@dataclass
class _Pauses:
    waiting_tokens: int = 0  # decode steps since prompts paused them
    decodes_next: bool = False


@dataclass(frozen=True)
class TGI(Policy):
    """With `chunking`, decodes and prompts share `max_batch_prefill_tokens`, the last prompt taking
    exactly the rest.

    Without, whole prompts run alone, followed by a step of all decodes. While decodes run, new
    prompts pause them only if at least `waiting_served_ratio` times as many fit as are running, or
    after `max_waiting_tokens` decode steps. A request reserves cache for its whole output, and
    running ones may have `max_batch_total_tokens` of prompt and output (None: the cache's limit).

    Read in `backends/v3/src/backend.rs` and `queue.rs` (`next_batch`), defaults in the launcher's
    reference: ratio 0.3 (1.2 in older versions), 20 tokens; `max_batch_prefill_tokens` is the
    longest input plus 50 there. Deviations: the budget is not rounded up to whole blocks; in a
    chunked batch a running prompt takes its part of it before a new one.
    """

    name = "tgi"
    budget_field = "max_batch_prefill_tokens"
    max_batch_prefill_tokens: int = 256
    chunking: bool = flag(True)
    max_batch_total_tokens: int | None = whole(None, minimum=1, fix=_NO_TOTAL)
    waiting_served_ratio: float = number(0.3, minimum=0, fix="use a number such as 0.3")
    max_waiting_tokens: int = whole(20, minimum=0, fix="use a number of decode steps such as 20")
    reserve = "total"

    def check(self, batch_size: int, max_model_len: int) -> None:
        if not self.chunking:
            why = "without chunking a prompt may not fit; raise it, or use chunking=true"
            self.check_longest("max_batch_prefill_tokens", max_model_len, why)
        why = f"a request may never start; raise it, or {_NO_TOTAL}"
        self.check_longest("max_batch_total_tokens", max_model_len, why)

    def fill(self, batch: Batch, scheduler: Scheduler) -> None:
        if self.chunking:
            scheduler.add_decodes(batch)
            scheduler.continue_prefills(batch, self.max_batch_prefill_tokens)
            fits_total = self._within_total(scheduler)
            scheduler.admit(batch, self.max_batch_prefill_tokens, may_enter=fits_total)
            return
        state, pauses = scheduler.state(_Pauses), bool(scheduler.running)
        if not pauses or not state.decodes_next:
            for sequence in self._next_batch(scheduler):
                # Earlier ones may have evicted its cached prefix.
                num_pending = scheduler.blocks.look_up(sequence).num_pending
                if batch.num_tokens + num_pending > self.max_batch_prefill_tokens:
                    break
                scheduler.enter(batch, sequence, num_pending)
        if batch.chunks:
            state.waiting_tokens, state.decodes_next = 1, pauses
            return
        scheduler.add_decodes(batch)
        if batch.chunks:
            state.waiting_tokens += 1
            state.decodes_next = False

    def _next_batch(self, scheduler: Scheduler) -> list[SequenceState]:
        """The whole prompts to run now; none while too few fit to pause what is running."""
        fits_total = self._within_total(scheduler)
        free, num_tokens, chosen = scheduler.blocks.num_free, 0, []
        slots = min(scheduler.batch_size, scheduler.max_num_seqs - len(scheduler.running))
        for sequence in scheduler.upcoming(slots):
            num_tokens += sequence.num_pending
            free -= scheduler.blocks.blocks_for(sequence.request.total_len)
            if num_tokens > self.max_batch_prefill_tokens or free < 0 or not fits_total(sequence):
                break
            chosen.append(sequence)
        needed = int(len(scheduler.running) * self.waiting_served_ratio)
        is_early = scheduler.state(_Pauses).waiting_tokens < self.max_waiting_tokens
        return [] if is_early and len(chosen) < needed else chosen

    def _within_total(self, scheduler: Scheduler) -> Callable[[SequenceState], bool]:
        """Make a test whether one more request fits the total, for one call each, in order."""
        most = self.max_batch_total_tokens
        total = sum(sequence.request.total_len for sequence in scheduler.running)

        def fits(sequence: SequenceState) -> bool:
            nonlocal total
            total += sequence.request.total_len
            return most is None or total <= most

        return fits
