"""Signs of life, by which rank 0 tells a rank that hangs from one that is slow."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import NamedTuple

import torch.distributed as dist

BEAT = 0.5  # seconds between a rank's signs of life
LOOK = 1.0  # seconds between rank 0's looks at them: its unit of time


class Sign(NamedTuple):
    """What a rank tells of itself."""

    beat: int  # how many signs it has given
    exchanges: int  # how many it began and ended
    cpu_time: float  # of its main thread, which does not advance while that waits
    waits: bool  # for another rank


class Signs:
    """The signs of rank number `rank` of `size`: given now and then over `store`, from which rank 0
    takes all, and calls `end` with the rank that hangs and in what way.
    """

    def __init__(
        self, store: dist.Store, rank: int, size: int, end: Callable[[int | None, str], None]
    ) -> None:
        self.is_on = True
        self.timeout = 1  # looks without progress after which a rank hangs
        self._rank, self._size, self._end = rank, size, end
        self._beat, self._exchanges, self._waits = 0, 0, False
        self._cpu_time = _main_clock()
        self._expects: bool | None = None  # progress of the others; True: CPU time is such
        self._store = store
        self._give()

    def start(self) -> None:
        self._store = self._store.clone()  # of one thread: another one may wait for a key
        threading.Thread(target=self._give_on if self._rank else self._watch, daemon=True).start()

    @contextmanager
    def exchanging(self) -> Iterator[None]:
        """This thread waits for another rank."""
        is_main = threading.current_thread() is threading.main_thread()
        self._exchanges += 1
        if is_main:
            self._waits = True
        try:
            yield
        finally:
            self._exchanges += 1
            if is_main:
                self._waits = False

    @contextmanager
    def expecting(self, *, counts_cpu: bool) -> Iterator[None]:
        """The others have something to do; CPU time `counts_cpu` shows that they do it."""
        self._expects = counts_cpu
        try:
            yield
        finally:
            self._expects = None

    def _next(self) -> Sign:
        self._beat += 1
        return Sign(self._beat, self._exchanges, self._cpu_time(), self._waits)

    def _give(self) -> None:
        self._store.set(f"sign/{self._rank}", json.dumps(self._next()))

    def _give_on(self) -> None:
        with suppress(RuntimeError):  # rank 0 is gone, of which the main thread hears, too
            while self.is_on:
                time.sleep(BEAT)
                self._give()

    def _watch(self) -> None:
        watch, keys = Watch(), [f"sign/{rank}" for rank in range(self._size)]
        with suppress(RuntimeError):  # the store is gone
            while self.is_on:
                time.sleep(LOOK)
                counts_cpu = self._expects
                if counts_cpu is None:
                    watch.forget()
                    continue
                self._give()
                told = self._store.multi_get(keys)
                signs = {rank: Sign(*json.loads(one)) for rank, one in enumerate(told)}
                if watch.is_stuck(signs, self.timeout, counts_cpu=counts_cpu):
                    self._end(*watch.culprit())
                    return


def _main_clock() -> Callable[[], float]:
    """The main thread's CPU time, or the process's where a thread has none of its own."""
    if not hasattr(time, "pthread_getcpuclockid"):
        return time.process_time
    clock = time.pthread_getcpuclockid(threading.main_thread().ident or 0)
    return lambda: time.clock_gettime(clock)


class Watch:
    """Tells which rank hangs, having looked at the signs of all `limit` times without seeing one
    make progress. As looks are counted, nobody ages while rank 0 itself is stopped.
    """

    def __init__(self) -> None:
        self._last: Mapping[int, Sign] = {}
        self._silent: dict[int, int] = {}  # looks since a rank's last sign
        self._still = 0  # looks since anybody's last progress

    def is_stuck(self, signs: Mapping[int, Sign], limit: int, *, counts_cpu: bool) -> bool:
        """Take a look. A host that waits for its GPU takes CPU time: then it tells nothing."""
        last, self._last = self._last, signs
        moved = False
        for rank, sign in signs.items():
            before = last.get(rank)
            is_new = before is None or sign.beat != before.beat
            self._silent[rank] = 0 if is_new else self._silent[rank] + 1
            moved |= before is None or sign.exchanges != before.exchanges
            moved |= before is not None and counts_cpu and sign.cpu_time != before.cpu_time
        self._still = 0 if moved else self._still + 1
        return self._still >= limit

    def forget(self) -> None:
        """Nobody is expected to do anything."""
        self._still, self._last = 0, {}

    def culprit(self) -> tuple[int | None, str]:
        """The rank that hangs, and how; None where they all wait for one another."""
        others = {rank: sign for rank, sign in self._last.items() if rank}
        rank = max(others, key=self._silent.__getitem__)
        if 2 * self._silent[rank] >= self._still:
            return rank, "has given no sign of life"
        working = {rank: sign for rank, sign in others.items() if not sign.waits}
        if not working:
            return None, "have waited for one another"
        return min(working, key=lambda rank: working[rank].exchanges), "has made no progress"
