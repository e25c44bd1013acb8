"""The timer of the kernels' benchmarks on a stub of torch.cuda: its branches for a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import cuda_stub
import pytest
import torch
from cuda_stub import stubbed
from late_device import DEVICE, LateDevice
from plain_kernels import plain_kernels

from sarathi_kernels.benchmarks.measure import Benchmark, measure


@pytest.fixture
def device() -> Iterator[LateDevice]:
    with stubbed(LateDevice()) as device, plain_kernels():
        yield device


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
