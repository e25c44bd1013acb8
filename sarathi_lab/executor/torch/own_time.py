"""Time on a shared CPU: threads on cores of their own, and a clock that stands still while another
process has the core of one of them.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from sarathi_lab.config.cores import allowed_cores
from sarathi_lab.executor.torch.executor import TorchExecutor
from sarathi_lab.executor.torch.watching import HostTimeline

TASKS = Path("/proc/self/task")  # Linux; elsewhere nothing is known of other processes
STAT = Path("/proc/stat")
TICKS = 100  # a second, in which it counts
CORES = allowed_cores()


def stolen() -> list[float]:
    """Seconds that other virtual machines had each core that this process may have, in steps of
    1/100 s (the eighth number of a line of /proc/stat): too coarse to take off an iteration's time.
    None where that is not known.
    """
    if not STAT.exists():
        return []
    lines = (line.split() for line in STAT.read_text().splitlines() if line.startswith("cpu"))
    by_core = {line[0]: int(line[8]) / TICKS for line in lines if len(line) > 8}
    return [by_core[name] for core in CORES if (name := f"cpu{core}") in by_core]


class OwnClock:
    """Seconds less those in which a thread of this process waited for a core, as Linux counts them
    (the second number of /proc/PID/task/TID/schedstat, in nanoseconds).

    Threads share each phase of an iteration, so that one that waits lets the others wait. When each
    did between two readings is not known: with shares a and b of the time, 1 - (1 - a)(1 - b) of it
    is lost, as of waits that are independent; but never what the calling thread computed, whoever
    waits for nothing meanwhile. What other processes cost beside that, in caches and memory, is in
    the time.
    """

    def __init__(self) -> None:
        files = (path / "schedstat" for path in _tasks())
        self._files = [file.open("rb", buffering=0) for file in files if file.exists()]
        self._waits, self._ran = self._waited(), time.thread_time()
        self._last, self.lost = time.perf_counter(), 0.0

    def __call__(self) -> float:
        now, waits, ran = time.perf_counter(), self._waited(), time.thread_time()
        whole = now - self._last
        shares = (
            min(1.0, (new - old) / whole) for old, new in zip(self._waits, waits, strict=True)
        )
        lost = whole * (1 - math.prod(1 - share for share in shares))
        self.lost += max(0.0, min(lost, whole - (ran - self._ran)))
        self._last, self._waits, self._ran = now, waits, ran
        return now - self.lost

    def _waited(self) -> list[float]:
        """Seconds by thread; those of a thread that is gone do not change."""
        found = []
        for i, file in enumerate(self._files):
            try:
                file.seek(0)
                found.append(1e-9 * int(file.read().split()[1]))
            except OSError:
                found.append(self._waits[i])
        return found


@contextmanager
def undisturbed(executor: TorchExecutor) -> Iterator[OwnClock]:
    """Let a CPU's executor tell the time of an `OwnClock`, its threads on cores of their own. A GPU
    keeps its own time.
    """
    clock, before = OwnClock(), executor.timeline
    if executor.model.device.type != "cpu":
        yield clock
        return
    with cores_of_their_own():
        executor.timeline = HostTimeline(clock)
        try:
            yield clock
        finally:
            executor.timeline = before


@contextmanager
def cores_of_their_own() -> Iterator[None]:
    """Keep this thread on its first core and the process's others on the next ones, in turn.

    Where another process has a core, the system may leave two threads on one for seconds: they then
    take twice the time, however idle the rest is. Does nothing where there are cores to spare, or
    none can be chosen.
    """
    before: dict[int, set[int]] = {}
    cores = allowed_cores()
    if 1 < len(cores) <= torch.get_num_threads():
        own = os.getpid()
        others = sorted({int(path.name) for path in _tasks()} - {own})
        places = {own: cores[0]}
        places |= {thread: cores[1:][i % (len(cores) - 1)] for i, thread in enumerate(others)}
        for thread, core in places.items():
            with suppress(ProcessLookupError):  # it has ended
                before[thread] = os.sched_getaffinity(thread)
                os.sched_setaffinity(thread, {core})
    try:
        yield
    finally:
        for thread, allowed in before.items():
            with suppress(ProcessLookupError):
                os.sched_setaffinity(thread, allowed)


def _tasks() -> list[Path]:
    return sorted(TASKS.iterdir()) if TASKS.is_dir() else []
