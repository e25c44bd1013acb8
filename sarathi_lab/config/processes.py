"""Processes that this one starts: what they inherit, and what reaches them."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker

from sarathi_lab.config.errors import UserError


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


@contextmanager
def start_methods_of_python() -> Iterator[None]:
    """Let libraries start processes meanwhile where this process was started by another library.

    In a process of joblib the default method is "loky". A process that is spawned there has to
    use it, too, and fails, as only joblib's import makes that method known.
    """
    inherited = multiprocessing.get_start_method(allow_none=True)
    # Python knows the method, so that libraries can use it.
    if inherited is None or inherited in multiprocessing.get_all_start_methods():
        yield
        return
    multiprocessing.set_start_method("spawn", force=True)
    try:
        yield
    finally:
        multiprocessing.set_start_method(inherited, force=True)


def require_child_processes() -> None:
    """Raise UserError where Python lets no process be started: in a daemon."""
    process = multiprocessing.current_process()
    if process.daemon:
        raise UserError(
            f"the process {process.name} is a daemon, which may start no workers; use "
            "hydra.launcher.backend=loky, or start it with daemon=False"
        )
