"""Computes the independent parts of one run on all the cores that it may use: simulations only, as
a measurement needs the machine to itself.
"""

from __future__ import annotations

import os
import signal
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, wait
from typing import Any, Generic, TypeVar

from sarathi_lab.config.checked import whole
from sarathi_lab.config.errors import RunError

JOIN_SECONDS = 2.0  # of work in this process, before others are worth their start
IDLE_SECONDS = 30.0  # after which another process ends
_made: dict[str, Any] = {}  # in another process: what it made for the crew that it works for
Made = TypeVar("Made")
Item = TypeVar("Item")
Value = TypeVar("Value")


def usable_cores() -> int:
    """The cores that this process may use: its share of a sweep's, or those of its Slurm job."""
    given = os.environ.get("SLURM_CPUS_ON_NODE", "")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return min(cores or 1, int(given)) if given.isdecimal() else cores or 1


def crew_size() -> Any:
    """The field of a task that says how many compute its simulation."""
    return whole(None, minimum=1, fix="use a number such as 2, or null for one a core")


class Crew(Generic[Made]):
    """This process and others, `size` together (None: one a core), each of which calls `make` once.

    Others join when there was work for `JOIN_SECONDS`. `make`, functions and items go to them by
    cloudpickle; what is computed must not depend on who does it.
    """

    def __init__(self, make: Callable[[], Made], size: int | None = None) -> None:
        self.size = usable_cores() if size is None else size
        self._make, self._key = make, uuid.uuid4().hex
        self._own: list[Made] = []
        self._worked = 0.0  # seconds of this process

    @property
    def own(self) -> Made:
        """What this process has made."""
        if not self._own:
            self._own.append(self._make())
        return self._own[0]

    def map(
        self,
        function: Callable[[Made, Item], Value],
        items: Iterable[Item],
        advance: Callable[[float], None] = lambda steps: None,
    ) -> list[Value]:
        """`function(made, item)` of all items, in their order; `advance(1)` after each.

        Raises what a call raises, and RunError if another process is killed. No work goes on then,
        nor after Ctrl-C.
        """
        left, found = deque(enumerate(items)), dict[int, Value]()
        lock = threading.Lock()

        def keep(place: int, value: Value) -> None:
            with lock:
                found[place] = value
                advance(1)

        def hand(executor: Executor, item: Item) -> Future[Value]:
            return executor.submit(_call, self._key, self._make, function, item)

        others = _Others(self.size - 1, left, hand, keep)
        if self.size > 1 and len(left) > 1:
            others.start_after(JOIN_SECONDS - self._worked)
        try:
            while (one := _next(left.popleft)) is not None and others.error is None:
                start = time.monotonic()
                keep(one[0], function(self.own, one[1]))
                self._worked += time.monotonic() - start
            others.join_if_started()
        except BaseException:
            others.end()
            raise
        if others.error is not None:
            others.end()
            raise others.error
        return [found[place] for place in range(len(found))]


class _Others(threading.Thread):
    """Hands what is left to `number` other processes, as many items at a time, the last first: then
    neighbours, which often need the same, are computed by the same process.
    """

    def __init__(
        self,
        number: int,
        left: deque[tuple[int, Any]],
        hand: Callable[[Executor, Any], Future[Any]],
        keep: Callable[[int, Any], None],
    ) -> None:
        super().__init__(daemon=True)
        self.error: Exception | None = None
        self._number, self._left, self._hand, self._keep = number, left, hand, keep
        self._ended = threading.Event()
        self._executor: Any = None
        self._delay = 0.0

    def start_after(self, seconds: float) -> None:
        self._delay = seconds
        self.start()

    def join_if_started(self) -> None:
        """Wait for the processes, or for nothing if they have not begun."""
        if self.ident is not None:
            if self._executor is None:
                self._ended.set()
            self.join()

    def end(self) -> None:
        """Kill the processes, whatever they do."""
        self._left.clear()
        self._ended.set()
        if self._executor is not None:
            self._executor.shutdown(wait=True, kill_workers=True)

    def run(self) -> None:
        if self._ended.wait(max(0.0, self._delay)) or not self._left:
            return
        try:
            self._executor = _executor(self._number)
            self._share()
        except BrokenExecutor:
            self.error = RunError(
                "a process that took part was killed; the system may have been out of memory: "
                "task.processes=1 takes the least"
            )
        except Exception as error:
            self.error = error

    def _share(self) -> None:
        places: dict[Future[Any], int] = {}
        while self._left or places:
            while len(places) < self._number and (one := _next(self._left.pop)) is not None:
                places[self._hand(self._executor, one[1])] = one[0]
            for future in wait(places, return_when=FIRST_COMPLETED).done:
                self._keep(places.pop(future), future.result())


def _next(take: Callable[[], tuple[int, Any]]) -> tuple[int, Any] | None:
    try:
        return take()
    except IndexError:
        return None


def _executor(number: int) -> Any:
    """Processes that a terminal's Ctrl-C does not reach: this one ends them."""
    from joblib.externals.loky import get_reusable_executor
    from joblib.externals.loky.backend import resource_tracker

    resource_tracker.ensure_running()  # which, begun later, would unblock the signal again
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # of this thread and its processes
    return get_reusable_executor(max_workers=number, timeout=IDLE_SECONDS)


def _call(
    key: str, make: Callable[[], Made], function: Callable[[Made, Item], Value], item: Item
) -> Value:
    """In another process: one call, with what it makes once for a crew."""
    if key not in _made:
        _made.clear()
        _made[key] = make()
    return function(_made[key], item)
