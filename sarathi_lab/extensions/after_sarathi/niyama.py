"""Niyama (arXiv 2503.22562), later QoServe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from sarathi_lab.config.checked import listed, number, one_of
from sarathi_lab.config.errors import require_number
from sarathi_lab.engine.compositions import make_batch
from sarathi_lab.engine.request import Batch, SequenceState
from sarathi_lab.engine.scheduler import Scheduler
from sarathi_lab.extensions.after_sarathi.adaptive import Since, SloBudget

DECAY = 0.995  # of the moving average of the throughput, an iteration
TIERS = "give the seconds to the first token of each tier, such as [2.0,20.0]"


@dataclass
class Throughput:
    """Prompt tokens a second, and those of the iteration that began at `time`."""

    rate: float = 0.0
    tokens: int = 0
    time: float = 0.0


@dataclass(frozen=True)
class Niyama(SloBudget):
    """Niyama: dynamic chunks, hybrid priorities and eager relegation, by the rules and defaults of
    `deadline_scheduler.py` in microsoft/sarathi-serve.

    The ladder is of predicted times with a margin of 1.2, within deadlines that leave the seconds
    saved on an early first token to the chunks. Prompts share the budget by the deadline of their
    first token plus `hybrid` seconds per token that they lack; those that wait and can't make it at
    the throughput of late go last. `tiers` are seconds to the first token by `Request.priority`
    (the last for all above), in place of `ttft`.

    Left out are the ladder's end at 2,552 tokens, its short form for a cache that is nearly full,
    the longer time between tokens of batch tiers, and deadlines of whole answers. The n-th token is
    due n - 1 times `tbt` after the first (the code counts one more), who is relegated is judged
    anew in each iteration, and the throughput, whose moving average begins there at 8,500 tokens a
    second, begins here as predicted for the largest budget.
    """

    name = "niyama"
    margin: float = number(1.2, above=0, fix="use 1 for the predicted time itself")
    since: Since = one_of("arrival", valid=("arrival", "first_token", "last_token"))
    hybrid: float = number(0.008, minimum=0, fix="use 0 for the earliest deadline first")
    tiers: Sequence[float] | None = listed(
        None, each=partial(require_number, above=0, fix=TIERS), complaint=TIERS
    )

    def due(self, sequence: SequenceState) -> float:
        request, tiers = sequence.request, self.tiers or (self.ttft,)
        return request.arrival_time + tiers[max(0, min(request.priority, len(tiers) - 1))]

    def ordered(
        self, prompts: list[SequenceState], scheduler: Scheduler
    ) -> Sequence[SequenceState]:
        now, rate = scheduler.now, self._throughput(scheduler).rate

        def rank(sequence: SequenceState) -> tuple[bool, float, int]:
            due, lacking = self.due(sequence), sequence.num_pending
            is_late = not sequence.is_running and now + lacking / rate > due
            return is_late, due + self.hybrid * lacking, sequence.order

        return sorted(prompts, key=rank)

    def take(
        self, batch: Batch, prompts: Sequence[SequenceState], budget: int, scheduler: Scheduler
    ) -> None:
        super().take(batch, prompts, budget, scheduler)
        state = self._throughput(scheduler)
        state.tokens, state.time = batch.num_prefill_tokens, scheduler.now

    def _throughput(self, scheduler: Scheduler) -> Throughput:
        """With what the last iteration of prompts served, which counts once."""
        state, most = scheduler.state(Throughput), self.max_num_batched_tokens
        if not state.rate:
            state.rate = most / self.predicted(make_batch(prefill_tokens=most))
        elif state.tokens and scheduler.now > state.time:
            served = state.tokens / (scheduler.now - state.time)
            state.rate = DECAY * state.rate + (1 - DECAY) * served
            state.tokens = 0
        return state
