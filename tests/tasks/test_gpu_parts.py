"""Parts of the campaign, and the timer of the kernels' benchmarks, on a stub of torch.cuda: their
branches for a GPU.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import SimpleNamespace

import cuda_stub
import pandas as pd
import pytest
import torch
from cuda_stub import stubbed
from late_device import DEVICE, LateDevice
from omegaconf import OmegaConf
from plain_kernels import plain_kernels

from sarathi_kernels.benchmarks.measure import Benchmark, measure
from sarathi_lab.executor.torch import profiling
from sarathi_lab.run import main
from sarathi_lab.tasks.gpu import delegated

NAME = "late-device"


@pytest.fixture
def device() -> Iterator[LateDevice]:
    with stubbed(LateDevice()) as device, plain_kernels():
        yield device


@pytest.fixture
def small(monkeypatch):
    """Few shapes of the model of dry runs, with heads that the kernels take."""
    monkeypatch.setattr(profiling, "TOKENS", (1, 2, 8, 32))
    monkeypatch.setattr(profiling, "CHUNKS", (16, 32))
    monkeypatch.setattr(profiling, "MAX_ROUNDS", 3)  # the fewest, whatever else the machine does
    read = delegated.read_option

    def with_heads(group, path):
        heads = {"num_layers": 1, "num_heads": 1, "num_kv_heads": 1, "head_size": 64}
        return OmegaConf.merge(read(group, path), heads if group == "model" else {})

    monkeypatch.setattr(delegated, "read_option", with_heads)


@pytest.mark.usefixtures("device", "small")
def test_parts_measure_replayed_graphs_and_record_them_by_the_gpus_name(tmp_path):
    parts = "task=peaks,gpu_calibration"
    folder = tmp_path / "campaign-dry"
    campaign = ["experiment=campaign_dry", "device=cuda", "limit=null", f"output={tmp_path}"]
    assert main([*campaign, parts]) == 0
    for home in ("gpu/peaks", "lab/calibration"):
        (record,) = json.loads((folder / home / "results" / NAME / "run.json").read_text())[
            "parts"
        ].values()
        assert (record["error"], record["device"]) == (None, "late device")
    peaks = pd.read_csv(folder / "gpu/peaks/results" / NAME / "peaks.csv")
    assert set(peaks.quantity) == {"copy", "read", "matmul"}
    assert (peaks.value > 0).all()
    assert set(peaks[peaks.quantity == "matmul"].dtype) == {"bfloat16"}
    attention = pd.read_csv(folder / "lab/calibration/results" / NAME / "attention.csv")
    assert set(attention.timing) == {"graph"}


@pytest.fixture
def timer(device, monkeypatch) -> LateDevice:
    """What Triton's timer asks of a driver; a piece of work takes a millisecond."""
    monkeypatch.setattr(cuda_stub, "TICK", 1e-3)
    driver = SimpleNamespace(
        get_device_interface=lambda: torch.cuda,
        get_empty_cache_for_benchmark=lambda: torch.empty(1, device=DEVICE),
        clear_cache=lambda cache: cache.zero_(),
    )
    monkeypatch.setattr("triton.runtime.driver", SimpleNamespace(active=driver))
    return device


def row_of(work: object) -> dict[str, object]:
    benchmark = Benchmark("add", "case", "mine", work, 3.0, 5.0)  # type: ignore[arg-type]
    return measure(benchmark, DEVICE, torch.float32, quick=True)


def test_the_timer_replays_what_can_be_captured_and_calls_the_rest(timer):
    x = torch.zeros(4, device=DEVICE)
    row = row_of(lambda: x.add_(1))
    assert (row["timing"], row["error"]) == ("graph", "")
    assert row["median_seconds"] == pytest.approx(1e-3)
    assert row["flops_per_second"] == pytest.approx(3e3)
    assert row_of(lambda: x.sum().item())["timing"] == "calls"
    timer.fails_capture = True
    assert row_of(lambda: x.add_(1))["timing"] == "calls"
    timer.fails_capture = False
    assert row_of(lambda: x.add_(1))["timing"] == "graph"
