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
from composed import kept, refusal_of, run
from hydra.utils import instantiate
from omegaconf import OmegaConf
from simulated import batch_of

from sarathi_lab.config.errors import UserError
from sarathi_lab.config.instantiate import load_option
from sarathi_lab.engine.executor import Sizes
from sarathi_lab.executor.simulated.backend import SimulatedBackend
from sarathi_lab.executor.simulated.cost_model import make_cost_model
from sarathi_lab.executor.simulated.hardware import Hardware
from sarathi_lab.executor.tables import ATTENTION, OperationTables, frames_of, read_tables
from sarathi_lab.executor.torch import profiling
from sarathi_lab.executor.torch.backend import TorchBackend
from sarathi_lab.executor.torch.operation_probe import OperationProbe
from sarathi_lab.executor.torch.profiling import (
    COLUMNS,
    Shape,
    blocks_needed,
    calibration_shapes,
    measure_profile,
)
from sarathi_lab.executor.torch.steal_corrected_clock import exclude_stolen_time
from sarathi_lab.extensions import calibration as calibrate
from sarathi_lab.extensions.calibration.from_profile import (
    ATTENDED,
    PARTS,
    STREAMED,
    batch_of_row,
    hardware_from_profile,
    rows_of,
)
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


def test_more_tokens_and_longer_contexts_cost_more(measured):
    folder, _ = measured
    _, rows = read_tables(str(folder)).layers["ffn"]
    ffn = rows.set_index("size").seconds
    assert ffn[ffn.index.max()] > 3 * ffn[1]
    batches = [batch_of(chunk=64), batch_of(chunk=1024), batch_of(chunk=1024, start=1024)]
    cost = make_cost_model("profiled", load_option("model", "tiny"), load(folder / "here.yaml"), 4)
    times = [cost.iteration_time(batch) for batch in batches]
    assert times == sorted(times)


def test_the_hardware_file_states_what_it_was_measured_in(measured):
    folder, _ = measured
    text = (folder / "here.yaml").read_text()
    assert text.startswith("# cpu (")
    assert "model tiny in float32" in text.splitlines()[0]
    hardware = load(folder / "here.yaml")
    assert hardware.name == "here"
    assert hardware.dtype_bytes == 4
    reached = [v for name, v in vars(hardware).items() if name.endswith("_efficiency")]
    assert len(reached) == 9
    assert all(0 < share <= 1 for share in reached if share is not None)
    assert hardware.tables == str(folder)
    assert hardware.uncertainty["matmul"] > 0


def test_float32_is_simulated_on_hardware_measured_in_it_only(measured):
    hardware = load(measured[0] / "here.yaml")
    assert SimulatedBackend(hardware).dtype_name == "float32"
    with pytest.raises(
        UserError,
        match=r"float16 is not an element type of 4 bytes.* hardware here .* auto, float32",
    ):
        SimulatedBackend(hardware, "float16")
    assert SimulatedBackend(load_option("hardware", "a6000")).dtype_name == "float16"


def test_interpolation_reproduces_the_measured_rows(measured):
    tables, spec = read_tables(str(measured[0])), load_option("model", "tiny")
    cost = make_cost_model("profiled", spec, load(measured[0] / "here.yaml"), 4)
    for operation in ROW_OPERATIONS:
        for row in rows_of(tables, operation, spec).itertuples():
            times = cost.operation_times(batch_of_row(operation, int(row.num_tokens), 0))
            assert times[operation] == pytest.approx(row.seconds)


@pytest.mark.parametrize("level", ["analytic", "profiled"])
def test_an_installed_hardware_is_an_option_of_the_command(measured, level, tmp_path, monkeypatch):
    _, conf = measured
    monkeypatch.setattr("sarathi_lab.executor.tables.REPOSITORY", conf.parent)
    installed = yaml.safe_load((conf / "hardware" / "here.yaml").read_text())
    # Moves with the repository.
    assert installed["tables"] == "experiments/lab/cost_model/tables/here"
    device = ["executor=simulated", "hardware=here", f"hydra.searchpath=[file://{conf}]"]
    small = ["model=tiny", "dtype=float32", "seq_len=256", "tracking=none", "baselines=[]"]
    args = [*device, f"executor.cost_model={level}", *small, f"output={tmp_path}"]
    assert main(args) == 0
    (summary,) = tmp_path.rglob("summary.json")
    assert json.loads(summary.read_text())["throughput"] > 0


def test_the_simulation_of_this_machine_is_near_a_run_on_it(measured, monkeypatch):
    """Within a factor of four: neighbours on the machine may slow either. The recorded comparisons
    are closer.
    """
    hardware = load(measured[0] / "here.yaml")
    cost = make_cost_model("profiled", load_option("model", "tiny"), hardware, 4)
    shapes = [Shape(1, 512, 0, is_whole=True), Shape(4, 1, 127, is_whole=True)]
    executor = TorchBackend("cpu").build(
        load_option("model", "tiny"), None, Sizes(64, 16, batch_size=4)
    )
    few = [*shapes, *calibration_shapes(4, 64)[:20]]
    monkeypatch.setattr(profiling, "MAX_ROUNDS", 3)  # the fewest, whatever else the machine does
    with exclude_stolen_time(executor):
        table = measure_profile(executor, few, 60.0, lambda seconds: None).table
    for shape, batch in zip(
        shapes, (batch_of(chunk=512), batch_of(decodes=4, context=128)), strict=True
    ):
        attention = (table.operation == shape.attention) & (table.kv_tokens == shape.kv_tokens)
        rows = (table.kv_tokens == 0) | attention
        real = table[rows & (table.num_tokens == shape.total_tokens)].seconds.sum()
        assert 1 / 4 < cost.iteration_time(batch) / real < 4


