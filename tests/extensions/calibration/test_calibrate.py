"""Calibration by whole iterations: what is run, what the table and the hardware file predict of
what they were not made of, and the way from the task to a simulated run.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from composed import config_of, kept, refusal_of, run

from sarathi_lab.config.errors import UserError
from sarathi_lab.config.instantiate import build, load_option
from sarathi_lab.engine.compositions import again, make_batch, make_sequence
from sarathi_lab.engine.executor import StepResult
from sarathi_lab.engine.request import Batch
from sarathi_lab.executor.simulated.cost_model import make_cost_model
from sarathi_lab.executor.simulated.executor import SimulatedExecutor
from sarathi_lab.executor.simulated.hardware import Hardware
from sarathi_lab.executor.simulated.iteration_table import IterationTable
from sarathi_lab.executor.tables import TIME
from sarathi_lab.experiment import measured_iterations
from sarathi_lab.experiment.measured_iterations import (
    Limits,
    grid_of,
    table_of,
    time_iterations,
)
from sarathi_lab.extensions.calibration import fit, task
from sarathi_lab.extensions.calibration.fit import (
    fit_hardware,
    held_out_of,
    mean_errors,
    predictions,
)
from sarathi_lab.model.roofline import Peaks
from sarathi_lab.results.load import load_summary
from sarathi_lab.results.table import RESULTS
from sarathi_lab.run import main

LIMITS = Limits(batch_size=8, longest=1024)
SPEC = load_option("model", "llama3-8b")


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Threads that wait for each other would make a busy machine's times many times longer, at
    random.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def is_quick(monkeypatch):
    """As few iterations as there may be."""
    monkeypatch.setattr(measured_iterations, "MIN_ROUNDS", 1)
    monkeypatch.setattr(measured_iterations, "VISIT", 0.0)
    monkeypatch.setattr(measured_iterations, "FILLING", 0.0)


@pytest.fixture(scope="module")
def h100():
    """A cost model with tiles, in the place of a GPU."""
    return make_cost_model("analytic", SPEC, load_option("hardware", "h100"), 2)


@pytest.fixture(scope="module")
def table(h100):
    """The grid's times on that device; each decode goes on by a token behind the warm-up."""
    grid = grid_of(LIMITS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measured_iterations, "MIN_ROUNDS", 1)
        patch.setattr(measured_iterations, "VISIT", 0.0)
        timings = time_iterations(
            SimulatedExecutor(h100.iteration_time),
            [composition.make() for composition in grid],
            LIMITS,
            num_blocks=LIMITS.sizes.num_blocks,
            block_size=LIMITS.sizes.block_size,
            vocab_size=SPEC.vocab_size,
            seconds=0.0,
        )
    assert len(timings.rows) == len(grid)
    return table_of(grid, timings.rows)


def test_measured_rows_come_out_as_they_were_measured(table):
    seconds_of = IterationTable(table).seconds
    rows = table[TIME].tolist()
    for composition, time_us in zip(grid_of(LIMITS), rows, strict=True):
        predicted = 1e6 * seconds_of(composition.make())
        assert predicted == pytest.approx(time_us, rel=0.1), composition


def test_held_out_compositions_are_predicted_within_a_few_percent(table, h100):
    held_out = held_out_of(LIMITS, seed=0)
    seconds = np.array([h100.iteration_time(batch) for _, batch in held_out])
    predicted = predictions(held_out, seconds, table, load_option("hardware", "h100"), SPEC)
    errors = mean_errors(predicted, "error")
    assert set(errors) == {"prompt", "prompts", "decodes", "both"}
    assert max(errors.values()) < 0.1, errors
    assert predicted.analytic_error.abs().max() < 1e-9, "the file is that of the device"


def test_a_table_without_one_kind_is_refused(table):
    with pytest.raises(UserError, match=r"iterations\.csv has no row of decodes alone"):
        IterationTable(table[table.n_decode == 0])


def test_past_the_edge_costs_grow_as_fitted(table, h100):
    seconds_of = IterationTable(table).seconds
    for past in (
        make_batch(prefill_tokens=2048, num_prefills=8),
        make_batch(num_decodes=32, context=1024),
        make_batch(num_decodes=8, context=4096),
    ):
        assert seconds_of(past) == pytest.approx(h100.iteration_time(past), rel=0.25)


