"""Prompts in an order that their lengths and waits decide anew in every iteration."""

from __future__ import annotations

from dataclasses import dataclass
from math import log2
from typing import Literal, get_args

from sarathi_lab.config.checked import number, one_of, refuse_unread, whole
from sarathi_lab.config.errors import UserError
from sarathi_lab.engine.policy import Reserve
from sarathi_lab.engine.queues import LOOKAHEAD
from sarathi_lab.engine.request import Batch, SequenceState
from sarathi_lab.engine.scheduler import Scheduler
from sarathi_lab.extensions.after_sarathi.prefill_cost import KnowsPrefillCost, PrefillCost

Order = Literal["fcfs", "response_ratio", "shortest", "slack", "preflow", "short_first"]
# Parameters that not every order reads, and which do.
READ = {"patience": ("shortest", "slack", "preflow", "short_first"), "deadline_factor": ("slack",)}

PAIRS = PrefillCost(0.5, 0.5)  # of query and key


@dataclass(frozen=True)
class Ranked(KnowsPrefillCost):
    """Decodes, then prompts by `order` within `chunk` tokens, whether they run or wait.

    A prompt that has begun may be passed over by one that comes later; it keeps its cache. Rules,
    with a prompt's age (seconds since it came), its prefill time p and what is left of that, r:

    - "fcfs": first come, first served.
    - "response_ratio": the largest (age + r) / r (Brinch Hansen's highest response ratio next).
    - "shortest": the least r, halved every `patience` seconds of age.
    - "slack": the least (d - age - r) / d, of a deadline d = max(`patience`, `deadline_factor` p):
      LARS of Medha (arXiv 2409.17264), as its simulator has the least remaining slack.
    - "preflow": the largest 2^(age / `patience`) / (P R), P and R the prompt's and its remaining
      pairs of query and key (vllm-ascend pull request 16360, from its description).
    - "short_first": those older than `patience`, then prompts of at most `short_len` tokens, then
      long ones (ShortRequestFirst of vllm-ascend, from its description, without its class of
      immediate requests).

    In each a prompt's rank rises as it waits until no newer one passes it. One that has no room in
    the cache keeps those behind it from entering, too.
    `reserve_tokens` of an iteration are kept from prompts of more than `short_len` tokens while a
    shorter one is there (SGLang pull request 22995). Of those that wait the next
    `queues.LOOKAHEAD` are ranked.

    Times are quadratic in length, of the device's cost model unless stated; where there is none,
    tokens stand for them, but for "slack", which needs seconds.
    """

    name = "ranked"
    budget_field = "chunk"
    chunk: int = 2048
    order: Order = one_of("response_ratio", valid=get_args(Order))
    patience: float = number(10.0, above=0, fix="use seconds such as 10")
    deadline_factor: float = number(5.0, above=0, fix="use a factor such as 5")
    short_len: int = whole(256, minimum=1, fix="use tokens such as 256")
    reserve_tokens: int = whole(0, minimum=0, fix="use 0 to keep none")
    watermark: float = 0.01
    reserve: Reserve = "prompt"

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
        scheduler.swap_in(batch, self.chunk)
        prompts = scheduler.idle_prefills
        if not scheduler.swapped:
            prompts += scheduler.upcoming(LOOKAHEAD)
        has_short = any(one.num_known <= self.short_len for one in prompts)
        kept = self.reserve_tokens if has_short else 0

        def size(sequence: SequenceState, left: int) -> int:
            if kept and sequence.num_known > self.short_len:
                return max(1, min(left, self.chunk - kept - batch.num_tokens))
            return left

        prompts.sort(key=lambda one: (self.rank(one, scheduler.now), one.order))
        scheduler.share(batch, prompts, self.chunk, size)

    def rank(self, sequence: SequenceState, now: float) -> float:
        """The lower is served first; `now` in seconds."""
        age = now - sequence.request.arrival_time
        if self.order == "fcfs":
            return 0.0
        if self.order == "short_first":
            return -1.0 if age > self.patience else float(sequence.num_known > self.short_len)
        cost = PAIRS if self.order == "preflow" else self.prefill_cost
        rest = cost(sequence.num_pending, sequence.num_computed)
        match self.order:
            case "response_ratio":
                return -age / rest
            case "shortest":
                return log2(rest) - age / self.patience
            case "slack":
                deadline = max(self.patience, self.deadline_factor * cost(sequence.num_known))
                return (deadline - age - rest) / deadline
        return log2(cost(sequence.num_known)) + log2(rest) - age / self.patience
