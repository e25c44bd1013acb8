"""The task that measures this machine: what it leaves, what its settings change, what it refuses,
and the way back.
"""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from composed import kept, refusal_of
from hydra.utils import instantiate
from omegaconf import OmegaConf

from sarathi_lab.config.instantiate import load_option
from sarathi_lab.executor.simulated.cost_model import make_cost_model
from sarathi_lab.executor.simulated.hardware import Hardware
from sarathi_lab.executor.tables import ATTENTION, read_tables
from sarathi_lab.executor.torch import profiling
from sarathi_lab.executor.torch.profiling import (
    COLUMNS,
    blocks_needed,
    calibration_shapes,
)
from sarathi_lab.extensions import calibration as calibrate
from sarathi_lab.extensions.calibration import from_profile
from sarathi_lab.extensions.calibration.from_profile import (
    ATTENDED,
    PARTS,
    STREAMED,
    batch_of_row,
    hardware_from_profile,
)
from sarathi_lab.model.roofline import Peaks
from sarathi_lab.run import main

ROW_OPERATIONS = ("qkv_proj", "out_proj", "ffn", "elementwise", "logits", "others")
TINY = ["task=calibrate", "model=tiny", "device=cpu", "batch=4", "seq_len=256", "tracking=none"]


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Threads that wait for each other would make a busy machine's times many times longer, at
    random.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A calibration of the tiny model: (its folder, the configuration that it was installed in)."""
    output = tmp_path_factory.mktemp("calibrate")
    conf = output / "repository" / "conf"
    (conf / "hardware").mkdir(parents=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibrate, "CONF", conf)
        patch.setattr(profiling, "MAX_ROUNDS", 3)
        patch.setattr(profiling, "VISIT", 0.003)
        patch.setattr(from_profile, "MAX_ITERATIONS", 5)
        patch.setattr(calibrate, "MAX_ERROR", np.inf)  # of a machine as busy as it may be
        limits = ["task.seconds=30", "task.name=here", "task.install=true"]
        return kept(output / "run", *TINY, *limits), conf


def load(path) -> Hardware:
    return instantiate(OmegaConf.load(path), _convert_="all")


def test_the_tables_hold_every_operation(measured):
    tables = read_tables(str(measured[0]), model="tiny")
    assert set(tables.layers) == set(ROW_OPERATIONS)
    assert tables.is_of(load_option("model", "tiny"))
    assert tables.dtype_bytes == 4
    attention = tables.frames["attention"]
    assert ((attention.prefill_chunk > 0) != (attention.n_decode > 0)).all()
    decodes = attention[attention.n_decode > 0]
    assert set(decodes.n_decode) == {1, 2, 4}
    assert set(decodes.kv_decode) == {16, 64, 128, 256}


def test_interpolation_reproduces_the_measured_rows(measured):
    tables, spec = read_tables(str(measured[0])), load_option("model", "tiny")
    cost = make_cost_model("profiled", spec, load(measured[0] / "here.yaml"), 4)
    for operation in ROW_OPERATIONS:
        layer, rows = tables.layers[operation]
        calls = spec.num_layers if layer.per == "layer" else 1
        for row in rows.itertuples():
            times = cost.operation_times(batch_of_row(operation, int(row.size), 0))
            assert times[operation] == pytest.approx(calls * row.seconds)


def test_an_installed_hardware_is_an_option_of_the_command(measured, tmp_path, monkeypatch):
    _, conf = measured
    monkeypatch.setattr("sarathi_lab.executor.tables.REPOSITORY", conf.parent)
    installed = yaml.safe_load((conf / "hardware" / "here.yaml").read_text())
    # Moves with the repository.
    assert installed["tables"] == "experiments/lab/cost_model/tables/here"
    device = ["executor=simulated", "hardware=here", f"hydra.searchpath=[file://{conf}]"]
    small = ["model=tiny", "dtype=float32", "seq_len=256", "tracking=none", "baselines=[]"]
    args = [*device, "executor.cost_model=profiled", *small, f"output={tmp_path}"]
    assert main(args) == 0
    (summary,) = tmp_path.rglob("summary.json")
    assert json.loads(summary.read_text())["throughput"] > 0


def test_the_settings_change_what_is_measured():
    shapes = calibration_shapes(batch_size=8, longest=1024)
    assert {shape.count for shape in shapes} == {1, 2, 4, 8}
    assert (
        max(shape.kv_tokens for shape in shapes if shape.attention == "decode_attention")
        == 8 * 1024
    )
    assert max(shape.count for shape in calibration_shapes(6, 1024)) == 6
    longer = calibration_shapes(8, 4096)
    assert max(shape.start for shape in longer) == 4096 - 1
    assert blocks_needed(longer, 16) == 8 * 256
    assert len(longer) > len(shapes)
    for batch_size, longest in ((1, 64), (3, 100), (8, 1024), (64, 8192)):
        made = calibration_shapes(batch_size, longest)
        assert len({(shape.count, shape.num_tokens, shape.start) for shape in made}) == len(made)
        for kind in ATTENTION:
            assert len({shape.kv_tokens for shape in made if shape.attention == kind}) >= 3


def test_the_fit_finds_the_hardware_that_made_a_table():
    spec = load_option("model", "30m")
    truth = dataclasses.replace(load_option("hardware", "a40"), dtype_bytes=4)
    cost = make_cost_model("analytic", spec, truth, 4)
    rows = []
    for shape in calibration_shapes(4, 256):
        for operation in (
            (*ROW_OPERATIONS, shape.attention) if shape.is_whole else (shape.attention,)
        ):
            kv_tokens = shape.kv_tokens if operation in ATTENTION else 0
            times = cost.operation_times(batch_of_row(operation, shape.total_tokens, kv_tokens))
            seconds = (
                sum(times[part] for part in PARTS[operation])
                + (operation == "others") * times["overhead"]
            )
            rows.append((operation, shape.total_tokens, kv_tokens, seconds))
    table = pd.DataFrame(rows, columns=list(COLUMNS))
    peaks = Peaks(truth.flops_per_second, truth.bytes_per_second, "given")
    start = Hardware.at_peaks(truth.name, peaks, truth.dtype_bytes, num_sms=truth.num_sms)
    found = hardware_from_profile(table, spec, start)
    assert found.iteration_overhead == pytest.approx(truth.iteration_overhead, rel=0.05)
    for name in (
        "memory_efficiency",
        "kernel_launch",
        "attention_launch",
    ):  # what a model of this size is limited by
        assert name in (*STREAMED, *ATTENDED)
        assert getattr(found, name) == pytest.approx(getattr(truth, name), rel=0.2)
    assert max(found.uncertainty.values()) < 0.1


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["executor=simulated"], ["task=calibrate measures a real device", "executor=torch"]),
        (["model=gpt3-175b"], ["gpt3-175b is for simulation only"]),
        (
            ["task.install=true", "task.name=a6000"],
            ["conf/hardware has a6000.yaml already", "task.name"],
        ),
        (["batch=0"], ["batch=0", "below 1"]),
        (["seq_len=8"], ["seq_len=8", "below 64"]),
        (["seq_len=1000000000"], ["GB for KV"]),
    ],
)
def test_what_cannot_be_measured_is_one_line(args, words):
    said = refusal_of(*TINY, *args)
    assert all(word in said for word in words), said


def test_rows_that_contradict_each_other_are_not_installed(measured, tmp_path, monkeypatch, capsys):
    """As on a busy machine: every third time is four times as long as it should be."""
    frames = read_tables(str(measured[0])).layers
    table = pd.concat(
        [
            pd.DataFrame(
                {
                    "operation": name,
                    "num_tokens": rows["size"],
                    "kv_tokens": 0,
                    "seconds": rows["size"] * np.where(np.arange(len(rows)) % 3, 1e-6, 4e-6),
                }
            )
            for name, (_, rows) in frames.items()
        ]
    )
    attended = [
        (name, tokens, 64 * tokens, 1e-6 * tokens) for name in ATTENTION for tokens in (1, 2, 4, 8)
    ]
    table = pd.concat([table, pd.DataFrame(attended, columns=list(COLUMNS))])
    busy = profiling.Measured(table, 3, 9)
    monkeypatch.setattr(profiling, "measure_profile", lambda *args: busy)
    monkeypatch.setattr(calibrate, "CONF", tmp_path / "conf")
    args = [*TINY, "task.name=here", "task.install=true", f"output={tmp_path / 'out'}"]
    assert main(args) == 2
    assert not (tmp_path / "conf").exists()
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "from the others, more than 30%: the machine is busy" in line
    assert "task.seconds=150" in line
