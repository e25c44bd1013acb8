"""Replicas of an engine in lockstep, mixtures of experts, and hosts that schedule ahead."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from helpers import requests_of
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated import LINKED, SPEC, batch_of

from sarathi_lab.config.errors import UserError
from sarathi_lab.engine.config import EngineConfig
from sarathi_lab.engine.executor import Sizes
from sarathi_lab.engine.loop import serve
from sarathi_lab.engine.request import Batch
from sarathi_lab.executor.simulated.backend import SimulatedBackend
from sarathi_lab.executor.simulated.cost_model import make_cost_model
from sarathi_lab.executor.simulated.drawn_times import BatchShape
from sarathi_lab.executor.simulated.executor import SimulatedExecutor
from sarathi_lab.executor.simulated.hardware import Host
from sarathi_lab.extensions.cluster.lockstep import (
    Lockstep,
    LockstepBatch,
    LockstepReplicas,
    SharedExperts,
    iteration_time,
)
from sarathi_lab.extensions.cluster.routers import least_loaded
from sarathi_lab.policy import VllmV1

EXPERTS = replace(SPEC, num_experts=8, experts_per_token=2)
LENGTHS = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 8)), min_size=1, max_size=12)
SIZES = {"batch_size": 3, "num_blocks": 30, "block_size": 4}


@settings(max_examples=30, deadline=None)
@given(LENGTHS, st.integers(1, 3), st.booleans())
def test_every_request_is_served_once_and_no_token_twice(lengths, replicas, overlaps):
    executor = SimulatedExecutor(lambda batch: 1.0, Host("h", 0.0, overlaps=overlaps))
    ledger = serve(
        requests_of(*lengths),
        EngineConfig(VllmV1(max_num_batched_tokens=16), cluster=Lockstep(num=replicas), **SIZES),
        executor,
    )
    requests, iterations = ledger.requests(), ledger.iterations()
    assert list(requests.request_id) == list(range(len(lengths)))
    assert [len(times) for times in requests.token_times] == [d for _, d in lengths]
    assert iterations.num_emits.sum() == sum(d for _, d in lengths)
    assert (iterations.num_emits <= 3 * replicas).all()
    assert iterations.num_blocks_used.iloc[-1] == 0


def test_a_host_ahead_of_its_device_hides_what_is_shorter():
    def duration(device: float, host: Host) -> float:
        executor = SimulatedExecutor(lambda batch: device, host)
        engine = EngineConfig(VllmV1(max_num_batched_tokens=16), **SIZES)
        ledger = serve(requests_of((4, 10)), engine, executor)
        return float(ledger.iterations().end.max())

    serial = Host("serial", iteration=0.25, sequence=0.25)
    ahead = replace(serial, overlaps=True)
    assert duration(2.0, serial) == 10 * (2.0 + 0.5)
    assert duration(2.0, ahead) == 10 * 2.0 + 0.5
    assert duration(0.25, ahead) >= 10 * 0.5
    batch = batch_of(decodes=1)
    assert (serial.exposed(batch, 2.0), ahead.exposed(batch, 2.0)) == (0.5, 0.0)
    assert ahead.exposed(batch, 0.25) == 0.25

    seen = replace(ahead, visible=0.0625, visible_sequence=0.0625)
    assert duration(2.0, seen) == 10 * 2.0 + 9 * 0.125 + 0.5
    assert (seen.exposed(batch, 2.0), seen.exposed(batch, 0.25)) == (0.125, 0.25)


def test_replicas_wait_for_the_slowest_and_share_the_experts():
    cost = make_cost_model("analytic", EXPERTS, LINKED, 2)
    cost.experts = SharedExperts(cost.experts, Lockstep(num=2))
    parts = (batch_of(decodes=1), batch_of(chunk=200), Batch())
    alone = [cost.iteration_time(part) for part in parts]
    own = [
        time - cost.experts.seconds(part.num_tokens)
        for time, part in zip(alone, parts, strict=True)
    ]
    both = LockstepBatch.of(parts)
    assert both.num_tokens == 201
    expected = max(own) + cost.experts.of_all((1, 200, 0))
    assert iteration_time(cost, both) == pytest.approx(expected)
    assert sum(cost.operation_times(parts[1]).values()) == pytest.approx(alone[1])


def test_replicas_err_in_the_draws_of_the_cost_models_constants():
    sharing = Lockstep(num=2)
    hardware = replace(LINKED, uncertainty={"matmul": 0.1, "attention": 0.1})

    def duration(draw: int = 0, slower_shape: BatchShape | None = None) -> float:
        varied = SimulatedBackend(hardware, draw=draw, slower_shape=slower_shape)
        backend = sharing.backend(varied, EXPERTS)
        executor = backend.build(EXPERTS, None, Sizes(30, 4, 3))
        engine = EngineConfig(VllmV1(max_num_batched_tokens=16), cluster=sharing, **SIZES)
        return float(serve(requests_of((9, 4), (5, 3)), engine, executor).iterations().end.max())

    as_stated = duration()
    assert duration(draw=1) != as_stated
    assert duration(slower_shape="decodes") > as_stated
    assert duration(slower_shape="to-512") > as_stated
    assert duration(slower_shape="larger") == pytest.approx(
        as_stated
    )  # no batch has as many tokens


@given(st.integers(1, 500))
def test_a_mixture_reads_the_experts_that_are_chosen(tokens):
    share = EXPERTS.share_of_experts(tokens)
    assert EXPERTS.experts_per_token / EXPERTS.num_experts - 1e-9 <= share <= 1
    work = batch_of(decodes=tokens)
    dense = replace(EXPERTS, num_experts=0, experts_per_token=0)
    assert EXPERTS.weight_read_bytes(work, 2) <= EXPERTS.weight_bytes(2)
    ffn = 2 * sum(linear.num_params for linear in dense.layer_linears[2:])
    router = 2 * EXPERTS.layer_linears[2].num_params
    flops = EXPERTS.flops(work) - dense.flops(work)
    assert flops == tokens * (ffn * (EXPERTS.experts_per_token - 1) + router)


def test_replicas_that_replay_a_graph_compute_as_many_tokens_as_the_fullest():
    sharing = Lockstep(num=2, graph_tokens=256)
    for own, computed in (((3, 0), (8, 8)), ((250, 9), (256, 256)), ((257, 9), (257, 9))):
        assert tuple(sharing.computed(own)) == computed


def test_replicas_count_the_iterations_between_prompts_together():
    """The second replica is idle until iteration 2, and yet takes its next prompt in 3."""
    policy = VllmV1(max_num_batched_tokens=8, prefill_schedule_interval=3)
    engine = EngineConfig(policy, cluster=Lockstep(num=2), **SIZES)
    requests = requests_of(*[(8, 8)] * 4, arrivals=(0.0, 1.5, 2.5, 2.5))
    ledger = serve(requests, engine, SimulatedExecutor(lambda batch: 1.0))
    assert ledger.iterations().num_prefill_tokens.tolist()[:5] == [8, 0, 8, 7 + 7, 0]


def test_replicas_that_were_all_idle_count_anew():
    """Both take a prompt at 5 s, iteration 0 again: the last prompt waits for iteration 3, in
    which a decode leaves it 7 tokens.
    """
    policy = VllmV1(max_num_batched_tokens=8, prefill_schedule_interval=3)
    engine = EngineConfig(policy, cluster=Lockstep(num=2), **SIZES)
    requests = requests_of((8, 2), *[(8, 8)] * 3, arrivals=(0.0, 5.0, 5.0, 5.5))
    ledger = serve(requests, engine, SimulatedExecutor(lambda batch: 1.0))
    assert ledger.iterations().num_prefill_tokens.tolist()[:6] == [8, 0, 8 + 8, 0, 0, 8 - 1]


def test_waiting_for_the_slowest_replica_is_idle_time():
    scheduler = LockstepReplicas([SimpleNamespace(policy=None)], least_loaded)
    scheduler.waited = 2.0
    _, found = Lockstep(num=2).results(scheduler, {"busy_time": 3.0, "duration": 4.0}, 2)
    assert found["instance_idle_fraction"] == pytest.approx((2 * 1.0 + 2.0) / (2 * 4.0))


def test_only_a_mixture_is_shared():
    lockstep = Lockstep(num=3)
    backend = SimulatedBackend(LINKED)
    for spec, fix in ((SPEC, "use cluster=replicas"), (EXPERTS, "use a number that divides them")):
        with pytest.raises(UserError, match=fix):
            lockstep.backend(backend, spec)
    backend = SimulatedBackend(replace(LINKED, fp8_flops_per_second=7.0))
    peaks = Lockstep(num=4).backend(backend, EXPERTS).peaks()
    assert peaks.flops_per_second == 4 * LINKED.flops_per_second
    assert peaks.fp8_flops_per_second == 4 * 7.0


def test_experts_that_replicas_share_are_not_those_of_other_devices():
    """Cost models are kept between runs, such as those of a sweep over clusters."""
    alone = SimulatedBackend(LINKED)
    shared = Lockstep(num=4).backend(alone, EXPERTS)
    assert isinstance(shared.cost_of(EXPERTS).experts, SharedExperts)
    assert not isinstance(alone.cost_of(EXPERTS).experts, SharedExperts)
