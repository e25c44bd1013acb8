"""Processes that a time limit, a crash or Ctrl-C ends without this one."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import resource_tracker
from typing import Any

from omegaconf import DictConfig

from sarathi_lab.config.errors import RunError
from sarathi_lab.config.instantiate import build

CHECK_SECONDS = 600


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
        raise RunError(f"it took more than limit={limit:g} s and was ended; allow more") from None
    except TerminatedWorkerError as error:
        raise RunError(f"its process was killed ({str(error).splitlines()[0]})") from None
    finally:
        pool.shutdown(wait=True, kill_workers=True)


def check_elsewhere(cfgs: Sequence[DictConfig]) -> None:
    """Let the tasks check these jobs in a fresh process, which takes the memory of a GPU that it
    looked at with it: runs under a `limit` have it all. Raises what the checks raise.
    """
    run_with_timeout(_check, cfgs, limit=CHECK_SECONDS)


def _check(cfgs: Sequence[DictConfig]) -> None:
    for cfg in cfgs:
        build(cfg.task).check(cfg)


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
