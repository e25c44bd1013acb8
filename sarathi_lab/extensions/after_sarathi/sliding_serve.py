"""SlidingServe (arXiv 2606.05933)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

from sarathi_lab.config.checked import one_of, whole
from sarathi_lab.engine.request import Batch, SequenceState
from sarathi_lab.engine.scheduler import Scheduler
from sarathi_lab.extensions.after_sarathi.adaptive import Since, SloBudget, last_within


@dataclass(frozen=True)
class SlidingServe(SloBudget):
    """SlidingServe, reconstructed: the budget that lets this iteration and the next take the most
    tokens together, where the largest one now would leave too little slack for the next.

    Of budgets alike the largest is taken. The next iteration is predicted as this one is, with the
    slack that is left and another `tbt`. Prompts share the budget by whether they can still meet
    the deadline of their first token, by its urgency (in `urgency_levels` parts of `ttft`), then
    shortest first.

    Reconstructed from the abstract and a public review (zhongzhuzhou.org, 2026-06-07): those name
    the two iterations, a ternary search and the three keys of the order; how urgency is rounded is
    assumed. The choice of requests by dynamic programming, where several risk their deadlines, is
    left out, and the predictor is the device's cost model.
    """

    name = "sliding_serve"
    since: Since = one_of("arrival", valid=("arrival", "first_token", "last_token"))
    urgency_levels: int = whole(4, minimum=1, fix="use 1 for the shortest first")

    def budget_within(self, slack: float, batch: Batch, prompts: Sequence[SequenceState]) -> int:
        if slack == math.inf or self.since == "last_token":  # which leaves the next no slack
            return super().budget_within(slack, batch, prompts)
        seconds = cache(lambda rung: self.seconds(batch, prompts, rung))
        wanted = batch.num_tokens + sum(sequence.num_pending for sequence in prompts)
        largest = last_within(slack, self.rungs, seconds)
        rungs = [rung for rung in self.rungs if rung <= largest]
        return max(rungs, key=lambda rung: (self._together(rung, slack, wanted, seconds), rung))

    def _together(
        self, rung: int, slack: float, wanted: int, seconds: Callable[[int], float]
    ) -> int:
        """Tokens of this iteration with `rung` and of the next, of those that are `wanted`."""
        left = slack - seconds(rung) + self.tbt
        following = last_within(left, self.rungs, seconds)
        return min(wanted, rung + (following if seconds(following) <= left else 0))

    def ordered(
        self, prompts: list[SequenceState], scheduler: Scheduler
    ) -> Sequence[SequenceState]:
        part = self.ttft / self.urgency_levels

        def rank(sequence: SequenceState) -> tuple[bool, int, int, int]:
            left = self.due(sequence) - scheduler.now
            return left <= 0, math.floor(left / part), sequence.num_pending, sequence.order

        return sorted(prompts, key=rank)
