"""Stage times of vLLM's pipelines without vLLM: hooks, pipes, and the executor's bubbles."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from bookkeeper import BLOCK, Bookkeeper
from helpers import requests_of
from vllm_engine import SIZES, TINY

from sarathi_lab.config.errors import RunError, UserError
from sarathi_lab.engine.config import EngineConfig
from sarathi_lab.engine.loop import serve
from sarathi_lab.executor.timeline import HostTimeline
from sarathi_lab.executor.vllm import stage_pipes, worker_extension
from sarathi_lab.executor.vllm.backend import VllmBackend
from sarathi_lab.executor.vllm.stage_pipes import StagePipes
from sarathi_lab.executor.vllm.stages import StagedExecutor
from sarathi_lab.executor.vllm.worker_extension import EventClock, WorkerExtension
from sarathi_lab.policy import Orca

OPTION = "compilation_config"


class Slow(torch.nn.Module):
    """A module that takes a millisecond."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        time.sleep(1e-3)
        return values


class Worker(WorkerExtension):
    """One of four workers, two a stage, as vLLM's, whose sampler may be no module."""

    def __init__(self, rank: int, *, is_v2: bool = False) -> None:
        self.rank, self.device = rank, torch.device("cpu")
        self.parallel_config = SimpleNamespace(tensor_parallel_size=2, pipeline_parallel_size=2)
        self.model = torch.nn.Sequential()
        self.model.add_module("layers", Slow())
        # As in vLLM's models, the forward pass does not call it.
        logits_processor = Slow()
        self.model.add_module("inner", torch.nn.ModuleDict({"logits_processor": logits_processor}))
        self.model.forward = self.model.layers.forward
        self.sample = logits_processor if is_v2 else Slow()
        self.model_runner = SimpleNamespace(sampler=None if is_v2 else self.sample)

    def get_model(self) -> torch.nn.Module:
        return self.model

    def run(self) -> None:
        self.model(torch.zeros(1))
        if self.rank >= 2:
            self.sample(torch.zeros(1))


@pytest.fixture
def pipes():
    pipes = StagePipes(2)
    yield pipes
    pipes.close()


@pytest.mark.parametrize("is_v2", [False, True])
def test_stages_report_when_they_computed(pipes, is_v2):
    workers = [Worker(rank, is_v2=is_v2) for rank in range(4)]
    for worker in workers:
        worker.report_stage_times(pipes.folder)
    assert not pipes.has_report(timeout=0.0)
    begun = time.perf_counter()
    for worker in workers:
        worker.run()
    ended = time.perf_counter()
    assert pipes.has_report(timeout=0.0)
    (first_start, first_end), (last_start, last_end) = pipes.read()
    assert begun < first_start < first_end < last_start < last_end < ended
    assert first_end - first_start >= 1e-3
    assert last_end - last_start >= 2e-3, "with the sampling"


def test_a_new_run_has_no_reports_of_the_one_before(pipes):
    workers = [Worker(rank) for rank in (0, 2)]
    for _ in range(2):
        for worker in workers:
            worker.report_stage_times(pipes.folder)
        pipes.drop()
        for worker in workers:
            worker.run()
    assert len(pipes.read()) == 2
    assert not pipes.has_report(timeout=0.0), "hooks are there once"


def test_a_stage_without_a_report_ends_the_run(pipes, monkeypatch):
    """As where vLLM replays whole graphs, in which no hook is called."""
    monkeypatch.setattr(stage_pipes, "PATIENCE", 0.01)
    with pytest.raises(RunError, match=r"stage 0 .* reported no time.*use executor.eager=true"):
        pipes.read()


def test_events_are_anchored_to_the_host_s_clock(monkeypatch):
    """By hand: the GPU is idle at 100 s, and events follow 250 ms and 500 ms later."""

    class Event:
        passed = 0.0  # seconds of the GPU's clock

        def __init__(self, **settings: bool) -> None:
            assert settings == {"enable_timing": True, "blocking": True}

        def record(self) -> None:
            self.seconds = Event.passed

        def synchronize(self) -> None:
            pass

        def elapsed_time(self, later: Event) -> float:
            return 1e3 * (later.seconds - self.seconds)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(worker_extension.time, "perf_counter", lambda: 100.0)
    clock, marks = EventClock(), []
    for _ in range(2):
        Event.passed += 0.25
        marks.append(clock.mark())
    assert [clock.seconds(mark) for mark in marks] == pytest.approx([100.25, 100.5])


