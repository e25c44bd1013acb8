"""Prompt budgets that follow an objective: SloBudget, Niyama and LPRS."""

from __future__ import annotations

import math
from abc import abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import islice
from typing import Any, Literal, Self, get_args

from sarathi_lab.config.checked import number, one_of, whole
from sarathi_lab.config.errors import UserError, require_list, require_number
from sarathi_lab.engine.compositions import make_batch
from sarathi_lab.engine.executor import Predictor
from sarathi_lab.engine.policy import Policy, Reserve
from sarathi_lab.engine.queues import LOOKAHEAD
from sarathi_lab.engine.request import Batch, SequenceState
from sarathi_lab.engine.scheduler import Scheduler, tokens_to_take

Since = Literal["arrival", "last_token"]
SECONDS = "use the seconds that the objective allows"
TOKENS = "use a number of tokens such as 128"
MARGIN = "use 1 for the predicted time itself"
TIMES = (
    "give [seconds of an iteration, of a token, of a token of context], as task=calibrate measures "
    "them, such as [0.01,5.0e-5,1.0e-8]"
)
DECAY = 0.995  # of Niyama's moving average of the throughput, an iteration


@dataclass(frozen=True)
class AdaptiveBudget(Policy):
    """Decodes, then prompts within the largest budget whose predicted time fits the slack.

    Budgets are those of a ladder: `min_num_batched_tokens`, multiples of `step`, and
    `max_num_batched_tokens` (tokens of an iteration, decodes included). The first is always taken,
    so that prompts never wait for ever. Predicted times are multiplied by `margin`.

    `times` are [seconds of an iteration, of a token, of a token of context that attention reads];
    None: the cost model of a simulated device.
    """

    budget_field = "max_num_batched_tokens"
    max_num_batched_tokens: int = 2048
    min_num_batched_tokens: int = whole(128, minimum=1, fix=TOKENS)
    step: int = whole(256, minimum=1, fix=TOKENS)
    margin: float = number(1.0, above=0, fix=MARGIN)
    times: Any = None
    watermark: float = 0.01
    reserve: Reserve = "prompt"

    def check(self, batch_size: int, max_model_len: int) -> None:
        if isinstance(self.times, Predictor):
            return
        if self.times is None:
            reason = "as a measured device has no cost model"
            raise UserError(f"policy={self.name} needs policy.times here, {reason}; {TIMES}")
        unfit = f"are not three times; {TIMES}"
        require_list("times", self.times, unfit, partial(require_number, minimum=0, fix=TIMES))
        if len(self.times) != 3:
            raise UserError(f"times={self.times} {unfit}")

    def on_device(
        self, predictor: Callable[[], Predictor | None], batch_size: int, max_model_len: int
    ) -> Self:
        return self if self.times is not None else replace(self, times=predictor())

    def fill(self, batch: Batch, scheduler: Scheduler) -> None:
        scheduler.sort_running()
        scheduler.add_decodes(batch)
        slack = self.slack(batch, scheduler)
        prompts = [*scheduler.idle_prefills, *islice(scheduler.waiting, LOOKAHEAD)]
        prompts.sort(key=lambda sequence: self.rank(sequence, scheduler))
        if prompts:
            budget = self.budget_within(slack, batch, prompts)
            scheduler.share(batch, prompts, budget)

    @abstractmethod
    def slack(self, batch: Batch, scheduler: Scheduler) -> float:
        """Seconds that an iteration with the decodes in `batch` may take; maybe infinite."""

    def rank(self, sequence: SequenceState, scheduler: Scheduler) -> tuple[float, ...]:
        """Key of a running or waiting prompt: the least takes of the budget first."""
        return ()

    def budget_within(self, slack: float, batch: Batch, prompts: Sequence[SequenceState]) -> int:
        """Bisect for the largest rung that is predicted to fit `slack`; the smallest if none is."""
        if slack == math.inf:
            return self.max_num_batched_tokens

        # The rungs descend, so that their negative seconds ascend, as a bisection needs.
        def negative_seconds(rung: int) -> float:
            return -self.seconds(batch, prompts, rung)

        # The search ends before the last rung, which is taken even if it does not fit.
        last = len(self.rungs) - 1
        largest_fitting = bisect_left(self.rungs, -slack, hi=last, key=negative_seconds)
        return self.rungs[largest_fitting]

    @cached_property
    def rungs(self) -> list[int]:
        """The ladder, descending, in tokens."""
        smallest = self.min_num_batched_tokens
        largest = self.max_num_batched_tokens
        steps = range(self.step, largest, self.step)
        rungs = {min(smallest, largest), largest}
        rungs.update(rung for rung in steps if rung > smallest)
        return sorted(rungs, reverse=True)

    def seconds(self, batch: Batch, prompts: Sequence[SequenceState], budget: int) -> float:
        """Predict `batch` with what `prompts` take of `budget` tokens, times the margin."""
        probe = replace(batch, chunks=list(batch.chunks))
        for sequence in prompts:
            num_tokens = tokens_to_take(sequence, budget, probe)
            if not num_tokens:
                break
            probe.add(sequence, num_tokens)
            sequence.in_flight = False  # not scheduled yet
        return self.margin * self.predicted(probe)

    def predicted(self, batch: Batch) -> float:
        """Predict the seconds of an iteration."""
        if isinstance(self.times, Predictor):
            return self.times(batch)
        iteration, token, context = self.times
        read = batch.prefill_kv_tokens + batch.decode_kv_tokens
        return float(iteration + token * batch.num_tokens + context * read)


