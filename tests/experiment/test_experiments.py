"""Experiments: the same points on a device and simulated, in pairs, with a reason where there is no
number.
"""

from __future__ import annotations

import math
from pathlib import Path

import pandas as pd
import pytest

from sarathi_lab.config.instantiate import load_option
from sarathi_lab.config.paths import CONF
from sarathi_lab.config.paths import EXPERIMENTS as FOLDERS
from sarathi_lab.engine.compositions import make_batch
from sarathi_lab.engine.executor import Sizes
from sarathi_lab.executor.simulated.cost_model import make_cost_model
from sarathi_lab.executor.torch.backend import TorchBackend
from sarathi_lab.experiment.bench import Bench
from sarathi_lab.experiment.experiments import EXPERIMENTS, decode_over_prefill, tile_step
from sarathi_lab.experiment.gpu_serving import Load, Served
from sarathi_lab.experiment.measure import QuietContext, measure_rounds, table_of
from sarathi_lab.experiment.reread import chunk_at_context, prompt_in_chunks
from sarathi_lab.experiment.served_figures import Gain
from sarathi_lab.experiment.simulate import SimulatedDevice, simulated_points
from sarathi_lab.experiment.sizes import SETUPS, dry_setup
from sarathi_lab.experiment.stages import BUBBLES, COMPLETION
from sarathi_lab.results import load
from sarathi_lab.run import main

TINY = load_option("model", "tiny")
DRY = dry_setup("tiny")
# The stages of fig12 are measured another way, and requests that arrive over time too.
MEASURABLE = [name for name, own in EXPERIMENTS.items() if name != "fig12" and not own.is_serving]


@pytest.fixture(scope="module")
def executor():
    num_blocks = 4 * DRY.largest // 16
    sizes = Sizes(num_blocks, 16, batch_size=DRY.most_sequences, max_model_len=DRY.longest)
    return TorchBackend(device="cpu").build(TINY, None, sizes)


@pytest.fixture(scope="module")
def bench() -> Bench:
    hardware = load_option("hardware", "a6000")
    return Bench(make_cost_model("analytic", TINY, hardware, 2), hardware)


class HandCost:
    """An iteration takes 1 second and 0.01 a prompt token, 0.1 a decode; nothing of it is
    attention.
    """

    uncertainty = {"matmul": 0.0, "attention": 0.0}  # noqa: RUF012

    def operation_times(self, batch) -> dict[str, float]:
        return {"ffn": 1 + 0.01 * batch.num_prefill_tokens + 0.1 * batch.num_decode_tokens}

    def iteration_time(self, batch) -> float:
        return self.operation_times(batch)["ffn"]


@pytest.mark.parametrize("name", MEASURABLE)
def test_an_experiment_has_the_same_points_measured_and_simulated(name, executor, bench):
    own = EXPERIMENTS[name]
    units, gains = own.timed(DRY, TINY), own.served(DRY, "tiny")
    passed: list[float] = []
    context = QuietContext(name, "cpu", False, 0.0, Path(), Path())
    samples = measure_rounds(executor, units, gains, context, passed.append)
    assert all(len(values) == 3 for values in samples.values()), (
        "three rounds at least, however short the time"
    )
    assert sum(passed) > 0
    simulated = simulated_points(bench, units, gains)
    keys = list(zip(simulated.figure, simulated.panel, simulated.series, simulated.x, strict=True))
    assert set(samples) == set(keys) != set()
    assert {key[0] for key in samples} == {name}
    extra = simulated_points(bench, own.extra(DRY, TINY), [])
    assert set(zip(extra.figure, extra.panel, extra.series, extra.x, strict=True)) <= set(samples)
    assert set(table_of(samples, 10.0, 0).unit) == set(simulated.unit)
    assert (
        simulated.y.notna() & (simulated.low <= simulated.y) & (simulated.y <= simulated.high)
    ).all()


