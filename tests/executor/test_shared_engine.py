"""One engine of vLLM for all experiments of a campaign, counted with workers without a model."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from sarathi_lab.config.sweeper import compose
from sarathi_lab.engine.executor import Sizes
from sarathi_lab.executor import memory
from sarathi_lab.executor.vllm import backend as backends
from sarathi_lab.executor.vllm import workers
from sarathi_lab.executor.vllm.backend import SharedEngine, VllmBackend
from sarathi_lab.experiment import measured_cost
from sarathi_lab.experiment.measure import engine_sizes, loaded
from sarathi_lab.run import main

FIGURES = "gpu_targets,table2,fig08,table4,fig03,fig13,fig07,fig04,fig10,fig11,fig09,kv_reread"
DRY = ("executor=vllm", "device=cpu", "task=measure", "task.setup=dry", "tracking=none", "-m")


class IdleWorkers:
    """Workers that answer each sequence with token 0, and compute nothing."""

    is_async = False
    num_stages = 1
    in_process = True
    is_lost = False
    wants_newest_tokens = False
    times_operations = False

    def __init__(self, sizes: Sizes) -> None:
        self.block_size = sizes.block_size
        self.num_blocks = sizes.num_blocks
        self.max_model_len = sizes.max_model_len

    def run(self, step: Any) -> Any:
        for sequence in step.new:
            computed = sequence.num_computed + step.num_tokens[sequence.name]
            if computed == len(sequence.token_ids):  # one more is sampled
                assert computed < self.max_model_len, "Sampled token IDs exceed the max length"
        output = SimpleNamespace(
            req_id_to_index={name: row for row, name in enumerate(step.num_tokens)},
            sampled_token_ids=[[0]] * len(step.num_tokens),
            cudagraph_stats=None,
        )
        forward = SimpleNamespace(result=lambda: output)
        samples = SimpleNamespace(result=lambda: None)
        return workers.Pending(forward, samples)

    def forget(self, names: Iterable[str]) -> None: ...

    def facts(self) -> dict[str, Any]:
        return {}

    def close(self) -> None: ...


@pytest.fixture
def starts(monkeypatch):
    """The model and the sizes of each engine that is started, on a vLLM for CPUs."""
    started: list[tuple[str, Sizes]] = []

    def start(backend: Any, spec: Any, checkpoint: Any, sizes: Sizes) -> IdleWorkers:
        started.append((spec.name, sizes))
        return IdleWorkers(sizes)

    monkeypatch.setattr(workers, "version", lambda: "0.33.0")
    monkeypatch.setattr(workers, "device_type", lambda: "cpu")
    monkeypatch.setattr(workers, "head_sizes_of_cpu", lambda: (16, 64, 128))
    monkeypatch.setattr(VllmBackend, "_start", start)
    monkeypatch.setattr(backends, "_engine", SharedEngine())
    for name in ("ENOUGH", "ALTERNATED", "REFERENCES"):  # no test here reads how long it took
        monkeypatch.setattr(measured_cost, name, 0)
    return started


def test_24_figures_of_a_campaign_start_2_engines(starts):
    sweep = compose([*DRY, "model=tiny,30m", f"task.experiment={FIGURES}"])
    sweep.check()
    measurements = [measurement for job in sweep.jobs for measurement in job.prepared.measured]
    for measurement in measurements:
        with loaded(measurement) as (executor, _):
            sizes = engine_sizes(measurement.backend, measurement.room)
            assert executor.num_blocks == sizes.num_blocks
    assert len(measurements) == 24
    assert [name for name, _ in starts] == ["tiny", "30m"]


def test_figures_are_measured_and_recorded_on_one_engine(starts, tmp_path, monkeypatch):
    """Once it is there, nothing looks at the memory that it holds: that would end it on a GPU."""
    looked_at: list[int] = []
    monkeypatch.setattr(VllmBackend, "check_memory", lambda *_: looked_at.append(len(starts)))
    command = [*DRY, "model=tiny", "task.experiment=table2,fig08", "task.seconds=0.01"]
    assert main([*command, f"output={tmp_path}", f"task.record={tmp_path}/record"]) == 0
    assert len(starts) == 1
    assert looked_at == [0, 0]
    recorded = {path.stem for path in tmp_path.glob("record/*/*/results/*/*.csv")}
    assert recorded >= {"table2", "fig08"}


def test_what_does_not_fit_is_left_out_with_a_line_and_the_rest_runs(
    starts, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(memory, "free_memory_bytes", lambda device: 8e9)
    command = [*DRY, "model=33b,tiny", "task.experiment=table2", "task.seconds=0.01"]
    assert main([*command, "skip_invalid=true", f"output={tmp_path}"]) == 0
    assert [name for name, _ in starts] == ["tiny"]
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "left out" in line]
    assert line.startswith("left out: model=33b")
    assert "GB for weights" in line


def test_an_objective_refers_to_a_decode_that_a_sequence_has_room_for(starts, tmp_path):
    """Its context is of 4,096 tokens, or as many as the longest request has before its last one."""
    command = ["executor=vllm", "device=cpu", "model=tiny", "slo=strict", "tracking=none"]
    command += ["workload=uniform", "workload.min_len=24", "workload.max_len=48", "pd_ratio=5"]
    command += ["workload.num_requests=4", "batch=2", "chunk=32", "baselines=[]"]
    assert main([*command, f"output={tmp_path}"]) == 0
    assert len(starts) == 1
