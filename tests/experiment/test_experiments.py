"""Experiments: the same points on a device and simulated, in pairs, with a reason where there is no
number.
"""

from __future__ import annotations

import math
from pathlib import Path

import pandas as pd
import pytest

from sarathi_lab.config.checked import check_fields
from sarathi_lab.config.errors import UserError
from sarathi_lab.config.instantiate import load_option
from sarathi_lab.config.paths import CONF
from sarathi_lab.config.paths import EXPERIMENTS as FOLDERS
from sarathi_lab.executor.simulated.cost_model import make_cost_model
from sarathi_lab.executor.torch.backend import TorchBackend
from sarathi_lab.experiment import measured_cost, measured_iterations
from sarathi_lab.experiment.bench import CostBench
from sarathi_lab.experiment.grid import Grid
from sarathi_lab.experiment.measure import DeviceBench, load_executor, measure
from sarathi_lab.experiment.pipeline import BUBBLES, COMPLETION
from sarathi_lab.experiment.points import Estimate, Part, Point, predicted_table, table_of
from sarathi_lab.experiment.registry import CATALOG, SETUPS
from sarathi_lab.experiment.scenario import Composition, Room
from sarathi_lab.results import load
from sarathi_lab.results.intervals import FEWEST_PAIRS, Steps
from sarathi_lab.run import main
from sarathi_lab.tasks.measure import Measure

TINY = load_option("model", "tiny")
# The stages of fig12 are measured another way, and requests that arrive over time too.
MEASURABLE = [name for name, own in CATALOG.items() if type(own) is Grid]


def dry_parts(name: str) -> list:
    return CATALOG[name].parts(TINY, CATALOG[name].sizes("dry"))


@pytest.fixture(autouse=True)
def few_timings(monkeypatch):
    """As no test here reads how long anything took; test_measuring takes as many as users do."""
    for name in ("ENOUGH", "ALTERNATED", "REFERENCES"):
        monkeypatch.setattr(measured_cost, name, 0)


@pytest.fixture(scope="module")
def executor():
    backend = TorchBackend(device="cpu")
    rooms = [CATALOG[name].room(backend, TINY, CATALOG[name].sizes("dry")) for name in MEASURABLE]
    return load_executor(backend, TINY, Room.largest(rooms))


@pytest.fixture
def bench() -> CostBench:
    return CostBench(make_cost_model("analytic", TINY, load_option("hardware", "a6000"), 2))


class HandCost:
    """An iteration takes 1 second and 0.01 a prompt token, 0.1 a decode; nothing of it is
    attention.
    """

    has_operations = True
    uncertainty = {"matmul": 0.0, "attention": 0.0}  # noqa: RUF012

    def operation_times(self, batch) -> dict[str, float]:
        return {"ffn": 1 + 0.01 * batch.num_prefill_tokens + 0.1 * batch.num_decode_tokens}

    def iteration_time(self, batch) -> float:
        return self.operation_times(batch)["ffn"]


@pytest.mark.parametrize("name", MEASURABLE)
def test_an_experiment_has_the_same_points_measured_and_simulated(name, executor, bench):
    passed: list[float] = []
    device = DeviceBench(executor)
    samples = measure(
        dry_parts(name), device, seconds=0.0, advance=lambda took, *_: passed.append(took)
    )
    assert all(len(values) == FEWEST_PAIRS for values in samples.values()), (
        "the fewest rounds at least, however short the time"
    )
    assert sum(passed) > 0
    simulated = {
        point.position: point.y for part in dry_parts(name) for point in part.points(bench)
    }
    counted = {position for position in samples if position.panel.startswith("counted")}
    assert set(samples) == set(simulated) | counted != set()
    of_counts = [samples[position] for position in counted]
    assert all(values == pytest.approx([1.0] * FEWEST_PAIRS, rel=1e-5) for values in of_counts)
    assert bool(counted) == (name == "kv_reread"), "keys are counted where a kernel reads them"
    assert all(math.isfinite(y.value) for y in simulated.values())
    assert table_of(name, samples, 10.0).unit.notna().all()


def test_the_papers_grid_is_cut_to_the_time_and_the_rest_has_a_reason(executor):
    parts = dry_parts("fig04")
    samples = measure(parts, DeviceBench(executor), seconds=1e-9, is_cut=True)
    assert [len(values) for values in samples.values()] == [
        FEWEST_PAIRS,
        *([0] * (len(parts) - 1)),
    ]


