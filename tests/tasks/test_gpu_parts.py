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
from plain_kernels import plain_kernels

from sarathi_kernels.benchmarks.measure import Benchmark, measure
from sarathi_lab.run import main

NAME = "late-device"


@pytest.fixture
def device() -> Iterator[LateDevice]:
    with stubbed(LateDevice()) as device, plain_kernels():
        yield device


def test_parts_measure_replayed_graphs_and_record_them_by_the_gpus_name(tmp_path, device):
    parts = "task=peaks,gpu_calibration,gpu_kv_reread"
    folder = tmp_path / "campaign-dry"
    campaign = ["experiment=campaign_dry", "device=cuda", "limit=null", f"output={tmp_path}"]
    assert main([*campaign, parts]) == 0
    for home in ("gpu/peaks", "lab/calibration", "sarathi/kv_reread"):
        (record,) = json.loads((folder / home / "results" / NAME / "run.json").read_text())[
            "parts"
        ].values()
        assert (record["error"], record["device"]) == (None, "late device")
    peaks = pd.read_csv(folder / "gpu/peaks/results" / NAME / "peaks.csv")
    assert set(peaks.quantity) == {"copy", "read", "matmul"}
    assert (peaks.value > 0).all()
    assert set(peaks[peaks.quantity == "matmul"].dtype) == {"bfloat16"}
    measured = pd.read_csv(folder / "sarathi/kv_reread/results" / NAME / "kv_reread.csv")
    assert measured.y.notna().all()


@pytest.fixture
def timer(device, monkeypatch) -> LateDevice:
    """What Triton's timer asks of a driver; a piece of work takes a millisecond."""
    monkeypatch.setattr(cuda_stub, "TICK", 1e-3)
    driver = SimpleNamespace(
        get_device_interface=lambda: torch.cuda,
        get_empty_cache_for_benchmark=lambda: torch.empty(1, device=DEVICE),
        clear_cache=lambda cache: cache.zero_(),
    )
    monkeypatch.setattr("triton.runtime.driver._active", driver)
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
