"""Whatever the lab does on a GPU alone, run on CPU tensors: commands, captures and allocations that
fail, host memory that can't be locked.
"""

from __future__ import annotations

import gc
import json
import sys
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from cuda_stub import stubbed
from late_device import Graph, LateDevice
from plain_kernels import plain_kernels
from toy_executors import SPEC as TOY
from toy_executors import requests_with_tokens

from sarathi_lab.config.errors import RunError
from sarathi_lab.engine.block_manager import BlockManager
from sarathi_lab.engine.compositions import make_batch
from sarathi_lab.engine.config import EngineConfig
from sarathi_lab.engine.executor import Sizes
from sarathi_lab.engine.ledger import Ledger
from sarathi_lab.engine.loop import serve
from sarathi_lab.executor.torch.backend import TorchBackend
from sarathi_lab.executor.torch.memory import SPARE_BYTES
from sarathi_lab.executor.torch.operation_probe import OperationProbe
from sarathi_lab.executor.torch.shapes import CudaGraphs
from sarathi_lab.experiment.measure import DeviceBench, load_executor
from sarathi_lab.experiment.measured_cost import MeasuredCostModel
from sarathi_lab.experiment.registry import CATALOG
from sarathi_lab.experiment.scenario import Room
from sarathi_lab.policy import SarathiServe
from sarathi_lab.results.load import load_summary
from sarathi_lab.run import main

SMALL = [
    *("model=tiny", "model.head_size=64", "model.num_heads=1", "model.num_kv_heads=1"),
    *("model.num_layers=1", "tracking=none", "dtype=float32", "seq_len=48", "pd_ratio=5"),
    *("batch=2", "workload.num_requests=3", "baselines=[]", "device=cuda", "chunk=16"),
]
SPEC = replace(TOY, num_layers=1)
LENGTHS = [(20, 3), (7, 2)]


@pytest.fixture
def device() -> Iterator[LateDevice]:
    with stubbed(LateDevice()) as device, plain_kernels():
        yield device


def served(batch_size: int = 2, **settings: Any) -> Ledger:
    """All that a run asks of the backend, on the device that is in use."""
    backend = TorchBackend(device="cuda", dtype="float32", **settings)
    backend.check(SPEC, kv_tokens=160)
    backend.peaks()
    sizes = {"num_blocks": 10, "block_size": 16, "batch_size": batch_size}
    executor = backend.build(SPEC, None, Sizes(chunk=16, max_model_len=32, **sizes))
    return serve(
        requests_with_tokens(LENGTHS), EngineConfig(SarathiServe(chunk=16), **sizes), executor
    )


def run(tmp_path: Path, *args: str) -> dict[str, Any]:
    folder = tmp_path / "r"
    assert main([*SMALL, f"output={tmp_path}", f"hydra.run.dir={folder}", *args]) == 0
    return load_summary(folder)


@pytest.mark.parametrize("profile", ["none", "operations"])
def test_a_run(tmp_path, device, profile):
    # All of it counts: admissions are by the host's clock, which is not the late device's.
    whole = "window.warmup=0"
    summary = run(tmp_path, f"executor.profile={profile}", whole)
    assert (summary["replayed_fraction"] > 0) == (profile == "none")
    assert summary["device_idle_fraction"] < 1
    written = json.loads((tmp_path / "r" / "run.json").read_text())
    assert "late device" in json.dumps(written)


def sites(device: LateDevice) -> dict[tuple[str, ...], int]:
    """The first allocation of a run, counted from 1, by the lines of ours that it came from."""
    found: dict[tuple[str, ...], int] = {}

    def seen() -> None:
        frame, lines = sys._getframe(), list[str]()
        while frame is not None and len(lines) < 1:
            code = frame.f_code
            if "/sarathi_" in code.co_filename:
                lines.append(f"{Path(code.co_filename).name}:{frame.f_lineno}")
            frame = frame.f_back
        found.setdefault(tuple(lines), device.num_allocations)

    device.allocated = seen
    with stubbed(device), plain_kernels():
        served(batch_size=1)
    return found


def test_no_memory_at_any_place_is_one_line_and_leaves_nothing_behind():
    """Each place of ours that asks for memory is refused some, once."""
    places = sites(LateDevice())
    gc.collect()
    gc.freeze()  # what is there by now: it is collected after every refusal
    for lines, number in places.items():
        device = LateDevice()
        device.fail_at = number
        with stubbed(device), plain_kernels(), pytest.raises(RunError) as caught:
            served(batch_size=1)
        line = str(caught.value)
        assert "\n" not in line, lines
        assert line.startswith("out of memory during "), (lines, line)
        del caught
        gc.collect()
        assert device.taken == 0, lines
    with stubbed(LateDevice()), plain_kernels():
        served()


def test_a_capture_that_fails_names_the_fix(device):
    device.fails_capture = True
    with pytest.raises(RunError, match=r"recording of CUDA graphs failed.*cuda_graphs=false"):
        served()
    assert device.stream is device.default_stream
    assert not served(cuda_graphs=False).iterations().is_replayed.any()


