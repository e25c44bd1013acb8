"""The clock of a device, and a profiler of iterations by it (`executor.profile`)."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

Mark = Any  # a point in a timeline, for itself alone: a clock's reading, or an event of a stream
Marks = list[tuple[str, Mark, Mark]]  # operations, their begins and ends


class HostTimeline:
    """Timeline of a device that computes while the host waits; `clock` returns seconds."""

    has_stream = False  # of work that goes on while the host launches more

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.reset()

    @property
    def now(self) -> float:
        """Seconds since `reset`, on the host's clock."""
        return self._clock() - self._zero

    def at(self, reading: float) -> float:
        """Return the seconds since `reset` of a reading of the host's clock."""
        return reading - self._zero

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

    has_stream = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        super().__init__()

    def reset(self) -> None:
        torch.cuda.synchronize(self._device)
        self._last = self.mark()
        self._last_time = 0.0
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


class WallClock:
    """The time of an executor of a real device, by its `timeline`."""

    timeline: HostTimeline
    _sleep: Callable[[float], None]

    @property
    def shares_phases(self) -> bool:
        """Whether threads of this process share each phase of an iteration: then one that waits for
        a core delays all others.
        """
        return False

    @property
    def now(self) -> float:
        return self.timeline.now

    @property
    def next_end(self) -> float:
        """`now`, as the end is unknown before `collect`: the engine collects instead of waiting."""
        return self.now

    def wait_until(self, time: float) -> None:
        while (remaining := time - self.now) > 0:
            self._sleep(remaining)


class OperationProfiler:
    """Seconds by operation and iteration on the device's clock. Operations have to be launched one
    by one, without CUDA graphs, which takes longer.
    """

    def __init__(self, timeline: HostTimeline) -> None:
        self._timeline = timeline
        self._marks: Marks = []  # of the iteration that is being launched
        self._seconds: list[tuple[int, str, float]] = []
        self._num_iterations = 0
        self._is_started = False  # not in a warm-up, whose graphs can't have marks

    def start(self) -> None:
        """Begin a run: drop what was recorded before."""
        self._marks = []
        self._seconds = []
        self._num_iterations = 0
        self._is_started = True

    @contextmanager
    def range(self, name: str) -> Iterator[None]:
        """Enclose the work of operation `name`."""
        if not self._is_started:
            yield
            return
        begin = self._timeline.mark()
        yield
        self._marks.append((name, begin, self._timeline.mark()))

    def record(self, name: str, seconds: float) -> None:
        """Receive the seconds of an operation that times itself."""
        self._marks.append((name, 0.0, seconds))

    def launched(self) -> Marks:
        """Return the marks of the iteration whose operations have all been launched."""
        marks = self._marks
        self._marks = []
        return marks

    def collected(self, marks: Marks) -> None:
        """Take the seconds between the `marks` of an iteration that has ended."""
        seconds: dict[str, float] = defaultdict(float)
        for name, begin, end in marks:
            seconds[name] += self._timeline.seconds(begin, end)
        self._seconds += ((self._num_iterations, *item) for item in seconds.items())
        self._num_iterations += 1

    def write(self, directory: Path) -> None:
        """Write `operations.parquet` (`iteration`, `operation`, `seconds`)."""
        import pandas as pd

        table = pd.DataFrame(self._seconds, columns=["iteration", "operation", "seconds"])
        table.to_parquet(directory / "operations.parquet")
