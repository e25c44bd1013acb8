"""A clock for shared CPUs: it excludes the time in which another process held this one's cores."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from sarathi_lab.executor.placement import allowed_cores
from sarathi_lab.executor.timeline import HostTimeline

TASKS = Path("/proc/self/task")  # of Linux
STAT = Path("/proc/stat")
TICKS = 100  # per second, the unit of /proc/stat
CORES = allowed_cores()


def stolen() -> list[float]:
    """Seconds that other virtual machines held each core of this process, in steps of 1/100 s (the
    eighth number of a line of /proc/stat); empty where unknown. Too coarse to correct an iteration.
    """
    if not STAT.exists():
        return []
    lines = (line.split() for line in STAT.read_text().splitlines() if line.startswith("cpu"))
    by_core = {line[0]: int(line[8]) / TICKS for line in lines if len(line) > 8}
    return [by_core[name] for core in CORES if (name := f"cpu{core}") in by_core]


class StealCorrectedClock:
    """Seconds without those in which a thread of this process waited for a core (the second number
    of /proc/PID/task/TID/schedstat, in nanoseconds).

    Threads share each phase of an iteration, so one that waits delays the others. Waits are taken
    as independent: with shares a and b of the time, 1 - (1 - a)(1 - b) of it is lost, but never
    what the calling thread computed. Effects on caches and memory stay in the time.
    """

    def __init__(self) -> None:
        self._files = [path.open("rb", buffering=0) for path in sorted(TASKS.glob("*/schedstat"))]
        self._waits = [0.0] * len(self._files)
        self._waits, self._ran = self._read_waits(), time.thread_time()
        self._last, self.lost = time.perf_counter(), 0.0

    def __call__(self) -> float:
        now, waits, ran = time.perf_counter(), self._read_waits(), time.thread_time()
        elapsed = now - self._last
        shares = (
            min(1.0, (new - old) / elapsed) for old, new in zip(self._waits, waits, strict=True)
        )
        lost = elapsed * (1 - math.prod(1 - share for share in shares))
        self.lost += max(0.0, min(lost, elapsed - (ran - self._ran)))
        self._last, self._waits, self._ran = now, waits, ran
        return now - self.lost

    def _read_waits(self) -> list[float]:
        """Seconds by thread; those of a thread that has ended do not change."""
        waits = list(self._waits)
        for i, file in enumerate(self._files):
            with suppress(OSError):
                file.seek(0)
                waits[i] = 1e-9 * int(file.read().split()[1])
        return waits


@contextmanager
def exclude_stolen_time(executor: Any) -> Iterator[None]:
    """Give the lab's executor on a CPU a `StealCorrectedClock`; leave the clock of a GPU, and of
    others, whose threads do not share each phase of an iteration.
    """
    model = getattr(executor, "model", None)
    if model is None or model.device.type != "cpu":
        yield
        return
    before = executor.timeline
    executor.timeline = HostTimeline(StealCorrectedClock())
    try:
        yield
    finally:
        executor.timeline = before
