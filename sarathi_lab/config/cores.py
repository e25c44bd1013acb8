"""Processes of a sweep that take cores of their own, none of them another's."""

from __future__ import annotations

import os
import stat
import tempfile
from functools import cache
from pathlib import Path
from typing import TextIO

from sarathi_lab.config.paths import try_lock

_claims: list[TextIO] = []  # open files that keep other processes from this one's cores


def allowed_cores() -> list[int]:
    """The numbers of the cores that this process may use; none where the system does not say."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


@cache
def pin_process(num_processes: int) -> tuple[int, ...]:
    """Bind this process, once, to the `num_processes`-th part of the cores it may use; returns
    their numbers.

    It stays unbound, and they are none, where other sweeps on the machine have taken too many,
    where the folder of their locks is not this user's alone, or the system binds no processes.
    """
    if not hasattr(os, "sched_setaffinity"):
        return ()
    usable = os.sched_getaffinity(0)
    share = max(1, len(usable) // num_processes)
    if (folder := own_folder()) is None:
        return ()
    numbers: list[int] = []
    for number in sorted(usable, key=lambda number: (_physical(number), number)):
        if len(numbers) < share and (claim := try_lock(folder / str(number))) is not None:
            numbers.append(number)
            _claims.append(claim)
    if len(numbers) < share:
        for claim in _claims:
            claim.close()
        return ()
    os.sched_setaffinity(0, numbers)
    return tuple(numbers)


def own_folder() -> Path | None:
    """A folder for locks that nobody else can write to; None if there is something else."""
    folder = Path(tempfile.gettempdir()) / f"sarathi-lab-cores-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError:
        return None
    is_own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
    return folder if is_own and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) else None


def _physical(number: int) -> int:
    """The first of the hardware threads that share a core: they belong to one process."""
    path = Path(f"/sys/devices/system/cpu/cpu{number}/topology/thread_siblings_list")
    try:
        return int(path.read_text().replace("-", ",").split(",")[0])
    except (OSError, ValueError):
        return number