def test_the_fit_finds_the_hardware_that_made_a_table():
    spec = load_option("model", "30m")
    truth = dataclasses.replace(load_option("hardware", "a40"), dtype_bytes=4)
    limits = Limits(batch_size=4, longest=256)
    seconds_of = make_cost_model("analytic", spec, truth, 4).iteration_time
    batches = [composition.make() for composition in grid_of(limits)]
    seconds = np.array([seconds_of(batch) for batch in batches])
    peaks = Peaks(truth.flops_per_second, truth.bytes_per_second, "given")
    at_peaks = Hardware.at_peaks(truth.name, peaks, truth.dtype_bytes, num_sms=truth.num_sms)
    fitted = fit_hardware(at_peaks, spec, batches, seconds)
    for name in fit.START:
        assert getattr(fitted, name) == pytest.approx(getattr(truth, name), rel=0.1), name
    predicted = fit.predictor(fitted, spec)
    for _, batch in held_out_of(limits, seed=0):
        assert predicted(batch) == pytest.approx(seconds_of(batch), rel=0.01)


def test_a_round_has_no_composition_twice_and_none_beyond_the_limits():
    for limits in (LIMITS, Limits(1, 64), Limits(3, 100), Limits(256, 8192)):
        grid = grid_of(limits)
        assert len(set(grid)) == len(grid) <= 400
        batches = [composition.make() for composition in grid]
        batches += [batch for _, batch in held_out_of(limits, 0)]
        for batch in batches:
            ends = [chunk.start + chunk.num_tokens for chunk in batch.chunks]
            assert 0 < len(batch) <= limits.batch_size
            assert max(ends) <= limits.longest
            assert batch.num_prefill_tokens <= limits.prompt_tokens


def test_decodes_of_a_repeated_batch_go_on_until_nothing_is_spare():
    batch = Batch()
    batch.add(make_sequence(4, is_decode=True, spare=2), 1)
    batch.add(make_sequence(0, 8, emits=True), 8)
    starts = []
    for token in range(7):
        starts.append([chunk.start for chunk in batch.chunks])
        batch = again(StepResult(batch, 0.0, 1.0, [token, 0]))
    assert [decode for decode, _ in starts] == [4, 5, 6, 4, 5, 6, 4]
    assert {prompt for _, prompt in starts} == {0}


# -- the task --------------------------------------------------------------------------------------

TINY = ["task=calibrate", "model=tiny", "device=cpu", "batch=2", "tracking=none"]
SHORT = ["seq_len=64", "task.seconds=0.1", "task.name=here"]


def test_the_command_leaves_a_folder_that_simulates_the_device(tmp_path, is_quick, monkeypatch):
    conf = tmp_path / "repository" / "conf"
    (conf / "hardware").mkdir(parents=True)
    monkeypatch.setattr(task, "CONF", conf)
    monkeypatch.setattr(task, "MAX_ERROR", np.inf)  # of a machine as busy as it may be
    more = ["executor.threads=1", "task.install=true"]
    folder = kept(tmp_path / "tables", *TINY, *SHORT, *more)
    held_out = pd.read_csv(folder / "held_out.csv")
    assert set(held_out.kind) == {"prompt", "prompts", "decodes", "both"}
    assert (held_out[["seconds", "predicted", "analytic"]] > 0).all(axis=None)
    device = ["executor=simulated", "hardware=auto", f"hardware.tables={folder}"]
    profiled = ["executor.cost_model=profiled", "dtype=float32"]
    sizes = ["model=tiny", "batch=2", "seq_len=64", "chunk=16", "baselines=[]"]
    simulated = run(tmp_path, "task=serve", *device, *profiled, *sizes)
    assert simulated.summary["throughput"] > 0
    backend = build(config_of(*device, *profiled).executor)
    spec = load_option("model", "tiny")
    cautions = backend.cautions(spec)
    assert any("past 128 prompt tokens, 2 decodes" in caution for caution in cautions)
    with pytest.raises(UserError, match="has no network_bytes_per_second"):
        dataclasses.replace(backend, pipeline_parallel=2).check(spec, 64)

    monkeypatch.setattr("sarathi_lab.executor.tables.REPOSITORY", conf.parent)
    installed = yaml.safe_load((conf / "hardware" / "here.yaml").read_text())
    # Moves with the repository.
    assert installed["tables"] == "experiments/lab/cost_model/tables/here"
    named = ["executor=simulated", "hardware=here", f"hydra.searchpath=[file://{conf}]"]
    places = ["tracking=none", f"output={tmp_path / 'out'}"]
    assert main([*named, *profiled, *sizes, *places]) == 0
    (quantities,) = (tmp_path / "out").rglob(RESULTS)
    assert load_summary(quantities.parent)["throughput"] > 0


