"""The sequences that hold cache and may be scheduled."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter

from sarathi_lab.engine.queues import Rank
from sarathi_lab.engine.request import SequenceState

_by_position = attrgetter("position")


class RunningSequences(list[SequenceState]):
    """Running sequences in the order that they entered in, or of `rank` once sorted.

    The largest by `rank` gives way first. `at_rest` are those that are not in flight, in the same
    order (of a pipeline's sequences those of one batch); it may also have some that have left it
    since `tidy`, which `is_idle` tells.
    """

    def __init__(self, rank: Callable[[SequenceState], Rank]) -> None:
        super().__init__()
        self.rank = rank
        self.at_rest: list[SequenceState] = []
        self._num_positions = 0
        self._is_sorted = True

    @property
    def idle(self) -> list[SequenceState]:
        """Those that could be scheduled now."""
        return list(filter(is_idle, self.at_rest))

    def enter(self, sequence: SequenceState) -> None:
        """Take in a sequence, which is in flight from now on."""
        if self and self.rank(sequence) < self.rank(self[-1]):
            self._is_sorted = False
        self.append(sequence)
        sequence.is_running = True
        sequence.position = self._num_positions
        self._num_positions += 1

    def leave(self, sequence: SequenceState) -> None:
        """Let a sequence go."""
        self.remove(sequence)
        sequence.is_running = False

    def rest(self, sequences: list[SequenceState]) -> None:
        """Take `sequences` back from a batch that has ended."""
        self.at_rest += sequences
        self.at_rest.sort(key=_by_position)

    def tidy(self) -> None:
        """Forget of `at_rest` who left or is in flight."""
        self.at_rest = self.idle

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
