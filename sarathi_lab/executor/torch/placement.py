"""Which cores the threads of a CPU's engine compute on: one thread a core, the fast ones first,
node by node of the memory (Linux; elsewhere the system decides).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from sarathi_lab.config.cores import allowed_cores

SYSTEM = Path("/sys/devices")
CGROUPS, OWN_CGROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
SLOW = 0.8  # of the fastest core's speed: below are efficiency cores, not mere differences of chips


@dataclass(frozen=True)
class Core:
    """A core that this process may use: the first of its `number`s, one a hardware thread, and the
    node of memory that is near.
    """

    number: int
    node: int
    is_fast: bool


@dataclass(frozen=True)
class Placement:
    """The core and node of each thread. They are bound if they take all fast cores: where there are
    cores to spare, others may have these.
    """

    num_threads: int
    cores: tuple[Core, ...]  # none: threads move

    @property
    def bound(self) -> list[int]:
        """The number of each thread's core, -1 for any."""
        return [core.number for core in self.cores] or [-1] * self.num_threads

    @property
    def nodes(self) -> list[int]:
        """Those of the threads, counted from 0."""
        found = list(dict.fromkeys(core.node for core in self.cores))
        return [found.index(core.node) for core in self.cores] or [0] * self.num_threads

    def describe(self) -> str:
        if not self.cores:
            return "threads on cores of the system's choice"
        parts = []
        for node, own in groupby(self.cores, key=lambda core: core.node):
            numbers = ", ".join(str(core.number) for core in own)
            parts.append(f"{numbers} (node {node})")
        return f"a thread on each of the cores {', '.join(parts)}"


def place(num_threads: int) -> Placement:
    """Cores for so many threads of this process."""
    cores = sorted(physical_cores(), key=lambda core: not core.is_fast)
    num_fast = sum(core.is_fast for core in cores)
    takes_all = 0 < num_fast <= num_threads <= len(cores)
    chosen = sorted(cores[:num_threads], key=lambda core: core.node) if takes_all else ()
    return Placement(num_threads, tuple(chosen))


def most_threads() -> int | None:
    """Threads that pay: the fast cores, no more than this process's share of time lets run at once;
    None where nothing is known.
    """
    known = [sum(core.is_fast for core in physical_cores()), *_quotas()]
    return min((number for number in known if number), default=None)


def physical_cores() -> list[Core]:
    """Those that this process may use, by what Linux says of them; none elsewhere."""
    if not (allowed := set(allowed_cores())):
        return []
    firsts = sorted({min(_siblings(number) & allowed, default=number) for number in allowed})
    slow = _numbers(SYSTEM / "cpu_atom" / "cpus")  # Intel's efficiency cores
    speeds, nodes = _speeds(firsts), _nodes()
    enough = SLOW * max(speeds)
    return [
        Core(number, nodes.get(number, 0), speed >= enough and number not in slow)
        for number, speed in zip(firsts, speeds, strict=True)
    ]


def _siblings(number: int) -> set[int]:
    """The hardware threads that share a core."""
    path = SYSTEM / "system" / "cpu" / f"cpu{number}" / "topology" / "thread_siblings_list"
    return _numbers(path) | {number}


def _speeds(numbers: Sequence[int]) -> list[float]:
    """Of cores, in whatever unit there is for all of them; alike where there is none."""
    for name in ("cpu_capacity", "cpufreq/cpuinfo_max_freq"):
        texts = [_text(SYSTEM / "system" / "cpu" / f"cpu{number}" / name) for number in numbers]
        if all(texts):
            return [float(text) for text in texts]
    return [1.0 for _ in numbers]


def _nodes() -> dict[int, int]:
    """The node of memory by core."""
    folders = (SYSTEM / "system" / "node").glob("node[0-9]*")
    return {
        number: int(folder.name.removeprefix("node"))
        for folder in folders
        for number in _numbers(folder / "cpulist")
    }


def _quotas() -> Iterable[int]:
    """How many cores' time this process's groups may take, as containers are limited."""
    for line in (_text(OWN_CGROUPS) or "0::/").splitlines():
        controllers, path = line.split(":", 2)[1:]
        if controllers and "cpu" not in controllers.split(","):
            continue
        root = CGROUPS / controllers if controllers else CGROUPS
        for folder in (root / path.lstrip("/"), root):  # a container's own is the root
            if controllers:
                limits = [_text(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period")]
            else:
                limits = (_text(folder / "cpu.max") or "").split()
            if all(limits) and limits and limits[0] not in ("max", "-1"):
                yield max(1, int(limits[0] or 0) // int(limits[1] or 1))


def _numbers(path: Path) -> set[int]:
    """Of a list such as 0-3,8."""
    found: set[int] = set()
    for part in _text(path).split(","):
        first, _, last = part.partition("-")
        if first:
            found |= set(range(int(first), int(last or first) + 1))
    return found


def _text(path: Path) -> str:
    """What a file says; empty if it is not there."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
