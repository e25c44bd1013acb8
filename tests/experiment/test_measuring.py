"""Measuring on a device: benches, loads that are served, and what does not fit."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from sarathi_lab.config.errors import RunError
from sarathi_lab.config.instantiate import load_option
from sarathi_lab.engine.compositions import make_batch
from sarathi_lab.executor.simulated.cost_model import make_cost_model
from sarathi_lab.executor.simulated.executor import SimulatedExecutor
from sarathi_lab.executor.timeline import HostTimeline
from sarathi_lab.executor.torch.backend import Sizes, TorchBackend
from sarathi_lab.executor.torch.executor import TorchExecutor
from sarathi_lab.experiment import measured_cost
from sarathi_lab.experiment.bench import CostBench
from sarathi_lab.experiment.measure import MAX_ROUNDS_OF_PART, DeviceBench, measure
from sarathi_lab.experiment.measured_cost import (
    LOWER,
    NO_OPERATIONS,
    MeasuredCostModel,
    composition,
    describe,
)
from sarathi_lab.experiment.points import Estimate, Point, part
from sarathi_lab.experiment.registry import CATALOG
from sarathi_lab.experiment.scenario import Scenario, batch, chunked, request, serve
from sarathi_lab.results.intervals import FEWEST_PAIRS, median_of


def test_a_steady_window_takes_as_long_as_the_simulator_counts():
    """Real requests through the engine's loop, on a virtual clock, against the difference of two
    longer runs.
    """
    spec, hardware = load_option("model", "13b"), load_option("hardware", "h200")
    bench = CostBench(make_cost_model("analytic", spec, hardware, 2))
    for policy, chunk, pd_ratio in (
        ("sarathi", 256, 28.4),
        ("orca_best", 256, 28.4),
        ("sarathi", 512, 50.0),
    ):
        scenario = Scenario.of(policy, 2048, pd_ratio, 10, chunk)
        executor = SimulatedExecutor(bench.cost.iteration_time)
        served = serve(executor, scenario, num_blocks=10_000, block_size=16, vocab_size=100)
        assert served is not None
        expected = bench.seconds(request(scenario)).value
        assert served.seconds_per_request == pytest.approx(expected, rel=0.02)
        assert served.idle_share == 0


def test_a_scenario_that_the_cache_cannot_hold_is_not_served():
    scenario, executor = Scenario("request_level", 100, 10, 4), SimulatedExecutor(lambda batch: 1.0)
    served = [serve(executor, scenario, num_blocks=n, block_size=16) for n in (27, 28)]
    assert [one is None for one in served] == [True, False]


def test_a_scenario_that_the_device_has_no_memory_for_is_left_out(executor, monkeypatch):
    bench = DeviceBench(executor)
    sarathi, orca = (Scenario.of(name, 48, 4.0, 3, 16) for name in ("sarathi", "orca_best"))
    submit = TorchExecutor.submit

    def refuse_mixed(executor, batch):
        if batch.num_decode_tokens and batch.num_prefills:
            raise RunError("out of memory")
        submit(executor, batch)

    monkeypatch.setattr(TorchExecutor, "submit", refuse_mixed)
    assert math.isnan(bench.gain(sarathi, sarathi.baseline).value)
    assert "out of memory" in bench.cost.reason
    monkeypatch.undo()
    assert bench.gain(orca, orca.baseline).value > 0
    assert executor.num_in_flight == 0
    assert {row["quantity"] for row in bench.serving_rows("tiny")} == {
        "time per request",
        "idle share",
        "replayed share",
    }


@pytest.fixture(scope="module")
def executor():
    backend = TorchBackend(device="cpu", dtype="float32")
    return backend.build(load_option("model", "tiny"), None, Sizes(12, 16, batch_size=4))


@pytest.fixture(scope="module")
def cost(executor):
    return MeasuredCostModel(executor)


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_a_composition_is_measured_once_and_its_operations_sum_to_the_iteration(
    executor, kernels, monkeypatch
):
    if kernels == "torch":  # whose operations are timed one by one, not told by the C++
        backend = TorchBackend(device="cpu", dtype="float32", kernels=kernels)
        executor = backend.build(load_option("model", "tiny"), None, Sizes(12, 16, batch_size=4))
    cost = MeasuredCostModel(executor)
    monkeypatch.setattr(cost, "reference", lambda tokens: 1.0)  # however busy the machine is
    monkeypatch.setattr(cost, "stolen_by_core", list)
    monkeypatch.setattr(measured_cost, "ENOUGH", math.inf)
    batch = make_batch(prefill_tokens=24, start=16, num_decodes=2, context=20)
    first = cost.operation_times(batch)
    again = make_batch(prefill_tokens=24, start=16, num_decodes=2, context=20)
    assert cost.operation_times(again) is first
    found = cost.measurements[composition(batch)]
    assert sum(first.values()) == pytest.approx(pd.Series(found.seconds).quantile(LOWER))
    assert {"qkv_proj", "out_proj", "ffn", "prefill_attention", "others"} <= set(first)
    assert describe(batch) == "2 decodes at 20 + 24 at 16"


def test_a_batch_that_does_not_fit_has_no_time_and_gives_no_point(cost):
    too_large = make_batch(prefill_tokens=193)
    assert math.isnan(sum(cost.operation_times(too_large).values()))
    assert composition(too_large) not in cost.measurements
    assert cost.reason == "193 at 0: the cache is too small"
    bench = DeviceBench(cost.executor)
    sizes = {"lengths": [193], "batches": [1]}
    ((point,), _) = (each.points(bench) for each in CATALOG["fig04"].parts(cost.spec, sizes))
    assert math.isnan(point.y.value)


def test_keys_are_counted_by_what_attention_returns(executor):
    """A hole in the inputs is a hole in the count: it is no formula of the batch."""
    bench = DeviceBench(executor)
    chunks = chunked(96, 32)
    assert bench.keys_read(chunks).value == pytest.approx(32 + 64 + 96, rel=1e-5)
    mixed = batch(prefill_tokens=24, start=16, num_decodes=2, context=20)
    assert bench.keys_read(mixed).value == pytest.approx(40 + 2 * 20, rel=1e-5)
    packed = executor.packed

    def blind(batch):  # attention that has lost the first 16 keys of each sequence
        inputs = packed(batch)
        lost = [
            own._replace(
                kv_len=own.kv_len - 16, blocks=slice(own.blocks.start + 1, own.blocks.stop)
            )
            for own in inputs.attention
        ]
        return replace(inputs, attention=lost)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor, "packed", blind)
        assert bench.keys_read(batch(start=64, prefill_tokens=32)).value == pytest.approx(
            80, rel=1e-5
        )
    assert math.isnan(bench.keys_read(batch(prefill_tokens=193)).value)


@pytest.mark.parametrize(
    ("references", "stolen", "kept"),
    [
        ([1.0, 1.0, 1.0, 1.0], [0, 0, 0], [7.0, 7.0, 7.0]),
        ([1.0, 1.2, 1.2, 1.0], [0, 0, 0], [7.0, 7.0 / 1.2, 7.0]),  # slower, as its references are
        ([1.0, 1.0, 3.0, 1.0], [0, 0, 0], [7.0]),  # two of three are beside one that was disturbed
        ([1.0, 3.0, 1.0, 3.0], [0, 0, 0], [7.0, 7.0, 7.0]),  # nothing is left: as it is
        ([3.0, 3.0, 3.0, 1.0], [0, 0, 0], [7.0, 7.0, 7.0]),  # they agree, but on a slow machine
        ([1.0, 1.2, 1.2, 1.0], [1, 0, 1], [7.0 / 1.2]),  # a core was lost in the others
        ([1.0, 1.2, 1.2, 1.0], [1, 2, 1], [7.0, 7.0, 7.0]),
    ],
)
def test_a_timing_counts_as_its_references_show(cost, monkeypatch, references, stolen, kept):
    told, lost = iter(references), np.repeat(np.cumsum([0, *stolen]), 2)[1:-1].tolist()
    monkeypatch.setattr(cost, "reference", lambda tokens: next(told))
    monkeypatch.setattr(cost, "stolen_by_core", partial(next, iter(lost)))
    monkeypatch.setattr(measured_cost, "ENOUGH", math.inf)
    found = cost.timed(1, lambda: {"a": 7.0}, repetitions=3)
    assert [times["a"] for times in found] == pytest.approx(kept)


def test_what_decodes_add_is_a_difference_of_neighbours(executor, monkeypatch):
    """A machine that is slower from turn to turn slows all three of a turn alike."""
    alone = batch(num_decodes=2, context=20)
    both, without = batch(prefill_tokens=24), batch(prefill_tokens=16)
    seconds, ran = {alone.num_tokens: 8.0, both.num_tokens: 21.0, without.num_tokens: 20.0}, []

    def slower_and_slower(executor, batch):
        ran.append(batch.num_tokens)
        return SimpleNamespace(seconds=seconds[batch.num_tokens] * (1 + (len(ran) - 1) // 3))

    monkeypatch.setattr(measured_cost, "single_iteration", slower_and_slower)
    monkeypatch.setattr(measured_cost, "ALTERNATED", 0.0)
    bench = DeviceBench(executor)
    monkeypatch.setattr(bench.cost, "stolen_by_core", list)
    assert bench.saving(alone, both, without).value == pytest.approx(8.0)
    assert ran == [16, 24, 2, 2, 24, 16, 16, 24, 2]
    assert math.isnan(bench.saving(alone, batch(prefill_tokens=193), without).value)
    assert bench.cost.reason == "193 at 0: the cache is too small"


class OnGpu(HostTimeline):
    """The clock of a device that nobody else uses."""

    has_stream = True


@pytest.mark.parametrize(
    ("name", "totals"),
    [
        ("fig03", {"total", "decode / prefill"}),
        ("fig04", {"16", "64"}),
        ("fig07", {"total", "one token more"}),
        ("fig08", {"48"}),
    ],
)
def test_an_executor_of_whole_iterations_gives_totals_and_says_what_it_lacks(name, totals):
    spec, hardware = load_option("model", "13b"), load_option("hardware", "a100")
    whole = make_cost_model("analytic", spec, hardware, 2)
    executor = SimulatedExecutor(whole.iteration_time)
    executor.num_blocks, executor.block_size, executor.timeline = 4096, 32, OnGpu()
    figure = CATALOG[name]
    sizes, bench = figure.sizes("dry"), DeviceBench(executor, spec)
    samples = measure(figure.parts(spec, sizes), bench, seconds=0.0, max_rounds=1)
    named = {point.series for point, values in samples.items() if not math.isnan(values[0])}
    assert named & totals
    assert not named & {"attn", "qkv_proj", "preproj", "ffn"}
    if name == "fig07":
        totals = {point.x: found[0] for point, found in samples.items() if point.series == "total"}
        for tokens, milliseconds in totals.items():
            seconds = whole.iteration_time(make_batch(prefill_tokens=int(tokens)))
            assert milliseconds == pytest.approx(1e3 * seconds)
    assert bench.cost.reason == NO_OPERATIONS
    assert {row["operation"] for row in bench.cost.rows("13b", 2)} == {"iteration"}
    assert bench.keys_read(batch(prefill_tokens=16)) is None
    assert math.isnan(bench.losses(64, 16)["attention"].value)
    assert bench.losses(64, 16)["total"].value > 0


def noisy_point(bench, x: int, spread: float, random: np.random.Generator):
    """A value that scatters by `spread` about 1."""
    yield Point("", "line", x, Estimate(float(np.exp(spread * random.standard_normal()))))


def noisy_parts(spreads, random):
    return [part(noisy_point, x, spread, random) for x, spread in enumerate(spreads)]


def test_a_point_is_measured_until_its_interval_is_narrow_or_the_rounds_are_over(executor):
    parts = noisy_parts([0.0, 0.2, 5.0], np.random.default_rng(1))
    samples = measure(parts, DeviceBench(executor), max_rounds=MAX_ROUNDS_OF_PART, narrow=0.15)
    counts = [len(values) for values in samples.values()]
    assert counts[0] == FEWEST_PAIRS < counts[1] < counts[2] == MAX_ROUNDS_OF_PART


def test_progress_expects_what_the_fewest_rounds_take_where_that_is_longer(executor):
    parts, expected = noisy_parts([0.0, 0.0], np.random.default_rng(1)), []
    bench = DeviceBench(executor)
    measure(parts, bench, seconds=0.0, advance=lambda _, *all_of_it: expected.extend(all_of_it))
    (of_all,) = expected  # told after the first round
    assert of_all > 0.0


def test_intervals_of_points_that_stop_when_narrow_enclose_the_truth_as_often_as_they_say(executor):
    """The looks at the interval in between cost it little, where a fifth of the value is noise."""
    parts = noisy_parts([0.05, 0.1, 0.2] * 60, np.random.default_rng(2))
    samples = measure(parts, DeviceBench(executor), max_rounds=MAX_ROUNDS_OF_PART, narrow=0.15)
    found = [median_of(values, 0.15) for values in samples.values()]
    known = [own for own in found if own.reason is None]
    assert len(known) >= 0.9 * len(found)
    assert np.mean([own.low <= 1 <= own.high for own in known]) >= 0.92
