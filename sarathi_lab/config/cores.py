"""Processes of a sweep that take cores of their own, none of them another's."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TextIO

from sarathi_lab.config.paths import try_lock


@dataclass(frozen=True)
class Cores:
    """The cores of this process; empty if there were too few. The open files keep other processes
    from them.
    """

    numbers: tuple[int, ...]
    claims: tuple[TextIO, ...]


@cache
def pin_process(num_processes: int) -> Cores:
    """Bind this process, once, to the `num_processes`-th part of the cores it may use.

    It stays unbound where other sweeps on the machine have taken too many, or where the system
    binds no processes.
    """
    if not hasattr(os, "sched_setaffinity"):
        return Cores((), ())
    share = max(1, len(os.sched_getaffinity(0)) // num_processes)
    cores = _claim(share, Path(tempfile.gettempdir()) / f"sarathi-lab-cores-{os.getuid()}")
    if cores.numbers:
        os.sched_setaffinity(0, cores.numbers)
    return cores


def _claim(share: int, folder: Path) -> Cores:
    numbers: list[int] = []
    claims: list[TextIO] = []
    for number in sorted(os.sched_getaffinity(0), key=lambda number: (_physical(number), number)):
        if (claim := try_lock(folder / str(number))) is not None:
            numbers.append(number)
            claims.append(claim)
        if len(numbers) == share:
            return Cores(tuple(numbers), tuple(claims))
    for claim in claims:
        claim.close()
    return Cores((), ())


def _physical(number: int) -> int:
    """The first of the hardware threads that share a core with `number`: they belong to one
    process.
    """
    path = Path(f"/sys/devices/system/cpu/cpu{number}/topology/thread_siblings_list")
    try:
        return int(path.read_text().replace("-", ",").split(",")[0])
    except (OSError, ValueError):
        return number