def test_a_simulated_device_is_found_again(tmp_path, is_quick):
    device = ["executor=simulated", "hardware=a40", "model=13b"]
    calibrated = run(tmp_path, "task=calibrate", *device, "batch=2", *SHORT)
    assert calibrated.summary["error/analytic"] < 0.01
    assert max(calibrated.summary.values()) < 0.1
    measured = pd.DataFrame(calibrated.tables["iterations.csv"])
    seconds_of = make_cost_model(
        "analytic", load_option("model", "13b"), load_option("hardware", "a40"), 2
    ).iteration_time
    (decode,) = measured.query("n_decode == 2 and prefill_chunk == 0").tail(1).itertuples()
    batch = make_batch(num_decodes=2, context=decode.kv_decode + 1)
    assert decode.time_us == pytest.approx(1e6 * seconds_of(batch), rel=1e-3)


@pytest.mark.parametrize(
    ("host", "named"),
    [
        ("vllm_0_12", ["no effect of host.graphs"]),
        ("trtllm_1_0", ["no effect of host.attention_kernel"]),
        ("none", []),
    ],
)
def test_kernels_of_a_host_have_no_effect_on_whole_iterations(table, tmp_path, host, named):
    table.to_csv(tmp_path / "iterations.csv", index=False)
    (tmp_path / "meta.yaml").write_text(f"model: {SPEC.name}")
    device = ["executor=simulated", "hardware=h100", f"hardware.tables={tmp_path}"]
    profiled = ["executor.cost_model=profiled", f"host={host}"]
    backend = build(config_of(*device, *profiled).executor)
    said = [caution.partition(":")[0] for caution in backend.cautions(SPEC)]
    assert [line for line in said if line.startswith("no effect")] == named


def test_stages_of_a_pipeline_take_equal_shares_of_an_iteration(table, h100, tmp_path):
    table.to_csv(tmp_path / "iterations.csv", index=False)
    (tmp_path / "meta.yaml").write_text(f"model: {SPEC.name}")
    device = ["executor=simulated", "hardware=h100", f"hardware.tables={tmp_path}"]
    settings = ["executor.cost_model=profiled", "executor.pipeline_parallel=2"]
    backend = build(config_of(*device, *settings).executor)
    executor = backend.build(SPEC, None, LIMITS.sizes)
    batch = make_batch(prefill_tokens=512)
    executor.submit(batch)
    first, second = executor.collect().stages
    seconds = IterationTable(table).seconds(batch)
    assert first[1] - first[0] == pytest.approx(seconds / 2)
    assert second[1] - second[0] == pytest.approx(seconds / 2)
    assert second[0] > first[1], "the hidden states are sent"
    assert any("equal share of an iteration" in caution for caution in backend.cautions(SPEC))


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["model=gpt3-175b"], ["gpt3-175b is for simulation only"]),
        (
            ["task.install=true", "task.name=a6000"],
            ["conf/hardware has a6000.yaml already", "task.name"],
        ),
        (["task.name=1/2"], ["task.name=1/2", "a letter first"]),
        (["batch=0"], ["batch=0", "below 1"]),
        (["seq_len=8"], ["seq_len=8", "below 64"]),
        (["seq_len=1000000000"], ["GB for KV"]),
    ],
)
def test_what_cannot_be_measured_is_one_line(args, words):
    said = refusal_of(*TINY, *args)
    assert all(word in said for word in words), said


def test_a_front_end_is_no_part_of_an_iteration():
    simulated = ["executor=simulated", "hardware=a40", "model=13b", "host.request=0.1"]
    assert "use host.request=0" in refusal_of("task=calibrate", *simulated, *SHORT)


def test_hardware_auto_needs_a_file_beside_the_tables(tmp_path):
    said = refusal_of(
        "task=serve", "executor=simulated", "hardware=auto", f"hardware.tables={tmp_path}"
    )
    assert "has no hardware file" in said


def test_a_table_that_contradicts_held_out_iterations_is_not_installed(
    tmp_path, is_quick, monkeypatch, capsys
):
    """As on a busy machine: every third composition takes four times as long as it should."""
    timed = measured_iterations._Timer.visit
    numbers = {}

    def visit_with_others(timer, batch):
        number = numbers.setdefault(id(batch), len(numbers))
        iterations = timed(timer, batch)
        factor = 1.0 if number % 3 else 4.0
        return [dataclasses.replace(each, seconds=factor * each.seconds) for each in iterations]

    monkeypatch.setattr(measured_iterations._Timer, "visit", visit_with_others)
    monkeypatch.setattr(fit, "fit_hardware", lambda at_peaks, *measured: at_peaks)
    monkeypatch.setattr(task, "CONF", tmp_path / "conf")
    device = ["executor=simulated", "hardware=a40", "model=13b", "batch=2", "tracking=none"]
    more = ["task.install=true", f"output={tmp_path / 'out'}"]
    assert main(["task=calibrate", *device, *SHORT, *more]) == 2
    assert not (tmp_path / "conf").exists()
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "more than 30%: the machine is busy" in line
    assert "task.seconds=0.2" in line
