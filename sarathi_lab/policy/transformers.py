"""The two schedulers of Hugging Face transformers' continuous batching."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from sarathi_lab.config.checked import share
from sarathi_lab.engine.policy import Policy
from sarathi_lab.engine.request import Batch, SequenceState
from sarathi_lab.engine.scheduler import Scheduler
from sarathi_lab.policy import systems

_MARGIN = "use a share of the cache from 0 to 1"
_Starved = tuple[SequenceState, int]  # and the blocks that it lacked for what it was to take


@dataclass(frozen=True)
class _Transformers(Policy):
    """Base of both: `max_batch_tokens` for candidates in an order, with blocks for these tokens.

    With less than `safety_margin` of the blocks free, only decodes follow the first sequence of a
    batch. A candidate without blocks is passed over. Of running ones that were, the newest are
    preempted until the others fit, and then none is admitted until a request that kept running has
    finished.

    Read in transformers 5.23, `generation/continuous_batching/scheduler.py` and
    `offloading_manager.py`; its default of `max_batch_tokens` is 8192, and `max_requests_per_batch`
    is the lab's batch. Deviations: preempted ones return first, not last; as many waiting ones are
    tried as a batch has sequences, not all; the limit of cache entries of its attention mask is not
    modelled.
    """

    budget_field = "max_batch_tokens"
    system = systems.TRANSFORMERS
    has_prompts_first: ClassVar[bool] = False  # of running sequences
    max_batch_tokens: int = 256
    safety_margin: float = share(0.0, fix=_MARGIN)
    reserve = "chunk"

    def fill(self, batch: Batch, scheduler: Scheduler) -> None:
        starved = self._try_all(batch, scheduler)
        # What is freed is used in the next iteration, unless this one would be empty.
        while starved and _preempt_newest(starved, scheduler) and not batch.chunks:
            starved = self._try_all(batch, scheduler)

    def _try_all(self, batch: Batch, scheduler: Scheduler) -> list[_Starved]:
        """Add what has room; returns the running sequences that had none."""
        is_scarce = scheduler.blocks.num_free < self.safety_margin * scheduler.blocks.num_blocks
        decodes = scheduler.idle_decodes
        prompts = scheduler.idle_prefills
        running = prompts + decodes if self.has_prompts_first else decodes + prompts
        starved = self._try(running, batch, scheduler, is_scarce)
        if _may_admit(scheduler):
            self._try(scheduler.upcoming(scheduler.batch_size), batch, scheduler, is_scarce)
        return starved

    def _try(
        self, candidates: list[SequenceState], batch: Batch, scheduler: Scheduler, is_scarce: bool
    ) -> list[_Starved]:
        """Add those of `candidates` that have room; returns those that had none."""
        blocks = scheduler.blocks
        starved: list[_Starved] = []
        for sequence in candidates:
            num_tokens = min(sequence.num_pending, self.max_batch_tokens - batch.num_tokens)
            if not num_tokens or (is_scarce and batch.chunks and not sequence.is_decoding):
                break
            missing = blocks.num_missing(sequence, sequence.num_computed + num_tokens)
            if missing > blocks.num_free:
                starved.append((sequence, missing))
            elif not sequence.is_running:
                scheduler.enter(batch, sequence, num_tokens)
            elif len(batch) < scheduler.batch_size:
                scheduler.take(batch, sequence, num_tokens)
        return starved


@dataclass
class _Kept:
    """Sequences that kept running at a preemption, until one of them finishes."""

    sequences: list[SequenceState] = field(default_factory=list)


@dataclass(frozen=True)
class TransformersFIFO(_Transformers):
    """Decodes, then prompts that were cut, then waiting ones, with a margin."""

    name = "transformers_fifo"
    safety_margin: float = share(0.15, fix=_MARGIN)


@dataclass(frozen=True)
class TransformersPrefillFirst(_Transformers):
    """Prompts that were cut, then decodes, then waiting ones, without margin."""

    name = "transformers_prefill_first"
    has_prompts_first = True


def _may_admit(scheduler: Scheduler) -> bool:
    """Whether a request has finished since the last preemption."""
    state = scheduler.state(_Kept)
    has_finished = any(sequence.is_finished for sequence in state.sequences)
    if state.sequences and scheduler.running and not has_finished:
        return False
    state.sequences = []
    return True


def _preempt_newest(starved: list[_Starved], scheduler: Scheduler) -> bool:
    """Preempt the newest of `starved` until the others fit; False if all fit."""
    missing = sum(num_blocks for _, num_blocks in starved)
    has_preempted = False
    while starved and len(scheduler.running) > 1 and missing > scheduler.blocks.num_free:
        sequence, num_blocks = starved.pop()
        scheduler.preempt(sequence)
        missing -= num_blocks
        has_preempted = True
    if has_preempted:
        scheduler.state(_Kept).sequences = list(scheduler.running)
    return has_preempted
