"""Moments of a device, and looking into iterations while they run (`executor.profile`): ranges for
Nsight, times by operation, a torch trace.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch

from sarathi_lab.model.operations import Record, unwatched

ProfileKind = Literal["none", "nvtx", "operations", "trace"]
TRACED_ITERATIONS = 30  # from the start of the run: a trace of more is too large to open
REHEARSALS = 7  # whose median says what watching costs


Mark = Any  # a moment of a timeline


class HostTimeline:
    """Moments of a device that works while the host waits. `clock` returns seconds."""

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
        """The host's time when it has launched what a device, apart from it, is to do; 0 where the
        work is done by then.
        """
        return 0.0

    def mark(self) -> Mark:
        """When the device has done all work submitted so far: now, as nothing is ever pending."""
        return self.now

    def wait(self, mark: Mark) -> float:
        """Wait until it has come, in the order of marks; its seconds since `reset`."""
        return mark

    def seconds(self, before: Mark, after: Mark) -> float:
        """From one mark to a later one, both of which have come."""
        return after - before


class CudaTimeline(HostTimeline):
    """Moments of a GPU's current stream, on its own clock: durations without launches and waits."""

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
        """Counted from the one before it: an event's own clock has only 24 bits."""
        mark.synchronize()
        self._last_time += self.seconds(self._last, mark)
        self._last = mark
        return self._last_time

    def seconds(self, before: Mark, after: Mark) -> float:
        return before.elapsed_time(after) / 1e3


def timeline_of(device: torch.device) -> HostTimeline:
    return CudaTimeline(device) if device.type == "cuda" else HostTimeline()


def durations(work: Callable[[], object], timeline: HostTimeline, repetitions: int) -> list[float]:
    """Seconds of each repetition; the host launches all of them before it waits."""
    marks = [timeline.mark()]
    for _ in range(repetitions):
        work()
        marks.append(timeline.mark())
    timeline.wait(marks[-1])
    return [timeline.seconds(before, after) for before, after in pairwise(marks)]


class Nothing:
    """Watches nothing and costs nothing; subclasses see the operations of every iteration. With
    `is_apart` each operation must be launched by itself.
    """

    is_apart = False

    def range(self, name: str) -> AbstractContextManager[object]:
        """Around the work of operation `name`."""
        return unwatched(name)

    def recorder(self) -> Record | None:
        """What takes the seconds of operations that time themselves; None if nobody asks."""
        return None

    def start(self) -> None:
        """The run begins: forget what was seen before."""

    def submitted(self) -> None:
        """An iteration's operations have all been launched."""

    def collected(self) -> None:
        """The oldest of them is done."""

    def write(self, directory: Path, rehearse: Callable[[], float]) -> dict[str, float]:
        """Leave what was seen in `directory`; returns what it cost. `rehearse` runs common
        iterations, and returns their seconds.
        """
        return {}


class NvtxRanges(Nothing):
    """Names operations for NVIDIA's profilers; a replayed graph would have no names."""

    is_apart = True

    def range(self, name: str) -> AbstractContextManager[object]:
        return torch.cuda.nvtx.range(name)


class OperationTimes(Nothing):
    """Seconds by operation and iteration, on the device's clock, while `is_apart`: from `start` on.

    Operations can be told apart only where they are launched one by one, and each mark is work of
    its own: it slows the run.
    """

    def __init__(self, timeline: HostTimeline) -> None:
        self._timeline = timeline
        self._marks: list[tuple[str, Mark, Mark]] = []
        self._in_flight: deque[list[tuple[str, Mark, Mark]]] = deque()
        self._seconds: list[dict[str, float]] = []

    def range(self, name: str) -> AbstractContextManager[object]:
        return self._timed(name) if self.is_apart else super().range(name)

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        begin = self._timeline.mark()
        yield
        self._marks.append((name, begin, self._timeline.mark()))

    def recorder(self) -> Record | None:
        return self._record if self.is_apart else None

    def _record(self, name: str, seconds: float) -> None:
        self._marks.append((name, 0.0, seconds))

    def start(self) -> None:
        self.is_apart = True
        self._seconds.clear()

    def submitted(self) -> None:
        self._in_flight.append(self._marks)
        self._marks = []

    def collected(self) -> None:
        seconds: dict[str, float] = defaultdict(float)
        for name, begin, end in self._in_flight.popleft():
            seconds[name] += self._timeline.seconds(begin, end)
        if self.is_apart:
            self._seconds.append(dict(seconds))

    def write(self, directory: Path, rehearse: Callable[[], float]) -> dict[str, float]:
        """`operations.parquet`: `iteration`, `operation`, `seconds`; returns the seconds while
        operations are told apart, over those without (medians, in turn).
        """
        import pandas as pd  # here, as ranks start in less time without it

        rows = [
            (iteration, operation, seconds)
            for iteration, by_operation in enumerate(self._seconds)
            for operation, seconds in by_operation.items()
        ]
        table = pd.DataFrame(rows, columns=["iteration", "operation", "seconds"])
        table.to_parquet(directory / "operations.parquet")
        seconds: dict[bool, list[float]] = {True: [], False: []}
        for is_apart in (True, False) * REHEARSALS:
            self.is_apart = is_apart
            seconds[is_apart].append(rehearse())
        return {"profiling_slowdown": median(seconds[True]) / median(seconds[False])}


class Trace(Nothing):
    """A trace of the first iterations by torch's profiler, for ui.perfetto.dev."""

    _profiler: torch.profiler.profile | None = None
    _left = 0

    def range(self, name: str) -> AbstractContextManager[object]:
        return torch.profiler.record_function(name) if self._left else super().range(name)

    def start(self) -> None:
        self._profiler = torch.profiler.profile()
        self._profiler.start()
        self._left = TRACED_ITERATIONS
        self.is_apart = True

    def collected(self) -> None:
        if self._left:
            self._left -= 1
            if not self._left:
                self._stop()

    def write(self, directory: Path, rehearse: Callable[[], float]) -> dict[str, float]:
        """`torch_trace.json`, if anything ran."""
        if self._profiler is not None:
            self._stop()
            self._profiler.export_chrome_trace(str(directory / "torch_trace.json"))
        return {}

    def _stop(self) -> None:
        if self._profiler is not None and self.is_apart:
            self._profiler.stop()
        self.is_apart, self._left = False, 0


def make_watch(kind: ProfileKind, timeline: HostTimeline) -> Nothing:
    if kind == "operations":
        return OperationTimes(timeline)
    return {"none": Nothing, "nvtx": NvtxRanges, "trace": Trace}[kind]()
