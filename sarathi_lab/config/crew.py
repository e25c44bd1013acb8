"""Computes the independent parts of one run on all the cores that it may use: simulations only, as
a measurement needs the machine to itself.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import wait
from typing import Any, Generic, Protocol, TypeVar

from sarathi_lab.config.checked import whole
from sarathi_lab.config.cores import allowed_cores
from sarathi_lab.config.other_process import OtherProcess

LOOK_SECONDS = 0.01  # between two looks for what a process that has nothing to do could do
SWITCH_SECONDS = 5e-4  # between threads while calls are handed out: ten times as often as usual
Made = TypeVar("Made")
Item = TypeVar("Item")
Value = TypeVar("Value")
Told = TypeVar("Told", contravariant=True)


def usable_cores() -> int:
    """The cores that this process may use: its share of a sweep's, or those of its Slurm job."""
    given = os.environ.get("SLURM_CPUS_ON_NODE", "")
    cores = len(allowed_cores()) or os.cpu_count() or 1
    return min(cores, int(given)) if given.isdecimal() else cores


def crew_size() -> Any:
    """The field of a task that says how many compute its simulation."""
    return whole(None, minimum=1, fix="use a number such as 2, or null for one a core")


class Work(Protocol[Item, Told]):
    """Calls to be made, which may depend on the values of others; asked by a thread at a time."""

    @property
    def is_done(self) -> bool:
        """Whether no value is missing, though calls may be under way."""

    def take(self, *, is_own: bool) -> Item | None:
        """The next call's item, for the process that asks or another; None: nothing until a call
        that is under way has ended.
        """

    def keep(self, item: Item, value: Told) -> None:
        """Take the value of an item."""


class Crew(Generic[Made]):
    """This process and others, `size` together (None: one a core), each of which calls `make` once.

    What is computed must not depend on who does it. The others end with this object.
    """

    def __init__(self, make: Callable[[], Made], size: int | None = None) -> None:
        self.size = usable_cores() if size is None else size
        self._make = make
        self._own: list[Made] = []
        self._others: list[OtherProcess] = []

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
        """`function(made, item)` of all items, in their order; `advance(1)` after each. Raises as
        `do` does.
        """
        listed = _Listed[Item, Value](items, advance)
        self.do(partial(_of_listed, function), listed, len(listed.left))
        return [listed.found[place] for place in range(len(listed.found))]

    def do(
        self,
        function: Callable[[Made, Item], Value],
        work: Work[Item, Value],
        most: int = sys.maxsize,
    ) -> None:
        """Call `function(made, item)` for items of `work`, `most` of them, until it is done.

        Raises what a call raises, and RunError if another process is killed. No work goes on then,
        nor after Ctrl-C.
        """
        while len(self._others) < min(self.size, most) - 1:
            self._others.append(OtherProcess(self._make))
        sharing = _Sharing(self._others, function, work)
        try:
            with _switching_often():
                sharing.start()
                while (item := sharing.take_own()) is not None:
                    sharing.keep(item, function(self.own, item))
        except BaseException:
            self._end()
            raise
        finally:
            sharing.end()
        if sharing.calls:  # of no use any more
            self._end()
        sharing.join()

    def _end(self) -> None:
        """Kill the others, whatever they do."""
        for other in self._others:
            other.kill()
        self._others.clear()


class _Sharing(threading.Thread):
    """Hands items of `work` to the others, each as it is free; this process takes its own."""

    def __init__(
        self,
        others: Sequence[OtherProcess],
        function: Callable[[Any, Any], Any],
        work: Work[Any, Any],
    ) -> None:
        super().__init__(daemon=True)
        self.calls: dict[Any, Any] = {}  # the items of those under way, by connection
        self._others = {other.connection: other for other in others}
        self._function, self._work = function, work
        self._error: Exception | None = None
        self._is_ended = False
        self._news = threading.Condition()

    def take_own(self) -> Any:
        """This process's next item; None: all is done. Raises what the others' calls raise."""
        with self._news:
            while not self._work.is_done and self._error is None:
                if (item := self._work.take(is_own=True)) is not None:
                    return item
                self._news.wait()
        if self._error is not None:
            raise self._error
        return None

    def keep(self, item: Any, value: Any) -> None:
        with self._news:
            self._work.keep(item, value)
            self._news.notify()

    def end(self) -> None:
        with self._news:
            self._is_ended = True

    def run(self) -> None:
        try:
            while self._others and not self._is_ended:
                for other in self._others.values():
                    self._hand(other)
                is_busy = len(self.calls) == len(self._others)
                for connection in wait(self._others, None if is_busy else LOOK_SECONDS):
                    self._receive(connection)
        except Exception as error:
            with self._news:
                self._error = error
                self._news.notify()

    def _hand(self, other: OtherProcess) -> None:
        if other.connection in self.calls or not other.is_ready():
            return
        with self._news:
            if self._is_ended or (item := self._work.take(is_own=False)) is None:
                return
            self.calls[other.connection] = item
        other.call(self._function, item)

    def _receive(self, connection: Any) -> None:
        if connection in self.calls:
            value = self._others[connection].receive()
            self.keep(self.calls.pop(connection), value)


class _Listed(Generic[Item, Value]):
    """Items that are all known: this process takes the first, others the last. So neighbours, which
    often need the same, are computed by the same process.
    """

    def __init__(self, items: Iterable[Item], advance: Callable[[float], None]) -> None:
        self.left = deque(enumerate(items))
        self.found: dict[int, Value] = {}
        self._number, self._advance = len(self.left), advance

    @property
    def is_done(self) -> bool:
        return len(self.found) == self._number

    def take(self, *, is_own: bool) -> tuple[int, Item] | None:
        if not self.left:
            return None
        return self.left.popleft() if is_own else self.left.pop()

    def keep(self, item: tuple[int, Item], value: Value) -> None:
        self.found[item[0]] = value
        self._advance(1)


def _of_listed(
    function: Callable[[Made, Item], Value], made: Made, listed: tuple[int, Item]
) -> Value:
    return function(made, listed[1])


@contextmanager
def _switching_often() -> Iterator[None]:
    """Let a thread that hands out calls wait for this one's Python no longer than its own takes."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_SECONDS)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
