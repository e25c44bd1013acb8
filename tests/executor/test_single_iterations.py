"""Single iterations on a GPU whose host takes a known time, which they must not contain."""

from __future__ import annotations

import copy

import numpy as np
import pytest
from virtual_gpu import executor_on_gpu

from sarathi_lab.engine.block_manager import BlockManager
from sarathi_lab.engine.compositions import make_batch, run_once
from sarathi_lab.engine.config import EngineConfig
from sarathi_lab.engine.loop import serve
from sarathi_lab.engine.request import Request
from sarathi_lab.engine.single_iteration import host_caution, single_iteration
from sarathi_lab.experiment import measured_iterations
from sarathi_lab.experiment.measured_cost import MeasuredCostModel
from sarathi_lab.model.spec import ModelSpec
from sarathi_lab.policy import Sarathi
from sarathi_lab.results.decode_cost import decode_iteration, measure_decode_cost
from sarathi_lab.results.metrics import graph_use_by_kind
from sarathi_lab.results.report import graph_use_lines

SPEC = ModelSpec("tiny", 2, 64, 2, 1, ffn_size=96, vocab_size=97, head_size=32)
SIZES = {"prefill_tokens": 13, "start": 5, "num_decodes": 4, "context": 9}
COMPOSITIONS = [
    {"prefill_tokens": 6, "start": 4},
    {"prefill_tokens": 6, "emits": True},
    {"num_decodes": 3, "context": 8},
    {"num_decodes": 1, "context": 1},
    {"prefill_tokens": 5, "num_decodes": 2, "context": 5},
]


def seconds_of(num_tokens):
    """A prompt's token takes 2 ms, and an iteration 5 ms."""
    return 5e-3 + 2e-3 * sum(num_tokens.values())


@pytest.mark.parametrize("sizes", COMPOSITIONS)
def test_the_hosts_time_is_hidden_behind_an_equal_iteration(sizes):
    executor = executor_on_gpu(3e-3, seconds_of)
    batch = make_batch(**sizes, blocks=BlockManager(64, 4))
    for chunk in batch.chunks:
        chunk.sequence.in_flight = False
    sequences = [chunk.sequence for chunk in batch.chunks]
    before = copy.deepcopy([(one.num_computed, one.output_token_ids) for one in sequences])
    expected = 5e-3 + 2e-3 * batch.num_tokens
    assert run_once(executor, batch).busy == pytest.approx(3e-3 + expected)  # on an idle device
    for _ in range(2):
        iteration = single_iteration(executor, batch)
        assert iteration.seconds == pytest.approx(expected)
        assert iteration.launching == iteration.host_share == 0.0
    after = [(one.num_computed, one.output_token_ids) for one in sequences]
    assert after == before
    assert not any(one.in_flight for one in sequences)
    assert executor.num_in_flight == 0


def test_a_host_that_is_slower_than_the_device_is_part_of_the_time_and_said_to_be():
    executor = executor_on_gpu(6e-3, lambda num_tokens: 5e-3)
    batch = make_batch(num_decodes=3, context=8, blocks=BlockManager(64, 4))
    iteration = single_iteration(executor, batch)
    assert iteration.seconds == pytest.approx(6e-3)
    assert iteration.launching == pytest.approx(1e-3)
    (caution,) = host_caution("this", iteration.host_share)
    assert "up to 17% of an iteration is the host's work" in caution
    assert host_caution("this", 0.05) == []


def test_without_a_batch_in_flight_beside_it_the_time_has_the_host_and_says_how_much():
    executor = executor_on_gpu(3e-3, lambda num_tokens: 9e-3, is_async=False)
    batch = make_batch(num_decodes=3, context=8, blocks=BlockManager(64, 4))
    iteration = single_iteration(executor, batch)
    assert iteration.seconds == pytest.approx(12e-3)
    assert iteration.host_share == pytest.approx(0.25)


def test_users_of_single_iterations_have_the_devices_times():
    executor = executor_on_gpu(3e-3, seconds_of)
    cost = measure_decode_cost(executor, SIZES, num_blocks=64, block_size=4, seconds=0.0)
    assert cost.alone == pytest.approx((5e-3 + 4 * 2e-3) / 4)
    assert cost.marginal == pytest.approx(2e-3)
    assert cost.host_share == 0.0
    alone = decode_iteration(executor, 4, 9, num_blocks=64, block_size=4)
    assert alone == pytest.approx(5e-3 + 4 * 2e-3)
    model = MeasuredCostModel(executor, SPEC)
    assert model.iteration_time(make_batch(**SIZES)) == pytest.approx(5e-3 + 17 * 2e-3)
    (row,) = model.rows("tiny", 2)
    assert row["host_share"] == 0.0
    assert row["timing"] == "graph"


def test_how_each_kind_of_iteration_was_replayed_is_recorded_and_stated():
    executor = executor_on_gpu(1e-3, seconds_of)

    def graph_use(num_tokens):
        if max(num_tokens.values()) == 1:
            return "full"
        return "piecewise" if sum(num_tokens.values()) <= 6 else "none"

    executor.workers.graph_use = graph_use
    requests = [Request(i, 0.0, 15, 4, np.zeros(15, dtype=np.int32)) for i in range(3)]
    engine = EngineConfig(Sarathi(chunk=6), 3, 64, 4, 19)
    iterations = serve(requests, engine, executor).iterations()
    shares = graph_use_by_kind(iterations)
    assert shares["decode"] == {"full": 1.0}
    assert shares["hybrid"] == {"piecewise": 1.0}
    assert shares["prefill"] == {"none": 1.0}  # SARATHI takes the first prompt whole
    (line,) = graph_use_lines(shares)
    kinds = "prompts 100% without; decodes 100% in full; chunks with decodes 100% in pieces"
    assert line == f"  CUDA graphs: {kinds}"
    eager = graph_use_by_kind(iterations.drop(columns="graph_use"))
    assert eager["hybrid"] == eager["decode"] == {"none": 1.0}
    on_cpu = iterations.drop(columns="graph_use").assign(launching_time=0.0)
    assert graph_use_lines(graph_use_by_kind(on_cpu)) == []


@pytest.mark.parametrize(("host_seconds", "host_share"), [(3e-3, 0.0), (12e-3, 5 / 12)])
def test_a_calibration_has_the_hosts_part_beside_each_time(host_seconds, host_share, monkeypatch):
    monkeypatch.setattr(measured_iterations, "VISIT", 0.0)
    executor = executor_on_gpu(host_seconds, seconds_of)
    decode = make_batch(num_decodes=1, context=8)
    timings = measured_iterations.time_iterations(
        executor,
        [decode],
        measured_iterations.Limits(batch_size=2, longest=64),
        num_blocks=executor.num_blocks,
        block_size=executor.block_size,
        vocab_size=SPEC.vocab_size,
        seconds=0.0,
    )
    (row,) = timings.rows.itertuples()
    assert row.seconds == pytest.approx(max(7e-3, host_seconds))
    assert row.launching == pytest.approx(max(0.0, host_seconds - 7e-3))
    assert row.host_share == pytest.approx(host_share)