@pytest.mark.parametrize("setup", SETUPS)
@pytest.mark.parametrize("name", CATALOG)
def test_every_setup_says_what_room_it_needs(name, setup):
    figure, sizes = CATALOG[name], CATALOG[name].sizes(setup)
    backend = TorchBackend(device="cpu")
    room = figure.room(backend, TINY, sizes)
    least = figure.least_tokens(backend, TINY, sizes)
    assert room.kv_tokens >= least or figure.is_in_rounds
    assert room.batch_size >= 1


def test_sizes_are_the_arguments_of_the_function():
    own = CATALOG["fig08"]
    with pytest.raises(UserError, match=r"task.sizes.small=colour is unknown; use one of seq_lens"):
        own.sizes("small", {"small": {"colour": 1}})
    with pytest.raises(UserError, match="of fig08 lacks seq_lens, batches; add what conf/exp"):
        own.sizes("small", {"small": {"chunk": 64}})


def test_ratios_by_hand():
    bench = CostBench(HandCost())
    found = {
        (point.panel, point.x): point.y.value
        for name, sizes in (
            ("fig07", {"tokens": [], "tiles": [100]}),
            ("fig03", {"batches": [2], "seq_len": 50}),
        )
        for part in CATALOG[name].parts(TINY, sizes)
        for point in part.points(bench)
    }
    assert found["step", 100] == pytest.approx(2.01 / 2.0)
    assert found["ratio", 2] == pytest.approx((1.2 / 2) / (2.0 / 100))


def test_the_price_of_chunking_is_split_without_rest(bench):
    parts = CATALOG["kv_reread"].parts(TINY, {"prompts": [64], "chunks": [16]})
    all_points = [point for part in parts for point in part.points(bench)]
    points = {point.panel: point.y.value for point in all_points if point.series == "64"}
    assert points["KV bytes / whole"] == points["N(N+1)/2 / N"] == 2.5
    assert "counted / N(N+1)/2" not in points, "nothing is read"
    causes = sum(point.y.value for point in all_points if point.kind == "share")
    assert causes == pytest.approx(points["prefill time / whole"] - 1)
    found = {point.panel: point.y.value for point in all_points if point.x == 48}
    assert found["KV read [MB]"] == pytest.approx(64 * TINY.kv_bytes_per_token(2) / 1e6)
    times = bench.cost.operation_times(Composition(prefill_tokens=16, start=48).make())
    assert found["attention [ms]"] == pytest.approx(
        1e3 * (times["prefill_attention"] + times.get("kv_write", 0.0))
    )


def test_what_is_too_wide_has_a_reason_instead_of_a_number():
    wide, noise = (Point("", "1K", float(x)) for x in (2, 4))
    share = Point("price: re-read", "64", 16.0, kind="share")  # of the whole, which may be nothing
    values = [1.0, 2.0, 3.0], [2.0, math.inf, math.inf], [-0.01, 0.0, 0.02]
    samples = {point: own * 2 for point, own in zip((wide, noise, share), values, strict=True)}
    table = table_of("fig08", samples, 0.15)
    assert list(table.y.isna()) == [True, True, False]
    assert list(table.reason.dropna()) == ["spread 50%, more than 15%", "below the noise"]
    assert list(table.low[:1]) == [1.0], "the interval is kept"
    noise_alone = Part(lambda bench, seed: [Point("", "1K", 2, Estimate(-1.0))], seed=0)
    noisy = measure([noise_alone], None, max_rounds=3)
    assert list(noisy.values()) == [[math.inf] * 3], "a time below zero is below the noise"


def test_rounds_that_agree_have_an_interval_only_as_wide_as_the_grid_they_are_on():
    alike = Point("", "1K", 2.0)
    on_grid = Point("", "1K", 4.0, resolution=Steps(0.05))
    table = table_of("fig08", {alike: [2.0] * 6, on_grid: [2.1] * 6}, math.inf)
    assert list(table.low.isna()) == [True, False]
    assert (table.low[1], table.high[1]) == pytest.approx((2.0, 2.205))


def test_a_curve_over_time_has_no_draws():
    ratio = Point("", "1K", 2.0)
    time, drawn_time = (Point("", "1K", x, kind="curve") for x in (3.0, 3.1))
    samples = {ratio: [1.0, 2.0, 3.0] * 2, time: [4.0]}
    drawn = {ratio: [2.0, 4.0, 6.0] * 2, drawn_time: [4.0]}
    table = table_of(
        "fig08", samples, math.inf, drawn=[drawn, samples, drawn, samples, samples, samples]
    )
    assert list(table.draws) == ["4 2", ""]
    assert list(table.moved) == ["decodes=4 to-512=2 to-2048=2 larger=2", ""]
    assert list(table.low.isna()) == [False, True]


