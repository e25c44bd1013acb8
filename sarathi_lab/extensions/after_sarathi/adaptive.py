"""Budgets that follow an objective: the most prompt tokens whose predicted time leaves the decodes
within their deadlines.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import islice
from typing import Any, Literal, TypeVar

from sarathi_lab.config.checked import number, one_of, whole
from sarathi_lab.config.errors import UserError
from sarathi_lab.engine.executor import Predictor
from sarathi_lab.engine.policy import Policy, Reserve
from sarathi_lab.engine.queues import LOOKAHEAD
from sarathi_lab.engine.request import Batch, SequenceState
from sarathi_lab.engine.scheduler import Scheduler, tokens_to_take

Since = Literal["arrival", "first_token", "last_token"]
Own = TypeVar("Own", bound="AdaptiveBudget")
SECONDS = "use the seconds that the objective allows"


@dataclass(frozen=True)
class AdaptiveBudget(Policy):
    """Decodes, then prompts within the largest budget whose predicted time fits the slack.

    Budgets are those of a ladder: `min_num_batched_tokens`, multiples of `step`, and
    `max_num_batched_tokens` (tokens of an iteration, decodes included). The first is taken whatever
    its time, so prompts never wait for ever. A predicted time counts `margin` times.

    `times` predicts: [seconds of an iteration, of a token, of a token of context that attention
    reads], or None for the cost model of a simulated device.
    """

    budget_field = "max_num_batched_tokens"
    max_num_batched_tokens: int = 2048
    min_num_batched_tokens: int = whole(128, minimum=1, fix="use a number of tokens such as 128")
    step: int = whole(256, minimum=1, fix="use a number of tokens such as 256")
    margin: float = number(1.0, above=0, fix="use 1 for the predicted time itself")
    times: Any = None
    watermark: float = 0.01
    reserve: Reserve = "prompt"

    def check(self, batch_size: int, max_model_len: int) -> None:
        if isinstance(self.times, Predictor):
            return
        if self.times is None:
            raise UserError(
                f"policy={self.name} needs policy.times here, as a device that is measured has no "
                "cost model; give [seconds of an iteration, of a token, of a token of context], as "
                "task=calibrate measures them"
            )
        is_list = isinstance(self.times, Sequence) and len(self.times) == 3
        if not is_list or not all(isinstance(x, int | float) and x >= 0 for x in self.times):
            raise UserError(
                f"times={self.times} are no three times; use [seconds of an iteration, of a token, "
                "of a token of context], such as [0.01,5.0e-5,1.0e-8]"
            )

    def on_device(
        self: Own, predictor: Callable[[], Predictor | None], batch_size: int, max_model_len: int
    ) -> Own:
        return self if self.times is not None else replace(self, times=predictor())

    def fill(self, batch: Batch, scheduler: Scheduler) -> None:
        scheduler.sort_running()
        scheduler.add_decodes(batch)
        slack = self.slack(batch, scheduler)
        if scheduler.swapped:
            scheduler.swap_in(batch, self.max_num_batched_tokens)
        waiting = islice(scheduler.waiting, LOOKAHEAD)
        prompts = self.ordered([*scheduler.idle_prefills, *waiting], scheduler)
        if prompts:
            self.take(batch, prompts, self.budget_within(slack, batch, prompts), scheduler)

    @abstractmethod
    def slack(self, batch: Batch, scheduler: Scheduler) -> float:
        """Seconds that an iteration with the decodes in `batch` may take; infinite for any."""

    def ordered(
        self, prompts: list[SequenceState], scheduler: Scheduler
    ) -> Sequence[SequenceState]:
        """Running and waiting `prompts` in the order in which they share the budget."""
        return prompts

    def budget_within(self, slack: float, batch: Batch, prompts: Sequence[SequenceState]) -> int:
        """The largest rung of the ladder that is predicted to fit `slack`; the first if none is."""
        if slack == math.inf:
            return self.max_num_batched_tokens
        return last_within(slack, self.rungs, partial(self.seconds, batch, prompts))

    @cached_property
    def rungs(self) -> list[int]:
        """The ladder, ascending, in tokens."""
        least, most = self.min_num_batched_tokens, self.max_num_batched_tokens
        steps = range(self.step, most, self.step)
        return sorted({min(least, most), *(rung for rung in steps if rung > least), most})

    def seconds(self, batch: Batch, prompts: Sequence[SequenceState], budget: int) -> float:
        """Predicted for `batch` and what `prompts` take of `budget` tokens, with the margin."""
        probe = replace(batch, chunks=list(batch.chunks))
        for sequence in prompts:
            if not (left := tokens_to_take(sequence, budget, probe)):
                break
            probe.add(sequence, left)
            sequence.in_flight = False  # it is only tried
        return self.margin * self.predicted(probe)

    def predicted(self, batch: Batch) -> float:
        """Seconds of an iteration."""
        if isinstance(self.times, Predictor):
            return self.times(batch)
        whole_iteration, token, context = self.times
        read = batch.prefill_kv_tokens + batch.decode_kv_tokens
        return float(whole_iteration + token * batch.num_tokens + context * read)

    def take(
        self, batch: Batch, prompts: Sequence[SequenceState], budget: int, scheduler: Scheduler
    ) -> None:
        """Let `prompts` share `budget` tokens."""
        scheduler.share(batch, prompts, budget)


def last_within(slack: float, rungs: Sequence[int], seconds: Callable[[int], float]) -> int:
    """The last of the ascending `rungs` whose `seconds` fit `slack`, by bisection; or the first."""
    low, high = 0, len(rungs) - 1
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if seconds(rungs[middle]) <= slack else (low, middle - 1)
    return rungs[low]


@dataclass(frozen=True)
class SloBudget(AdaptiveBudget):
    """The largest budget that leaves every decode its next token in time, first come first served.

    Tokens are due every `tbt` seconds `since` the last token (no gap is longer), the first token
    (what is saved early may be spent later, as a mean time per token allows), or the arrival and
    `ttft` more (Niyama's deadlines: an early first token is slack, too).
    """

    name = "slo_budget"
    ttft: float = number(2.0, above=0, fix=SECONDS)
    tbt: float = number(0.05, above=0, fix=SECONDS)
    since: Since = one_of("last_token", valid=("arrival", "first_token", "last_token"))

    def slack(self, batch: Batch, scheduler: Scheduler) -> float:
        decodes = (chunk.sequence for chunk in batch.chunks)
        return min(map(self.deadline, decodes), default=math.inf) - scheduler.now

    def deadline(self, sequence: SequenceState) -> float:
        """When the next token of a decode is due, in seconds."""
        request, times = sequence.request, sequence.token_times
        if not times:  # its first is still computed
            return request.arrival_time + self.ttft + self.tbt
        if self.since == "last_token":
            return times[-1] + self.tbt
        first = max(times[0], self.due(sequence)) if self.since == "arrival" else times[0]
        return first + len(sequence.output_token_ids) * self.tbt

    def due(self, sequence: SequenceState) -> float:
        """When the first token is due, in seconds."""
        return sequence.request.arrival_time + self.ttft
