"""The order in which waiting sequences are admitted, and who gives way when the cache is short."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterator
from heapq import heappop, heappush
from itertools import islice
from typing import Literal

from sarathi_lab.engine.request import SequenceState

QueueOrder = Literal["fcfs", "priority", "shortest"]
Rank = tuple[float, int]
Test = Callable[[SequenceState], bool]
# How many waiting sequences an iteration looks at, if some may be passed over: it takes no longer
# for a longer queue.
LOOKAHEAD = 64


class ArrivalQueue(deque[SequenceState]):
    """A waiting queue in the order of arrival, the next one first; `appendleft` puts those that
    were preempted in front.
    """

    def oldest(self) -> SequenceState:
        """The one that arrived first: one of those in front, or the next behind them."""
        oldest = self[0]
        for sequence in self:
            if sequence.order < oldest.order:
                oldest = sequence
            if not sequence.num_preemptions:
                break
        return oldest


class RankedQueue:
    """A waiting queue in the order of `rank`, lowest first; preempted sequences come where their
    rank puts them.

    A sorted list with the next one last: insertion moves pointers only, taking the next one moves
    nothing.
    """

    def __init__(self, rank: Callable[[SequenceState], Rank]) -> None:
        self._rank = rank
        self._items: list[SequenceState] = []
        self._by_order: dict[int, SequenceState] = {}
        self._orders: list[int] = []  # a heap of all in `_by_order`, and of some that left

    def append(self, sequence: SequenceState) -> None:
        """Queue a sequence."""
        insort(self._items, sequence, key=self._descending)
        self._by_order[sequence.order] = sequence
        if len(self._orders) > 2 * len(self._items) + 16:
            self._orders = sorted(self._by_order)
        else:
            heappush(self._orders, sequence.order)

    appendleft = append

    def popleft(self) -> SequenceState:
        """Take the one of the lowest rank out."""
        sequence = self._items.pop()
        del self._by_order[sequence.order]
        return sequence

    def remove(self, sequence: SequenceState) -> None:
        """Take any one out. Raises ValueError if it does not wait."""
        index = bisect_left(self._items, self._descending(sequence), key=self._descending)
        if index == len(self._items) or self._items[index] is not sequence:
            raise ValueError(f"{sequence} does not wait")
        del self._items[index]
        del self._by_order[sequence.order]

    def oldest(self) -> SequenceState:
        """The one that arrived first."""
        while self._orders[0] not in self._by_order:
            heappop(self._orders)
        return self._by_order[self._orders[0]]

    def _descending(self, sequence: SequenceState) -> Rank:
        rank, order = self._rank(sequence)
        return -rank, -order

    def __getitem__(self, index: int) -> SequenceState:
        return self._items[-1 - index]

    def __iter__(self) -> Iterator[SequenceState]:
        return reversed(self._items)

    def __len__(self) -> int:
        return len(self._items)


WaitingQueue = ArrivalQueue | RankedQueue


def make_queue(order: QueueOrder) -> WaitingQueue:
    """An empty queue: in the order of arrival, by priority, or shortest first."""
    if order == "fcfs":
        return ArrivalQueue()
    return RankedQueue(by_priority if order == "priority" else by_remaining)


def candidates(waiting: WaitingQueue, pass_over: Test | None) -> Iterator[SequenceState]:
    """The first of `waiting`, again and again; or the next `LOOKAHEAD` not passed over."""
    if pass_over is not None:
        upcoming = list(islice(waiting, LOOKAHEAD))  # the queue changes as they are admitted
        yield from (sequence for sequence in upcoming if not pass_over(sequence))
        return
    while waiting:
        yield waiting[0]


def by_arrival(sequence: SequenceState) -> Rank:
    """First come, first served."""
    return 0, sequence.order


def by_priority(sequence: SequenceState) -> Rank:
    """Lowest `Request.priority` first, as in vLLM; first come among equals."""
    return sequence.request.priority, sequence.order


def by_remaining(sequence: SequenceState) -> Rank:
    """Fewest tokens to prefill first, which is what a server knows of a request; first come among
    equals.

    Cached ones count, too: how many there are changes while a sequence waits.
    """
    return sequence.num_known, sequence.order
