"""Processes that a time limit, a crash or Ctrl-C ends without this one."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from typing import TypeVar, TypeVarTuple

from sarathi_lab.config.errors import RunError, UserError

Returned = TypeVar("Returned")
Arguments = TypeVarTuple("Arguments")


def run_with_timeout(
    function: Callable[[*Arguments], Returned], *args: *Arguments, limit: float
) -> Returned:
    """Return `function(*args)` of a fresh process. Raises what it raises, and RunError if the
    process dies, or is ended after `limit` seconds with all that it started.
    """
    from joblib.externals.loky import ProcessPoolExecutor
    from joblib.externals.loky.process_executor import TerminatedWorkerError

    # Not of the standard library: that one can't end a process that runs.
    pool = ProcessPoolExecutor(max_workers=1)
    try:
        returned: Returned = pool.submit(function, *args).result(timeout=limit)
        return returned
    except TimeoutError:
        raise RunError(f"it took more than limit={limit:g} s and was ended; allow more") from None
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
