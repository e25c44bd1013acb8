"""LPRS, whose budget keeps each iteration within a target time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from sarathi_lab.config.checked import number, whole
from sarathi_lab.engine.compositions import make_batch
from sarathi_lab.engine.request import Batch, SequenceState
from sarathi_lab.engine.scheduler import Scheduler
from sarathi_lab.extensions.after_sarathi.budgets import WEIGHT, AdaptiveBudget

WAIT_SHARE = 0.3  # of a second's prompt tokens, the weight of a second of waiting


@dataclass(frozen=True)
class Lprs(AdaptiveBudget):
    """LPRS with ageing (arXiv 2606.09061): latency-prediction-based scheduling with active prefill
    control, after its authors' code (Charmstok/sarathi-serve).

    An iteration may take `target_time` seconds, with decodes or without. Prompts share the budget,
    running ones first, by `time_weight` times their seconds of waiting less `prompt_weight` times
    the tokens that they lack, the highest first. At most `max_active_prefills` take part (None: any
    number), and each takes `min_active_chunk` tokens, or all it lacks, or waits, except the first.

    The budget is searched on the ladder, there each prompt's chunk by the token; a prompt that
    waits on keeps its place, there it returns to the queue. `time_weight` is 125 * 0.3 there, and
    the documentation asks for the prompt tokens that the device computes in a second, or less: None
    is 0.3 of those predicted for the largest budget.
    """

    name = "lprs"
    min_num_batched_tokens: int = whole(64, minimum=1, fix="use a number of tokens such as 64")
    step: int = whole(64, minimum=1, fix="use a number of tokens such as 64")
    target_time: float = number(0.05, above=0, fix="use the seconds that an iteration may take")
    time_weight: float | None = number(None, minimum=0, fix=WEIGHT)
    prompt_weight: float = number(1.0, minimum=0, fix=WEIGHT)
    max_active_prefills: int | None = whole(None, minimum=1, fix="use null for no limit")
    min_active_chunk: int = whole(1, minimum=1, fix="use 1 for any chunk")

    def slack(self, batch: Batch, scheduler: Scheduler) -> float:
        return self.target_time

    def ordered(
        self, prompts: list[SequenceState], scheduler: Scheduler
    ) -> Sequence[SequenceState]:
        weight = self._weight

        def rank(sequence: SequenceState) -> tuple[bool, float, int]:
            waited = scheduler.now - sequence.request.arrival_time
            lacking = self.prompt_weight * sequence.num_pending
            return not sequence.is_running, lacking - weight * waited, sequence.order

        return sorted(prompts, key=rank)[: self.max_active_prefills]

    @cached_property
    def _weight(self) -> float:
        if self.time_weight is not None:
            return self.time_weight
        most = self.max_num_batched_tokens
        return WAIT_SHARE * most / self.predicted(make_batch(prefill_tokens=most))

    def take(
        self, batch: Batch, prompts: Sequence[SequenceState], budget: int, scheduler: Scheduler
    ) -> None:
        num_tokens, kept = batch.num_tokens, list[SequenceState]()
        for sequence in prompts:
            left = min(sequence.num_pending, budget - num_tokens)
            if left >= min(sequence.num_pending, self.min_active_chunk) or not kept:
                kept.append(sequence)
                num_tokens += left
        super().take(batch, kept, budget, scheduler)
