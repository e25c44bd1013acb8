"""A clock for shared CPUs: it excludes the time in which another process held this one's cores."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from sarathi_lab.engine.executor import Executor
from sarathi_lab.executor.placement import allowed_cores
from sarathi_lab.executor.timeline import HostTimeline, WallClock

TASKS = Path("/proc/self/task")  # of Linux
STAT = Path("/proc/stat")
TICKS = 100  # per second, the unit of /proc/stat
STOLEN = 8  # which number of a line counts ticks of other virtual machines
CORES = allowed_cores()


def stolen() -> list[float]:
    """Seconds that other virtual machines held each core of this process, in steps of 1/100 s (the
    eighth number of a line of /proc/stat); empty where unknown. Too coarse to correct an iteration.
    """
    if not STAT.exists():
        return []
    by_core = {}
    for line in STAT.read_text().splitlines():
        name, *counts = line.split()
        if name.startswith("cpu") and len(counts) >= STOLEN:
            by_core[name] = int(counts[STOLEN - 1]) / TICKS
    names = [f"cpu{core}" for core in CORES]
    return [by_core[name] for name in names if name in by_core]


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
        self._waits = self._read_waits()
        self._computed = time.thread_time()
        self._last = time.perf_counter()
        self.lost = 0.0

    def __call__(self) -> float:
        now = time.perf_counter()
        waits = self._read_waits()
        computed = time.thread_time()
        # All since the last call:
        elapsed = now - self._last
        computing = computed - self._computed  # of the calling thread
        undisturbed_share = 1.0  # of the time, in which no thread waited
        for before, after in zip(self._waits, waits, strict=True):
            waiting_share = min(1.0, (after - before) / elapsed)
            undisturbed_share *= 1 - waiting_share
        lost = elapsed * (1 - undisturbed_share)
        # While the calling thread computed, nothing was lost.
        lost = max(0.0, min(lost, elapsed - computing))
        self.lost += lost
        self._last = now
        self._waits = waits
        self._computed = computed
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
def exclude_stolen_time(executor: Executor) -> Iterator[None]:
    """Give the lab's executor on a CPU a `StealCorrectedClock`; leave the clock of a GPU, and of
    others, whose threads do not share each phase of an iteration.
    """
    if not isinstance(executor, WallClock) or not executor.shares_phases:
        yield
        return
    before = executor.timeline
    executor.timeline = HostTimeline(StealCorrectedClock())
    try:
        yield
    finally:
        executor.timeline = before
