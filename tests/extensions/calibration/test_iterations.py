"""Whole iterations, measured on any executor: what is run, what the table predicts, and the way
from the task to a simulated run.
"""

from __future__ import annotations

import dataclasses

import pandas as pd
import pytest
from composed import config_of, kept, refusal_of, run

from sarathi_lab.config.errors import UserError
from sarathi_lab.config.instantiate import build, load_option
from sarathi_lab.engine.compositions import again, make_batch, make_sequence
from sarathi_lab.engine.executor import StepResult
from sarathi_lab.engine.request import Batch
from sarathi_lab.executor.simulated.cost_model import make_cost_model
from sarathi_lab.executor.simulated.executor import SimulatedExecutor
from sarathi_lab.executor.simulated.iteration_table import IterationTable
from sarathi_lab.executor.tables import TIME
from sarathi_lab.extensions.calibration import from_profile, iterations
from sarathi_lab.extensions.calibration.iterations import (
    Limits,
    batch_of,
    grid_of,
    held_out_of,
    measure_iterations,
)

LIMITS = Limits(batch_size=8, longest=1024)
SPEC = load_option("model", "llama3-8b")


@pytest.fixture(scope="module")
def h100():
    """A cost model with tiles, in the place of a GPU."""
    return make_cost_model("analytic", SPEC, load_option("hardware", "h100"), 2)


@pytest.fixture(scope="module")
def measured(h100):
    executor = SimulatedExecutor(h100.iteration_time)
    executor.num_blocks, executor.block_size = 8 * 1024 // 32, 32
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(iterations, "MIN_ROUNDS", 1)
        patch.setattr(iterations, "VISIT", 0.0)
        patch.setattr(iterations, "FILLING", 0.0)
        return measure_iterations(executor, SPEC, LIMITS, 0.01, lambda seconds: None)


def test_measured_rows_come_out_as_they_were_measured(measured):
    table = IterationTable(measured.table)
    for row in measured.table.to_dict("records"):
        assert 1e6 * table.seconds(batch_of(row)) == pytest.approx(row[TIME], rel=0.1), row


def test_held_out_compositions_are_predicted_within_a_few_percent(measured):
    assert set(measured.errors) == {"prompt", "prompts", "decodes", "both"}
    assert measured.num_left_out == 0
    assert max(measured.errors.values()) < 0.1, measured.errors


def test_a_table_without_one_kind_is_refused(measured):
    with pytest.raises(UserError, match=r"iterations\.csv has no row of decodes alone"):
        IterationTable(measured.table[measured.table.n_decode == 0])


def test_past_the_edge_costs_grow_as_fitted(measured, h100):
    table = IterationTable(measured.table)
    for past in (
        make_batch(prefill_tokens=2048, num_prefills=8),
        make_batch(num_decodes=32, context=1024),
        make_batch(num_decodes=8, context=4096),
    ):
        assert table.seconds(past) == pytest.approx(h100.iteration_time(past), rel=0.25)


def test_a_round_has_no_composition_twice_and_none_beyond_the_limits():
    for limits in (LIMITS, Limits(1, 64), Limits(3, 100), Limits(256, 8192)):
        rows = list(grid_of(limits))
        assert len({tuple(row.values()) for row in rows}) == len(rows) <= 400
        batches = [batch_of(row) for row in rows] + [batch for _, batch in held_out_of(limits, 0)]
        for batch in batches:
            ends = [chunk.start + chunk.num_tokens for chunk in batch.chunks]
            assert 0 < len(batch) <= limits.batch_size
            assert max(ends) <= limits.longest
            assert batch.num_prefill_tokens <= limits.most_tokens


def test_decodes_of_a_repeated_batch_go_on_until_nothing_is_spare():
    batch, starts = Batch(), []
    for sequence, tokens in (
        (make_sequence(4, is_decode=True, spare=2), 1),
        (make_sequence(0, 8, emits=True), 8),
    ):
        batch.add(sequence, tokens)
    for token in range(7):
        starts.append([chunk.start for chunk in batch.chunks])
        batch = again(StepResult(batch, 0.0, 1.0, [token, 0]))
    assert [decode for decode, _ in starts] == [4, 5, 6, 4, 5, 6, 4]
    assert {prompt for _, prompt in starts} == {0}


TINY = ["task=calibrate", "task.by=iterations", "model=tiny", "device=cpu", "batch=2"]


def test_the_command_leaves_a_folder_that_simulates_the_device(tmp_path, monkeypatch):
    monkeypatch.setattr(iterations, "MIN_ROUNDS", 1)
    monkeypatch.setattr(iterations, "VISIT", 0.0)
    monkeypatch.setattr(from_profile, "MAX_ITERATIONS", 1)
    settings = ["seq_len=64", "task.seconds=0.1", "task.name=here", "executor.threads=1"]
    folder = kept(tmp_path / "tables", *TINY, *settings, "tracking=none")
    held_out = pd.read_csv(folder / "held_out.csv")
    assert set(held_out.kind) == {"prompt", "prompts", "decodes", "both"}
    assert (held_out[["seconds", "predicted"]] > 0).all(axis=None)
    device = ["executor=simulated", "hardware=auto", f"hardware.tables={folder}"]
    sizes = ["model=tiny", "dtype=float32", "batch=2", "seq_len=64", "chunk=16", "baselines=[]"]
    found = run(tmp_path, "task=serve", *device, "executor.cost_model=profiled", *sizes)
    assert found.summary["throughput"] > 0
    backend = build(config_of(*device, "executor.cost_model=profiled", "dtype=float32").executor)
    spec = load_option("model", "tiny")
    assert any("past 128 prompt tokens, 2 decodes" in one for one in backend.cautions(spec))
    with pytest.raises(UserError, match=r"executor\.pipeline_parallel=2: .* whole iterations"):
        dataclasses.replace(backend, pipeline_parallel=2).check(spec, 64)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["task.by=layers"], "task.by=layers"),
        (["seq_len=1000000000"], "GB for KV"),
    ],
)
def test_what_cannot_be_measured_is_one_line(args, words):
    assert words in refusal_of(*TINY, *args)


def test_hardware_auto_needs_a_file_beside_the_tables(tmp_path):
    said = refusal_of(
        "task=serve", "executor=simulated", "hardware=auto", f"hardware.tables={tmp_path}"
    )
    assert "has no hardware file" in said
