"""Random queues for `vllm_v1` and vLLM's schedulers, and where the two first differ."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from vllm_scheduler import Case, FakeWorkers, Steps, case, lab_steps, make_scheduler

from sarathi_lab.engine.request import Request
from sarathi_lab.policy import VllmV1
from sarathi_lab.policy.vllm import rules_of

FIELDS = (  # of the policy and of vLLM's SchedulerConfig
    *("max_num_batched_tokens", "long_prefill_token_threshold", "max_num_active_seqs"),
    *("long_prefill_token_threshold_adaptive", "scheduler_reserve_full_isl"),
    *("enable_chunked_prefill", "watermark", "prefill_schedule_interval"),
)
AMPLE = 5000  # blocks more than the longest request needs


@dataclass(frozen=True)
class Kind:
    """What the queues of one kind have in common.

    Attributes:
        num_in_flight: 1 for vLLM's Scheduler, 2 for its AsyncScheduler.
        is_scarce: Whether the cache may be too small for all.
        shares: Whether prompts begin alike and prefixes are cached.
    """

    num_in_flight: int
    is_scarce: bool
    shares: bool

    def describe(self) -> str:
        batches = "one batch" if self.num_in_flight == 1 else "two batches"
        cache = "scarce cache" if self.is_scarce else "ample cache"
        return f"{batches} in flight, {cache}{', shared prefixes' if self.shares else ''}"


@dataclass(frozen=True)
class Difference:
    """The first step, of those that are not empty, in which a queue is served differently."""

    step: int
    vllm: dict[int, int]  # tokens by request
    lab: dict[int, int]


def cases(kind: Kind, seed: int, number: int) -> Iterator[Case]:
    """Draw `number` cases, each by itself, so that one can be drawn again."""
    import vllm

    version = rules_of(vllm.__version__)
    for i in range(number):
        yield draw_case(random.Random(f"{seed}/{i}"), kind, version)


def draw_case(dice: random.Random, kind: Kind, version: str) -> Case:
    """Draw requests and the engine that serves them, with every field of the policy."""
    requests = draw_requests(dice, shares=kind.shares)
    longest = max(request.total_len for request in requests)
    batch_size = dice.randint(1, 12)
    cuts = dice.random() < 0.8
    limit = dice.choice((0, 0, 1, 3, 6, 17, 40, 64)) if cuts else 0
    if limit >= longest:
        limit = 0
    policy = VllmV1(
        max_num_batched_tokens=(
            dice.randint(batch_size, dice.choice((24, 128, 256)))
            if cuts
            else max(longest, batch_size)
        ),
        long_prefill_token_threshold=limit,
        scheduler_reserve_full_isl=dice.random() < 0.5,
        enable_chunked_prefill=cuts,
        long_prefill_token_threshold_adaptive=limit > 0 and dice.random() < 0.5,
        max_num_active_seqs=dice.choice((None, None, dice.randint(1, batch_size))),
        prefill_schedule_interval=dice.choice((1, 1, 2, 3, 5)),
        version=version,
    )
    watermark = dice.choice((0, 0, 1, 2))
    spare = watermark + dice.choice((0, 0, 1, 2, 5, 12)) if kind.is_scarce else AMPLE
    sizes: dict[str, Any] = {
        "batch_size": batch_size,
        "block_size": dice.choice((1, 2, 4, 8, 16, 32)),
        "max_model_len": longest,
        "queue_order": dice.choice(("fcfs", "priority")),
        "shares_prefixes": kind.shares,
    }
    drawn = case(policy, requests, spare, **sizes)
    if watermark == 0:
        return drawn
    # A share that is `watermark` blocks of the lab's cache, and of vLLM's, which has one more.
    share = (watermark + 0.9) / (drawn.engine.num_blocks + 1)
    return replace(drawn, engine=replace(drawn.engine, policy=replace(policy, watermark=share)))


def draw_requests(dice: random.Random, *, shares: bool) -> tuple[Request, ...]:
    """Draw up to 30 requests, short and long; with `shares` some begin alike, to any length."""
    common = [dice.randrange(90) for _ in range(300)]
    gaps = dice.choice(((0, 0, 0, 1, 3, 10), (0, 1, 2, 3, 4, 5, 6), (0, 0, 0, 1, 2, 5, 20)))
    requests, now = list[Request](), 0
    for i in range(dice.randint(2, 30)):
        now += dice.choice(gaps)
        length = dice.choice((dice.randint(1, 12), dice.randint(1, 120), dice.randint(100, 300)))
        output_len = dice.choice((1, dice.randint(1, 8), dice.randint(5, 60)))
        alike = dice.choice((0, dice.randint(0, length), length)) if shares else 0
        prompt = [*common[:alike], *(1000 * (i + 1) + k for k in range(length - alike))]
        requests.append(Request(i, float(now), length, output_len, prompt, dice.randint(0, 3)))
    return tuple(requests)


def vllm_steps(tried: Case, kind: Kind) -> Steps:
    """Serve a case by vLLM's scheduler. Before 0.33 an interval is a data-parallel engine's."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    settings = {name: getattr(tried.policy, name) for name in FIELDS}
    settings["async_scheduling"] = kind.num_in_flight > 1
    cls = AsyncScheduler if kind.num_in_flight > 1 else Scheduler
    workers = FakeWorkers(make_scheduler(cls, tried.engine, settings, {}), kind.num_in_flight)
    interval = tried.policy.prefill_schedule_interval if tried.policy.is_older else 1
    workers.serve(tried, throttles=lambda number: number % interval != 0)
    return workers.steps


def difference(tried: Case, kind: Kind) -> Difference | None:
    """Serve a case by both; empty steps, which take no time, do not count."""
    theirs = [step for step in vllm_steps(tried, kind) if step]
    ours = [step for step in lab_steps(tried, kind.num_in_flight) if step]
    if theirs == ours:
        return None
    for i in range(max(len(theirs), len(ours))):
        step_of_vllm = theirs[i] if i < len(theirs) else {}
        step_of_lab = ours[i] if i < len(ours) else {}
        if step_of_vllm != step_of_lab:
            break
    return Difference(i, step_of_vllm, step_of_lab)


def is_recomputed(steps: Steps, requests: tuple[Request, ...]) -> bool:
    """Return whether any token was computed again, as its sequence was evicted."""
    taken = Counter[int]()
    for step in steps:
        taken.update(step)
    return any(taken[one.request_id] >= one.total_len for one in requests)
