"""Batches made while the one before runs: the same schedule, and every token where it belongs."""

from __future__ import annotations

from every_policy import MAX_LEN, POLICIES
from helpers import ScriptedExecutor, expect, requests_of, rows, scheduler_for
from hypothesis import given, settings
from hypothesis import strategies as st

from sarathi_lab.engine.ledger import Ledger
from sarathi_lab.engine.loop import run_engine
from sarathi_lab.policy import Orca, SarathiServe, VllmV1

# The others schedule by times, which differ: delays, and what the zoo's rules rank by.
TIMELESS = []
for name, policy in POLICIES.items():
    module = type(policy).__module__
    is_served = module.startswith("sarathi_lab.policy.") and ".zoo." not in module
    if is_served and "delay" not in name:
        TIMELESS.append(policy)
SAME = [policy for policy in TIMELESS if not policy.leaves_with_output]
LATER = [policy for policy in TIMELESS if policy.leaves_with_output]
LENGTHS = st.lists(st.tuples(st.integers(1, 24), st.integers(1, 16)), min_size=1, max_size=10)


def served(requests, policy, num_blocks, *, overlapped):
    scheduler = scheduler_for(policy, num_blocks=num_blocks, max_model_len=MAX_LEN)
    executor = ScriptedExecutor(capacity=2 if overlapped else 1, feeds_tokens=overlapped)
    ledger = Ledger()
    run_engine(requests, scheduler, executor, ledger)
    return executor, ledger, scheduler


@settings(max_examples=60, deadline=None)
@given(policy=st.sampled_from(SAME), lengths=LENGTHS, num_blocks=st.integers(11, 30))
def test_the_schedule_is_the_same(policy, lengths, num_blocks):
    """Preemptions included: with few blocks a sequence may be evicted while its newest token is
    still on the device.
    """
    requests = requests_of(*lengths)
    one, one_ledger, _ = served(requests, policy, num_blocks, overlapped=False)
    two, two_ledger, _ = served(requests, policy, num_blocks, overlapped=True)
    assert one.schedule == two.schedule
    assert one_ledger.iterations().equals(two_ledger.iterations())
    assert tokens_by_request(one_ledger) == tokens_by_request(two_ledger) == expected(lengths)


@settings(max_examples=20, deadline=None)
@given(policy=st.sampled_from(LATER), lengths=LENGTHS, num_blocks=st.integers(11, 30))
def test_where_sequences_leave_with_their_last_token_all_tokens_are_there(
    policy, lengths, num_blocks
):
    _, ledger, scheduler = served(requests_of(*lengths), policy, num_blocks, overlapped=True)
    assert tokens_by_request(ledger) == expected(lengths)
    assert scheduler.blocks.num_free == num_blocks
    assert [scheduler.has_work, len(scheduler.ahead), len(scheduler.awaited)] == [False, 0, 0]


def test_vllm_frees_a_place_when_the_last_token_is_back():
    """As its AsyncScheduler does: the third request waits for an iteration in which there is a
    place already, but not for the scheduler.
    """
    lengths = (2, 1), (2, 3), (2, 1)
    at_once = "0:0+2 1:0+2 | 1:2+1 2:0+2 | 1:3+1"
    with_output = "0:0+2 1:0+2 | 1:2+1 | 1:3+1 2:0+2"
    expect_overlapped(SarathiServe(chunk=8), lengths, at_once, batch_size=2)
    expect_overlapped(VllmV1(8), lengths, with_output, batch_size=2)
    expect(VllmV1(8), "2+1 2+3 2+1", at_once, batch_size=2)


def test_vllm_frees_blocks_when_the_last_token_is_back():
    lengths = (2, 3), (3, 1), (3, 1)
    sizes = {"num_blocks": 7, "block_size": 1}
    at_once = "0:0+2 1:0+3 | 0:2+1 2:0+3 | 0:3+1"
    expect_overlapped(SarathiServe(chunk=8, watermark=0.0), lengths, at_once, **sizes)
    expect_overlapped(VllmV1(8), lengths, "0:0+2 1:0+3 | 0:2+1 | 0:3+1 2:0+3", **sizes)


def test_vllm_evicts_a_sequence_whose_last_token_is_on_its_way():
    """It needs its blocks no more, and is not admitted again."""
    lengths, sizes = ((2, 3), (3, 1)), {"num_blocks": 5, "block_size": 1}
    batches = "0:0+2 1:0+3 | 0:2+1 | 0:3+1"
    scheduler, ledger = expect_overlapped(VllmV1(8), lengths, batches, **sizes)
    assert scheduler.num_preemptions == 1
    assert tokens_by_request(ledger) == expected(lengths)
    assert ledger.requests().token_times.map(len).tolist() == [3, 1]


def expect_overlapped(policy, lengths, batches, **sizes):
    """Check the batches, as `expect` reads them, with two in flight."""
    scheduler = scheduler_for(policy, max_model_len=MAX_LEN, **sizes)
    executor, ledger = ScriptedExecutor(capacity=2, feeds_tokens=True), Ledger()
    run_engine(requests_of(*lengths), scheduler, executor, ledger)
    assert executor.schedule == rows(batches)
    return scheduler, ledger


def tokens_by_request(ledger):
    return ledger.requests().output_token_ids.tolist()


def expected(lengths):
    return [[1000 * i + j for j in range(output_len)] for i, (_, output_len) in enumerate(lengths)]


def test_a_request_that_comes_during_a_batch_waits_for_the_one_already_made():
    """The price of making batches ahead: one iteration of delay for what arrives in between."""
    requests = requests_of((4, 6), (4, 2), arrivals=[0.0, 0.5])
    one, _, _ = served(requests, Orca(), 30, overlapped=False)
    two, _, _ = served(requests, Orca(), 30, overlapped=True)
    assert [any(row[0] == 1 for row in rows) for rows in one.schedule].index(True) == 1
    assert [any(row[0] == 1 for row in rows) for rows in two.schedule].index(True) == 2