def test_a_point_that_a_draw_lacks_has_an_unknown_error():
    ratio = Point("", "1K", 2.0)
    samples = {ratio: [1.0, 2.0, 3.0] * 2}
    drawn = [samples, {}, samples, samples, samples, samples]
    table = table_of("fig08", samples, math.inf, drawn=drawn)
    assert table.draws[0].split() == ["nan", "nan"]
    assert table.y[0] == 2.0
    assert math.isnan(table.low[0])


def test_an_exact_value_is_recorded_as_exact():
    exact, near = (Point("", "bytes", x) for x in (1.0, 2.0))
    exact = exact._replace(y=Estimate(123456.0, (123456.0,) * 2))
    near = near._replace(y=Estimate(123456.0, (123456.0, 123654.0)))
    assert list(predicted_table("fig08", [[exact, near]]).draws) == [
        "123456 123456",
        "1.2346e+05 1.2365e+05",
    ]


# -- the task --------------------------------------------------------------------------------------


@pytest.mark.parametrize("draws", [-1, 1, 7, 9, True])
def test_fewer_draws_than_all_are_refused(draws):
    check_fields(Measure("fig08", draws=8), "task.")
    with pytest.raises(UserError, match=rf"task.draws={draws} .*use 8, or 0 for intervals"):
        check_fields(Measure("fig08", draws=draws), "task.")


def run(*args: str, tmp_path: Path) -> int:
    places = [
        f"output={tmp_path}",
        f"hydra.run.dir={tmp_path}/run",
        f"task.record={tmp_path}/records",
    ]
    return main([*args, "tracking=none", *places])


@pytest.mark.parametrize("name", ["table4", "fig12"])
def test_a_measured_experiment_is_recorded(name, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(measured_iterations, "MAX_ROUNDS", 3)  # however busy the machine is
    small = ["model=tiny", "device=cpu", "task.setup=dry", "task.max_spread=50", "task.seconds=60"]
    assert run(f"experiment={name}", *small, tmp_path=tmp_path) == 0
    table = load.load(name, tmp_path / "records")
    device = "simulated-pipeline-cpu" if name == "fig12" else "cpu"
    assert set(table.device) == {device}
    assert set(table.model) == {"tiny"}
    assert (table.num_pairs >= FEWEST_PAIRS).all()
    assert table.samples.str.split().map(len).eq(table.num_pairs).all()
    assert set(load.POINT_COLUMNS) <= set(table.columns)
    points = pd.read_parquet(tmp_path / "run" / "figure.parquet")
    assert set(points.source) == {"simulated" if name == "fig12" else "measured"}
    if name == "fig12":
        assert set(table.series) == {BUBBLES, COMPLETION}
        assert table.device_name.str.startswith(
            "simulated pipeline of 4 stages, times measured on cpu"
        ).all()
    assert set(table.unit) == {"ratio"}
    assert f"{name} on {device}: " in capsys.readouterr().out


PAPER_PAGE = FOLDERS / "sarathi" / "README.md"


@pytest.mark.parametrize("name", [name for name in CATALOG if name != "gpu_targets"])
def test_every_experiment_has_its_overlay_and_its_page(name):
    overlay = (CONF / "experiment" / f"{name}.yaml").read_text()
    page = FOLDERS / load.group_of(name) / name / "README.md"
    text = page.read_text() if page.exists() else _section(PAPER_PAGE, name)
    if not page.exists():
        page = PAPER_PAGE
    assert f"see experiments/{page.relative_to(FOLDERS)}." in overlay
    for heading in ("**Claim.**", "**Method.**", "**Found.**"):
        assert heading in text
    assert f"experiment={name}" in text


def _section(page: Path, name: str) -> str:
    """The text under the heading `name`."""
    _, _, after = page.read_text().partition(f"\n## {name}\n")
    return after.partition("\n## ")[0]


@pytest.mark.parametrize(("name", "chunk"), [("fig08", 1), ("fig11", 2)])
def test_a_chunk_that_decodes_fill_is_refused(name, chunk, bench):
    sizes = CATALOG[name].sizes("dry")
    small = {key: [chunk] if key == "chunks" else value for key, value in sizes.items()}
    if "chunk" in small:
        small["chunk"] = chunk
    small["batches"] = {key: [4] if name == "fig08" else 4 for key in sizes["batches"]}
    with pytest.raises(UserError, match=r"task\.sizes: a chunk .* larger chunk or smaller batches"):
        [part.points(bench) for part in CATALOG[name].parts(TINY, small)]
