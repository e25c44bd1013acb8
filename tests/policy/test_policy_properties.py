"""In which order policies begin requests, and what gives way where the cache is short."""

from __future__ import annotations

import pytest
from every_policy import MAX_LEN, POLICIES
from helpers import ScriptedExecutor, scheduler_for
from hypothesis import given, settings
from hypothesis import strategies as st
from shadow import Checker

from sarathi_lab.engine.ledger import Ledger
from sarathi_lab.engine.loop import run_engine
from sarathi_lab.engine.request import Request
from sarathi_lab.policy import SarathiServe

# Those that let a later request pass an earlier one that has no room, or is long.
OUT_OF_ORDER = (
    "trtllm",
    "transformers",
    "ascend_v0_9",
    "ascend_long",
    "ascend_phases",
    "vllm_v0_chunked_partial",
    "niyama",
    "sliding_serve",
    "lprs",
)
IN_ORDER = [name for name in POLICIES if not name.startswith(OUT_OF_ORDER)]

lengths = st.tuples(st.integers(1, 24), st.integers(1, MAX_LEN - 24))
queues = st.lists(st.tuples(lengths, st.floats(0, 30)), min_size=1, max_size=12)


@pytest.mark.parametrize("name", IN_ORDER)
@settings(max_examples=10, deadline=None)
@given(queue=queues)
def test_requests_are_first_scheduled_in_order_of_arrival(name, queue):
    requests = sorted(
        (Request(i, time, p, d) for i, ((p, d), time) in enumerate(queue)),
        key=lambda request: request.arrival_time,
    )
    scheduler = scheduler_for(POLICIES[name], num_blocks=25, max_model_len=MAX_LEN)
    checker = Checker(scheduler)
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
    checker = Checker(scheduler)
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
