"""`vllm_v1` beside vLLM's scheduler, step by step: which request gets how many tokens.

FUZZ_CASES=2000 tries more. What differs is listed in experiments/sarathi_serve/policies.
"""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from vllm_scheduler import MAX_LEN, Case, FakeWorkers, case, lab_steps, make_scheduler

from sarathi_lab.engine.request import Request
from sarathi_lab.policy import VllmV1

pytestmark = pytest.mark.vllm

NUM_CASES = int(os.environ.get("FUZZ_CASES", "50"))
COMMON = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6, 4, 3, 3, 8, 3]
FIELDS = (  # of the policy and of vLLM's SchedulerConfig
    *("max_num_batched_tokens", "long_prefill_token_threshold", "max_num_active_seqs"),
    *("long_prefill_token_threshold_adaptive", "scheduler_reserve_full_isl"),
    *("enable_chunked_prefill", "watermark"),
)


@st.composite
def queues(draw: Any, *, shares: bool) -> tuple[Request, ...]:
    """Requests of up to 40 tokens; with `shares` most begin alike, to a length of their own."""
    requests, now = [], 0.0
    for i in range(draw(st.integers(1, 8))):
        now += draw(st.sampled_from([0, 0, 0, 1, 2, 5, 20]))
        length = draw(st.integers(1, 28))
        alike = draw(st.integers(0, length)) if shares else 0
        prompt = [*COMMON[:alike], *(100 * (i + 1) + k for k in range(length - alike))]
        output_len, priority = draw(st.integers(1, 12)), draw(st.integers(0, 2))
        requests.append(Request(i, now, length, output_len, prompt, priority))
    return tuple(requests)


@st.composite
def cases(draw: Any, *, shares: bool) -> Case:
    """Draw a case. Prefixes are shared where the cache is ample, as what is evicted differs."""
    batch_size, block_size = draw(st.integers(1, 5)), draw(st.sampled_from([1, 2, 4, 8]))
    cuts = draw(st.sampled_from([True, True, True, False]))
    limit = draw(st.sampled_from([0, 0, 1, 2, 3, 6, 12])) if cuts else 0
    policy = VllmV1(
        draw(st.integers(batch_size, 24)) if cuts else MAX_LEN,
        limit,
        scheduler_reserve_full_isl=draw(st.booleans()),
        enable_chunked_prefill=cuts,
        long_prefill_token_threshold_adaptive=bool(limit) and draw(st.booleans()),
        max_num_active_seqs=draw(st.none() | st.integers(1, batch_size)),
        prefill_schedule_interval=draw(st.sampled_from([1, 1, 2, 3])),
    )
    requests = draw(queues(shares=shares))
    watermark = draw(st.sampled_from([0, 0, 1, 2]))
    spare = 400 if shares else watermark + draw(st.sampled_from([0, 0, 1, 3, 8, 100]))
    sizes: dict[str, Any] = {"batch_size": batch_size, "block_size": block_size}
    sizes["queue_order"] = draw(st.sampled_from(["fcfs", "priority"]))
    found = case(policy, requests, spare, shares_prefixes=shares, **sizes)
    # A share that is `watermark` blocks of the lab's cache, and of vLLM's, which has one more.
    share = (watermark + 0.9) / (found.engine.num_blocks + 1) if watermark else 0.0
    engine = replace(found.engine, policy=replace(policy, watermark=share))
    return replace(found, engine=engine)


@pytest.mark.parametrize("shares", [False, True], ids=["scarce", "prefixes"])
def test_vllm_v1_takes_the_tokens_that_vllm_does(shares):
    from vllm.v1.core.sched.scheduler import Scheduler

    @settings(max_examples=NUM_CASES, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(tried=cases(shares=shares))
    def check(tried: Case) -> None:
        of_policy = {name: getattr(tried.policy, name) for name in FIELDS}
        workers = FakeWorkers(make_scheduler(Scheduler, tried.engine, of_policy, {}))
        interval = tried.policy.prefill_schedule_interval
        workers.serve(tried, partial(is_between, interval))
        assert lab_steps(tried) == workers.steps

    check()


def is_between(interval: int, number: int) -> bool:
    """Return whether prompts wait in a step, as vLLM's data-parallel engine decides."""
    return number % interval != 0
