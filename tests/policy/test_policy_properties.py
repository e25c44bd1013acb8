"""What every policy must keep on random queues (POLICIES' invariants), whatever the executor's
capacity.
"""

from __future__ import annotations

import pytest
from every_policy import MAX_LEN, POLICIES
from helpers import ScriptedExecutor, scheduler_for
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from integrity import check_integrity

from sarathi_lab.engine.ledger import Ledger
from sarathi_lab.engine.loop import run_engine
from sarathi_lab.engine.request import Request, SequenceState
from sarathi_lab.engine.scheduler import Scheduler
from sarathi_lab.policy import SarathiServe

# Those that let a later request pass an earlier one that has no room, or is long.
OUT_OF_ORDER = (
    "trtllm",
    "transformers",
    "ascend_v0_9",
    "ascend_long",
    "ascend_phases",
    "vllm_v0_chunked_partial",
)
IN_ORDER = [name for name in POLICIES if not name.startswith(OUT_OF_ORDER)]

lengths = st.tuples(st.integers(1, 24), st.integers(1, MAX_LEN - 24))
queues = st.lists(st.tuples(lengths, st.floats(0, 30)), min_size=1, max_size=12)


class Checker:
    """A recorder that checks every iteration, and keeps what finished and their sums."""

    def __init__(self, scheduler: Scheduler, budget: int | None, whole_if_no_decodes: bool) -> None:
        self.scheduler = scheduler
        self.budget = budget
        self.whole_if_no_decodes = whole_if_no_decodes
        self.finished: list[SequenceState] = []
        self.num_iterations = self.num_tokens = self.num_emits = 0

    def record(self, result, finished):
        scheduler = self.scheduler
        self.num_iterations += 1
        assert self.num_iterations < 5000, "sequences evict one another and none gets done"
        self.num_tokens += result.batch.num_tokens
        self.num_emits += result.batch.num_emits
        chunks = result.batch.chunks
        ids = [chunk.sequence.request.request_id for chunk in chunks]
        assert len(ids) == len(set(ids)), "a sequence twice in one batch"
        assert len(chunks) <= scheduler.batch_size
        assert all(chunk.num_tokens > 0 for chunk in chunks)
        exempt = self.whole_if_no_decodes and result.batch.num_decode_tokens == 0
        if self.budget is not None and not exempt:
            num_decodes = result.batch.num_decode_tokens
            budget = self.budget + (num_decodes if scheduler.policy.decodes_on_top else 0)
            assert result.batch.num_tokens <= max(budget, num_decodes)
        check_integrity(scheduler.blocks, scheduler.running, scheduler.swapped)
        assert all(not sequence.block_ids for sequence in [*scheduler.waiting, *scheduler.swapped])
        self.finished += finished


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    executor=st.sampled_from([(1, False), (3, False), (2, True)]),  # capacity, feeds_tokens
    queue=queues,
    num_blocks=st.integers(11, 40),
    num_host_blocks=st.integers(0, 20),
    queue_order=st.sampled_from(["fcfs", "priority", "shortest"]),
)
def test_invariants(name, executor, queue, num_blocks, num_host_blocks, queue_order):
    policy = POLICIES[name]
    capacity, feeds_tokens = executor
    requests = [Request(i, time, p, d, priority=i % 3) for i, ((p, d), time) in enumerate(queue)]
    scheduler = scheduler_for(
        policy,
        num_blocks=num_blocks,
        num_host_blocks=num_host_blocks,
        preemption="swap" if num_host_blocks else "recompute",
        queue_order=queue_order,
        max_model_len=MAX_LEN,
        num_micro_batches=1 if feeds_tokens else capacity,
        batch_size=4,
    )
    checker = Checker(scheduler, policy.budget, policy.budget is not None and not policy.is_capped)
    executor = ScriptedExecutor(
        lambda batch: 0.5 + 0.1 * batch.num_tokens, capacity, feeds_tokens=feeds_tokens
    )

    run_engine(requests, scheduler, executor, checker)

    assert sorted(one.request.request_id for one in checker.finished) == list(range(len(requests)))
    for one in checker.finished:
        assert len(one.output_token_ids) == len(one.token_times) == one.request.output_len
        assert one.token_times == sorted(one.token_times)
        assert one.first_scheduled_time >= one.request.arrival_time
    assert scheduler.blocks.num_free == num_blocks
    assert not scheduler.running
    assert not scheduler.waiting
    assert not scheduler.swapped
    assert checker.num_emits == sum(request.output_len for request in requests)
    if not scheduler.num_preemptions:
        assert checker.num_tokens == sum(request.total_len - 1 for request in requests)


@pytest.mark.parametrize("name", IN_ORDER)
@settings(max_examples=10, deadline=None)
@given(queue=queues)
def test_requests_are_first_scheduled_in_order_of_arrival(name, queue):
    requests = sorted(
        (Request(i, time, p, d) for i, ((p, d), time) in enumerate(queue)),
        key=lambda request: request.arrival_time,
    )
    scheduler = scheduler_for(POLICIES[name], num_blocks=25, max_model_len=MAX_LEN)
    checker = Checker(scheduler, None, False)
    run_engine(requests, scheduler, ScriptedExecutor(), checker)
    started = {one.request.request_id: one.first_scheduled_time for one in checker.finished}
    times = [started[request.request_id] for request in requests]
    assert times == sorted(times)


def test_sequences_in_flight_elsewhere_do_not_drive_an_older_one_out():
    """Found by the test above: with three batches in flight, each sequence gave way to the next,
    for ever.
    """
    lengths = [(7, 8), (23, 16), (20, 11), (19, 13), (22, 9), (13, 1)]
    arrivals = [10.6, 0.0, 0.0, 2.9, 0.0, 5.7]
    requests = [
        Request(i, time, p, d)
        for i, ((p, d), time) in enumerate(zip(lengths, arrivals, strict=True))
    ]
    policy = POLICIES["sarathi_serve_chunk"]
    scheduler = scheduler_for(policy, num_blocks=11, max_model_len=MAX_LEN, num_micro_batches=3)
    checker = Checker(scheduler, policy.chunk, False)
    run_engine(
        requests,
        scheduler,
        ScriptedExecutor(lambda batch: 0.5 + 0.1 * batch.num_tokens, 3),
        checker,
    )
    assert len(checker.finished) == len(requests)


def test_memory_pressure_preempts_and_loses_nothing():
    requests = [Request(i, 0.0, 12, 16) for i in range(8)]
    scheduler = scheduler_for(
        SarathiServe(chunk=16, watermark=0.0), num_blocks=12, max_model_len=28
    )
    ledger = Ledger()
    run_engine(requests, scheduler, ScriptedExecutor(), ledger)
    table = ledger.requests()
    assert scheduler.num_preemptions > 0
    assert (
        table.num_preemptions.sum()
        == scheduler.num_preemptions
        == ledger.iterations().num_preemptions.sum()
    )
    assert (
        table.output_len.tolist() == [len(tokens) for tokens in table.output_token_ids] == [16] * 8
    )


def test_a_sequence_in_the_batch_is_never_evicted_for_a_later_one():
    """Two decodes need the last block; the older takes it and the newer must give way, not the
    batch's own.
    """
    scheduler = scheduler_for(
        SarathiServe(chunk=16, watermark=0.0), num_blocks=4, block_size=4, max_model_len=12
    )
    executor = ScriptedExecutor()
    run_engine([Request(i, 0.0, 8, 4) for i in range(2)], scheduler, executor, Ledger())
    assert executor.schedule[1] == [(0, 8, 1)]
