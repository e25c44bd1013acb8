"""The cache blocks of running sequences as a table that packing reads."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from sarathi_lab.engine.request import SequenceState

Ints = NDArray[np.int64]
Int32s = NDArray[np.int32]
Sequences = Sequence[SequenceState]
UNCHANGED = (0, 0)  # an axis that `np.pad` leaves as it is: nothing before, nothing behind


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
        no_rows = np.zeros(0, dtype=np.int64)
        self._num_written = no_rows
        self._num_preemptions = no_rows

    def rows_of(self, sequences: Sequences, preemptions: Sequence[int]) -> Ints:
        """Return the rows of `sequences`, which were preempted so many times; valid until other
        sequences are requested, or one of these is preempted.
        """
        missing = self._without_row(sequences)
        if missing:
            here = set(sequences)
            self._take_rows_back(here)
            self._give_rows(missing)
        row_numbers = [self._row_of[sequence] for sequence in sequences]
        rows = np.array(row_numbers, dtype=np.int64)
        # A preempted sequence comes back with other blocks, all of which are new to its row.
        preemptions_before = self._num_preemptions[rows]
        is_preempted = preemptions_before != preemptions
        self._clear(rows[is_preempted])
        self._num_preemptions[rows] = preemptions
        return rows

    def extend(self, rows: Ints, sequences: Sequences, kv_lens: Ints) -> None:
        """Write the blocks of `sequences` to their `rows` where `kv_lens` tokens need more."""
        blocks_written = self._num_written[rows]
        tokens_written = blocks_written * self.block_size
        needs_more = tokens_written < kv_lens
        # Few: most decodes stay in their last block.
        numbers = needs_more.nonzero()[0]
        for number in numbers.tolist():
            row = int(rows[number])
            sequence = sequences[number]
            self._write(row, sequence.block_ids)

    def _write(self, row: int, block_ids: Sequence[int]) -> None:
        """Write the blocks to a `row` that are not there yet."""
        num_blocks = len(block_ids)
        if num_blocks > self._num_columns:
            # Twice as many as are needed, so that it is seldom: contexts grow by a token.
            num_new = 2 * num_blocks - self._num_columns
            self._add_columns(num_new)
        first_new = int(self._num_written[row])
        new_blocks = block_ids[first_new:]
        ids_of_row = self._ids[row]
        ids_of_row[first_new:num_blocks] = new_blocks
        self._num_written[row] = num_blocks

    def slots(self, rows: Ints, positions: Ints) -> Ints:
        """Return the cache slots of the tokens at `positions` of the sequences in `rows`."""
        columns = positions // self.block_size
        blocks = self._ids[rows, columns]
        first_slots = blocks * self.block_size
        slots_within = positions % self.block_size
        return first_slots + slots_within

    def fill(self, view: Int32s, rows: Ints) -> None:
        """Write the blocks in `rows` to `view`, as many as it has columns."""
        num_wanted = view.shape[1]
        num_shared = min(num_wanted, self._num_columns)
        blocks = self._ids[rows, :num_shared]
        view[:, :num_shared] = blocks
        empty = view[:, num_shared:]
        empty.fill(0)

    def _without_row(self, sequences: Sequences) -> list[SequenceState]:
        missing = []
        for sequence in sequences:
            if sequence not in self._row_of:
                missing.append(sequence)
        return missing

    def _take_rows_back(self, here: set[SequenceState]) -> None:
        """Take the rows of sequences that ended and are not `here`."""
        with_row = list(self._row_of)  # a copy, as the loop takes rows out
        for sequence in with_row:
            if sequence.is_running or sequence in here:
                continue
            row = self._row_of.pop(sequence)
            self._free.append(row)

    def _give_rows(self, missing: Sequences) -> None:
        """Assign empty rows to `missing`."""
        num_free = len(self._free)
        num_lacking = len(missing) - num_free
        if num_lacking > 0:
            self._add_rows(num_lacking)
        for sequence in missing:
            row = self._free.pop()
            self._row_of[sequence] = row
            self._clear(row)

    def _clear(self, rows: Ints | int) -> None:
        self._ids[rows] = 0
        self._num_written[rows] = 0

    @property
    def _num_columns(self) -> int:
        return self._ids.shape[1]

    def _add_columns(self, num_new: int) -> None:
        new_columns = (0, num_new)
        self._ids = np.pad(self._ids, (UNCHANGED, new_columns))

    def _add_rows(self, num_lacking: int) -> None:
        """Add at least as many rows as there are, so that the table is seldom copied."""
        num_rows = len(self._num_written)
        num_new = max(num_rows, num_lacking)
        num_rows_after = num_rows + num_new
        new_rows = (0, num_new)
        self._ids = np.pad(self._ids, (new_rows, UNCHANGED))
        self._num_written = np.pad(self._num_written, new_rows)
        self._num_preemptions = np.pad(self._num_preemptions, new_rows)
        self._free += range(num_rows, num_rows_after)