@pytest.mark.parametrize("name", SETUPS)
def test_every_setup_fits_the_room_that_it_asks_for(name):
    setup = SETUPS[name]("13b" if name == "paper" else "30m")
    for own in EXPERIMENTS.values():
        for gain in own.served(setup, "13b"):
            assert gain.load.batch_size * gain.load.longest <= 2 * setup.largest, gain
            assert gain.load.longest <= setup.longest
            assert gain.load.batch_size <= setup.most_sequences


def test_ratios_by_hand():
    bench = Bench(HandCost(), None)  # type: ignore[arg-type]
    (step,) = tile_step(bench, TINY, 100)
    assert step.y.value == pytest.approx(2.01 / 2.0)
    (ratio,) = decode_over_prefill(bench, 2, 50)
    assert ratio.y.value == pytest.approx((1.2 / 2) / (2.0 / 100))


def test_the_price_of_chunking_is_split_without_rest(bench):
    points = {point.panel: point.y.value for point in prompt_in_chunks(bench, TINY, 64, 16)}
    assert points["KV bytes / whole"] == points["N(N+1)/2 / N"] == 2.5
    assert points["counted / N(N+1)/2"] == 1.0
    causes = sum(value for panel, value in points.items() if panel.startswith("price: "))
    assert causes == pytest.approx(points["prefill time / whole"] - 1)
    found = {point.panel: point.y.value for point in chunk_at_context(bench, TINY, 48, 16)}
    assert found["KV read [MB]"] == pytest.approx(64 * TINY.kv_bytes_per_token(2) / 1e6)
    batch = make_batch(prefill_tokens=16, start=48)
    times = bench.cost.operation_times(batch)
    assert found["attention [ms]"] == pytest.approx(
        1e3 * (times["prefill_attention"] + times.get("kv_write", 0.0))
    )


def test_a_pair_gives_the_ratio_of_its_quantity():
    load = Load("sarathi", 32, 4, 2, 16)
    slow, fast = Served(2.0, 0.0, 9, 9.0, 0.5, 0.3), Served(1.0, 0.0, 9, 9.0, 0.25, 0.6)
    gain = Gain("fig09", "", "", 0.0, load)
    assert gain.of(slow, fast) == 2.0
    assert gain.baseline.policy == "request_level"
    versus = Load("sarathi_serve", 32, 4, 2, 64)
    assert Gain("token_budget", "", "", 0.0, load, "tbt_p99", versus).of(slow, fast) == 2.0
    assert Gain("token_budget", "", "", 0.0, load, "ttft_p50", versus).of(slow, fast) == 0.5
    assert Gain("token_budget", "", "", 0.0, load, "ttft_p50", versus).baseline == versus


def test_what_is_too_wide_has_a_reason_instead_of_a_number():
    wide, noise, share = [("fig08", "", "1K", float(x)) for x in (2, 4, 6)]
    samples = {wide: [1.0, 2.0, 3.0], noise: [2.0, math.inf, math.inf], share: [5.0, 5.1, 4.9]}
    # A share of the whole, which may be nothing:
    samples["kv_reread", "price: re-read", "64", 16.0] = [-0.01, 0.0, 0.02]
    table = table_of(samples, 0.15, 0)
    assert list(table.y.isna()) == [True, True, False, False]
    assert list(table.reason.dropna()) == ["spread 50%, more than 15%", "below the noise"]
    assert list(table.low[:1]) == [1.0], "the interval is kept"


def test_simulated_devices_are_named_by_their_figures():
    assert SimulatedDevice.of("simulated a6000, profiled, 13b").folder == "simulated-a6000-profiled"
    assert SimulatedDevice.of("simulated a100, analytic, 33b").folder == "simulated-a100"


# -- the task --------------------------------------------------------------------------------------


def run(*args: str, tmp_path: Path) -> int:
    places = [
        f"output={tmp_path}",
        f"hydra.run.dir={tmp_path}/run",
        f"task.record={tmp_path}/records",
    ]
    return main([*args, "tracking=none", *places])


