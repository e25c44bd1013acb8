"""FairBatching: prompts before those decodes that have time left."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass, replace
from itertools import islice

from sarathi_lab.config.checked import one_of
from sarathi_lab.engine.queues import LOOKAHEAD
from sarathi_lab.engine.request import Batch, SequenceState
from sarathi_lab.engine.scheduler import Scheduler
from sarathi_lab.extensions.after_sarathi.budgets import Since, SloBudget


@dataclass(frozen=True)
class FairBatching(SloBudget):
    """FairBatching (arXiv 2510.14392), reconstructed: urgent decodes, then prompts, then other
    decodes, within the time that the least slack leaves.

    The n-th token is due `ttft` + (n - 1) `tbt` seconds after the arrival. A decode that is due
    within `tbt` seconds is urgent. An iteration may take as long as leaves every decode another
    `tbt` seconds, but `tbt` at least; of decodes that are not urgent as many ride as fit that time
    beside the prompts.

    Reconstructed from the abstract and a public review (themoonlight.io), which name the deadlines,
    the budget by slack and that decodes with slack give way to prompts. The threshold of urgency is
    assumed; the estimate of load for routers is omitted.
    """

    name = "fair_batching"
    since: Since = one_of("arrival", valid=("arrival",))

    def fill(self, batch: Batch, scheduler: Scheduler) -> None:
        scheduler.sort_running()
        most, now = self.max_num_batched_tokens, scheduler.now
        decodes = [one for one in scheduler.running.idle if one.is_decoding]
        decodes.sort(key=self.deadline)
        slacks = [self.deadline(one) - now for one in decodes]
        num_urgent = bisect_right(slacks, self.tbt)
        seconds = max(self.tbt, slacks[0] - self.tbt) if slacks else math.inf
        scheduler.share(batch, decodes[:num_urgent], most)
        scheduler.swap_in(batch, most)
        prompts = [*scheduler.idle_prefills, *islice(scheduler.waiting, LOOKAHEAD)]
        if prompts:
            scheduler.share(batch, prompts, self.budget_within(seconds, batch, prompts))
        rest = [one for one in decodes[num_urgent:] if one.is_running]
        scheduler.share(batch, rest[: self._riding(rest, batch, seconds)], most)

    def deadline(self, sequence: SequenceState) -> float:
        return self.due(sequence) + len(sequence.output_token_ids) * self.tbt

    def _riding(self, decodes: list[SequenceState], batch: Batch, seconds: float) -> int:
        """Bisect for how many of `decodes` fit `seconds` in `batch`; without prompts all do."""
        if not batch.num_prefill_tokens:
            return len(decodes)

        def predicted(number: int) -> float:
            probe = replace(batch, chunks=list(batch.chunks))
            for one in decodes[:number]:
                probe.add(one, 1)
                one.in_flight = False  # not scheduled yet
            return self.margin * self.predicted(probe)

        return max(0, bisect_right(range(len(decodes) + 1), seconds, key=predicted) - 1)
