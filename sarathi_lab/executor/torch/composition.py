"""The part of packed batches that stays equal while the same sequences take as many tokens each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sarathi_kernels.attention.plan import PADDING, tiles_of
from sarathi_lab.engine.request import Batch, SequenceState
from sarathi_lab.executor.torch.block_table import BlockTable, Int32s, Ints
from sarathi_lab.executor.torch.fields import Fields
from sarathi_lab.executor.torch.shapes import Shape

Flags = NDArray[np.bool_]


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
    # A preempted sequence may come back with a chunk like its last, but with other blocks.
    num_preemptions = tuple([sequence.num_preemptions for sequence in sequences])
    columns = Columns(sequences, num_tokens, is_decode, emits, num_preemptions)
    return columns, starts


class Samples(NamedTuple):
    """Where tokens are sampled.

    Attributes:
        emitting: The sequences that emit.
        rows: The packed rows after which tokens are sampled, sequence after sequence.
        numbers: By sequence of the batch: which of `emitting` it is, if it emits.
    """

    emitting: tuple[SequenceState, ...]
    rows: Ints
    numbers: Ints


class Decodes(NamedTuple):
    """Decodes without drafts: mostly they are all sequences of a batch but one, and their tokens
    can be looked up without an array for each.

    Attributes:
        numbers: Of these sequences in the batch.
        others: Of the other sequences.
        outputs: The tokens that each has generated.
        prompt_lens: Tokens of their prompts.
    """

    numbers: Ints
    others: list[int]
    outputs: list[list[int]]
    prompt_lens: Ints


@dataclass(frozen=True, eq=False)
class Composition:
    """Part of packed batches that stays equal while the same sequences take as many tokens each,
    mostly for many iterations: while their `columns` are equal.

    Rows are those of packed tokens, sequence after sequence. For chunks of 3, 1 and 2 tokens `ends`
    are 3, 4, 6, `owners` 0 0 0 1 2 2, and `offsets` 0 1 2 0 0 1.
    """

    columns: Columns
    table_rows: Ints  # [sequences] of the block table
    lengths: Ints  # [sequences] tokens
    ends: Ints  # [sequences] the row behind the last token
    owners: Ints  # [tokens] the sequence
    offsets: Ints  # [tokens] tokens of the sequence that come before
    singles: Ints  # sequences of one token, which are decodes to the kernels
    samples: Samples
    decodes: Decodes

    @property
    def sequences(self) -> tuple[SequenceState, ...]:
        return self.columns.sequences

    @property
    def num_tokens(self) -> int:
        return len(self.owners)

    def fill(self, fields: Fields[Int32s], shape: Shape) -> None:
        """Write the part that stays equal, and padding, in fields of `shape`."""
        num_tokens = self.num_tokens
        num_sequences = len(self.sequences)
        fields.token_ids[num_tokens:] = 0
        fields.positions[num_tokens:] = 0
        fields.slots[num_tokens:] = PADDING
        fields.feed_rows.fill(PADDING)
        fields.kv_lens[num_sequences:] = 0
        fields.block_table[num_sequences:] = 0
        fields.query_starts[0] = 0
        put_padded(fields.query_starts[1:], self.ends, padding=num_tokens)
        put_padded(fields.emit_rows, self.samples.rows, padding=0)
        if shape.tile_rows:
            tiles = tiles_of(self.lengths.tolist(), shape.tile_rows)
            put_padded(fields.tiles, tiles, padding=PADDING)
            put_padded(fields.decodes, self.singles, padding=PADDING)


def compose(columns: Columns, table: BlockTable) -> Composition:
    """Work out what stays equal while the columns of batches are `columns`."""
    lengths = np.array(columns.num_tokens, dtype=np.int64)
    ends = np.cumsum(lengths)
    first_rows = ends - lengths
    has_one_token = lengths == 1
    numbers = np.arange(len(lengths))
    owners = np.repeat(numbers, lengths)
    token_rows = np.arange(len(owners))
    return Composition(
        columns=columns,
        table_rows=table.rows_of(columns.sequences, columns.num_preemptions),
        lengths=lengths,
        ends=ends,
        owners=owners,
        offsets=token_rows - first_rows[owners],
        singles=np.flatnonzero(has_one_token),
        samples=_samples_of(columns, lengths, ends),
        decodes=_decodes_of(columns, has_one_token),
    )


def _samples_of(columns: Columns, lengths: Ints, ends: Ints) -> Samples:
    emits = _flags(columns.emits_token)
    is_decode = _flags(columns.is_decode)
    # A decode with drafts samples after each of its tokens, others after the last.
    num_samples = np.where(is_decode, lengths, 1) * emits
    # A sequence samples after its last rows, in their order: so all of its samples have the same
    # distance from their number, counted over all sequences, to their row.
    sample_ends = np.cumsum(num_samples)  # the number behind each sequence's last sample
    distances = np.repeat(ends - sample_ends, num_samples)
    sample_numbers = np.arange(len(distances))
    emitting = compress(columns.sequences, columns.emits_token)
    return Samples(
        emitting=tuple(emitting),
        rows=sample_numbers + distances,
        numbers=np.cumsum(emits) - 1,
    )


def _decodes_of(columns: Columns, has_one_token: Flags) -> Decodes:
    is_plain = _flags(columns.is_decode) & has_one_token
    outputs = []
    prompt_lens = []
    for sequence in compress(columns.sequences, is_plain.tolist()):
        outputs.append(sequence.output_token_ids)
        prompt_lens.append(sequence.request.prompt_len)
    return Decodes(
        numbers=np.flatnonzero(is_plain),
        others=np.flatnonzero(~is_plain).tolist(),
        outputs=outputs,
        prompt_lens=np.array(prompt_lens, dtype=np.int64),
    )


def _flags(values: Sequence[bool]) -> Flags:
    return np.array(values, dtype=bool)


def put_padded(field: Int32s, values: NDArray[np.integer], padding: int) -> None:
    """Write `values` to a field, and `padding` behind them."""
    num_values = len(values)
    field[:num_values] = values
    field[num_values:] = padding