@pytest.mark.parametrize("name", ["table4", "fig12"])
def test_a_measured_experiment_is_recorded(name, tmp_path, capsys):
    small = ["model=tiny", "device=cpu", "task.setup=dry", "task.max_spread=50", "task.seconds=2"]
    assert run(f"experiment={name}", *small, tmp_path=tmp_path) == 0
    table = load.load(name, tmp_path / "records")
    device = "simulated-pipeline-cpu" if name == "fig12" else "cpu"
    assert set(table.device) == {device}
    assert set(table.model) == {"tiny"}
    assert (table.num_pairs >= 3).all()
    assert set(load.COLUMNS) <= set(table.columns)
    points = pd.read_parquet(tmp_path / "run" / "figure.parquet")
    assert set(points.source) == {"simulated" if name == "fig12" else "measured"}
    if name == "fig12":
        assert set(table.series) == {BUBBLES, COMPLETION}
        assert table.device_name.str.startswith(
            "simulated pipeline of 4 stages, times measured on cpu"
        ).all()
    assert f"{name} on {device}" in capsys.readouterr().out


def test_a_figure_of_the_paper_is_recomputed_at_both_levels(tmp_path, capsys):
    assert run("experiment=fig07", "executor=simulated", "task.every=20", tmp_path=tmp_path) == 0
    table = load.load("fig07", tmp_path / "records")
    assert set(table.device) == {"simulated-a6000", "simulated-a6000-profiled"}
    steps = table[(table.panel == "step") & (table.device == "simulated-a6000")]
    assert set(steps.x) == {128, 256, 512}
    assert (tmp_path / "run" / "fig07.png").is_file()
    assert "Fig 7, iteration time" in capsys.readouterr().out


def test_another_gpu_is_simulated(tmp_path):
    assert run("experiment=table2", "executor=simulated", "hardware=h100", tmp_path=tmp_path) == 0
    assert set(load.load("table2", tmp_path / "records").device) == {"simulated-h100"}
    assert (
        run(
            "experiment=kv_reread",
            "executor=simulated",
            "hardware=h100",
            "model=7b",
            tmp_path=tmp_path,
        )
        == 0
    )
    assert set(load.load("kv_reread", tmp_path / "records").model) == {"7b"}


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["task.experiment=fig99"], "task.experiment=fig99 is unknown; use one of fig03"),
        (["task.setup=huge"], "task.setup=huge is unknown; use one of auto, paper, small, dry"),
        (["task.seconds=0"], "task.seconds=0 must be a finite number above 0"),
        (["task.max_spread=-1"], "task.max_spread=-1 must be a finite number above 0"),
        (
            ["task.every=2"],
            "task.every=2 has no effect: it is for the recomputed figures of executor=simulated",
        ),
        (["chunk=256"], "chunk=256 has no effect: task=measure does not read chunk"),
        (
            ["executor=simulated", "task.seconds=9"],
            "task.seconds=9 has no effect: it is for measuring",
        ),
        (
            ["executor=simulated", "task.setup=small"],
            "task.setup=small has no effect: it is for measuring",
        ),
        (
            ["executor=simulated", "executor.cost_model=profiled"],
            "executor.cost_model=profiled has no effect",
        ),
        (
            ["executor=simulated", "model=7b"],
            "model=7b has no effect: fig08 is of the paper's models",
        ),
        (["executor=simulated", "task.experiment=kv_reread", "task.every=2"], "kv_reread is none"),
    ],
)
def test_bad_input_is_one_line(args, words, tmp_path, capsys):
    assert main(["task=measure", *args, "tracking=none", f"output={tmp_path}/o"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert words in err
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_has_its_overlay_and_its_folder(name):
    overlay = (CONF / "experiment" / f"{name}.yaml").read_text()
    folder = f"{load.group_of(name)}/{name}"
    assert f"experiments/{folder}/README.md" in overlay
    readme = (FOLDERS / folder / "README.md").read_text()
    for heading in ("**Claim.**", "**Method.**", "**Command.**", "**Found.**"):
        assert heading in readme
    assert f"experiment={name}" in readme
