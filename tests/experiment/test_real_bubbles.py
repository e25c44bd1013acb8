"""The real pipeline's experiment: stages' times are fitted, measured stands beside simulated."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from sarathi_lab.__main__ import main as main_of_package
from sarathi_lab.config.instantiate import load_option
from sarathi_lab.engine.compositions import make_batch
from sarathi_lab.engine.config import EngineConfig
from sarathi_lab.engine.loop import serve
from sarathi_lab.executor.simulated.executor import PipelineExecutor
from sarathi_lab.executor.timeline import HostTimeline
from sarathi_lab.experiment.pipeline import workload
from sarathi_lab.experiment.real_bubbles import BUBBLES, COMPLETION, ERROR, IDLE
from sarathi_lab.experiment.registry import CATALOG, MeasuredJob
from sarathi_lab.experiment.stage_times import StageTimes
from sarathi_lab.policy import Orca, Sarathi
from sarathi_lab.results import load
from sarathi_lab.run import main
from sarathi_lab.tasks import claims

TURNAROUNDS = [2e-3, 1e-3]
SIZES = {**CATALOG["real_bubbles"].sizes("small"), "num_seeds": 6}
ON_H100 = ["executor=simulated", "hardware=h100", "model=30m", "task.setup=dry", "tracking=none"]


def seconds_of(batch) -> list[float]:
    """Of two stages, the second with the output head."""
    both = 0.01 + 0.001 * batch.num_tokens + 1e-6 * batch.prefill_query_key_pairs
    return [both, both + 0.002 * batch.num_emits]


def pipeline() -> PipelineExecutor:
    return PipelineExecutor(
        2,
        seconds_of,
        lambda batch: 1e-3 + 1e-5 * batch.num_tokens,
        turnarounds=TURNAROUNDS,
    )


def test_times_of_stages_are_fitted_to_what_they_took():
    requests = workload(60, 1, 64, 256)
    ledgers = []
    for policy in (Sarathi(chunk=32), Orca()):
        engine = EngineConfig(policy, 4, 200, 16, 256, 2)
        ledgers.append(serve(requests, engine, pipeline()))
    times = StageTimes.fit(ledgers)
    for shape in (
        {"prefill_tokens": 28, "start": 60, "num_decodes": 3, "context": 150},
        {"prefill_tokens": 150, "num_decodes": 2, "context": 90, "emits": True},
        {"num_decodes": 4, "context": 70},
    ):
        batch = make_batch(**shape)
        assert times.stage_times(batch) == pytest.approx(seconds_of(batch), rel=0.03)
        assert times.send_time(batch) == pytest.approx(1e-3 + 1e-5 * batch.num_tokens, rel=0.01)
    assert times.turnarounds == pytest.approx(TURNAROUNDS, rel=0.05)


def test_measured_stands_beside_simulated():
    """Of a pipeline that is as simulated, both are equal."""
    figure = CATALOG["real_bubbles"]

    def build(spec, checkpoint, sizes):
        executor = pipeline()
        executor.num_blocks, executor.block_size = sizes.num_blocks, sizes.block_size
        executor.timeline = HostTimeline()
        return executor

    backend = SimpleNamespace(
        build=build, block_multiple=32, num_stages=2, dtype_name="float32", device_name="two stages"
    )
    spec = load_option("model", "tiny")
    job = MeasuredJob(figure, spec, backend, SIZES, seconds=100.0, max_spread=0.5)
    table = figure.measure(job)[""]
    assert (table.num_pairs == 6).all()
    assert set(table.how) == {"measured", "simulated"}
    assert (table.x == 2).all()
    values = table.set_index(["panel", "series"]).y
    for panel in (BUBBLES, COMPLETION):
        measured, simulated = (values[panel, f"tiny, {how}"] for how in ("measured", "simulated"))
        assert measured == pytest.approx(simulated, rel=0.05)
        assert measured > 0.5
    assert values[ERROR].to_numpy() == pytest.approx([1.0, 1.0], rel=0.02)
    idle = table[table.panel == IDLE]
    assert (idle.groupby("how").y.sum() < 2).all(), "two policies, none idle all the time"


def test_the_room_is_that_of_all_stages_and_of_whole_blocks():
    figure = CATALOG["real_bubbles"]
    spec = load_option("model", "tiny")
    sizes = {**SIZES, "longest": 40, "batch": 3}
    backend = SimpleNamespace(num_stages=2)
    room = figure.room(backend, spec, sizes)
    assert room.kv_tokens >= 2 * 3 * 64
    assert room.batch_tokens == 43


def test_a_cost_model_simulates_it(tmp_path, capsys):
    places = [f"output={tmp_path}", f"hydra.run.dir={tmp_path}/run", f"task.record={tmp_path}"]
    two_stages = "executor.pipeline_parallel=2"
    assert main(["experiment=real_bubbles", *ON_H100, two_stages, *places]) == 0
    table = load.load("real_bubbles", tmp_path)
    assert set(table.device) == {"simulated-h100"}
    assert set(table.how) == {"simulated"}
    assert set(table.panel) == {BUBBLES, COMPLETION, IDLE}
    assert np.isfinite(table.y).all()


@pytest.mark.parametrize("executor", [["executor=torch", "device=cpu"], ["executor=simulated"]])
def test_it_needs_stages(executor, refused):
    assert "add executor=vllm executor.pipeline_parallel=2, or" in refused(
        "experiment=real_bubbles", *executor
    )


def test_the_lab_s_engine_has_one_device(refused):
    words = "is not a parameter of TorchBackend, but of executor=simulated and executor=vllm"
    said = refused("executor.pipeline_parallel=2")
    assert words in said
    assert said.endswith("add executor=simulated or executor=vllm\n")


def test_claims_run_leaves_it_out_without_its_engine(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(claims, "find_spec", lambda name: None)
    only = ["--only", "real_bubbles", "--results", str(tmp_path)]
    assert main_of_package(["claims", "--run", *only]) == 2
    printed = capsys.readouterr()
    assert "real_bubbles is left out: it is measured with executor=vllm" in printed.out
    assert "real_bubbles can't be measured here; use --simulate" in printed.err
