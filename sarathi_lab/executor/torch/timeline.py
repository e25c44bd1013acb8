"""The clock of a device, and profilers of iterations by it (`executor.profile`)."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from sarathi_lab.engine.request import Batch
from sarathi_lab.model.operations import Record, no_range

Mark = Any  # a point in a timeline
ProfileKind = Literal["none", "nvtx", "operations"]
REHEARSALS = 7  # whose median gives the cost of profiling


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


class NullProfiler:
    """Profiler that records nothing and costs nothing; the base of the others. While `is_eager`,
    each operation must be launched by itself, without CUDA graphs.
    """

    is_eager = False

    def range(self, name: str) -> AbstractContextManager[object]:
        """Enclose the work of operation `name`."""
        return no_range(name)

    def recorder(self) -> Record | None:
        """Return the receiver of seconds of operations that time themselves; None if unused."""
        return None

    def start(self) -> None:
        """Begin a run: drop what was recorded before."""

    def submitted(self) -> None:
        """Note that all operations of an iteration have been launched."""

    def collected(self) -> None:
        """Note that the oldest iteration has ended."""

    def write(self, directory: Path, rehearse: Callable[[], float]) -> dict[str, float]:
        """Write the records to `directory`; return the metrics of their cost. `rehearse` runs
        common iterations and returns their seconds.
        """
        return {}


class NvtxProfiler(NullProfiler):
    """Named ranges for NVIDIA's profilers; a replayed graph would have no names."""

    is_eager = True

    def range(self, name: str) -> AbstractContextManager[object]:
        return torch.cuda.nvtx.range(name)


class OperationProfiler(NullProfiler):
    """Seconds by operation and iteration on the device's clock. Marks and eager launches slow the
    run by `profiling_slowdown`.
    """

    def __init__(self, timeline: HostTimeline) -> None:
        self._timeline = timeline
        self._marks: list[tuple[str, Mark, Mark]] = []
        self._in_flight: deque[list[tuple[str, Mark, Mark]]] = deque()
        self._seconds: list[dict[str, float]] = []

    def range(self, name: str) -> AbstractContextManager[object]:
        return self._timed(name) if self.is_eager else super().range(name)

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        begin = self._timeline.mark()
        yield
        self._marks.append((name, begin, self._timeline.mark()))

    def recorder(self) -> Record | None:
        return self._record if self.is_eager else None

    def _record(self, name: str, seconds: float) -> None:
        self._marks.append((name, 0.0, seconds))

    def start(self) -> None:
        self.is_eager = True
        self._seconds.clear()

    def submitted(self) -> None:
        self._in_flight.append(self._marks)
        self._marks = []

    def collected(self) -> None:
        seconds: dict[str, float] = defaultdict(float)
        for name, begin, end in self._in_flight.popleft():
            seconds[name] += self._timeline.seconds(begin, end)
        if self.is_eager:
            self._seconds.append(dict(seconds))

    def write(self, directory: Path, rehearse: Callable[[], float]) -> dict[str, float]:
        """Write `operations.parquet` (`iteration`, `operation`, `seconds`); return the ratio of
        median seconds with and without profiling, measured in turn.
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
        for is_eager in (True, False) * REHEARSALS:
            self.is_eager = is_eager
            seconds[is_eager].append(rehearse())
        return {"profiling_slowdown": median(seconds[True]) / median(seconds[False])}


def make_profiler(kind: ProfileKind, timeline: HostTimeline) -> NullProfiler:
    if kind == "operations":
        return OperationProfiler(timeline)
    return NvtxProfiler() if kind == "nvtx" else NullProfiler()
