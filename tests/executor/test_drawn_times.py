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
from sarathi_lab.engine.executor import Sizes
from sarathi_lab.engine.request import Batch
from sarathi_lab.engine.single_iteration import single_iteration
from sarathi_lab.executor.simulated.backend import SimulatedBackend
from sarathi_lab.executor.simulated.cost_model import make_cost_model
from sarathi_lab.executor.simulated.drawn_times import (
    DEVIATION,
    NUM_DRAWS,
    SHARED,
    SIGNS,
    CostVariant,
    DrawnTimes,
    own_deviation,
    shape_of,
)
from sarathi_lab.experiment.bench import CostBench
from sarathi_lab.experiment.scenario import batch, chunked

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
    return math.log(estimate.ends.high / estimate.value)


def test_constants_are_drawn_independently():
    assert (NUM_DRAWS * np.eye(7) == SIGNS.T @ SIGNS).all()
    assert (SIGNS.sum(axis=0) == 0).all()


def test_each_kind_of_operation_has_its_own_error():
    bench = CostBench(ToyCost())
    alone = batch(num_decodes=1, context=5)
    of_products = spread(bench.seconds(alone, ["preproj"]))
    of_attention = spread(bench.seconds(alone, ["attn"]))
    assert of_products == pytest.approx(1.96 * DEVIATION * math.log1p(0.1), rel=0.01)
    assert of_attention == pytest.approx(1.96 * DEVIATION * math.log1p(0.5), rel=0.01)
    together = spread(bench.seconds(alone))
    assert of_products < together < of_attention
    # Only the attention differs.
    difference = bench.seconds(alone - batch(prefill_tokens=1))
    assert spread(difference) == pytest.approx(of_attention, rel=0.01)


def test_errors_of_a_shape_cancel_in_a_ratio_and_those_of_two_add_up():
    bench = CostBench(ToyCost())
    first, second = (bench.seconds(batch(prefill_tokens=tokens)) for tokens in (256, 272))
    assert math.isnan((first / first).ends.low)  # exact
    own = 1.96 * DEVIATION * math.log1p(0.1) * math.sqrt(1 - SHARED)
    assert spread(first / second) == pytest.approx(math.sqrt(2) * own, rel=0.01)
    assert spread((first + second) / second) == pytest.approx(own / math.sqrt(2), rel=0.1)


def test_intervals_hold_as_often_as_they_state():
    """Values made of two shapes, whose true times err by a shared and an own normal error."""
    deviation = DEVIATION * math.log1p(0.1)
    errors = np.random.default_rng(0).standard_normal((3, 4000)) * deviation * math.sqrt(SHARED)
    bench = CostBench(ToyCost())
    first, second = (bench.seconds(batch(prefill_tokens=tokens)) for tokens in (2000, 4000))
    true = [np.exp(errors[0] + own) for own in errors[1:]]  # seconds of each
    total = (first + second, true[0] + true[1])
    ratio = (first / second, true[0] / true[1])
    for estimate, true_values in (total, ratio):
        low, high, _ = estimate.ends
        assert ((low < true_values) & (true_values < high)).mean() == pytest.approx(0.95, abs=0.015)


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
        seconds = DrawnTimes(cost).iteration_time_of(CostVariant(draw))(hybrid)
        assert seconds == pytest.approx(all_draws[draw])
    stages = SimulatedBackend(A100, pipeline_parallel=2).cost_of(SPEC)
    first = CostVariant(draw=1)
    drawn_stages = DrawnTimes(stages).stage_times_of(first, stages.stage_times)(hybrid)
    ratios = np.divide(drawn_stages, stages.stage_times(hybrid))
    assert ratios[0] == pytest.approx(ratios[1])
    # What a shape errs by alone leaves out the way between stages, of which the error is shared.
    slower = CostVariant(slower_shape="to-512")
    larger = DrawnTimes(stages).stage_times_of(slower, stages.stage_times)(hybrid)
    in_one_stage = own_deviation(DrawnTimes(cost).iteration_time(hybrid))
    assert math.log(larger[0] / stages.stage_times(hybrid)[0]) == pytest.approx(in_one_stage)
    # A batch's way through both stages errs as the sum of its operations does.
    drawn_send = DrawnTimes(stages).send_time_of(first, stages.send_time)(hybrid)
    assert drawn_send != stages.send_time(hybrid)
    in_both = sum(drawn_stages) + drawn_send
    assert in_both == pytest.approx(DrawnTimes(stages).iteration_time_of(first)(hybrid))


