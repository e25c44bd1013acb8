"""Orders and chunks of prompts by their predicted prefill time, and caps by pressure (P-PAS)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple, Self, get_args

import numpy as np

from sarathi_lab.config.checked import number, one_of, refuse_unread, share, whole
from sarathi_lab.config.errors import UserError
from sarathi_lab.engine.compositions import make_batch
from sarathi_lab.engine.executor import Predictor
from sarathi_lab.engine.policy import Policy, Reserve
from sarathi_lab.engine.queues import LOOKAHEAD
from sarathi_lab.engine.request import Batch, SequenceState
from sarathi_lab.engine.scheduler import Scheduler, Size
from sarathi_lab.policy.vllm import VllmV1

NUM_SAMPLES = 64  # prompts of the fit
LEAST_SHARE = 4  # a dynamic chunk is at least this part of the first
Order = Literal["fcfs", "response_ratio", "shortest", "slack", "preflow", "short_first"]
# Parameters that not every order reads, and the orders that do.
READ = {"patience": ("shortest", "slack", "preflow", "short_first"), "deadline_factor": ("slack",)}


class PrefillCost(NamedTuple):
    """Seconds f(l) = `square` l^2 + `linear` l of a prompt's first l tokens, over those of none.

    The default counts tokens, which suffices for an order.
    """

    square: float = 0.0
    linear: float = 1.0

    def __call__(self, num_tokens: int, start: int = 0) -> float:
        """Seconds of `num_tokens` tokens behind `start` ones."""
        return num_tokens * (self.square * (2 * start + num_tokens) + self.linear)


PAIRS = PrefillCost(0.5, 0.5)  # of query and key


def fit_prefill_cost(iteration_time: Callable[[Batch], float], longest: int) -> PrefillCost:
    """Fit by least squares over whole prompts of up to `longest` tokens, evenly spaced, with the
    seconds `iteration_time` of a batch. Coefficients are not negative; a token always takes time.
    """
    # At least three lengths, as a parabola has three coefficients.
    longest_sample = max(3, longest)
    evenly_spaced = np.linspace(1, longest_sample, NUM_SAMPLES)
    lengths = np.unique(evenly_spaced.astype(int))
    prompts = [make_batch(prefill_tokens=length) for length in lengths.tolist()]
    seconds = [iteration_time(prompt) for prompt in prompts]
    square, linear, _ = np.polyfit(lengths, seconds, 2)
    if square <= 0:  # a parabola that bends down would make the longest prompts cheap
        square = 0.0
        linear = np.polyfit(lengths, seconds, 1)[0]
    positive_linear = max(float(linear), 1e-12)
    return PrefillCost(float(square), positive_linear)


@dataclass(frozen=True, kw_only=True)
class PrefillAware(Policy):
    """A policy with a prompt's prefill time: by its settings, or the device's cost model."""

    seconds_per_token: float | None = number(None, above=0, fix="use seconds such as 3e-5")
    seconds_per_squared_token: float = number(0.0, minimum=0, fix="use seconds such as 1e-10")
    watermark: float = 0.01
    reserve: Reserve = "prompt"

    @cached_property  # read for every ranked prompt
    def prefill_cost(self) -> PrefillCost:
        """In seconds; in tokens if `seconds_per_token` is unset."""
        return PrefillCost(self.seconds_per_squared_token, self.seconds_per_token or 1.0)

    def check_seconds(self, what: str) -> None:
        """Raise UserError, naming `what` needs them, if `seconds_per_token` is unset."""
        if self.seconds_per_token is None:
            raise UserError(
                f"{what} needs seconds_per_token here, as a measured device has no cost model; add "
                "policy.seconds_per_token=SECONDS"
            )

    def on_device(
        self, predictor: Callable[[], Predictor | None], batch_size: int, max_model_len: int
    ) -> Self:
        if self.seconds_per_token is not None:
            return self
        iteration_time = predictor()
        if iteration_time is None:
            return self
        square, linear = fit_prefill_cost(iteration_time, max_model_len)
        return replace(self, seconds_per_token=linear, seconds_per_squared_token=square)


@dataclass(frozen=True)
class Ranked(PrefillAware):
    """Decodes, then running and waiting prompts by `order` within `chunk` tokens.

    A later prompt may overtake one that has begun, which keeps its cache. Rules, with a prompt's
    age (seconds since its arrival), its prefill time p and the remaining part of that, r:

    - "fcfs": first come, first served.
    - "response_ratio": the largest (age + r) / r (Brinch Hansen's highest response ratio next).
    - "shortest": the least r, halved every `patience` seconds of age.
    - "slack": the least (d - age - r) / d, of a deadline d = max(`patience`, `deadline_factor` p):
      LARS of Medha (arXiv 2409.17264), the least remaining slack of its simulator.
    - "preflow": the largest 2^(age / `patience`) / (P R), P and R the prompt's and its remaining
      pairs of query and key (vllm-ascend pull request 16360, from its description).
    - "short_first": those older than `patience`, then prompts of at most `short_len` tokens, then
      long ones (ShortRequestFirst of vllm-ascend, from its description, without immediate ones).

    In each a waiting prompt rises until no newer one overtakes it. One that has no room in the
    cache also stops those behind it. `reserve_tokens` of an iteration are kept from prompts of more
    than `short_len` tokens while a shorter one is there (SGLang pull request 22995). Of waiting
    prompts the next `queues.LOOKAHEAD` are ranked. Times are quadratic in length, of the device's
    cost model unless stated; without either, tokens stand for them, except for "slack".
    """

    name = "ranked"
    budget_field = "chunk"
    chunk: int = 2048
    order: Order = one_of("response_ratio", valid=get_args(Order))
    patience: float = number(10.0, above=0, fix="use seconds such as 10")
    deadline_factor: float = number(5.0, above=0, fix="use a factor such as 5")
    short_len: int = whole(256, minimum=1, fix="use tokens such as 256")
    reserve_tokens: int = whole(0, minimum=0, fix="use 0 to keep none")

    def check(self, batch_size: int, max_model_len: int) -> None:
        unread = [name for name, readers in READ.items() if self.order not in readers]
        refuse_unread(self, unread, f" with order={self.order}; drop it")
        if self.reserve_tokens >= self.chunk:
            reserved = f"reserve_tokens={self.reserve_tokens}"
            raise UserError(f"{reserved} leaves nothing of chunk={self.chunk}; lower it")
        if self.order == "slack":
            self.check_seconds("order=slack")

    def fill(self, batch: Batch, scheduler: Scheduler) -> None:
        scheduler.sort_running()
        scheduler.add_decodes(batch, self.chunk)
        prompts = scheduler.idle_prefills + scheduler.upcoming(LOOKAHEAD)
        reserves = False
        if self.reserve_tokens:
            reserves = any(prompt.num_known <= self.short_len for prompt in prompts)

        def size(sequence: SequenceState, num_tokens: int) -> int:
            if not reserves or sequence.num_known <= self.short_len:
                return num_tokens
            unreserved = self.chunk - self.reserve_tokens - batch.num_tokens
            return max(1, min(num_tokens, unreserved))

        prompts.sort(key=lambda prompt: (self.rank(prompt, scheduler.now), prompt.order))
        scheduler.share(batch, prompts, self.chunk, size)

    def rank(self, sequence: SequenceState, now: float) -> float:
        """The rank at `now` (seconds); lower ones are served first."""
        age = now - sequence.request.arrival_time
        if self.order == "fcfs":
            return 0.0
        if self.order == "short_first":
            if age > self.patience:
                return -1.0
            is_long = sequence.num_known > self.short_len
            return float(is_long)
        cost = PAIRS if self.order == "preflow" else self.prefill_cost
        rest = cost(sequence.num_pending, sequence.num_computed)
        # Logarithms of 2^(age / patience) and of what it is divided by: a power would overflow.
        match self.order:
            case "response_ratio":
                return -age / rest
            case "shortest":
                return math.log2(rest) - age / self.patience
            case "slack":
                seconds_of_prompt = cost(sequence.num_known)
                deadline = max(self.patience, self.deadline_factor * seconds_of_prompt)
                slack = deadline - age - rest
                return slack / deadline
        whole_cost = cost(sequence.num_known)
        return math.log2(whole_cost) + math.log2(rest) - age / self.patience


@dataclass(frozen=True)
class DynamicChunks(PrefillAware):
    """SGLang's dynamic chunking: decodes, then prompts in order of arrival, whose chunks shrink
    with the context, so that each takes a pipeline's stages equally long.

    A prompt's time is a quadratic f of its length. The next chunk x behind L tokens solves f(L + x)
    - f(L) = f(`chunk`) - f(0), moves towards `chunk` by 1 - `smooth_factor`, is at least a quarter
    of that, and a multiple of `alignment` tokens; `smooth_factor=0` gives equal chunks. Rule and
    defaults are those of `scheduler_pp_mixin.py` and its environment variable
    SGLANG_DYNAMIC_CHUNKING_SMOOTH_FACTOR. There f is fitted to prompts of up to 1.25 chunks, here
    up to the model length; and a batch has prompts or decodes unless mixed, here both.

    The next chunk of a prompt begins before the one before has left the pipeline
    (`Policy.follows_up`), as every stage keeps their order.
    """

    name = "dynamic_chunks"
    budget_field = "chunk"
    follows_up = True
    chunk: int = 8192
    smooth_factor: float = share(0.75, fix="use 0 for chunks that are alike, or 0.75")
    alignment: int = whole(64, minimum=1, fix="use the tokens of a page such as 64")

    def check(self, batch_size: int, max_model_len: int) -> None:
        if self.smooth_factor:
            self.check_seconds(f"policy={self.name}")

    def fill(self, batch: Batch, scheduler: Scheduler) -> None:
        def size(sequence: SequenceState, num_tokens: int) -> int:
            room = self.next_chunk(sequence.num_computed) - batch.num_tokens
            return min(num_tokens, max(0, room))

        scheduler.sort_running()
        scheduler.add_decodes(batch, self.chunk)
        scheduler.continue_prefills(batch, self.chunk, size=size)
        scheduler.admit(batch, self.chunk, size=size)

    def next_chunk(self, context: int) -> int:
        """Tokens of an iteration for a prompt with `context` tokens computed."""
        cost = self.prefill_cost
        square, linear = cost
        # Without context the solution is `chunk` itself, which rounding would reduce by a page.
        if not (square and context):
            return self.chunk
        # The positive root of square x^2 + slope x = f(chunk).
        first_chunk = cost(self.chunk)
        slope = 2 * square * context + linear
        root = math.sqrt(slope * slope + 4 * square * first_chunk)
        equal = (root - slope) / (2 * square)
        change = self.smooth_factor * (equal - self.chunk)
        smoothed = int(self.chunk + change)
        least = self.chunk // LEAST_SHARE
        tokens = max(smoothed, least)
        aligned = tokens // self.alignment * self.alignment
        return min(self.chunk, max(self.alignment, aligned))


@dataclass(frozen=True)
class PPas(VllmV1):
    """P-PAS, prefill-pressure adaptive scheduling over vLLM v1 (vLLM RFC 52906).

    While at least `min_active_prefills` prompts run or wait beside running decodes, the prompts of
    an iteration take at most `prefill_cap` tokens together; else all that `max_num_batched_tokens`
    leaves. Decodes are not capped.

    The paper's N_th, B_cap and B_max are 2, 2,048 and 16,384; `prefill_cap=None` is the same eighth
    of the budget. Its patch for vLLM 0.22.1 has the numbers in the code and no names. It also drops
    the clamp of a chunk to the model length, which no request here is long enough for.
    """

    name = "p_pas"
    max_num_batched_tokens: int = 16384
    prefill_cap: int | None = whole(
        None, minimum=1, fix="use null for an eighth of max_num_batched_tokens"
    )
    min_active_prefills: int = whole(2, minimum=1, fix="use 2, as the paper does")

    def check(self, batch_size: int, max_model_len: int) -> None:
        super().check(batch_size, max_model_len)
        if self.prefill_cap is not None and self.prefill_cap >= self.max_num_batched_tokens:
            raise UserError(
                f"prefill_cap={self.prefill_cap} has no effect, as max_num_batched_tokens="
                f"{self.max_num_batched_tokens}; use a smaller cap, or policy=vllm_v1"
            )

    def size(self, batch: Batch, scheduler: Scheduler) -> Size:
        take = super().size(batch, scheduler)
        running = [sequence for sequence in scheduler.running if not sequence.is_decoding]
        num_decodes = len(scheduler.running) - len(running)
        if not self.presses(num_decodes, running, len(scheduler.waiting)):
            return take
        cap = self.prefill_cap or max(1, self.max_num_batched_tokens // 8)

        def size(sequence: SequenceState, num_tokens: int) -> int:
            wanted = take(sequence, num_tokens)
            if sequence.is_decoding:
                return wanted
            return min(wanted, cap - batch.num_prefill_tokens)

        return size

    def presses(self, num_decodes: int, running: Sequence[SequenceState], num_waiting: int) -> bool:
        """Return whether `running` prompts and those that wait press on the decodes."""
        return num_decodes > 0 and len(running) + num_waiting >= self.min_active_prefills
