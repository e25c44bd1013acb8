"""The cache blocks of running sequences as a table that packing reads."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from sarathi_lab.engine.request import SequenceState

Ints = NDArray[np.int64]


class BlockTable:
    """Cache blocks of running sequences, a row each. A sequence takes blocks, or loses all when
    preempted, so only those taken since its last batch are written.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._row_of: dict[SequenceState, int] = {}
        self._free: list[int] = []  # rows
        # Of each row: its blocks, how many they are, and how often its sequence was preempted.
        self._ids = np.zeros((0, 0), dtype=np.int32)  # [rows, blocks of the longest sequence]
        self._num_written = np.zeros(0, dtype=np.int64)  # [rows]
        self._num_preemptions = np.zeros(0, dtype=np.int64)  # [rows]

    def rows_of(self, sequences: Sequence[SequenceState], preemptions: Sequence[int]) -> Ints:
        """Return the rows of `sequences`, which were preempted so many times; valid until other
        sequences are requested, or one of these is preempted.
        """
        missing = [sequence for sequence in sequences if sequence not in self._row_of]
        if missing:
            self._give_rows(missing, set(sequences))
        row_numbers = [self._row_of[sequence] for sequence in sequences]
        rows = np.array(row_numbers, dtype=np.int64)
        # A preempted sequence comes back with other blocks, all of which are new to its row.
        is_preempted = self._num_preemptions[rows] != preemptions
        preempted = rows[is_preempted]
        self._ids[preempted] = 0
        self._num_written[preempted] = 0
        self._num_preemptions[rows] = preemptions
        return rows

    def extend(
        self,
        rows: Ints,
        sequences: Sequence[SequenceState],
        kv_lens: Ints,
    ) -> None:
        """Write the blocks of `sequences` to their `rows` where `kv_lens` tokens need more."""
        tokens_written = self._num_written[rows] * self.block_size
        needs_more = tokens_written < kv_lens
        # Few: most decodes stay in their last block.
        for i in needs_more.nonzero()[0].tolist():
            self._write(int(rows[i]), sequences[i].block_ids)

    def _write(self, row: int, block_ids: Sequence[int]) -> None:
        """Write the blocks to a `row` that are not there yet."""
        num_blocks = len(block_ids)
        num_rows, num_columns = self._ids.shape
        if num_blocks > num_columns:
            # Twice as many as are needed, so that it is seldom: contexts grow by a token.
            self._resize(num_rows, 2 * num_blocks)
        first_new = int(self._num_written[row])
        self._ids[row, first_new:num_blocks] = block_ids[first_new:]
        self._num_written[row] = num_blocks

    def slots(self, rows: Ints, positions: Ints) -> Ints:
        """Return the cache slots of the tokens at `positions` of the sequences in `rows`."""
        columns = positions // self.block_size
        blocks = self._ids[rows, columns]
        return blocks * self.block_size + positions % self.block_size

    def fill(self, view: NDArray[np.int32], rows: Ints) -> None:
        """Write the blocks in `rows` to `view`, as many as it has columns."""
        num_wanted = view.shape[1]
        num_columns = self._ids.shape[1]
        num_shared = min(num_wanted, num_columns)
        view[:, :num_shared] = self._ids[rows, :num_shared]
        view[:, num_shared:] = 0

    def _give_rows(self, missing: Sequence[SequenceState], here: set[SequenceState]) -> None:
        """Assign rows to `missing`: first those of sequences that ended and are not `here`."""
        for sequence in list(self._row_of):
            has_ended = not sequence.is_running
            if has_ended and sequence not in here:
                row = self._row_of.pop(sequence)
                self._free.append(row)
        num_lacking = len(missing) - len(self._free)
        if num_lacking > 0:
            num_rows, num_columns = self._ids.shape
            more_rows = num_rows + max(num_rows, num_lacking)
            self._resize(more_rows, num_columns)
            self._free += range(num_rows, more_rows)
        for sequence in missing:
            row = self._free.pop()
            self._row_of[sequence] = row
            self._ids[row] = 0
            self._num_written[row] = 0

    def _resize(self, num_rows: int, num_columns: int) -> None:
        old_rows, old_columns = self._ids.shape
        # As `np.pad` wants it: none before the first, these behind the last.
        new_rows = (0, num_rows - old_rows)
        new_columns = (0, num_columns - old_columns)
        self._ids = np.pad(self._ids, (new_rows, new_columns))
        self._num_written = np.pad(self._num_written, new_rows)
        self._num_preemptions = np.pad(self._num_preemptions, new_rows)
