"""A rank that follows rank 0: a process that rank 0 has started with PORT RANK SIZE PID, or the
lab's own command under torchrun.
"""

from __future__ import annotations

import ctypes
import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn

import torch
import torch.distributed as dist

from sarathi_lab.config.errors import EXIT_FAILED, UserError
from sarathi_lab.executor.torch.ranks import wire
from sarathi_lab.executor.torch.ranks.build import build_part
from sarathi_lab.executor.torch.ranks.executor import Follower
from sarathi_lab.executor.torch.ranks.group import (
    HOST,
    JOINED_IN,
    Group,
    Kind,
    Lost,
    Message,
    join_torchrun,
)

PR_SET_PDEATHSIG = 1  # of Linux's prctl


class Inbox:
    """What rank 0 has said so far; a thread takes it in while batches are computed."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._messages: queue.SimpleQueue[Message | Lost] = queue.SimpleQueue()
        self.executor: Follower | None = None
        threading.Thread(target=self._listen, daemon=True).start()

    def next(self) -> Message:
        with self._group.exchanging():
            message = self._messages.get()
        if isinstance(message, Lost):
            raise message
        return message

    def _listen(self) -> None:
        try:
            while True:
                message = self._group.hear()
                executor = self.executor
                if message.kind == Kind.RUN and executor is not None:
                    executor.expect(wire.num_tokens(message.payload.view(torch.int64)))
                self._messages.put(message)
                if message.kind == Kind.STOP:
                    return
        except Lost as error:
            self._messages.put(error)


def follow(group: Group) -> int:
    """Do what rank 0 says until it says no more; returns the exit code."""
    try:
        _follow(group)
        return 0
    except Lost as error:
        group.leave(str(error), is_own=False)
    except UserError as error:
        group.leave(str(error), is_own=True)
    except BaseException as error:
        group.leave(f"{type(error).__name__}: {error}".splitlines()[0], is_own=True)
        traceback.print_exc()
    return EXIT_FAILED


def _follow(group: Group) -> None:
    inbox = Inbox(group)
    executor: Follower | None = None
    while (message := inbox.next()).kind != Kind.STOP:
        if message.kind == Kind.BUILD:
            inbox.executor = executor = None  # its memory is the next one's
            inbox.executor = executor = _built(message, group)
            continue
        assert executor is not None, "rank 0 builds first"
        if message.kind == Kind.RUN:
            executor.run(message.payload.view(torch.int64))
        elif message.kind == Kind.PREPARE:
            executor.prepare(*message.unpickled())
        elif message.kind == Kind.START:
            executor.start()
        elif message.kind == Kind.CLOCK:
            executor.read_clock()


def _built(message: Message, group: Group) -> Follower | None:
    backend, spec, checkpoint, sizes = message.unpickled()
    made = build_part(backend, spec, checkpoint, sizes, group)
    assert made is None or isinstance(made, Follower), "this is not rank 0"
    return made


def main(args: Sequence[str]) -> int:
    port, rank, size, parent = map(int, args)
    with suppress(OSError, AttributeError):  # where there is none, a broken connection ends it
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it was gone before
        return EXIT_FAILED
    store = dist.TCPStore(HOST, port, is_master=False, timeout=JOINED_IN)
    return follow(Group(store, rank, size))


def follow_torchrun() -> NoReturn:
    """Follow as one of torchrun's ranks, and end the process."""
    _end(follow(join_torchrun()))


def _end(code: int) -> NoReturn:
    """End at once: a thread may wait for a message that never comes."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    _end(main(sys.argv[1:]))
