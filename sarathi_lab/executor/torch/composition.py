"""The part of packed batches that stays equal while the same sequences decode."""

from __future__ import annotations

from itertools import compress
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sarathi_kernels.attention.plan import PADDING, tiles_of
from sarathi_lab.engine.request import Batch, SequenceState
from sarathi_lab.executor.torch.block_table import BlockTable
from sarathi_lab.executor.torch.fields import Fields
from sarathi_lab.executor.torch.shapes import Shape

Int32s = NDArray[np.int32]


class Columns(NamedTuple):
    """Columns of a batch's chunks but `start`, and the preemptions of their sequences."""

    sequences: tuple[SequenceState, ...] = ()
    num_tokens: tuple[int, ...] = ()
    is_decode: tuple[bool, ...] = ()
    emits_token: tuple[bool, ...] = ()
    num_preemptions: tuple[int, ...] = ()


def columns_of(batch: Batch) -> tuple[Columns, tuple[int, ...]]:
    """Return the columns of the chunks of `batch`, and the position of each chunk's first token."""
    if not batch.chunks:
        return Columns(), ()
    sequences, starts, num_tokens, is_decode, emits = zip(*batch.chunks, strict=True)
    num_preemptions = tuple([sequence.num_preemptions for sequence in sequences])
    return Columns(sequences, num_tokens, is_decode, emits, num_preemptions), starts


class Composition:
    """Part of packed batches that stays equal while the same sequences take as many tokens each,
    mostly for many iterations: while their `columns` are equal.

    Rows are those of packed tokens, sequence after sequence. For chunks of 3, 1 and 2 tokens `ends`
    are 3, 4, 6, `owners` 0 0 0 1 2 2, and `offsets` 0 1 2 0 0 1.
    """

    def __init__(self, columns: Columns, table: BlockTable) -> None:
        self.columns = columns
        self.sequences = columns.sequences
        self.rows = table.rows_of(columns.sequences, columns.num_preemptions)  # of the block table
        # By sequence:
        self.lengths = np.array(columns.num_tokens, dtype=np.int64)
        self.ends = np.cumsum(self.lengths)  # the row behind each one's last token
        first_rows = self.ends - self.lengths
        self.num_tokens = int(self.lengths.sum())
        has_one_token = self.lengths == 1
        self.singles = np.flatnonzero(has_one_token)  # decodes to the kernels
        # By token: its sequence, and how many of the sequence's tokens come before.
        numbers = np.arange(len(self.lengths))
        self.owners = np.repeat(numbers, self.lengths)
        token_rows = np.arange(self.num_tokens)
        self.offsets = token_rows - first_rows[self.owners]
        self._find_sampled()
        self._find_decodes(has_one_token)

    def _find_sampled(self) -> None:
        """Find the rows after which tokens are sampled (`emit_rows`), and which of the emitting
        sequences each one is (`sampled_rows`).
        """
        emits = np.array(self.columns.emits_token, dtype=bool)
        is_decode = np.array(self.columns.is_decode, dtype=bool)
        self.emitting = tuple(compress(self.sequences, self.columns.emits_token))
        self.sampled_rows = np.cumsum(emits) - 1
        # A decode with drafts samples after each of its tokens, others after the last.
        num_samples = np.where(is_decode, self.lengths, 1) * emits
        # A sequence samples after its last rows, in their order: so all of its samples have the
        # same distance from their number, counted over all sequences, to their row.
        sample_ends = np.cumsum(num_samples)  # the number behind each sequence's last sample
        distances = np.repeat(self.ends - sample_ends, num_samples)
        sample_numbers = np.arange(len(distances))
        self.emit_rows = sample_numbers + distances

    def _find_decodes(self, has_one_token: NDArray[np.bool_]) -> None:
        """Set decodes without drafts apart: mostly they are all but one sequence, and their tokens
        can be looked up without an array for each.
        """
        is_decode = np.array(self.columns.is_decode, dtype=bool)
        is_plain_decode = is_decode & has_one_token
        self.decodes = np.flatnonzero(is_plain_decode)
        self.others = np.flatnonzero(~is_plain_decode).tolist()
        decoding = [self.sequences[i] for i in self.decodes.tolist()]
        self.outputs = [sequence.output_token_ids for sequence in decoding]
        prompt_lens = [sequence.request.prompt_len for sequence in decoding]
        self.prompt_lens = np.array(prompt_lens, dtype=np.int64)

    def fill(self, fields: Fields[Int32s], shape: Shape) -> None:
        """Write the part that stays equal, and padding, in fields of `shape`."""
        num_sequences = len(self.sequences)
        fields.token_ids[self.num_tokens :] = 0
        fields.positions[self.num_tokens :] = 0
        fields.slots[self.num_tokens :] = PADDING
        fields.feed_rows.fill(PADDING)
        fields.kv_lens[num_sequences:] = 0
        fields.block_table[num_sequences:] = 0
        fields.query_starts[0] = 0
        put_padded(fields.query_starts[1:], self.ends, padding=self.num_tokens)
        put_padded(fields.emit_rows, self.emit_rows, padding=0)
        if shape.tile_rows:
            tiles = tiles_of(self.lengths.tolist(), shape.tile_rows)
            put_padded(fields.tiles, tiles, padding=PADDING)
            put_padded(fields.decodes, self.singles, padding=PADDING)


def put_padded(field: Int32s, values: NDArray[np.integer], padding: int) -> None:
    """Write `values` to a field, and `padding` behind them."""
    num_values = len(values)
    field[:num_values] = values
    field[num_values:] = padding
