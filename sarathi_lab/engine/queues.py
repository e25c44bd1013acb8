"""The orders of waiting and running sequences, and which of them is evicted first."""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Literal

from sarathi_lab.engine.request import SequenceState

QueueOrder = Literal["fcfs", "priority", "shortest"]
Rank = tuple[float, int]
Test = Callable[[SequenceState], bool]
# Waiting sequences that an iteration looks at if some may be passed over, for queues of any length.
LOOKAHEAD = 64


class RankedQueue(list[SequenceState]):
    """A waiting queue in order of `rank`, lowest first, preempted sequences included."""

    def __init__(self, rank: Callable[[SequenceState], Rank]) -> None:
        super().__init__()
        self.rank = rank

    def append(self, sequence: SequenceState, /) -> None:
        insort(self, sequence, key=self.rank)

    appendleft = append


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
    """Sequences that hold cache, in order of admission, or of `rank` once sorted; the largest by
    `rank` is evicted first.
    """

    def __init__(self, rank: Callable[[SequenceState], Rank]) -> None:
        super().__init__()
        self.rank = rank
        self._is_sorted = True

    @property
    def idle(self) -> list[SequenceState]:
        """Sequences that could be scheduled now: those not in flight, in the same order."""
        return [sequence for sequence in self if not sequence.in_flight]

    def by_phase(
        self, *, only_idle: bool = False
    ) -> tuple[list[SequenceState], list[SequenceState]]:
        """List sequences that are decoding, and those whose prompt is not computed."""
        decodes = []
        prompts = []
        for sequence in self:
            if only_idle and sequence.in_flight:
                continue
            # `is_decoding` is inlined, as hundreds of sequences are asked in each iteration.
            num_generated = len(sequence.output_token_ids)
            num_known = sequence.request.prompt_len + num_generated
            if num_generated > 0 and num_known - sequence.num_computed == 1:
                decodes.append(sequence)
            else:
                prompts.append(sequence)
        return decodes, prompts

    def enter(self, sequence: SequenceState) -> None:
        """Add a sequence that is in flight from now on."""
        if self and self.rank(sequence) < self.rank(self[-1]):
            self._is_sorted = False
        self.append(sequence)
        sequence.is_running = True

    def leave(self, sequence: SequenceState) -> None:
        self.remove(sequence)
        sequence.is_running = False

    def sort_by_rank(self) -> None:
        """Restore the order of `rank`, which readmission upsets."""
        if not self._is_sorted:
            self.sort(key=self.rank)
            self._is_sorted = True
