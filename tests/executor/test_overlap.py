"""Batches made while the one before runs: the same schedule, and every token where it belongs."""

from __future__ import annotations

from every_policy import MAX_LEN, POLICIES
from helpers import ScriptedExecutor, requests_of, scheduler_for
from hypothesis import given, settings
from hypothesis import strategies as st

from sarathi_lab.engine.ledger import Ledger
from sarathi_lab.engine.loop import run_engine
from sarathi_lab.policy import (
    Orca,
)

# The others schedule by times, which differ.
TIMELESS = [
    policy
    for name, policy in POLICIES.items()
    if type(policy).__module__.startswith("sarathi_lab.policy") and "delay" not in name
]


def served(requests, policy, num_blocks, *, overlapped):
    scheduler = scheduler_for(policy, num_blocks=num_blocks, max_model_len=MAX_LEN)
    executor = ScriptedExecutor(capacity=2 if overlapped else 1, feeds_tokens=overlapped)
    ledger = Ledger()
    run_engine(requests, scheduler, executor, ledger)
    return executor, ledger, scheduler


@settings(max_examples=60, deadline=None)
@given(
    policy=st.sampled_from(TIMELESS),
    lengths=st.lists(st.tuples(st.integers(1, 24), st.integers(1, 16)), min_size=1, max_size=10),
    num_blocks=st.integers(11, 30),
)
def test_the_schedule_is_the_same(policy, lengths, num_blocks):
    """Preemptions included: with few blocks a sequence may be evicted while its newest token is
    still on the device.
    """
    requests = requests_of(*lengths)
    one, one_ledger, _ = served(requests, policy, num_blocks, overlapped=False)
    two, two_ledger, _ = served(requests, policy, num_blocks, overlapped=True)
    assert one.schedule == two.schedule
    assert one_ledger.iterations().equals(two_ledger.iterations())
    tokens = two_ledger.requests().output_token_ids.tolist()
    assert tokens == [
        [1000 * i + j for j in range(output_len)] for i, (_, output_len) in enumerate(lengths)
    ]
    assert one_ledger.requests().output_token_ids.tolist() == tokens


def test_a_request_that_comes_during_a_batch_waits_for_the_one_already_made():
    """The price of making batches ahead: one iteration of delay for what arrives in between."""
    requests = requests_of((4, 6), (4, 2), arrivals=[0.0, 0.5])
    one, _, _ = served(requests, Orca(), 30, overlapped=False)
    two, _, _ = served(requests, Orca(), 30, overlapped=True)
    assert [any(row[0] == 1 for row in rows) for rows in one.schedule].index(True) == 1
    assert [any(row[0] == 1 for row in rows) for rows in two.schedule].index(True) == 2
