"""Cores for the threads of C++: one thread a core, fast ones first, by memory node (Linux)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SYSTEM = Path("/sys/devices")
CGROUPS = Path("/sys/fs/cgroup")
PROCESS_CGROUP = Path("/proc/self/cgroup")


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
    cores = physical_cores()
    fast_cores = [core for core in cores if core.is_fast]
    slow_cores = [core for core in cores if not core.is_fast]
    if not 0 < len(fast_cores) <= num_threads <= len(cores):
        return [-1] * num_threads, [0] * num_threads
    fast_first = fast_cores + slow_cores
    chosen = sorted(fast_first[:num_threads], key=lambda core: core.node)
    numbers = [core.number for core in chosen]
    system_nodes = [core.node for core in chosen]
    # Threads count nodes from 0, without those that have no thread.
    distinct = sorted(set(system_nodes))
    nodes = [distinct.index(node) for node in system_nodes]
    return numbers, nodes


def most_threads() -> int | None:
    """Return the number of fast cores, limited to this process's share of time; None if unknown."""
    num_fast = sum(core.is_fast for core in physical_cores())
    limits = [num_fast, *_quotas()]
    return min(filter(None, limits), default=None)


def allowed_cores() -> list[int]:
    """Return the numbers of the cores that this process may use; none where that is unknown."""
    if not hasattr(os, "sched_getaffinity"):  # of Linux
        return []
    return sorted(os.sched_getaffinity(0))


def physical_cores() -> list[Core]:
    """Return the cores of this process, as Linux lists them; none elsewhere."""
    allowed = set(allowed_cores())
    if not allowed:
        return []
    firsts = set()  # the first hardware thread of each core
    for number in allowed:
        topology = SYSTEM / "system" / "cpu" / f"cpu{number}" / "topology"
        siblings = _numbers(topology / "thread_siblings_list")
        first = min(siblings & allowed, default=number)
        firsts.add(first)
    slow_cores = _numbers(SYSTEM / "cpu_atom" / "cpus")  # Intel's efficiency cores
    if firsts <= slow_cores:  # none is faster
        slow_cores = set()
    nodes = _nodes()
    cores = []
    for number in sorted(firsts):
        is_fast = number not in slow_cores
        cores.append(Core(number, nodes.get(number, 0), is_fast))
    return cores


def _nodes() -> dict[int, int]:
    """Return the memory node of each core; none where Linux lists no nodes."""
    nodes = {}
    for folder in (SYSTEM / "system" / "node").glob("node[0-9]*"):
        node = int(folder.name.removeprefix("node"))
        for number in _numbers(folder / "cpulist"):
            nodes[number] = node
    return nodes


def _quotas() -> Iterator[int]:
    """Yield the limits of containers (cgroup v2) on this process, in cores."""
    path = _text(PROCESS_CGROUP).partition("::")[2]
    own_folder = CGROUPS / path.lstrip("/")
    for folder in (own_folder, CGROUPS):  # in a container, the root
        limit = _text(folder / "cpu.max")  # microseconds of CPU time in a period, and the period
        quota, _, period = limit.partition(" ")
        if quota in ("", "max"):
            continue
        num_cores = int(quota) // int(period)
        yield max(1, num_cores)


def _numbers(path: Path) -> set[int]:
    """Read a list such as 0-3,8."""
    numbers: set[int] = set()
    for interval in filter(None, _text(path).split(",")):
        first, _, last = interval.partition("-")
        end = int(last or first) + 1
        numbers.update(range(int(first), end))
    return numbers


def _text(path: Path) -> str:
    """Read a file; empty if it is missing."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
