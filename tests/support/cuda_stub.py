"""torch.cuda over a `LateDevice`: what the lab does on a GPU runs on CPU tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from late_device import LateDevice, LaunchQueue, Point, Stream

from sarathi_kernels.attention import hybrid
from sarathi_kernels.runtime import chip, launch
from sarathi_lab.executor import device as devices

TICK = 1e-6  # seconds of a piece of work


def _events(device: LateDevice) -> type:
    class Event:
        """As torch.cuda.Event."""

        def __init__(self, enable_timing: bool = False) -> None:
            self._point: Point | None = None

        def record(self, stream: Stream | None = None) -> None:
            self._point = (stream or device.stream).record_event()

        def synchronize(self) -> None:
            if self._point is not None:
                device.wait(self._point)

        def query(self) -> bool:
            return self._point is None or self._point.is_done

        def elapsed_time(self, end: Event) -> float:
            """Milliseconds."""
            if not (self._point and end._point and self.query() and end.query()):
                raise RuntimeError("Both events must be completed before calculating elapsed time.")
            return 1e3 * TICK * (end._point.time - self._point.time)

    return Event


def _stream_contexts(device: LateDevice) -> type:
    class StreamContext:
        """As torch.cuda.stream. Who never leaves it, stays on the stream."""

        def __init__(self, stream: Stream) -> None:
            self._stream = stream

        def __enter__(self) -> None:
            self._before, device.stream = device.stream, self._stream

        def __exit__(self, *error: object) -> None:
            device.stream = self._before

    return StreamContext


def _stubs(device: LateDevice) -> dict[str, Any]:
    """The names of torch.cuda that the lab and torch's own graphs use."""

    def synchronize(where: object = None) -> None:
        device.synchronize()

    def mem_get_info(where: object = None) -> tuple[int, int]:
        return device.num_bytes - device.taken, device.num_bytes

    def reset_peak(where: object = None) -> None:
        device.most_taken = device.taken

    properties = SimpleNamespace(
        name="late device",
        major=9,
        minor=0,
        multi_processor_count=132,
        total_memory=device.num_bytes,
        shared_memory_per_block_optin=232_448,
        uuid="GPU-0",
    )
    return {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "set_device": lambda where: None,
        "current_device": lambda: 0,
        "get_device_properties": lambda where=None: properties,
        "get_device_name": lambda where=None: properties.name,
        "Stream": lambda where=None, priority=0: Stream(device),
        "Event": _events(device),
        "CUDAGraph": device.graph,
        "stream": _stream_contexts(device),
        "current_stream": lambda where=None: device.stream,
        "synchronize": synchronize,
        "empty_cache": lambda: None,
        "graph_pool_handle": lambda: (0, 1),
        "mem_get_info": mem_get_info,
        "memory_allocated": lambda where=None: device.taken,
        "memory_reserved": lambda where=None: device.taken,
        "max_memory_allocated": lambda where=None: device.most_taken,
        "reset_peak_memory_stats": reset_peak,
    }


@contextmanager
def stubbed(device: LateDevice) -> Iterator[LateDevice]:
    """Within, "cuda" is `device`; kernels are launched there in Triton's interpreter."""
    generator = torch.Generator

    class Generator:
        """A CPU's, whatever it is for."""

        def __new__(cls, where: object = None) -> Any:
            return generator("cpu")

    with pytest.MonkeyPatch.context() as patch:
        for name, stub in _stubs(device).items():
            patch.setattr(torch.cuda, name, stub)
        patch.setattr(torch.cuda.graph, "default_capture_stream", None)
        patch.setattr(torch._C, "_host_emptyCache", lambda: None, raising=False)
        patch.setattr(torch, "Generator", Generator)
        patch.setattr(devices, "best_peaks", {})
        patch.setitem(devices.PRODUCT_SIZE, "cuda", 64)
        patch.setitem(devices.STREAM_BYTES, "cuda", 1 << 16)
        hybrid._side_stream.cache_clear()
        chip._cuda_chip.cache_clear()
        recording = launch.Recording(chip.CHIPS[90], LaunchQueue(device))
        token = launch._recording.set(recording)
        lifts_cpu = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor moves what it made on the CPU
        try:
            with torch.inference_mode(), device:
                yield device
        finally:
            torch._C._set_only_lift_cpu_tensors(lifts_cpu)
            launch._recording.reset(token)
            hybrid._side_stream.cache_clear()
            chip._cuda_chip.cache_clear()
