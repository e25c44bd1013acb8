"""The clock of a device: marks in its work, and the seconds between them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sarathi_lab.engine.request import Batch

Mark = Any  # a point in a timeline


class InFlight(NamedTuple):
    """Submitted batch: its marks, the time its launch took until, its tokens on their way to the
    host, and further fields of its `StepResult`.
    """

    batch: Batch
    start: Mark
    end: Mark
    launched: float
    token_ids: Tensor
    fields: Mapping[str, Any]


class HostTimeline:
    """Timeline of a device that computes while the host waits; `clock` returns seconds."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.reset()

    @property
    def now(self) -> float:
        """Seconds since `reset`, on the host's clock."""
        return self._clock() - self._zero

    def reset(self) -> None:
        """Set zero to this moment, the device being idle."""
        self._zero = self._clock()

    @property
    def launched(self) -> float:
        """Seconds since `reset` at which the host ends a launch; 0 where launching computes."""
        return 0.0

    def mark(self) -> Mark:
        """Mark the end of all work submitted so far."""
        return self.now

    def wait(self, mark: Mark) -> float:
        """Wait for `mark`, in the order of marks; return its seconds since `reset`."""
        return mark

    def seconds(self, before: Mark, after: Mark) -> float:
        """Return the seconds between two marks that have passed."""
        return after - before


class CudaTimeline(HostTimeline):
    """Timeline of a GPU's current stream: durations exclude launches and waits of the host."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        super().__init__()

    def reset(self) -> None:
        torch.cuda.synchronize(self._device)
        self._last, self._last_time = self.mark(), 0.0
        torch.cuda.synchronize(self._device)
        super().reset()

    @property
    def launched(self) -> float:
        return self.now

    def mark(self) -> Mark:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def wait(self, mark: Mark) -> float:
        """Count from the mark before: the clock of events has only 24 bits."""
        mark.synchronize()
        self._last_time += self.seconds(self._last, mark)
        self._last = mark
        return self._last_time

    def seconds(self, before: Mark, after: Mark) -> float:
        return before.elapsed_time(after) / 1e3


def timeline_of(device: torch.device) -> HostTimeline:
    return CudaTimeline(device) if device.type == "cuda" else HostTimeline()


def durations(work: Callable[[], object], timeline: HostTimeline, repetitions: int) -> list[float]:
    """Return the seconds of each repetition; all are launched before the host waits."""
    marks = [timeline.mark()]
    for _ in range(repetitions):
        work()
        marks.append(timeline.mark())
    timeline.wait(marks[-1])
    return [timeline.seconds(before, after) for before, after in pairwise(marks)]