def test_a_run_averages_the_errors_that_shapes_have_alone():
    prompts, decodes = make_batch(prefill_tokens=100), make_batch(num_decodes=1, context=5)
    drawn = DrawnTimes(ToyCost())
    own = own_deviation(drawn.iteration_time(prompts))
    assert own_deviation(drawn.iteration_time(prompts), 4) == pytest.approx(own / 2)
    # Each shape of a run's batches is slower by itself.
    slower_decodes = drawn.iteration_time_of(CostVariant(slower_shape="decodes"))
    slower_prompts = drawn.iteration_time_of(CostVariant(slower_shape="to-512"))
    assert math.log(slower_prompts(prompts)) == pytest.approx(own)
    assert slower_prompts(decodes) == ToyCost().iteration_time(decodes) < slower_decodes(decodes)
    stages = drawn.stage_times_of(CostVariant(slower_shape="to-512"), lambda batch: [0.5, 0.5])
    assert sum(stages(prompts)) == pytest.approx(slower_prompts(prompts))
    of_tokens = [shape_of(make_batch(prefill_tokens=tokens)) for tokens in (512, 513, 2049)]
    assert of_tokens == ["to-512", "to-2048", "larger"]


def test_the_loss_of_chunks_errs_as_the_ratio_of_the_prompts_times_does():
    bench = CostBench(SimulatedBackend(A100).cost_of(SPEC))
    cut, uncut = (chunked(64, chunk, emits=True) for chunk in (16, 64))
    slower = bench.seconds(cut) / bench.seconds(uncut)
    loss = bench.losses(64, 16)["total"]
    np.testing.assert_allclose(loss.values, slower.values - 1)
    assert dict(loss.moved).keys() == dict(slower.moved).keys()


def test_without_a_stated_error_there_is_no_interval():
    unknown = dataclasses.replace(A100, uncertainty={"matmul": 0.1, "attention": None})
    cost = make_cost_model("analytic", SPEC, unknown, 2)
    estimate = CostBench(cost).seconds(batch(prefill_tokens=8))
    assert math.isfinite(estimate.value)
    assert math.isnan(estimate.ends.low)
    SimulatedBackend(unknown).check(SPEC, kv_tokens=16)
    with pytest.raises(UserError, match=r"none of attention; .*hardware.uncertainty.attention=0.1"):
        SimulatedBackend(unknown, draw=1).check(SPEC, kv_tokens=16)

    with pytest.raises(UserError, match=r"executor.slower_shape=decodes: .* none of attention"):
        SimulatedBackend(unknown, slower_shape="decodes").check(SPEC, kv_tokens=16)


@pytest.mark.parametrize("stages", [1, 2])
def test_an_engine_has_the_times_of_its_draw_slower_shape_or_slowdown(stages):
    def seconds(**variant) -> float:
        backend = SimulatedBackend(A100, pipeline_parallel=stages, **variant)
        executor = backend.build(SPEC, None, Sizes(30, 4, 3))
        return single_iteration(executor, make_batch(num_decodes=3, context=100)).seconds

    as_stated = seconds()
    assert seconds(draw=1) != pytest.approx(as_stated)
    assert seconds(slower_shape="decodes") > as_stated
    assert seconds(slower_shape="to-512") == pytest.approx(as_stated)
    assert seconds(slowdown=1.5) == pytest.approx(1.5 * as_stated)


@pytest.mark.parametrize(
    ("varied", "setting"),
    [
        ({"draw": 1}, "executor.draw=1: "),
        ({"slower_shape": "decodes"}, "executor.slower_shape=decodes: "),
        ({"slowdown": 1.36}, "executor.slowdown=1.36: "),
    ],
)
def test_a_run_with_other_times_than_predicted_says_so(varied, setting):
    (caution,) = set(SimulatedBackend(A100, **varied).cautions(SPEC)) - set(
        SimulatedBackend(A100).cautions(SPEC)
    )
    assert caution.startswith(setting)
    assert caution.endswith("the values are no prediction")


def test_a_run_has_a_draw_or_a_slower_shape():
    with pytest.raises(
        UserError, match=r"executor.draw=9.*use 1 to 8.*executor.slower_shape=decodes"
    ):
        SimulatedBackend(A100, draw=9)
    with pytest.raises(UserError, match=r"executor.slower_shape=to-51 is unknown .*to-512"):
        SimulatedBackend(A100, slower_shape="to-51")
    with pytest.raises(UserError, match=r"draw=1 and .*slower_shape=larger: .*slower_shape=null"):
        SimulatedBackend(A100, draw=1, slower_shape="larger")
