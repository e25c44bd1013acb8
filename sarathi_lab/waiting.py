"""The order in which waiting sequences are admitted, and who gives way when the cache is short."""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable, Iterator
from typing import Literal, Protocol

from sarathi_lab.request import Sequence

QueueOrder = Literal["fcfs", "priority", "shortest"]
Rank = tuple[float, int]


class WaitingQueue(Protocol):
    """Waiting sequences, the next one to be admitted first."""

    def append(self, sequence: Sequence, /) -> None:
        """Queue a new sequence."""
        ...

    def appendleft(self, sequence: Sequence, /) -> None:
        """Queue one again that was preempted."""
        ...

    def popleft(self) -> Sequence:
        """Take the next one out."""
        ...

    def remove(self, sequence: Sequence, /) -> None:
        """Take any one out. Raises ValueError if it does not wait."""
        ...

    def __getitem__(self, index: int, /) -> Sequence: ...

    def __iter__(self) -> Iterator[Sequence]: ...

    def __len__(self) -> int: ...


class RankedQueue:
    """A waiting queue in the order of `rank`, lowest first; preempted sequences come where their rank puts them.

    A sorted list with the next one last: insertion moves pointers only, taking the next one moves nothing.
    """

    def __init__(self, rank: Callable[[Sequence], Rank]) -> None:
        self._rank = rank
        self._items: list[Sequence] = []

    def append(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        insort(self._items, sequence, key=self._descending)

    appendleft = append

    def popleft(self) -> Sequence:
        """Take the one of the lowest rank out."""
        return self._items.pop()

    def remove(self, sequence: Sequence) -> None:
        """Take any one out. Raises ValueError if it does not wait."""
        self._items.remove(sequence)

    def _descending(self, sequence: Sequence) -> Rank:
        rank, order = self._rank(sequence)
        return -rank, -order

    def __getitem__(self, index: int) -> Sequence:
        return self._items[-1 - index]

    def __iter__(self) -> Iterator[Sequence]:
        return reversed(self._items)

    def __len__(self) -> int:
        return len(self._items)


def make_queue(order: QueueOrder) -> WaitingQueue:
    """An empty queue: first come, first served with the preempted ones in front; by priority; or shortest first."""
    if order == "fcfs":
        return deque()
    return RankedQueue(by_priority if order == "priority" else by_remaining)


def by_arrival(sequence: Sequence) -> Rank:
    """First come, first served."""
    return 0, sequence.order


def by_priority(sequence: Sequence) -> Rank:
    """Lowest `Request.priority` first, as in vLLM; first come among equals."""
    return sequence.request.priority, sequence.order


def by_remaining(sequence: Sequence) -> Rank:
    """Fewest tokens to prefill first, which is what a server knows of a request; first come among equals.

    Cached ones count, too: how many there are changes while a sequence waits.
    """
    return sequence.num_known, sequence.order
