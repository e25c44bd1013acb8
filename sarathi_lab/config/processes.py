"""Processes: the cores of those of a sweep, and one that a time limit or a crash ends alone."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, TextIO

from sarathi_lab.config.errors import RunError
from sarathi_lab.config.paths import try_lock

_claims: list[TextIO] = []  # open files that keep other processes from this one's cores


def allowed_cores() -> list[int]:
    """Return the numbers of the cores that this process may use; none where that is unknown."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


@cache
def pin_process(num_processes: int) -> tuple[int, ...]:
    """Bind this process, once, to the `num_processes`-th part of the cores it may use; returns
    their numbers.

    It stays unbound, and they are none, where other sweeps on the machine have taken too many, or
    the system binds no processes.
    """
    if not hasattr(os, "sched_setaffinity"):
        return ()
    usable = os.sched_getaffinity(0)
    share = max(1, len(usable) // num_processes)
    folder = Path(tempfile.gettempdir()) / f"sarathi-lab-cores-{os.getuid()}"
    numbers: list[int] = []
    with suppress(PermissionError):  # of a folder that another user has made
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


def _physical(number: int) -> int:
    """The first of the hardware threads that share a core: they belong to one process."""
    path = Path(f"/sys/devices/system/cpu/cpu{number}/topology/thread_siblings_list")
    try:
        return int(path.read_text().replace("-", ",").split(",")[0])
    except (OSError, ValueError):
        return number


def run_with_timeout(function: Callable[..., None], *args: Any, limit: float) -> None:
    """Call `function(*args)` in a fresh process. Raises what it raises, and RunError if the process
    dies, or is ended after `limit` seconds with all that it started.
    """
    from joblib.externals.loky import ProcessPoolExecutor
    from joblib.externals.loky.process_executor import TerminatedWorkerError

    pool = ProcessPoolExecutor(max_workers=1)
    try:
        pool.submit(function, *args).result(timeout=limit)
    except TimeoutError:
        raise RunError(
            f"it took more than limit={limit:g} seconds and was ended; allow more"
        ) from None
    except TerminatedWorkerError as error:
        raise RunError(f"its process was killed ({str(error).splitlines()[0]})") from None
    finally:
        pool.shutdown(wait=True, kill_workers=True)


@contextmanager
def interrupts_kept_from_children() -> Iterator[None]:
    """Start processes that a terminal's Ctrl-C does not reach: the launcher ends them, as one that
    is still importing would print a traceback. This process gets it in another thread.
    """
    resource_tracker.ensure_running()  # begun later, it would unblock the signal again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
