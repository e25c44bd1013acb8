"""Clusters: what holds of any run of several instances, and schedules worked out by hand."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

import pandas as pd
import pytest
from helpers import requests_of
from hypothesis import given, settings
from hypothesis import strategies as st

from sarathi_lab.config.instantiate import load_option
from sarathi_lab.engine.block_manager import BlockManager
from sarathi_lab.engine.config import EngineConfig
from sarathi_lab.engine.ledger import Ledger
from sarathi_lab.engine.loop import run_engine, serve
from sarathi_lab.engine.request import Request
from sarathi_lab.engine.scheduler import Scheduler
from sarathi_lab.executor.simulated.backend import SimulatedBackend
from sarathi_lab.executor.simulated.executor import SimulatedExecutor
from sarathi_lab.extensions.cluster import Disaggregated, Replicas, Several
from sarathi_lab.extensions.cluster.cluster import Cluster, Link
from sarathi_lab.extensions.cluster.routers import ROUTERS
from sarathi_lab.policy import Orca, SarathiServe, VllmV1

BLOCK_SIZE, NUM_BLOCKS = 4, 16
SIZES = {"batch_size": 3, "num_blocks": NUM_BLOCKS, "block_size": BLOCK_SIZE}
LINK = Link(bytes_per_second=8.0, latency=0.25, bytes_per_token=2)
POLICIES = {"vllm": VllmV1(max_num_batched_tokens=8), "sarathi_serve": SarathiServe(chunk=8)}
LENGTHS = st.lists(
    st.tuples(st.floats(0, 20), st.integers(1, 30), st.integers(1, 8)), min_size=1, max_size=12
)


def requests_at(wished: Sequence[tuple[float, int, int]]) -> list[Request]:
    return [Request(i, *wish) for i, wish in enumerate(wished)]


def seconds(batch) -> float:
    return 1.0 + 0.125 * batch.num_tokens


def ran(requests, topology: Several, policy) -> tuple[Ledger, Cluster]:
    def make(own) -> Scheduler:
        return Scheduler(own, BlockManager(NUM_BLOCKS, BLOCK_SIZE), batch_size=3, max_model_len=40)

    executor = topology.executor(lambda: SimulatedExecutor(seconds), LINK)
    cluster, ledger = topology.scheduler(policy, make, executor), Ledger()
    run_engine(requests, cluster, executor, ledger)
    return ledger, cluster


@settings(max_examples=60, deadline=None)
@given(
    LENGTHS,
    st.sampled_from(list(POLICIES)),
    st.sampled_from(["round_robin", "least_loaded"]),
    st.tuples(st.integers(1, 3), st.integers(0, 3)),
)
def test_each_request_is_served_once_and_its_cache_moves_once(wished, policy, router, sizes):
    num_prefill, num_decode = sizes
    topology: Several = Replicas(num=num_prefill, router=router)
    if num_decode:
        topology = Disaggregated(prefill=num_prefill, decode=num_decode, router=router)
    ledger, cluster = ran(requests_at(wished), topology, POLICIES[policy])
    requests, iterations = ledger.requests(), ledger.iterations()
    assert list(requests.request_id) == list(range(len(wished)))
    assert [len(times) for times in requests.token_times] == [d for _, _, d in wished]
    assert all(times == sorted(times) for times in requests.token_times)
    assert (requests.first_scheduled_time >= requests.arrival_time).all()
    assert iterations.end.is_monotonic_increasing
    assert iterations.num_emits.sum() == sum(d for _, _, d in wished)
    own = iterations.groupby("instance") if "instance" in iterations else [(0, iterations)]
    assert all((rows.start[1:].values >= rows.end[:-1].values).all() for _, rows in own)
    assert all(one.blocks.num_used == 0 and not one.has_work for one in cluster.schedulers)
    check_transfers(cluster, wished, num_prefill if num_decode else None)


def check_transfers(cluster, wished, num_prefill: int | None) -> None:
    """Whoever has a second token has moved with its whole prompt, in time, one at a time."""
    moves = cluster.transfers
    due = {i: p for i, (_, p, d) in enumerate(wished) if d > 1} if num_prefill else {}
    assert Counter(move.request_id for move in moves) == Counter(due.keys())
    assert sum(move.num_bytes for move in moves) == 2 * sum(due.values())
    for move in moves:
        assert move.num_tokens == due[move.request_id]
        assert move.source < num_prefill <= move.target
        assert move.end - move.start == pytest.approx(LINK.seconds(move.num_tokens))
        assert move.start >= move.requested
    for place in range(len(cluster.schedulers)):
        spans = sorted((m.start, m.end) for m in moves if place in (m.source, m.target))
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))


@settings(max_examples=40, deadline=None)
@given(LENGTHS, st.sampled_from(list(POLICIES)))
def test_one_replica_gives_what_one_engine_gives(wished, policy):
    engine = EngineConfig(POLICIES[policy], max_model_len=40, **SIZES)
    alone = serve(requests_at(wished), engine, SimulatedExecutor(seconds))
    ledger, _ = ran(requests_at(wished), Replicas(num=1), POLICIES[policy])
    pd.testing.assert_frame_equal(ledger.iterations(), alone.iterations(), check_exact=True)
    pd.testing.assert_frame_equal(ledger.requests(), alone.requests(), check_exact=True)


def test_a_sequence_moves_at_its_first_token_and_decodes_elsewhere():
    requests = requests_of((8, 3), (6, 1), (4, 2))
    ledger, cluster = ran(requests, Disaggregated(), POLICIES["vllm"])
    rows = ledger.iterations()[["instance", "start", "end", "num_prefill_tokens"]]
    # The first prompt is computed in 2 s and sent in 2.25, meanwhile the other two, of which one
    # is done; the second transfer waits for the link.
    assert rows.values.tolist() == [
        [0, 0.0, 2.0, 8],
        [0, 2.0, 4.0, 8],
        [0, 4.0, 5.25, 2],
        [1, 4.25, 5.375, 0],
        [1, 5.375, 6.5, 0],
        [1, 6.5, 7.625, 0],
    ]
    moves = [(m.request_id, m.requested, m.start, m.end) for m in cluster.transfers]
    assert moves == [(0, 2.0, 2.0, 4.25), (2, 5.25, 5.25, 6.5)]


def test_layers_with_a_window_send_the_newest_tokens_alone():
    spec = load_option("model", "gemma-3-12b")
    link = Disaggregated().link_between(SimulatedBackend(load_option("hardware", "h100")), spec)
    window = spec.layers.window
    assert link.num_bytes(window.size) == window.size * spec.kv_bytes_per_token(2)
    beyond = link.num_bytes(window.size + 1000) - link.num_bytes(window.size)
    assert beyond == 1000 * spec.cache_bytes_per_token(2) < 1000 * spec.kv_bytes_per_token(2)


def test_chunks_of_instances_are_for_policies_that_cut_prompts():
    topology = Disaggregated(prefill_chunk=32)
    assert [one.budget for one in topology.policies(POLICIES["vllm"])] == [32, 8]
    assert topology.policies(Orca()) == [Orca()] * 2


def test_prompts_wait_while_no_decode_engine_has_room():
    """Each prompt takes 7 of 16 blocks, so that a third one has no place."""
    requests = requests_of((27, 6), (27, 6), (27, 6))
    ledger, cluster = ran(requests, Disaggregated(), VllmV1(max_num_batched_tokens=32))
    last = cluster.transfers[-1]
    first_done = ledger.requests().finish_time.min()
    assert last.requested == first_done > ledger.requests().first_token_time.max()


# -- routers ---------------------------------------------------------------------------------------


def scheduler(*prompts: int) -> Scheduler:
    blocks = BlockManager(64, BLOCK_SIZE, shares_prefixes=True)
    own = Scheduler(VllmV1(max_num_batched_tokens=512), blocks, batch_size=8, max_model_len=1024)
    for i, text in enumerate(prompts):
        own.add(Request(i, 0.0, 16, 2, [text] * 16))
    return own


def test_routers_choose_by_turn_by_load_and_by_what_is_cached():
    idle, busy = scheduler(), scheduler(1, 2, 3)
    asked = Request(9, 0.0, 16, 2, [2] * 16)
    turns = ROUTERS["round_robin"]()
    assert [turns([busy, idle], asked) for _ in range(3)] == [0, 1, 0]
    assert ROUTERS["least_loaded"]()([busy, idle], asked) == 1
    while busy.has_work:
        run(busy)
    choose = ROUTERS["prefix_aware"]()
    assert choose([idle, busy], asked) == 1
    assert choose([idle, busy], Request(9, 0.0, 16, 2, [7] * 16)) == 0
    for text in range(20, 85):
        busy.add(Request(text, 0.0, 16, 2, [text] * 16))
    assert choose([idle, busy], asked) == 0  # out of balance: by more than 64 requests


def run(own: Scheduler) -> None:
    executor = SimulatedExecutor(seconds)
    executor.submit(own.schedule(0.0))
    own.update(executor.collect())
