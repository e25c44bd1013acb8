"""Profilers of iterations (`executor.profile`): NVTX ranges, times by operation, a torch trace."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from statistics import median
from typing import Literal

import torch

from sarathi_lab.executor.torch.timeline import HostTimeline, Mark
from sarathi_lab.model.operations import Record, no_range

ProfileKind = Literal["none", "nvtx", "operations", "trace"]
TRACED_ITERATIONS = 30  # from the start of the run: a trace of more is too large to open
REHEARSALS = 7  # whose median gives the cost of profiling


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


class TraceProfiler(NullProfiler):
    """Trace of the first iterations by torch's profiler, for ui.perfetto.dev."""

    _profiler: torch.profiler.profile | None = None
    _left = 0

    def range(self, name: str) -> AbstractContextManager[object]:
        return torch.profiler.record_function(name) if self._left else super().range(name)

    def start(self) -> None:
        self._profiler = torch.profiler.profile()
        self._profiler.start()
        self._left = TRACED_ITERATIONS
        self.is_eager = True

    def collected(self) -> None:
        if self._left:
            self._left -= 1
            if not self._left:
                self._stop()

    def write(self, directory: Path, rehearse: Callable[[], float]) -> dict[str, float]:
        """Write `torch_trace.json`, if anything ran."""
        if self._profiler is not None:
            self._stop()
            self._profiler.export_chrome_trace(str(directory / "torch_trace.json"))
        return {}

    def _stop(self) -> None:
        if self._profiler is not None and self.is_eager:
            self._profiler.stop()
        self.is_eager, self._left = False, 0


def make_profiler(kind: ProfileKind, timeline: HostTimeline) -> NullProfiler:
    if kind == "operations":
        return OperationProfiler(timeline)
    return {"none": NullProfiler, "nvtx": NvtxProfiler, "trace": TraceProfiler}[kind]()
