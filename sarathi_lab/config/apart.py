"""Calls a function in a process of its own, so that one that hangs or crashes ends nothing else."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any

from sarathi_lab.config.errors import RunError, UserError

GRACE = 5.0  # seconds to end by itself


def call_apart(function: Callable[..., None], *args: Any, limit: float) -> None:
    """`function(*args)`, which must be picklable, in a fresh process and process group.

    Raises what it raises, and RunError if its process dies or is ended after `limit` seconds: by a
    SIGTERM, on which its `finally` clauses run, then by force with all that it started.
    """
    spawning = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    receiver, sender = spawning.Pipe(duplex=False)
    process = spawning.Process(target=_run, args=(sender, function, args))
    process.start()
    sender.close()
    is_ended = False
    try:
        is_ended = receiver.poll(limit)
        if not is_ended:
            raise RunError(f"it took more than limit={limit:g} seconds and was ended; allow more")
        error = receiver.recv()
    except EOFError:
        process.join(GRACE)
        code = process.exitcode or 0
        how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        raise RunError(f"its process {how}") from None
    finally:
        if not is_ended:
            _signal(process, signal.SIGTERM)
        process.join(GRACE)
        _signal(process, signal.SIGKILL)  # threads and processes that a library left behind
        process.join()
    if error is not None:
        raise error


def _run(sender: Connection, function: Callable[..., None], args: tuple[Any, ...]) -> None:
    """The other process: does the work and sends the error, None if there was none."""
    os.setsid()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended: its time is over"))
    found: Exception | None = None
    try:
        function(*args)
    except Exception as error:
        found = _portable(error)
    sender.send(found)


def _portable(error: Exception) -> Exception:
    """The error with its traceback as a note, or one in its words if it can't be pickled."""
    if not isinstance(error, UserError):
        error.add_note(traceback.format_exc())
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # whatever a class of its own raises there
        kind = RunError if isinstance(error, UserError) else RuntimeError
        return kind(str(error))
    return error


def _signal(process: SpawnProcess, number: signal.Signals) -> None:
    assert process.pid is not None
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)