class Pipeline(Bookkeeper):
    """Workers of two stages that take a second a token each, on a clock that their reports move."""

    def __init__(self) -> None:
        super().__init__(num_stages=2)
        self.clock = 1000.0
        self._free_at = [self.clock] * 2
        self._reports = []

    def restart_stage_times(self):
        self._reports.clear()
        self._free_at = [self.clock] * 2
        return self

    def run(self, step):
        ready, spans = self.clock, []
        for stage, free_at in enumerate(self._free_at):
            start = max(ready, free_at)
            ready = start + sum(step.num_tokens.values())
            spans.append((start, ready))
            self._free_at[stage] = ready
        self._reports.append(spans)
        return super().run(step)

    def has_report(self, timeout: float) -> bool:
        end = self._reports[0][-1][1] if self._reports else math.inf
        is_there = end <= self.clock + timeout
        self.clock = min(max(self.clock, end), self.clock + timeout)
        return is_there

    def read(self):
        spans = self._reports.pop(0)
        self.clock = max(self.clock, spans[-1][1])
        return spans


def staged(lengths, **arriving):
    workers = Pipeline()

    def sleep(seconds: float) -> None:
        workers.clock += seconds

    timeline = HostTimeline(lambda: workers.clock)
    executor = StagedExecutor(workers, timeline=timeline, sleep=sleep)
    engine = EngineConfig(Orca(), 2, 40, BLOCK, 32, 2)
    requests = [
        replace(request, prompt_token_ids=list(range(request.prompt_len)))
        for request in requests_of(*lengths, **arriving)
    ]
    return serve(requests, engine, executor)


def test_bubbles_are_those_of_the_stages():
    ledger = staged([(4, 1), (2, 1), (3, 1)])
    spans = ledger.stages()[["start", "end"]].to_numpy().tolist()
    assert spans == [[0, 4], [4, 8], [4, 6], [8, 10], [8, 11], [11, 14]]
    assert ledger.bubbles().to_dict("list") == {
        "stage": [0, 1],
        "start": [6.0, 10.0],
        "end": [8.0, 11.0],
        "cause": ["PB1", "PB1"],
        "iteration": [2, 2],
    }
    iterations = ledger.iterations()
    assert iterations[["start", "end"]].to_numpy().tolist() == [[0, 8], [4, 10], [8, 14]]
    assert ledger.requests().bubble_time.tolist() == [0.0, 0.0, 3.0]


def test_a_gap_without_requests_is_starved_and_a_request_enters_when_it_comes():
    ledger = staged([(4, 1), (4, 1)], arrivals=[0.0, 50.0])
    assert ledger.bubbles().cause.tolist() == ["starved", "starved"]
    ledger = staged([(10, 1), (4, 1)], arrivals=[0.0, 3.0])
    assert ledger.stages().start.tolist() == [0, 10, 10, 20]
    assert ledger.bubbles().empty


def test_a_gpu_s_graphs_leave_the_stages_hooks(monkeypatch):
    """Whole graphs would skip them."""
    monkeypatch.setattr("sarathi_lab.executor.vllm.workers.version", lambda: "0.32.0")
    monkeypatch.setattr(VllmBackend, "torch_device", torch.device("cuda"))
    monkeypatch.setattr(VllmBackend, "dtype_name", "bfloat16")
    monkeypatch.setattr(VllmBackend, "dtype_bytes", 2)
    monkeypatch.setattr(VllmBackend, "_folder", lambda *key: "a folder")
    two = VllmBackend(pipeline_parallel=2)
    arguments = two.arguments(TINY, None, SIZES)
    assert arguments["compilation_config"] == {"cudagraph_mode": "PIECEWISE"}
    assert any("piecewise" in caution for caution in two.cautions(TINY))
    monkeypatch.setattr("sarathi_lab.executor.vllm.workers.engine_arguments", lambda: [OPTION])
    stated = VllmBackend(pipeline_parallel=2, options={OPTION: {"mode": 3}})
    assert stated.arguments(TINY, None, SIZES)[OPTION] == {"mode": 3, "cudagraph_mode": "PIECEWISE"}
    with pytest.raises(UserError, match="cudagraph_mode=FULL: whole graphs skip the hooks"):
        VllmBackend(pipeline_parallel=2, options={OPTION: {"cudagraph_mode": "FULL"}})
    for other in (VllmBackend(), VllmBackend(pipeline_parallel=2, eager=True)):
        assert "compilation_config" not in other.arguments(TINY, None, SIZES)
        assert not other.cautions(TINY)
