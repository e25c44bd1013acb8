"""Group of processes of one model: started here or by torchrun, joined by torch.distributed. Rank 0
sends calls through the store, and all end when one is lost.
"""

from __future__ import annotations

import atexit
import os
import pickle
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sarathi_lab.config.errors import RunError
from sarathi_lab.executor.timeline import HostTimeline, Mark
from sarathi_lab.extensions.ranks import by_torchrun
from sarathi_lab.model.degrees import Degrees

HOST = "127.0.0.1"
FOREVER = timedelta(days=365)  # between calls: rank 0 may draw pictures meanwhile
JOIN_TIMEOUT = timedelta(seconds=120)
GRACE = 3.0  # seconds for ranks to end, or to report why they failed
KEPT = 1000  # calls: more than any rank lags behind


class Lost(Exception):
    """Loss of another rank, which has ended or hangs."""


class Group:
    """All ranks as process `rank` of `size` sees them. `processes` are the others, in order, if
    this one started them.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        processes: Sequence[subprocess.Popen[bytes]] = (),
    ) -> None:
        self.store, self.rank, self.size, self.processes = store, rank, size, processes
        self.is_usable = True
        self.timeout = 0  # seconds, of `arrange`
        self.num_calls = 0  # sent by rank 0, or received
        self.ranks = Degrees()
        self.timeline = HostTimeline()
        self.began: Mark = 0.0  # of this stage's part of the newest iteration
        self.ended: Mark | None = None
        self._bells: deque[Any] = deque(maxlen=KEPT)  # dropped, they would not arrive
        self._sent: deque[tuple[Any, Tensor]] = deque()
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=size, timeout=JOIN_TIMEOUT
        )
        dist.barrier()

    def arrange(self, ranks: Degrees, timeout: int) -> None:
        """Make the process groups of `all` ranks and of this `stage`, with `timeout` in seconds;
        all ranks must call it.
        """
        if (ranks, timeout) == (self.ranks, self.timeout):
            return
        self.ranks, self.timeout, limit = ranks, timeout, timedelta(seconds=timeout)
        with self.exchange():
            dist.barrier()
            self.all = dist.new_group(timeout=limit)
            self.stage, _ = dist.new_subgroups(ranks.tensor, timeout=limit)

    @contextmanager
    def exchange(self) -> Iterator[None]:
        """Turn errors of an exchange into `Lost`."""
        try:
            yield
        except RuntimeError as error:
            raise Lost(str(error)) from None

    @contextmanager
    def end_if_lost(self) -> Iterator[None]:
        """End all ranks if one is lost. Raises RunError with the reason."""
        try:
            yield
        except Lost:
            raise self.end() from None

    # -- calls and reports -------------------------------------------------------------------------

    def call(self, method: str, *arguments: Any) -> None:
        """Call a method on all other ranks, without waiting for them."""
        with self.exchange():
            self.store.set(f"call/{self.num_calls}", pickle.dumps((method, arguments)))
            self.store.delete_key(f"call/{self.num_calls - KEPT}")
        self.num_calls += 1

    def receive(self) -> tuple[str, Sequence[Any]]:
        """Wait for the next call of rank 0, which runs this same program."""
        key = f"call/{self.num_calls}"
        with self.exchange():
            self.store.wait([key], FOREVER)
            method, arguments = pickle.loads(self.store.get(key))
        self.num_calls += 1
        return method, arguments

    def report(self, stage: int, result: object, *, is_last: bool) -> None:
        """Report the result of the newest call to rank 0, and wake it after the last stage."""
        with self.exchange():
            self.store.set(f"report/{self.num_calls}/{stage}", pickle.dumps(result))
            if is_last:
                bell = torch.zeros(1)
                self._bells.append((dist.isend(bell, 0, group=self.all), bell))

    def has_reports(self, number: int, stages: Sequence[int]) -> bool:
        """Return whether all `stages` reported call `number` (counted from 1)."""
        with self.exchange():
            return self.store.check([f"report/{number}/{stage}" for stage in stages])

    def take_reports(self, number: int, stages: Sequence[int], last: int) -> list[Any]:
        """Wait for the reports of call `number`, the last of which is of rank `last`."""
        keys = [f"report/{number}/{stage}" for stage in stages]
        with self.exchange():
            dist.recv(torch.zeros(1), last, group=self.all)
            results = [pickle.loads(self.store.get(key)) for key in keys]
            for key in keys:
                self.store.delete_key(key)
        return results

    # -- exchanges within an iteration -------------------------------------------------------------

    def begin(self) -> None:
        """Mark where this stage begins to compute an iteration: waiting for it is not work."""
        self.began, self.ended = self.timeline.mark(), None

    def sum(self, tensor: Tensor) -> Tensor:
        with self.exchange():
            dist.all_reduce(tensor, group=self.stage)
        return tensor

    def gather(self, tensor: Tensor) -> Tensor:
        parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(self.stage))]
        with self.exchange():
            dist.all_gather(parts, tensor, group=self.stage)
        return torch.stack(parts)

    def receive_into(self, hidden: Tensor) -> None:
        """Receive hidden states of the stage before, and begin with them."""
        with self.exchange():
            dist.recv(hidden, self.rank - self.ranks.tensor, group=self.all)
        self.begin()

    def send(self, hidden: Tensor) -> None:
        """End this stage's part, and send its hidden states to the next without waiting."""
        self.ended = self.timeline.mark()
        with self.exchange():
            work = dist.isend(hidden, self.rank + self.ranks.tensor, group=self.all)
            self._sent.append((work, hidden))  # dropped, the message would not arrive
            if len(self._sent) > 2 * self.ranks.pipeline:
                self._sent.popleft()[0].wait()

    # -- the end -----------------------------------------------------------------------------------

    def report_failure(self, error: BaseException) -> None:
        line = f"{type(error).__name__}: {error}".splitlines()[0]
        with suppress(RuntimeError):
            self.store.set("failure", f"rank {self.rank} failed: {line}")

    def _failure(self) -> str:
        """Return which rank failed and how; empty if none did."""
        with suppress(RuntimeError):
            if self.store.check(["failure"]):
                return self.store.get("failure").decode()
        for rank, process in enumerate(self.processes, 1):
            if code := process.poll():
                how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
                return f"rank {rank} {how}"
        return ""

    def end(self) -> RunError:
        """End all ranks; return the reason."""
        deadline = time.monotonic() + GRACE
        while not (reason := self._failure()) and time.monotonic() < deadline:
            time.sleep(0.05)
        reason = reason or (
            f"a rank did not answer for {self.timeout} s; find what holds it up, or raise "
            f"executor.rank_timeout={self.timeout} if it is only slow"
        )
        self.close()
        return RunError(f"{reason}; the other ranks were ended, too")

    def close(self) -> None:
        """Stop all ranks, by force after a grace period."""
        if not self.is_usable:
            return
        self.is_usable = False
        with suppress(Lost):
            self.call("stop")
        deadline = time.monotonic() + GRACE
        for process in self.processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
            process.kill()
            process.wait()
        with suppress(Exception):
            dist.destroy_process_group()