def test_no_finaliser_runs_during_a_capture(device):
    """Such as one that frees memory of the device, which would void the capture."""

    class Waiting:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            torch.cuda.synchronize()

    def work() -> None:
        Waiting()
        [[] for _ in range(10_000)]  # more than the collector's threshold

    threshold = gc.get_threshold()
    gc.set_threshold(700)
    try:
        CudaGraphs().capture("key", work)
    finally:
        gc.set_threshold(*threshold)
    assert gc.isenabled()


def test_executors_and_probes_are_freed_without_the_collector(device):
    def served() -> list[weakref.ref[Any]]:
        executor = TorchBackend(device="cuda", dtype="float32").build(SPEC, None, sizes)
        config = EngineConfig(SarathiServe(chunk=16), num_blocks=12, block_size=16, batch_size=4)
        serve(requests_with_tokens(LENGTHS), config, executor)
        probe = OperationProbe(executor)
        batch = make_batch(prefill_tokens=20, emits=True, blocks=BlockManager(12, 16))
        probe.attention(batch)
        probe.products(batch)
        return [weakref.ref(executor), weakref.ref(probe)]

    sizes = Sizes(12, 16, batch_size=4)
    served()  # what is imported at first holds frames
    gc.collect()
    gc.disable()
    try:
        assert [freed() for freed in served()] == [None, None]
    finally:
        gc.enable()


# -- measurements ----------------------------------------------------------------------------------


@pytest.fixture
def probe(device) -> OperationProbe:
    backend = TorchBackend(device="cuda", dtype="float32")
    return OperationProbe(backend.build(SPEC, None, Sizes(12, 16, batch_size=4)))


def captures(patch: pytest.MonkeyPatch) -> list[Graph]:
    """Those that begin from now on."""
    begun: list[Graph] = []
    begin = Graph.capture_begin

    def counted(graph: Graph, *pool: object, **settings: object) -> None:
        begun.append(graph)
        begin(graph, *pool, **settings)

    patch.setattr(Graph, "capture_begin", counted)
    return begun


def test_each_composition_is_captured_once(probe, monkeypatch):
    prompt = {"prefill_tokens": 20, "emits": True}
    decodes = {"num_decodes": 2, "context": 31}
    seen = captures(monkeypatch)
    numbers = []
    for _ in range(2):
        for sizes, read in ((prompt, 20), (decodes, 62)):
            batch = make_batch(**sizes, blocks=BlockManager(12, 16))
            assert probe.attention(batch) > 0
            assert probe.timing == "graph"
            assert probe.iteration(batch).seconds > 0
            assert probe.timing == "graph"
            assert probe.keys_read(batch) == pytest.approx(read, rel=1e-3)
            assert set(probe.products(batch)) >= {"qkv_proj", "ffn"}
            assert probe.timing == "graph"
        numbers.append(len(seen))
    assert numbers == [2 * (1 + 4)] * 2  # the warm-up has recorded the shapes of iterations


def test_work_that_is_too_large_to_capture_is_launched_in_calls(probe, device):
    def attention(num_tokens: int) -> str:
        blocks = BlockManager(12, 16)
        probe.attention(make_batch(prefill_tokens=num_tokens, emits=True, blocks=blocks))
        return probe.timing

    device.has_room_in_captures = False
    assert attention(40) == "calls"
    device.has_room_in_captures = True
    assert [attention(num_tokens) for num_tokens in (40, 20)] == ["calls", "graph"]


def test_what_is_measured_says_how(probe, device):
    cost = MeasuredCostModel(probe.executor)
    short, long = (make_batch(prefill_tokens=n, emits=True) for n in (20, 40))
    cost.iteration_time(short)
    device.has_room_in_captures = False
    cost.operation_times(long)
    rows = pd.DataFrame(cost.rows("toy", 4)).groupby("prefill_tokens").timing.agg(set)
    assert rows.to_dict() == {20: {"graph"}, 40: {"calls", "graph"}}


def test_rounds_of_a_figure_capture_nothing_again(probe, monkeypatch):
    clock, seen, numbers = DeviceBench(probe.executor), captures(monkeypatch), []
    groups = list(CATALOG["kv_reread"].parts(SPEC, {"prompts": [24], "chunks": [8, 16]}))
    for _ in range(2):
        for group in groups:
            clock.cost.forget()
            assert all(np.isfinite(point.y.value) for point in group.points(clock))
        numbers.append(len(seen))
    assert numbers[0] == numbers[1] > 0


def test_a_cache_beyond_memory_is_as_large_as_there_is_room_for():
    with stubbed(LateDevice(num_bytes=SPARE_BYTES + (8 << 20))) as device, plain_kernels():
        backend = TorchBackend(device="cuda", dtype="float32")
        assert backend.default_model == "120m"
        assert backend.size() == (device.num_bytes, 132)
        executor = load_executor(backend, SPEC, Room(10**6, 4, 64))
        block = SPEC.kv_bytes_per_token(4) * executor.block_size
        left = device.num_bytes - device.taken - SPARE_BYTES
        assert 0 <= left < 1 << 20
        assert executor.num_blocks * block > 4 << 20
