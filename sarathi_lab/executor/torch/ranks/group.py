"""Processes that compute together: started here or by torchrun, joined by torch.distributed, told
by rank 0 what to do, and ended together.
"""

from __future__ import annotations

import atexit
import os
import pickle
import platform
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from enum import IntEnum
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from sarathi_lab.config.errors import EXIT_USER_ERROR, RunError
from sarathi_lab.executor.torch.ranks.launched import by_torchrun
from sarathi_lab.executor.torch.ranks.signs import Signs
from sarathi_lab.model.parts import Ranks

HOST = "127.0.0.1"
FOREVER = timedelta(days=365)  # to wait for a batch: rank 0 may draw pictures meanwhile
JOINED_IN = timedelta(seconds=120)
TOLD_IN = 3.0  # seconds for ranks to say why they end, once one of them is gone
ENDED_BY_TORCHRUN = 5  # seconds that rank 0 has for its last words
ENDED_IN = 2.0  # seconds for a rank to end by itself
CONTROL, HIDDEN, REPORT = 1, 2, 3  # tags of messages
MOST_SENT = 256  # messages kept until they are known to be received


class Kind(IntEnum):
    """What rank 0 tells the others."""

    STOP = 0
    BUILD = 1  # (backend, spec, checkpoint, sizes), by everybody at once
    PREPARE = 2  # arguments of `prepare`
    START = 3  # set the clock to zero
    RUN = 4  # a batch, see `wire`
    CLOCK = 5  # answer with the time


class Message(NamedTuple):
    kind: Kind
    payload: Tensor  # uint8

    def unpickled(self) -> Any:
        """What rank 0 has sent, which is this program."""
        return pickle.loads(self.payload.numpy().tobytes())


class Lost(Exception):
    """Another rank is gone."""


class Group:
    """All ranks as this process, number `rank` of `size`, sees them. `processes` are those that it
    has started itself, by rank.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        processes: dict[int, subprocess.Popen[bytes]] | None = None,
    ) -> None:
        self.store, self.rank, self.size = store, rank, size
        self.is_usable = True
        self.ranks: Ranks | None = None
        self.signs = Signs(store, rank, size, self._end_hung)
        self._hung = ""  # words on the rank that does
        self.processes = processes or {}
        self._sent: deque[tuple[Any, Tensor]] = deque()
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=FOREVER)
        store.set(f"host/{rank}", platform.node())
        self.signs.start()

    @property
    def local_rank(self) -> int:
        """Its number on this machine, and of its GPU."""
        return int(os.environ["LOCAL_RANK"]) if by_torchrun() else self.rank

    def arrange(self, ranks: Ranks) -> None:
        """Make the group of the ranks that share this one's layers (`shared`) and that of all that
        have a part (`active`), the first ones; all ranks call it at once.
        """
        if ranks == self.ranks:
            return
        self.ranks = ranks
        stages = [
            range(rank, rank + ranks.tensor) for rank in map(ranks.leader, range(ranks.pipeline))
        ]
        self.active = dist.new_group(list(range(ranks.num_devices)), timeout=FOREVER)
        made = [dist.new_group(list(stage), timeout=FOREVER) for stage in stages]
        self.shared = next(
            (one for one, stage in zip(made, stages, strict=True) if self.rank in stage), None
        )

    @contextmanager
    def exchanging(self) -> Iterator[None]:
        """Tell an exchange that breaks off from other errors."""
        try:
            with self.signs.exchanging():
                yield
        except RuntimeError as error:
            raise Lost(str(error)) from None

    @contextmanager
    def ending_all(self) -> Iterator[None]:
        """End all ranks where one is lost; raises RunError, which says which."""
        try:
            yield
        except Lost:
            raise self.broken() from None

    # -- messages ----------------------------------------------------------------------------------

    def tell(self, kind: Kind, payload: Any = None) -> None:
        """Send the others `kind` and a tensor of numbers, or any object, and go on."""
        ranks = None if kind in (Kind.STOP, Kind.BUILD) else self.ranks
        count = self.size if ranks is None else ranks.num_devices
        if not isinstance(payload, Tensor):
            payload = torch.frombuffer(bytearray(pickle.dumps(payload)), dtype=torch.uint8)
        numbers = payload.view(torch.uint8)
        header = torch.tensor([kind, len(numbers)])
        with self.exchanging():
            for rank in range(1, count):
                self.send(header, rank, CONTROL)
                self.send(numbers, rank, CONTROL)

    def send(self, tensor: Tensor, rank: int, tag: int) -> None:
        """Send without waiting; the tensor must not change. Dropped, a message would not arrive."""
        self._sent.append((dist.isend(tensor, rank, tag=tag), tensor))
        if len(self._sent) > MOST_SENT:
            self._sent.popleft()[0].wait()

    def hear(self) -> Message:
        """Wait for what rank 0 says next."""
        header = torch.empty(2, dtype=torch.int64)
        with self.exchanging():
            dist.recv(header, 0, tag=CONTROL)
            kind, size = header.tolist()
            payload = torch.empty(size, dtype=torch.uint8)
            dist.recv(payload, 0, tag=CONTROL)
        return Message(Kind(kind), payload)

    # -- the end -----------------------------------------------------------------------------------

    def leave(self, words: str, *, is_own: bool) -> None:
        """Say why this rank ends: by a fault of its `own`, or because another one was gone."""
        with suppress(Exception):
            self.store.set(f"{'failed' if is_own else 'lost'}/{self.rank}", words)

    def _end_hung(self, rank: int | None, how: str) -> None:
        """Let the others, and so this one's main thread, find it gone."""
        who = "the ranks" if rank is None else self._named(rank)
        self._hung = (
            f"{who} {how} for {self.signs.timeout} s; find what holds it up, or raise "
            f"executor.rank_timeout={self.signs.timeout} if it is only slow"
        )
        if by_torchrun():  # whose processes may be on other machines; it ends them
            print(f"error: {self._hung}", file=sys.stderr, flush=True)
            os._exit(EXIT_USER_ERROR)
        for number, process in self.processes.items():
            if rank in (None, number):
                process.kill()

    def broken(self) -> RunError:
        """End what is left of the ranks; returns which of them was the first to go, and how."""
        told = RunError(f"{self._hung or self._culprit()}; the other ranks were ended, too")
        self.close()
        return told

    def _culprit(self) -> str:
        """The rank that failed, or the one that could not say that it lost another."""
        others = [rank for rank in range(self.size) if rank != self.rank]
        end, silent = time.monotonic() + TOLD_IN, others
        while time.monotonic() < end and len(silent) != 1:
            for rank in others:
                if self._said(f"failed/{rank}"):
                    return (
                        f"{self._named(rank)} failed: {self.store.get(f'failed/{rank}').decode()}"
                    )
            silent = [rank for rank in others if not self._said(f"lost/{rank}")]
            gone = [rank for rank in silent if self._has_ended(rank)]
            silent = gone if len(gone) == 1 else silent
            time.sleep(0.05)
        if len(silent) != 1:
            return f"one of the ranks {', '.join(map(str, silent or others))} is gone"
        (rank,) = silent
        process = self.processes.get(rank)
        with suppress(subprocess.TimeoutExpired):
            if process is not None and (code := process.wait(ENDED_IN)):
                how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
                return f"{self._named(rank)} {how}"
        return f"{self._named(rank)} is gone"

    def _said(self, key: str) -> bool:
        with suppress(Exception):
            return bool(self.store.check([key]))
        return False

    def _has_ended(self, rank: int) -> bool:
        process = self.processes.get(rank)
        return process is not None and process.poll() is not None

    def _named(self, rank: int) -> str:
        return f"rank {rank}" if self.ranks is None else self.ranks.named(rank)

    def close(self) -> None:
        """Let all ranks end, by force where they do not."""
        if not self.is_usable:
            return
        self.is_usable = self.signs.is_on = False
        with suppress(Exception):
            self.tell(Kind.STOP)
        end = time.monotonic() + ENDED_IN
        for process in self.processes.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, end - time.monotonic()))
            process.kill()
            process.wait()
        if by_torchrun():  # nobody to wait for: what was said must be on its way
            for work, _ in self._sent:
                with suppress(Exception):
                    work.wait(timedelta(seconds=ENDED_IN))
        self._sent.clear()
        with suppress(Exception):
            dist.destroy_process_group()