_current: Group | None = None  # rank 0's, kept between runs, as processes take seconds to start


def group_of(size: int) -> Group:
    """Return a group of `size` ranks that this process leads. Raises RunError if it can't form."""
    global _current
    if _current is not None and _current.is_usable and _current.size == size:
        return _current
    if by_torchrun():
        if _current is not None:
            raise RunError("a rank of torchrun's is lost; start the command again")
        _current = join()
    else:
        close()
        _current = _start(size)
    return _current


@atexit.register
def close() -> None:
    """Stop the ranks that this process leads; those of torchrun also if nothing was computed."""
    global _current
    if _current is None and by_torchrun() and os.environ["RANK"] == "0":
        _current = join()
    if _current is not None:
        _current.close()


def join() -> Group:
    """Join the group as the rank that the environment gives, as torchrun sets it."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store, _, _ = next(iter(dist.rendezvous("env://", rank, size, timeout=JOIN_TIMEOUT)))
    return Group(dist.PrefixStore("sarathi_lab", store), rank, size)


def _start(size: int) -> Group:
    """Start the other ranks as processes of this machine and join them."""
    store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False, timeout=JOIN_TIMEOUT)
    common = {"MASTER_ADDR": HOST, "MASTER_PORT": str(store.port), "WORLD_SIZE": str(size)}
    common["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "sarathi_lab.extensions.ranks.follow"],
            env={**os.environ, **common, "RANK": str(rank)},
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # a terminal's Ctrl-C is for rank 0
        )
        for rank in range(1, size)
    ]
    try:
        return Group(dist.PrefixStore("sarathi_lab", store), 0, size, processes)
    except BaseException as error:
        for process in processes:
            process.kill()
        if isinstance(error, RuntimeError):
            line = str(error).splitlines()[0]
            raise RunError(f"the {size} ranks could not be started: {line}") from None
        raise
