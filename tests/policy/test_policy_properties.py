"""Properties of all policies: the order in which requests begin, and refused parameters."""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import product

import pytest
from every_policy import MAX_LEN, POLICIES
from helpers import ScriptedExecutor, scheduler_for
from hypothesis import given, settings
from hypothesis import strategies as st
from shadow import Checker

from sarathi_lab.config.errors import UserError
from sarathi_lab.engine.block_manager import BlockManager
from sarathi_lab.engine.loop import run_engine
from sarathi_lab.engine.request import Request, SequenceState
from sarathi_lab.engine.scheduler import Scheduler
from sarathi_lab.model.layers import CachedWindow, Window
from sarathi_lab.policy import SGLang

# Those that let a later request pass an earlier one that has no room, or is long.
OUT_OF_ORDER = (
    "trtllm",
    "transformers",
    "ascend_v0_9",
    "ascend_long",
    "vllm_v0_chunked_partial",
    "ranked",
    "niyama",
    "lprs",
    "cache_aware",
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


OF_CLASS = {type(policy): policy for policy in POLICIES.values()}


@pytest.mark.parametrize("policy", OF_CLASS.values(), ids=lambda policy: policy.name)
def test_every_field_refuses_wrong_types_and_sizes_by_its_name(policy):
    checked = ("reserve", "watermark", policy.budget_field)  # by every policy
    names = [one.name for one in fields(policy) if "check" in one.metadata or one.name in checked]
    for name, wrong in product(names, ("?", -1)):
        with pytest.raises(UserError, match=rf"\b{name}=(\?|-1)"):
            replace(policy, **{name: wrong}).validate(4, MAX_LEN)


@pytest.mark.parametrize("policy", OF_CLASS.values(), ids=lambda policy: policy.name)
def test_a_budget_leaves_a_full_batch_of_decodes_a_prompts_token(policy):
    # Without mixed chunks SGLang's prompts have iterations without decodes.
    whole_or_on_top = ("lmdeploy", "ascend_v0_9", "ascend", "sglang")
    if policy.budget_field and policy.name not in whole_or_on_top:
        with pytest.raises(UserError, match=f"{policy.budget_field}=3 is smaller than the 3"):
            policy.with_budget(3).validate(4, MAX_LEN)


def test_sglangs_chunk_holds_a_full_batch_of_decodes_where_they_ride_along():
    SGLang(chunked_prefill_size=3).validate(4, MAX_LEN)
    with pytest.raises(UserError, match="chunked_prefill_size=3 is smaller than the 3"):
        SGLang(chunked_prefill_size=3, enable_mixed_chunk=True).validate(4, MAX_LEN)


pools = st.builds(
    CachedWindow,
    st.builds(Window, st.just(1), st.integers(2, MAX_LEN)),
    st.just(1.0),
    pool=st.sampled_from((0.3, 0.7, 0.8, 1.0)),
)


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(list(POLICIES)),
    queue=queues,
    window=pools,
    num_blocks=st.integers(8, 40),
    shares_prefixes=st.booleans(),
)
def test_a_request_fits_the_pool_of_windows_or_is_refused(
    name, queue, window, num_blocks, shares_prefixes
):
    requests = [Request(i, 0.0, p, d) for i, ((p, d), _) in enumerate(queue)]
    blocks = BlockManager(num_blocks, 4, shares_prefixes=shares_prefixes, window=window)
    scheduler = Scheduler(POLICIES[name], blocks, batch_size=4, max_model_len=MAX_LEN)
    served = []
    for request in requests:
        fits_alone = blocks.room_for(request.total_len) <= num_blocks
        try:
            scheduler.check_fits(request)
        except UserError:
            # A policy may reserve more than the request's tokens.
            assert not fits_alone or POLICIES[name].reserve == "max_model_len"
        else:
            assert fits_alone
            served.append(request)
    checker = Checker(scheduler)
    run_engine(served, scheduler, ScriptedExecutor(), checker)
    assert len(checker.finished) == len(served)
    assert blocks.window_pool.num_free == blocks.window_pool.num_blocks


@given(window=pools, num_tokens=st.integers(1, MAX_LEN))
def test_a_cache_with_room_for_a_sequence_holds_it_and_a_smaller_one_does_not(window, num_tokens):
    num_blocks = BlockManager(0, 4, window=window).room_for(num_tokens)
    assert BlockManager(num_blocks, 4, window=window).can_hold(num_tokens)
    assert not BlockManager(num_blocks - 1, 4, window=window).can_hold(num_tokens)


@given(window=pools, num_tokens=st.integers(1, MAX_LEN), num_blocks=st.integers(20, 40))
def test_the_slots_of_a_sequence_are_those_of_both_pools(window, num_tokens, num_blocks):
    blocks = BlockManager(num_blocks, 4, window=window)
    first, second = (SequenceState(Request(i, 0.0, num_tokens, 1), order=i) for i in range(2))
    blocks.admit(first, num_tokens)
    num_slots = blocks.num_slots(second)
    assert blocks.can_hold(num_slots)
    assert not blocks.can_hold(num_slots + 1)


def test_policies_choose_no_more_sequences_than_windows_have_room():
    """A pool of 12 blocks has room for two windows of 20 tokens, which touch 6 blocks each."""
    window = CachedWindow(Window(1, 20), 1.0, pool=0.3)
    blocks = BlockManager(40, 4, window=window)
    scheduler = Scheduler(SGLang(), blocks, batch_size=4, max_model_len=MAX_LEN)
    for number in range(4):
        scheduler.add(Request(number, 0.0, 8, 20))
    batch = scheduler.schedule(0.0)
    assert len(batch) == 2
    reserving = Scheduler(POLICIES["request_level"], blocks, batch_size=4, max_model_len=MAX_LEN)
    for number in range(4):
        reserving.add(Request(number, 0.0, 8, 20))
    assert len(reserving.with_room(4)) == 1
