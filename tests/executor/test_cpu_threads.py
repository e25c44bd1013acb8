"""The threads of a CPU: what a setting changes, what it leaves as it was, what is refused, and what
a run records.
"""

from __future__ import annotations

import os

import pytest
import torch
from native_library import needs_library

from sarathi_kernels.cpu import library
from sarathi_lab.config.errors import UserError
from sarathi_lab.config.instantiate import load_option
from sarathi_lab.engine.executor import Sizes
from sarathi_lab.executor import device as devices
from sarathi_lab.executor.torch.backend import TorchBackend
from sarathi_lab.executor.torch.executor import TorchExecutor

CPU = torch.device("cpu")
SIZES = Sizes(num_blocks=20, block_size=16, batch_size=2)


@pytest.fixture(autouse=True)
def four_cores(monkeypatch):
    """A machine on which torch takes two of four cores by itself; nothing is computed on it but
    what a test runs.
    """
    before = torch.get_num_threads()
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    monkeypatch.setattr(devices, "ORIGINAL_THREADS", 2)
    monkeypatch.setattr(TorchExecutor, "warm_up", lambda *_, **__: None)
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def built(**settings) -> TorchBackend:
    backend = TorchBackend(device="cpu", **settings)
    backend.build(load_option("model", "tiny"), None, SIZES)
    return backend


def test_none_takes_torchs_own_number_again_after_another_was_set():
    built(threads=3, kernels="torch")
    built(threads=1, kernels="torch")
    backend = TorchBackend(device="cpu", kernels="torch")
    assert backend.device_name.endswith(", 2 threads)")
    assert torch.get_num_threads() == 1  # a backend that is only made changes nothing
    built(kernels="torch")
    assert torch.get_num_threads() == 2


@needs_library
def test_the_cpp_starts_as_many(monkeypatch):
    started = []
    start = library.start
    monkeypatch.setattr(
        library, "start", lambda threads, isa: started.append(threads) or start(threads)
    )
    built(threads=1)
    built()
    assert started == [1, 2]


def test_peaks_are_those_of_as_many_threads(monkeypatch):
    measured = []
    monkeypatch.setattr(devices, "best_peaks", {})
    monkeypatch.setattr(
        devices, "product_speed", lambda *_: measured.append(torch.get_num_threads()) or 1e9
    )
    monkeypatch.setattr(devices, "stream_speed", lambda *_: 1e9 * torch.get_num_threads())
    found = [
        TorchBackend(device="cpu", threads=threads).peaks().bytes_per_second
        for threads in (4, 1, None)
    ]
    assert found == [4e9, 1e9, 2e9]  # those of four threads would be no peak of one
    assert measured == [4] * 4 + [1] * 4 + [2] * 4


@pytest.mark.parametrize(
    ("threads", "reason"),
    [
        (0, "=0 is below 1; use a number of cores, or null for as many as torch takes"),
        (5, "=5 is more than the 4 cores present; use fewer"),
        (1.5, "=1.5 is not a whole number"),
        ("all", "=all is not a whole number"),
    ],
)
def test_other_numbers_are_refused(threads, reason):
    with pytest.raises(UserError) as caught:
        TorchBackend(device="cpu", threads=threads)
    assert str(caught.value).startswith("executor.threads" + reason)
    assert "\n" not in str(caught.value)


def test_a_gpu_has_none(monkeypatch):
    monkeypatch.setattr(devices, "resolve_device", lambda name: torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    assert TorchBackend().num_threads is None
    with pytest.raises(
        UserError, match=r"executor\.threads=2 needs a CPU, the device is a GPU; leave it out"
    ):
        TorchBackend(threads=2)