def test_iterations_in_cpp_tell_their_operations_and_none_is_computed_beside_torch():
    executor = TorchBackend("cpu", dtype="float32", kernels="native").build(
        load_option("model", "tiny"), None, Sizes(64, 16, batch_size=4)
    )
    calls: list[str] = []
    for layer in executor.model.layers:
        layer.qkv_proj.register_forward_hook(lambda *_: calls.append("alone"))
    probe = OperationProbe(executor)
    for shape in (Shape(3, 1, 40), Shape(1, 20, 30)):
        batch = profiling.batch_of(executor, shape)
        times = {**probe.products(batch), "attention": probe.attention(batch)}
        assert set(times) == {"qkv_proj", "out_proj", "ffn", "elementwise", "attention"}
        assert all(times.values())
    assert probe.logits(3) > 0
    assert not calls
    assert executor.model.operations.recorder() is None


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


def test_more_seconds_measure_more(monkeypatch):
    monkeypatch.setattr("sarathi_lab.executor.torch.profiling.MAX_ROUNDS", 10_000)
    executor = TorchBackend("cpu").build(
        load_option("model", "tiny"), None, Sizes(256, 16, batch_size=4)
    )
    passed: list[float] = []
    shapes = calibration_shapes(4, 64)
    short = measure_profile(executor, shapes, 0.5, lambda seconds: None)
    long = measure_profile(executor, shapes, 2.5, passed.append)
    assert short.num_shapes + short.num_dropped == long.num_shapes + long.num_dropped == len(shapes)
    assert (long.num_shapes, long.num_rounds) > (short.num_shapes, short.num_rounds)
    assert (
        short.table.num_tokens.max() <= long.table.num_tokens.max()
    )  # the longest are left out first
    assert sum(passed) >= 2.5


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
    names = (
        "name",
        "flops_per_second",
        "bytes_per_second",
        "memory_bytes",
        "num_sms",
        "dtype_bytes",
    )
    known = {name: getattr(truth, name) for name in names}
    meta = {"model": spec.name, "layers": spec.num_layers}
    found = hardware_from_profile(OperationTables("", frames_of(table), meta), spec, **known)
    assert found.iteration_overhead == pytest.approx(truth.iteration_overhead, rel=0.05)
    for name in (
        "memory_efficiency",
        "kernel_launch",
        "attention_launch",
    ):  # what a model of this size is limited by
        assert name in (*STREAMED, *ATTENDED)
        assert getattr(found, name) == pytest.approx(getattr(truth, name), rel=0.2)
    assert max(found.uncertainty.values()) < 0.1
    noisy = table.assign(
        seconds=table.seconds * np.exp(0.3 * np.random.default_rng(0).standard_normal(len(table)))
    )
    noisy_tables = OperationTables("", frames_of(noisy), meta)
    assert hardware_from_profile(noisy_tables, spec, **known).uncertainty["matmul"] > 0.1


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"seconds": 0}, "task.seconds=0 must be a finite number above 0"),
        ({"seconds": "soon"}, "task.seconds=soon is not a number"),
        ({"name": "a/b"}, "task.name=a/b can't name a file"),
        ({"install": "maybe"}, "task.install=maybe is neither true nor false"),
    ],
)
def test_settings_that_make_no_measurement(settings, words):
    with pytest.raises(UserError, match=words):
        calibrate.Calibrate(**settings)


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


def test_rows_that_contradict_each_other_are_measured_again_and_not_installed(
    measured, tmp_path, monkeypatch, capsys
):
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
    visits = []

    def busy(*args):
        visits.append(args)
        return profiling.Measured(table, 3, 9, 0, 0)

    monkeypatch.setattr(profiling, "measure_profile", busy)
    monkeypatch.setattr(calibrate, "CONF", tmp_path / "conf")
    args = [*TINY, "task.name=here", "task.install=true", f"output={tmp_path / 'out'}"]
    assert main(args) == 2
    said = capsys.readouterr()
    assert len(visits) == calibrate.ATTEMPTS
    assert "from the others, more than 30%: the machine is busy" in said.out
    assert not (tmp_path / "conf").exists()
    (line,) = said.err.strip().splitlines()
    assert "after 3 measurements" in line
    assert "task.seconds=150" in line


def test_too_short_a_time_is_refused_with_the_least(tmp_path):
    with pytest.raises(UserError, match=r"task\.seconds=0.001 is too short.* use task\.seconds="):
        run(tmp_path, *TINY, "task.seconds=0.001")