_current: Group | None = None  # rank 0's: kept from run to run, as processes take seconds to start


def group_of(size: int) -> Group:
    """A group of `size` ranks or more that this process leads. RunError if it can't be formed."""
    global _current
    if _current is not None and _current.is_usable and _current.size >= size:
        return _current
    if by_torchrun():
        if _current is not None:
            raise RunError("a rank is gone, which torchrun started; start the command anew")
        _current = join_torchrun()
    else:
        close()
        _current = _started(size)
    return _current


def close() -> None:
    """End the ranks that this process leads, if there are any; those that torchrun has started hear
    of it even if there was nothing to do for them.
    """
    global _current
    if _current is None and by_torchrun():
        _current = join_torchrun()
    if _current is not None:
        _current.close()


def join_torchrun() -> Group:
    """This process as the rank that torchrun made it."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    rendezvous = dist.rendezvous("env://", rank, size, timeout=JOINED_IN)
    store, _, _ = next(iter(rendezvous))
    if rank == 0:  # torchrun ends it when another is gone, which it has yet to say
        signal.signal(signal.SIGTERM, lambda *_: signal.alarm(ENDED_BY_TORCHRUN))
    return Group(dist.PrefixStore("sarathi_lab", store), rank, size)


def _started(size: int) -> Group:
    store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False, timeout=JOINED_IN)
    module = "sarathi_lab.executor.torch.ranks.worker"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    processes = {
        rank: subprocess.Popen(
            [sys.executable, "-m", module, str(store.port), str(rank), str(size), str(os.getpid())],
            env=environment,
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # a terminal's Ctrl-C is for rank 0
        )
        for rank in range(1, size)
    }
    try:
        return Group(store, 0, size, processes)
    except BaseException as error:
        for process in processes.values():
            process.kill()
        if isinstance(error, RuntimeError):
            line = str(error).splitlines()[0]
            raise RunError(f"the {size} ranks could not be started: {line}") from None
        raise


@atexit.register
def _end_started() -> None:
    if _current is not None:
        _current.close()