@dataclass(frozen=True)
class SloBudget(AdaptiveBudget):
    """The largest budget that leaves every decode its next token in time, first come first served.

    Tokens are due every `tbt` seconds `since` the last token (no gap is longer), or the arrival and
    `ttft` more (Niyama's deadlines: time saved early may be spent later).
    """

    name = "slo_budget"
    ttft: float = number(2.0, above=0, fix=SECONDS)
    tbt: float = number(0.05, above=0, fix=SECONDS)
    since: Since = one_of("last_token", valid=get_args(Since))

    def slack(self, batch: Batch, scheduler: Scheduler) -> float:
        deadlines = [self.deadline(chunk.sequence) for chunk in batch.chunks]
        earliest = min(deadlines, default=math.inf)
        return earliest - scheduler.now

    def deadline(self, sequence: SequenceState) -> float:
        """When the next token of a decode is due, in seconds."""
        request = sequence.request
        times = sequence.token_times
        if not times:  # its first is in flight
            return request.arrival_time + self.ttft + self.tbt
        if self.since == "last_token":
            return times[-1] + self.tbt
        # A late first token moves all deadlines; an early one leaves its time to later tokens.
        first = max(times[0], self.due(sequence))
        num_tokens = len(sequence.output_token_ids)
        return first + num_tokens * self.tbt

    def due(self, sequence: SequenceState) -> float:
        """When the first token is due, in seconds."""
        return sequence.request.arrival_time + self.ttft


@dataclass
class Throughput:
    """Prompt tokens a second, and those of the iteration that began at `time`."""

    rate: float = 0.0
    tokens: int = 0
    time: float = 0.0


@dataclass(frozen=True)
class Niyama(SloBudget):
    """Niyama (arXiv 2503.22562), later QoServe: dynamic chunks, hybrid priorities and eager
    relegation, by the rules and defaults of `deadline_scheduler.py` in microsoft/sarathi-serve.

    The ladder is of predicted times with a margin of 1.2, within deadlines that leave the seconds
    saved on an early first token to the chunks. Prompts share the budget by the deadline of their
    first token plus `hybrid` seconds per token that they lack; waiting ones that would be late at
    the recent throughput go last.

    Omitted: tiers with deadlines of different lengths, the ladder's end at 2,552 tokens, its short
    form for a nearly full cache, the longer time between tokens of batch tiers, and deadlines of
    whole answers. Differences: the n-th token is due n - 1 times `tbt` after the first (n there),
    relegation is decided in each iteration again, and the moving average of the throughput begins
    as predicted for the largest budget, not at 8,500 tokens a second.
    """

    name = "niyama"
    margin: float = number(1.2, above=0, fix=MARGIN)
    since: Since = one_of("arrival", valid=get_args(Since))
    hybrid: float = number(0.008, minimum=0, fix="use 0 for the earliest deadline first")

    def rank(self, sequence: SequenceState, scheduler: Scheduler) -> tuple[float, ...]:
        due = self.due(sequence)
        lacking = sequence.num_pending
        seconds = lacking / self._throughput(scheduler).rate
        is_late = not sequence.is_running and scheduler.now + seconds > due
        due_by_length = due + self.hybrid * lacking
        return is_late, due_by_length, sequence.order

    def fill(self, batch: Batch, scheduler: Scheduler) -> None:
        super().fill(batch, scheduler)
        if batch.num_prefill_tokens:
            state = self._throughput(scheduler)
            state.tokens = batch.num_prefill_tokens
            state.time = scheduler.now

    def _throughput(self, scheduler: Scheduler) -> Throughput:
        """Update the throughput by the last iteration of prompts, once."""
        state = scheduler.state(Throughput)
        if not state.rate:
            largest = self.max_num_batched_tokens
            prompt = make_batch(prefill_tokens=largest)
            state.rate = largest / self.predicted(prompt)
        # Each prompt's rank asks: tokens of 0 say that the iteration has been counted.
        elif state.tokens and scheduler.now > state.time:
            served = state.tokens / (scheduler.now - state.time)
            state.rate = DECAY * state.rate + (1 - DECAY) * served
            state.tokens = 0
        return state


WAIT_SHARE = 0.3  # of a second's prompt tokens, the weight of a second of waiting


@dataclass(frozen=True)
class Lprs(AdaptiveBudget):
    """LPRS with ageing (arXiv 2606.09061): latency-prediction-based scheduling, after its authors'
    code (Charmstok/sarathi-serve), without its optional limits on active prefills.

    An iteration may take `target_time` seconds, with decodes or without. Prompts share the budget,
    running ones first, by a `time_weight` times their seconds of waiting less `prompt_weight` times
    the tokens that they lack, the highest first.

    The budget is searched on the ladder, there each prompt's chunk by the token; a prompt that
    waits on keeps its place, there it returns to the queue. `time_weight` is 125 * 0.3 there, and
    the documentation asks for the prompt tokens that the device computes in a second, or less: here
    it is 0.3 of those predicted for the largest budget.
    """

    name = "lprs"
    min_num_batched_tokens: int = whole(64, minimum=1, fix=TOKENS)
    step: int = whole(64, minimum=1, fix=TOKENS)
    target_time: float = number(0.05, above=0, fix="use the seconds that an iteration may take")
    prompt_weight: float = number(1.0, minimum=0, fix="use 0 to leave it out")

    def slack(self, batch: Batch, scheduler: Scheduler) -> float:
        return self.target_time

    def rank(self, sequence: SequenceState, scheduler: Scheduler) -> tuple[float, ...]:
        waited = scheduler.now - sequence.request.arrival_time
        lacking = self.prompt_weight * sequence.num_pending
        priority = self.time_weight * waited - lacking
        return not sequence.is_running, -priority, sequence.order

    @cached_property
    def time_weight(self) -> float:
        largest = self.max_num_batched_tokens
        prompt = make_batch(prefill_tokens=largest)
        return WAIT_SHARE * largest / self.predicted(prompt)
