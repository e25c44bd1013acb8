"""Draws of a cost model's constants: which operations err alike, and by how much."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import numpy as np
import pytest

from sarathi_lab.config.errors import UserError
from sarathi_lab.config.instantiate import load_option
from sarathi_lab.engine.compositions import make_batch
from sarathi_lab.engine.request import Batch
from sarathi_lab.executor.simulated.backend import SimulatedBackend
from sarathi_lab.executor.simulated.cost_model import make_cost_model
from sarathi_lab.executor.simulated.drawn_times import (
    DEVIATION,
    NUM_DRAWS,
    SIGNS,
    DrawnTimes,
    scattered,
)
from sarathi_lab.experiment.bench import CostBench
from sarathi_lab.experiment.scenario import batch, chunked
from sarathi_lab.results.intervals import ends_of_draws

A100 = load_option("hardware", "a100")
SPEC = load_option("model", "tiny")


class ToyCost:
    """Each operation takes a second; attention is off by half, products by a tenth."""

    has_operations = True
    uncertainty: ClassVar = {"matmul": 0.1, "attention": 0.5}

    def operation_times(self, batch: Batch) -> dict[str, float]:
        decodes = float(batch.num_decode_tokens > 0)
        return {"qkv_proj": 1.0, "decode_attention": decodes}

    def iteration_time(self, batch: Batch) -> float:
        return sum(self.operation_times(batch).values())


def spread(estimate) -> float:
    """Half of the interval in the logarithm."""
    ends = ends_of_draws(estimate.value, estimate.draws)
    return math.log(ends.high / estimate.value)


def test_constants_are_drawn_independently():
    assert (NUM_DRAWS * np.eye(7) == SIGNS.T @ SIGNS).all()
    assert (SIGNS.sum(axis=0) == 0).all()


def test_each_kind_of_operation_has_its_own_error():
    bench = CostBench(ToyCost())
    alone = batch(num_decodes=1, context=5)
    of_products = spread(bench.seconds(alone, ["preproj"]))
    of_attention = spread(bench.seconds(alone, ["attn"]))
    assert of_products == pytest.approx(1.96 * DEVIATION * math.log1p(0.1), rel=0.3)
    assert of_attention == pytest.approx(1.96 * DEVIATION * math.log1p(0.5), rel=0.3)
    together = spread(bench.seconds(alone))
    assert of_products < together < of_attention
    # Only the attention differs.
    difference = bench.seconds(alone - batch(prefill_tokens=1))
    assert spread(difference) == pytest.approx(of_attention, rel=0.5)


def test_errors_that_two_values_share_cancel_in_their_ratio():
    drawn = DrawnTimes(ToyCost())
    small = drawn.operation_times(make_batch(prefill_tokens=256))["qkv_proj"]
    near = drawn.operation_times(make_batch(prefill_tokens=272))["qkv_proj"]
    far = drawn.operation_times(make_batch(num_decodes=1, context=5))["qkv_proj"]
    assert np.ptp(small / near) < np.ptp(small / far) / 5


def test_a_draw_scales_the_times_that_a_simulation_has():
    cost = SimulatedBackend(A100).cost_of(SPEC)
    hybrid = make_batch(prefill_tokens=64, num_decodes=3, context=100)
    all_draws = DrawnTimes(cost).iteration_time(hybrid)
    assert all_draws[0] == pytest.approx(cost.iteration_time(hybrid))
    for draw in (1, NUM_DRAWS):
        seconds = DrawnTimes(cost).iteration_time_of(draw)(hybrid)
        assert seconds == pytest.approx(all_draws[draw])
    stages = SimulatedBackend(A100, pipeline_parallel=2).cost_of(SPEC)
    drawn_stages = DrawnTimes(stages).stage_times_of(1, stages.stage_times)(hybrid)
    ratios = np.divide(drawn_stages, stages.stage_times(hybrid))
    assert ratios[0] == pytest.approx(ratios[1])
    # A batch's way through both stages errs as the sum of its operations does.
    drawn_send = DrawnTimes(stages).send_time_of(1, stages.send_time)(hybrid)
    assert drawn_send != stages.send_time(hybrid)
    in_both = sum(drawn_stages) + drawn_send
    assert in_both == pytest.approx(DrawnTimes(stages).iteration_time_of(1)(hybrid))


def test_a_run_averages_the_errors_that_shapes_have_alone():
    values = DrawnTimes(ToyCost()).iteration_time(make_batch(prefill_tokens=100))
    alone = scattered(values, "a")
    of_run = scattered(values, "a", 4)
    np.testing.assert_allclose(np.log(alone / values), 2 * np.log(of_run / values))
    assert (scattered(values, "b") != alone)[1:].all()
    assert (scattered(values, "a") == alone).all()


def test_the_loss_of_chunks_errs_as_the_ratio_of_the_prompts_times_does():
    bench = CostBench(SimulatedBackend(A100).cost_of(SPEC))
    cut, uncut = (chunked(64, chunk, emits=True) for chunk in (16, 64))
    slower = bench.seconds(cut) / bench.seconds(uncut)
    loss = bench.chunking_losses(64, 16)["total"]
    np.testing.assert_allclose(loss.values, slower.values - 1)


def test_without_a_stated_error_there_is_no_interval():
    unknown = dataclasses.replace(A100, uncertainty={"matmul": 0.1, "attention": None})
    cost = make_cost_model("analytic", SPEC, unknown, 2)
    estimate = CostBench(cost).seconds(batch(prefill_tokens=8))
    assert math.isfinite(estimate.value)
    assert math.isnan(ends_of_draws(estimate.value, estimate.draws).low)
    SimulatedBackend(unknown).check(SPEC, kv_tokens=16)
    with pytest.raises(UserError, match=r"none of attention; .*hardware.uncertainty.attention=0.1"):
        SimulatedBackend(unknown, draw=1).check(SPEC, kv_tokens=16)


def test_there_is_no_ninth_draw():
    with pytest.raises(UserError, match=r"executor.draw=9.*use 1 to 8"):
        SimulatedBackend(A100, draw=9)
