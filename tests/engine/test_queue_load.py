"""Long queues, one giant among dwarfs, and a cache that is never enough: under every policy and
every order.
"""

from __future__ import annotations

import gc
import sys
from collections import Counter
from typing import get_args

import pytest
from every_policy import MAX_LEN, POLICIES
from helpers import scheduler_for

from sarathi_lab.engine.executor import StepResult
from sarathi_lab.engine.loop import run_engine
from sarathi_lab.engine.queues import QueueOrder
from sarathi_lab.engine.request import Request, SequenceState
from sarathi_lab.engine.scheduler import Scheduler
from sarathi_lab.executor.simulated.executor import SimulatedExecutor

ORDERS = get_args(QueueOrder)
EVICTING = ("sarathi_serve", "chunked_only", "splitfuse", "vllm_v1", "nano_vllm", "fastdeploy")


def order_of(name: str, turn: int) -> QueueOrder:
    """Each policy meets one order a test, in turns: the order is the queue's business."""
    return ORDERS[(list(POLICIES).index(name) + turn) % len(ORDERS)]


class Counts:
    """A recorder that keeps nothing but how often each request was done and each of its tokens
    came.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.finished: Counter[int] = Counter()
        self.num_tokens: Counter[int] = Counter()
        self.num_iterations = 0

    def record(self, result: StepResult, finished: list[SequenceState]) -> None:
        self.num_iterations += 1
        self.num_tokens.update(
            chunk.sequence.request.request_id for chunk in result.batch.chunks if chunk.emits_token
        )
        self.finished.update(sequence.request.request_id for sequence in finished)
        assert len(self.scheduler.running) <= self.scheduler.max_num_seqs


def served(name: str, requests: list[Request], queue_order: QueueOrder, **sizes) -> Counts:
    """Serve to the end, and see that nothing was lost, nothing came twice and nothing is left
    behind.
    """
    options = {"max_model_len": MAX_LEN, "queue_order": queue_order, "num_blocks": 2000, **sizes}
    scheduler = scheduler_for(POLICIES[name], **options)
    counts = Counts(scheduler)
    run_engine(requests, scheduler, SimulatedExecutor(lambda batch: 0.01), counts)
    assert counts.finished == Counter(request.request_id for request in requests)
    assert counts.num_tokens == {request.request_id: request.output_len for request in requests}
    assert not scheduler.has_work
    assert scheduler.blocks.num_used == 0
    return counts


@pytest.mark.parametrize(
    ("name", "queue_order"),
    [
        ("sarathi_serve", "priority"),
        ("prefill_first_delay", "fcfs"),
        ("vllm_v0_chunked_partial", "shortest"),
    ],
)
def test_five_thousand_requests_at_once(name, queue_order):
    before = num_sequences()
    counts = served(  # noqa: F841  # keeps the scheduler alive
        name, [Request(i, 0.0, 3, 1, priority=i % 7) for i in range(5000)], queue_order
    )
    assert num_sequences() == before  # the scheduler, which lives on in `counts`, holds on to none


def num_sequences() -> int:
    gc.collect()
    return sum(type(found) is SequenceState for found in gc.get_objects())


@pytest.mark.parametrize("name", POLICIES)
def test_a_cache_for_hardly_more_than_one_request(name):
    requests = [Request(i, 0.05 * i, 4 + i % 9, 1 + i % 23, priority=i % 3) for i in range(25)]
    counts = served(name, requests, order_of(name, 1), num_blocks=12)
    if name in EVICTING:
        assert counts.scheduler.num_preemptions > 0


# These look past requests with long prompts, up to LOOKAHEAD of them, or rank so many.
LOOKING_FURTHER = ("vllm_v0_chunked_partial", "ascend_long", "ranked_ratio", "niyama")


@pytest.mark.parametrize("name", ["sarathi", "sarathi_serve", "sglang", *LOOKING_FURTHER])
def test_five_times_the_requests_take_five_times_the_work(name):
    """Nothing that an iteration does grows with the queue, but the steps to a place in order."""
    few = 200 if name in LOOKING_FURTHER else 100
    assert num_calls(name, 5 * few) <= (5 + few / 150) * num_calls(name, few)


def num_calls(name: str, num_requests: int) -> int:
    """Calls of functions, in Python and C, while long and short requests that come at once are
    served.
    """
    requests = [
        Request(i, 0.0, 3 + 7 * (i % 10 > 0), 2, priority=i % 7) for i in range(num_requests)
    ]
    num_events = 0

    def count(*_: object) -> None:
        nonlocal num_events
        num_events += 1

    sys.setprofile(count)
    try:
        served(name, requests, order_of(name, 0))
    finally:
        sys.setprofile(None)
    return num_events
