"""Packing of a batch into the tensors that the model reads; for kernels one buffer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from operator import getitem

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sarathi_kernels.attention.plan import PADDING, AttentionPlan
from sarathi_kernels.attention.reference import Segment, make_segment
from sarathi_lab.engine.executor import NO_TOKEN
from sarathi_lab.engine.request import Batch, SequenceState
from sarathi_lab.executor.torch.block_table import BlockTable, Int32s, Ints
from sarathi_lab.executor.torch.composition import (
    Columns,
    Composition,
    columns_of,
    compose,
    put_padded,
)
from sarathi_lab.executor.torch.fields import Fields, layout_of
from sarathi_lab.executor.torch.shapes import Limits, Parts, Shape
from sarathi_lab.model.operations import PackedInputs
from sarathi_lab.model.transformer import Transformer

NUM_BUFFERS = 2  # batches in flight at most: a buffer is filled again when its batch is done


def add_masks(inputs: PackedInputs, model: Transformer) -> PackedInputs:
    """Add the attention masks to inputs of plain torch, where `model` needs them."""
    if not model.operations.wants_masks:
        return inputs
    segments = []
    for segment in inputs.attention:
        masked = make_segment(
            segment.start,
            segment.num_queries,
            segment.kv_len,
            segment.blocks,
            sliding_window=model.spec.sliding_window,
            device=model.device,
            dtype=model.dtype,
        )
        segments.append(masked)
    return replace(inputs, attention=segments)


def token_ids_of(sequence: SequenceState, start: int, end: int) -> NDArray[np.int64]:
    """Return tokens `start` to `end` of prompt, output and drafts, which all may be recomputed."""
    request = sequence.request
    prompt_len = request.prompt_len
    if request.prompt_token_ids is None:
        raise ValueError(
            f"request {request.request_id} has no token ids; this executor computes tokens"
        )
    # Positions of the output count from the prompt's end, those of drafts from the output's.
    first_output = max(0, start - prompt_len)
    end_of_output = max(0, end - prompt_len)
    num_drafts = max(0, end - sequence.num_known)
    prompt = request.prompt_token_ids[start:end]
    output = sequence.output_token_ids[first_output:end_of_output]
    drafts = sequence.draft_token_ids[:num_drafts]
    return np.concatenate([prompt, output, drafts], dtype=np.int64, casting="unsafe")


class Packer:
    """Packer of batches for one device: `fill` on the host, then `send` to the device, or
    `for_torch`.
    """

    def __init__(self, limits: Limits, device: torch.device) -> None:
        # The device reads pinned memory while the host goes on.
        is_pinned = device.type == "cuda"
        self._hosts = [_HostBuffer(pin_memory=is_pinned) for _ in range(NUM_BUFFERS)]
        self._filled = 0
        self._table = BlockTable(limits.block_size)
        self._composition = compose(Columns(), self._table)  # of the newest batch
        self._parts = Parts(limits)
        self._on_device = _Buffer(device=device)
        self._blocks: list[slice | Tensor] = []  # of the last `_blocks_for_torch`
        self._blocks_made_of: tuple[bytes, ...] = ()

    def fill(
        self, batch: Batch, shape: Shape, newest: Sequence[SequenceState]
    ) -> Sequence[SequenceState]:
        """Write `batch` and padding, in tensors of `shape`, to the buffer of the batch before last.

        Tokens in flight are fed from the tokens sampled last, a row for each sequence of `newest`.
        Returns the sequences that `batch` samples tokens of.
        """
        self._filled = (self._filled + 1) % len(self._hosts)
        columns, first_positions = columns_of(batch)
        if columns != self._composition.columns:
            self._composition = compose(columns, self._table)
        composition = self._composition
        starts = np.array(first_positions, dtype=np.int64)
        kv_lens = starts + composition.lengths
        self._table.extend(composition.table_rows, composition.sequences, kv_lens)
        fields = self.host.fill(shape, composition)
        self._fill_tokens(fields, starts, kv_lens)
        self._fill_feed_rows(fields, newest)
        num_sequences = len(kv_lens)
        fields.kv_lens[:num_sequences] = kv_lens
        self._table.fill(fields.block_table[:num_sequences], composition.table_rows)
        if shape.tile_rows:
            parts, reductions = self._parts.of(composition.singles, kv_lens, shape)
            put_padded(fields.parts, parts, padding=PADDING)
            put_padded(fields.reductions, reductions, padding=PADDING)
        return composition.samples.emitting

    def _fill_tokens(self, fields: Fields[Int32s], starts: Ints, kv_lens: Ints) -> None:
        """Write token ids, positions and slots of the tokens from `starts` up to `kv_lens`."""
        composition = self._composition
        num_tokens = composition.num_tokens
        positions = starts[composition.owners] + composition.offsets
        fields.positions[:num_tokens] = positions
        table_rows = composition.table_rows[composition.owners]
        fields.slots[:num_tokens] = self._table.slots(table_rows, positions)

        token_ids = fields.token_ids
        decodes = composition.decodes
        # A decode computes its newest output token.
        indices = starts[decodes.numbers] - decodes.prompt_lens
        newest = list(map(getitem, decodes.outputs, indices.tolist()))
        rows = composition.ends[decodes.numbers] - 1
        token_ids[rows] = newest
        for i in decodes.others:
            end_row = composition.ends[i]
            first_row = end_row - composition.lengths[i]
            start = int(starts[i])
            end = int(kv_lens[i])
            token_ids[first_row:end_row] = token_ids_of(composition.sequences[i], start, end)

    def _fill_feed_rows(self, fields: Fields[Int32s], newest: Sequence[SequenceState]) -> None:
        """Write for each token in flight its row among the tokens sampled last, of which `newest`
        has the sequences; PADDING for other tokens. Only the newest token of a sequence, in its
        last row, can be in flight.
        """
        composition = self._composition
        token_ids = fields.token_ids
        feed_rows = fields.feed_rows
        feed_rows[: composition.num_tokens] = PADDING
        last_rows = composition.ends - 1
        is_in_flight = token_ids[last_rows] == NO_TOKEN
        in_flight = is_in_flight.nonzero()[0]  # numbers of sequences
        if len(in_flight) == 0:
            return
        rows = last_rows[in_flight]
        token_ids[rows] = 0
        samples = composition.samples
        if newest == samples.emitting:  # mostly: the same sequences as in the batch before
            feed_rows[rows] = samples.numbers[in_flight]
            return
        number_of = {sequence: number for number, sequence in enumerate(newest)}
        sequences = [composition.sequences[i] for i in in_flight.tolist()]
        feed_rows[rows] = [number_of[sequence] for sequence in sequences]

    @property
    def host(self) -> _HostBuffer:
        """Buffer that was filled last."""
        return self._hosts[self._filled]

    def send(self, shape: Shape, into: Tensor | None = None) -> PackedInputs:
        """Start to copy the filled buffer to `into`, or one that the next call overwrites."""
        layout = layout_of(shape)
        buffer = into
        if buffer is None:
            buffer = self._on_device.sized(layout.size)
        self.copy(buffer)
        fields = layout.fields(buffer)
        plan = AttentionPlan(
            query_starts=fields.query_starts,
            kv_lens=fields.kv_lens,
            block_table=fields.block_table,
            tiles=fields.tiles,
            decodes=fields.decodes,
            parts=fields.parts,
            reductions=fields.reductions,
            tile_rows=shape.tile_rows,
        )
        return PackedInputs(
            token_ids=fields.token_ids,
            positions=fields.positions,
            slots=fields.slots,
            emit_rows=fields.emit_rows,
            attention=plan,
            feed_rows=fields.feed_rows,
        )

    def for_torch(self, model: Transformer) -> PackedInputs:
        """Return the filled buffer as inputs of plain torch and C++, without padding: int64,
        attention by a `Segment` a sequence, and no `feed_rows`, as the host has all tokens.
        """
        fields = self.host.fields
        blocks = self._blocks_for_torch(model.device)
        starts = fields.query_starts.tolist()
        kv_lens = fields.kv_lens.tolist()
        segments = []
        for i, kv_len in enumerate(kv_lens):
            start = starts[i]
            end = starts[i + 1]
            num_queries = end - start
            segment = Segment(start, num_queries, kv_len, blocks[i], first_key=0, mask=None)
            segments.append(segment)
        inputs = PackedInputs(
            token_ids=_as_indices(fields.token_ids, model.device),
            positions=_as_indices(fields.positions, model.device),
            slots=_as_indices(fields.slots, model.device),
            emit_rows=_as_indices(fields.emit_rows, model.device),
            attention=segments,
        )
        return add_masks(inputs, model)

    def _blocks_for_torch(self, device: torch.device) -> list[slice | Tensor]:
        """Return the cache blocks of each sequence: as a slice where they are neighbours, which
        attention reads without copying, else as an index.
        """
        table = self.host.fields.block_table
        kv_lens = self.host.fields.kv_lens
        num_blocks = -(-kv_lens // self._table.block_size)
        made_of = (num_blocks.tobytes(), table.tobytes())
        if made_of == self._blocks_made_of:  # in a run of decodes they seldom change
            return self._blocks
        self._blocks_made_of = made_of
        self._blocks = []
        has_neighbours = _has_neighbours(table, num_blocks).tolist()
        first_blocks = table[:, 0].tolist()
        for i, number in enumerate(num_blocks.tolist()):
            if has_neighbours[i]:
                first = first_blocks[i]
                self._blocks.append(slice(first, first + number))
            else:
                block_ids = table[i, :number].tolist()
                self._blocks.append(torch.tensor(block_ids, device=device))
        return self._blocks

    def copy(self, into: Tensor) -> None:
        """Start to copy the filled buffer to one with inputs from `send`."""
        into.copy_(self.host.sized(into.numel()), non_blocking=True)


def _as_indices(numbers: Int32s, device: torch.device) -> Tensor:
    """Return numbers of the host's buffer as plain torch indexes by them."""
    return torch.from_numpy(numbers.astype(np.int64)).to(device)


