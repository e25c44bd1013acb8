"""The orders of waiting and running sequences, and which of them is evicted first."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from operator import attrgetter
from typing import Literal

from sarathi_lab.engine.executor import NO_TOKEN
from sarathi_lab.engine.request import Chunk, SequenceState

QueueOrder = Literal["fcfs", "priority", "shortest"]
Rank = tuple[float, int]
Test = Callable[[SequenceState], bool]
# Waiting sequences that an iteration looks at if some may be passed over, for queues of any length.
LOOKAHEAD = 64


class RankedQueue:
    """A waiting queue in order of `rank`, lowest first, preempted sequences included.

    A sorted list with the first sequence last: removing it moves nothing.
    """

    def __init__(self, rank: Callable[[SequenceState], Rank]) -> None:
        self._rank = rank
        self._sequences: list[SequenceState] = []

    def append(self, sequence: SequenceState) -> None:
        insort(self._sequences, sequence, key=self._descending)

    appendleft = append

    def remove(self, sequence: SequenceState) -> None:
        """Take out `sequence`, which waits."""
        place = self._descending(sequence)
        del self._sequences[bisect_left(self._sequences, place, key=self._descending)]

    def _descending(self, sequence: SequenceState) -> Rank:
        rank, order = self._rank(sequence)
        return -rank, -order

    def __getitem__(self, index: int) -> SequenceState:
        return self._sequences[-1 - index]

    def __iter__(self) -> Iterator[SequenceState]:
        return reversed(self._sequences)

    def __len__(self) -> int:
        return len(self._sequences)


WaitingQueue = deque[SequenceState] | RankedQueue  # a deque has preempted sequences in front


def make_queue(order: QueueOrder) -> WaitingQueue:
    """Make an empty queue: by arrival, by priority, or shortest first."""
    if order == "fcfs":
        return deque()
    return RankedQueue(by_priority if order == "priority" else by_remaining)


def candidates(waiting: WaitingQueue, pass_over: Test | None) -> Iterator[SequenceState]:
    """The first of `waiting`, again and again; or the next `LOOKAHEAD` not passed over."""
    if pass_over is not None:
        upcoming = list(islice(waiting, LOOKAHEAD))  # the queue changes with each admission
        yield from (sequence for sequence in upcoming if not pass_over(sequence))
        return
    while waiting:
        yield waiting[0]


def by_arrival(sequence: SequenceState) -> Rank:
    return 0, sequence.order


def by_priority(sequence: SequenceState) -> Rank:
    """Lowest `Request.priority` first, as in vLLM, then by arrival."""
    return sequence.request.priority, sequence.order


def by_remaining(sequence: SequenceState) -> Rank:
    """Fewest tokens to prefill first, then by arrival. Cached ones count, as what is cached changes
    while a sequence waits.
    """
    return sequence.num_known, sequence.order


class RunningSequences(list[SequenceState]):
    """Sequences that hold cache, in order of admission, or of `rank` once sorted.

    The largest by `rank` is evicted first. `at_rest` are those not in flight, in the same order (of
    a pipeline's sequences those of one batch). It may also have some that have left since the
    last batch was made, or are in flight again, which `is_idle` excludes.
    """

    def __init__(self, rank: Callable[[SequenceState], Rank]) -> None:
        super().__init__()
        self.rank = rank
        self.at_rest: list[SequenceState] = []
        self._num_positions = 0
        self._is_sorted = True

    @property
    def idle(self) -> list[SequenceState]:
        """Sequences that could be scheduled now."""
        return [one for one in self.at_rest if one.is_running and not one.in_flight]

    def enter(self, sequence: SequenceState) -> None:
        """Add a sequence that is in flight from now on."""
        if self and self.rank(sequence) < self.rank(self[-1]):
            self._is_sorted = False
        self.append(sequence)
        sequence.is_running = True
        sequence.position = self._num_positions
        self._num_positions += 1

    def leave(self, sequence: SequenceState) -> None:
        self.remove(sequence)
        sequence.is_running = False

    def requeue(self, sequences: list[SequenceState]) -> None:
        """Put `sequences` of a batch that has ended back to `at_rest`."""
        self.at_rest += sequences
        self.at_rest.sort(key=attrgetter("position"))

    def commit(self, chunks: Iterable[Chunk]) -> list[SequenceState]:
        """Count `chunks` as computed, with their next tokens yet unknown, and requeue their
        sequences, except finished ones, which are returned.
        """
        resting, finished = [], []
        for sequence, start, num_tokens, _, emits_token in chunks:
            sequence.in_flight = False
            sequence.num_computed = start + num_tokens
            if emits_token:
                token_ids = sequence.output_token_ids
                token_ids.append(NO_TOKEN)
                if len(token_ids) >= sequence.request.output_len:
                    finished.append(sequence)
                    continue
            resting.append(sequence)
        self.requeue(resting)
        return finished

    def sort_by_rank(self) -> None:
        """Restore the order of `rank`, which readmission upsets."""
        if self._is_sorted:
            return
        self.sort(key=self.rank)
        self.at_rest.sort(key=self.rank)
        for position, sequence in enumerate(self):
            sequence.position = position
        self._is_sorted = True


def is_idle(sequence: SequenceState) -> bool:
    """Whether `sequence` is running, but not in flight."""
    return sequence.is_running and not sequence.in_flight
