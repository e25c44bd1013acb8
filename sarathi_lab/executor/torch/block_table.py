"""The cache blocks of running sequences as rows of one array, kept from batch to batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from sarathi_lab.engine.request import SequenceState


class BlockTable:
    """A row for every sequence that was in a batch, while it runs. A sequence only takes blocks, or
    is preempted and loses all: so what came since its last batch is written, and no more.
    """

    def __init__(self) -> None:
        self._row_of: dict[SequenceState, int] = {}
        self._ids = np.zeros((0, 0), dtype=np.int32)
        self._num_written = np.zeros(0, dtype=np.int64)
        self._num_preemptions = np.zeros(0, dtype=np.int64)  # of the sequence, when it was written

    def fill(self, view: NDArray[np.int32], sequences: Sequence[SequenceState]) -> None:
        """Write the blocks of `sequences` to the rows of `view`, zeros behind them and elsewhere;
        what it has no columns for is left out.
        """
        rows, num_columns = self._rows(sequences), min(view.shape[1], self._ids.shape[1])
        view[: len(rows), :num_columns] = self._ids[rows, :num_columns]
        view[: len(rows), num_columns:] = 0
        view[len(rows) :] = 0

    def _rows(self, sequences: Sequence[SequenceState]) -> NDArray[np.int64]:
        missing = [sequence for sequence in sequences if sequence not in self._row_of]
        if missing:
            self._enter(missing, sequences)
        rows = np.array([self._row_of[sequence] for sequence in sequences], dtype=np.int64)
        held = np.array([len(one.block_ids) for one in sequences], dtype=np.int64)
        preemptions = np.array([one.num_preemptions for one in sequences], dtype=np.int64)
        changed = held != self._num_written[rows]
        changed |= preemptions != self._num_preemptions[rows]
        for i in np.flatnonzero(changed).tolist():
            self._write(int(rows[i]), sequences[i])
        return rows

    def _enter(self, missing: Sequence[SequenceState], sequences: Sequence[SequenceState]) -> None:
        """Give rows to `missing`: those of sequences that neither run nor are in this batch, and
        then new ones.
        """
        here = set(sequences)
        gone = [one for one in self._row_of if not one.is_running and one not in here]
        taken = {row for one, row in self._row_of.items()} - {self._row_of.pop(one) for one in gone}
        free = [row for row in range(len(taken) + len(missing) + len(gone)) if row not in taken]
        for sequence, row in zip(missing, free, strict=False):
            self._row_of[sequence] = row
            self._resize(row + 1, 0)
            self._ids[row], self._num_written[row] = 0, 0
            self._num_preemptions[row] = sequence.num_preemptions

    def _write(self, row: int, sequence: SequenceState) -> None:
        first, last = int(self._num_written[row]), len(sequence.block_ids)
        if self._num_preemptions[row] != sequence.num_preemptions:
            first, self._num_preemptions[row] = 0, sequence.num_preemptions
        self._resize(0, last)
        self._ids[row, first:last] = sequence.block_ids[first:]
        self._ids[row, last:] = 0
        self._num_written[row] = last

    def _resize(self, num_rows: int, num_columns: int) -> None:
        """Have room for as many, and for twice as many where there is too little."""
        rows, columns = self._ids.shape
        if num_rows <= rows and num_columns <= columns:
            return
        larger = max(rows, 2 * num_rows if num_rows > rows else 0)
        wider = max(columns, 2 * num_columns if num_columns > columns else 0)
        self._ids = np.pad(self._ids, ((0, larger - rows), (0, wider - columns)))
        self._num_written = np.pad(self._num_written, (0, larger - rows))
        self._num_preemptions = np.pad(self._num_preemptions, (0, larger - rows))