def _has_neighbours(table: NDArray[np.int32], num_blocks: NDArray[np.int32]) -> NDArray[np.bool_]:
    """Return for each row of a `table` [sequences, columns] whether its first `num_blocks` blocks
    lie one behind another: then each is as far from the first block as its column from the first
    column.
    """
    columns = np.arange(table.shape[1], dtype=np.int32)
    is_in_use = columns < num_blocks[:, None]  # [sequences, columns]
    first_blocks = table[:, :1]
    distances = table - first_blocks
    is_apart = is_in_use & (distances != columns)
    return ~is_apart.any(axis=1)


class _Buffer:
    """Growing tensor of int32."""

    def __init__(self, device: torch.device | None = None, *, pin_memory: bool = False) -> None:
        self._device = device
        self._pin_memory = pin_memory
        self._tensor = torch.empty(0, dtype=torch.int32)

    def sized(self, size: int) -> Tensor:
        if self._tensor.numel() < size:
            self._tensor = torch.empty(
                2 * size,
                dtype=torch.int32,
                device=self._device,
                pin_memory=self._pin_memory,
            )
        return self._tensor[:size]


class _HostBuffer(_Buffer):
    """Buffer with the `fields` of the batch that filled it last."""

    fields: Fields[Int32s]  # from the first `fill` on

    def __init__(self, *, pin_memory: bool) -> None:
        super().__init__(pin_memory=pin_memory)
        self._filled_with: tuple[Composition, Shape] | None = None

    def fill(self, shape: Shape, composition: Composition) -> Fields[Int32s]:
        """Return the fields of `shape`, with what stays equal of `composition` filled in."""
        if self._filled_with != (composition, shape):
            layout = layout_of(shape)
            buffer = self.sized(layout.size).numpy()
            self.fields = layout.fields(buffer)
            composition.fill(self.fields, shape)
            self._filled_with = (composition, shape)
        return self.fields
