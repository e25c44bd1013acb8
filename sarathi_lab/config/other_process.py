"""Another process that makes calls for this one."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any

from sarathi_lab.config.errors import RunError

FORKS = sys.platform == "linux"  # elsewhere the system's own libraries do not bear it


class OtherProcess:
    """A process that calls `make` once and makes calls with that. A terminal's Ctrl-C does not
    reach it; it ends with this one, however that ends.

    Forked it is there at once, with all that is imported, or else imports anew. Whoever makes it
    must hold no lock, and it must touch nothing that other threads of this process use: it
    computes simulations, without tensors or output.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        context = multiprocessing.get_context("fork") if FORKS else _spawning()
        self.connection, there = multiprocessing.Pipe()
        inherited = self.connection if FORKS else None
        args = (there, inherited, make)
        self._process = context.Process(target=_work, args=args, daemon=True)
        self._is_ready = False
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # the process keeps it
        try:
            with warnings.catch_warnings():  # of newer Pythons, for locks of other threads
                warnings.simplefilter("ignore", DeprecationWarning)
                self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            there.close()

    def is_ready(self) -> bool:
        """Whether it waits for calls; to be asked while it makes none."""
        if self.connection.poll():  # its first message
            self._is_ready = bool(self.receive())
        return self._is_ready

    def call(self, function: Callable[[Any, Any], Any], item: Any) -> None:
        """Have it call `function(made, item)`, whose value `receive` returns."""
        with _told_if_killed():
            self.connection.send((function, item))

    def receive(self) -> Any:
        """Wait for a value. Raises what its call has raised, and RunError if it is gone."""
        with _told_if_killed():
            value, error = self.connection.recv()
        if error is not None:
            raise error
        return value

    def kill(self) -> None:
        if self._process.pid is not None:
            os.kill(self._process.pid, signal.SIGKILL)
        self._process.join()


@contextmanager
def _told_if_killed() -> Iterator[None]:
    try:
        yield
    except (EOFError, OSError):
        raise RunError(
            "a process that took part was killed; the system may have been out of memory: "
            "task.processes=1 takes the least"
        ) from None


def _spawning() -> Any:
    """Makes processes that begin without a script's own lines, which may have begun all this."""
    from joblib.externals.loky.backend import get_context, resource_tracker

    resource_tracker.ensure_running()  # which, begun later, would unblock Ctrl-C again
    return get_context("loky")


def _work(there: Connection, here: Connection | None, make: Callable[[], Any]) -> None:
    """In the other process: calls, until nobody has the other end."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    gc.freeze()  # what was forked stays shared
    if here is not None:
        here.close()
    made: list[Any] = []
    with suppress(EOFError, OSError):
        there.send((True, None))
        while True:
            there.send(_answer(made, make, *there.recv()))


def _answer(
    made: list[Any], make: Callable[[], Any], function: Callable[[Any, Any], Any], item: Any
) -> tuple[Any, Exception | None]:
    """The call's value, or what it raises."""
    try:
        if not made:
            made.append(make())
        return function(made[0], item), None
    except Exception as error:
        error.add_note(traceback.format_exc())
        return None, error
