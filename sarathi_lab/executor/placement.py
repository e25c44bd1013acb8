"""Cores for the threads of C++: one thread a core, fast ones first, by memory node (Linux)."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

SYSTEM = Path("/sys/devices")
CGROUPS, PROCESS_CGROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
SLOW = 0.8  # of the fastest core's speed: below are efficiency cores, not mere differences of chips


@dataclass(frozen=True)
class Core:
    """Core of this process: the first of its hardware threads, and its memory node."""

    number: int
    node: int
    is_fast: bool


def place(num_threads: int) -> tuple[list[int], list[int]]:
    """Choose the core (-1: any) and the memory node, counted from 0, of each thread. Threads are
    bound if they take all fast cores: others may use what is left over.
    """
    cores = sorted(physical_cores(), key=lambda core: not core.is_fast)
    if not 0 < sum(core.is_fast for core in cores) <= num_threads <= len(cores):
        return [-1] * num_threads, [0] * num_threads
    chosen = sorted(cores[:num_threads], key=lambda core: core.node)
    order = list(dict.fromkeys(core.node for core in chosen))
    return [core.number for core in chosen], [order.index(core.node) for core in chosen]


def most_threads() -> int | None:
    """Return the number of fast cores, limited to this process's share of time; None if unknown."""
    known = [sum(core.is_fast for core in physical_cores()), *_quotas()]
    return min((number for number in known if number), default=None)


def allowed_cores() -> list[int]:
    """Return the numbers of the cores that this process may use; none where that is unknown."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def physical_cores() -> list[Core]:
    """Return the cores of this process, as Linux lists them; none elsewhere."""
    if not (allowed := set(allowed_cores())):
        return []
    siblings = "system/cpu/cpu{}/topology/thread_siblings_list"
    firsts = sorted(
        {min(_numbers(SYSTEM / siblings.format(n)) & allowed, default=n) for n in allowed}
    )
    slow = _numbers(SYSTEM / "cpu_atom" / "cpus")  # Intel's efficiency cores
    nodes = {
        number: int(folder.name.removeprefix("node"))
        for folder in (SYSTEM / "system" / "node").glob("node[0-9]*")
        for number in _numbers(folder / "cpulist")
    }
    speeds = _speeds(firsts)
    enough = SLOW * max(speeds)
    return [
        Core(number, nodes.get(number, 0), speed >= enough and number not in slow)
        for number, speed in zip(firsts, speeds, strict=True)
    ]


def _speeds(numbers: Sequence[int]) -> list[float]:
    """Return the speeds of cores in any common unit; equal ones if unknown."""
    for name in ("cpu_capacity", "cpufreq/cpuinfo_max_freq"):
        texts = [_text(SYSTEM / "system" / "cpu" / f"cpu{number}" / name) for number in numbers]
        if all(texts):
            return [float(text) for text in texts]
    return [1.0 for _ in numbers]


def _quotas() -> Iterator[int]:
    """Yield the limits of containers (cgroup v2) on this process, in cores."""
    path = _text(PROCESS_CGROUP).partition("::")[2]
    for folder in (CGROUPS / path.lstrip("/"), CGROUPS):  # in a container, the root
        quota, _, period = _text(folder / "cpu.max").partition(" ")
        if quota not in ("", "max"):
            yield max(1, int(quota) // int(period))


def _numbers(path: Path) -> set[int]:
    """Read a list such as 0-3,8."""
    found: set[int] = set()
    for part in filter(None, _text(path).split(",")):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


def _text(path: Path) -> str:
    """Read a file; empty if it is missing."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
