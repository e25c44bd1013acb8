"""Packing of a batch into the tensors that the model reads; for kernels one buffer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import compress
from operator import getitem
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sarathi_kernels.attention.plan import PADDING, AttentionPlan, Views, tiles_of
from sarathi_kernels.attention.reference import Segment, make_segment
from sarathi_lab.engine.executor import NO_TOKEN
from sarathi_lab.engine.request import Batch, SequenceState
from sarathi_lab.executor.torch.block_table import BlockTable, Ints
from sarathi_lab.executor.torch.shapes import Limits, Parts, Shape
from sarathi_lab.model.operations import PackedInputs
from sarathi_lab.model.transformer import Transformer

BY_TOKEN = ("token_ids", "positions", "slots", "feed_rows")
BY_SEQUENCE = (
    "query_starts", "kv_lens", "block_table", "tiles", "decodes", "parts", "reductions",
)  # fmt: skip
ALIGNMENT = 32  # int32 elements: kernels are compiled for aligned pointers, once only if all are
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


Flat = TypeVar("Flat", Tensor, NDArray[np.int32])


class Field(NamedTuple):
    """A tensor's name, its elements in the buffer, and its shape."""

    name: str
    elements: slice
    shape: tuple[int, ...]


class Fields:
    """Layout of the buffer for tensors of `shape`, which has `size` elements."""

    def __init__(self, shape: Shape) -> None:
        shapes: dict[str, tuple[int, ...]] = {
            **dict.fromkeys(BY_TOKEN, (shape.num_tokens,)),
            "emit_rows": (shape.num_emits,),
            "query_starts": (shape.num_sequences + 1,),
            "kv_lens": (shape.num_sequences,),
            "decodes": (shape.num_decodes,),
            "tiles": (shape.num_tiles, 2),
            "parts": (shape.num_parts, 4),
            "reductions": (shape.num_reductions, 3),
            "block_table": (shape.num_sequences, shape.max_blocks),
        }
        self.size = 0
        self._fields: list[Field] = []
        for name, lengths in shapes.items():
            num_elements = math.prod(lengths)
            end = self.size + num_elements
            elements = slice(self.size, end)
            self._fields.append(Field(name, elements, lengths))
            self.size = math.ceil(end / ALIGNMENT) * ALIGNMENT

    def views(self, buffer: Flat) -> dict[str, Flat]:
        """Return each field of a flat tensor or array, in its shape."""
        views = {}
        for name, elements, shape in self._fields:
            view = buffer[elements]
            if len(shape) > 1:
                view = view.reshape(shape)
            views[name] = view
        return views


fields_of = lru_cache(maxsize=256)(Fields)


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

    def fill(self, views: Views, shape: Shape) -> None:
        """Write the part that stays equal, and padding, in tensors of `shape`."""
        num_sequences = len(self.sequences)
        views["token_ids"][self.num_tokens :] = 0
        views["positions"][self.num_tokens :] = 0
        views["slots"][self.num_tokens :] = PADDING
        views["feed_rows"].fill(PADDING)
        views["kv_lens"][num_sequences:] = 0
        views["block_table"][num_sequences:] = 0
        views["query_starts"][0] = 0
        _put(views["query_starts"][1:], self.ends, padding=self.num_tokens)
        _put(views["emit_rows"], self.emit_rows, padding=0)
        if shape.tile_rows:
            tiles = tiles_of(self.lengths.tolist(), shape.tile_rows)
            _put(views["tiles"], tiles, padding=PADDING)
            _put(views["decodes"], self.singles, padding=PADDING)


def _put(field: NDArray[np.int32], values: NDArray[np.integer], padding: int) -> None:
    num_values = len(values)
    field[:num_values] = values
    field[num_values:] = padding


class Packer:
    """Packer of batches for one device: `fill` on the host, then `send` to the device, or
    `for_torch`.
    """

    def __init__(self, limits: Limits, device: torch.device) -> None:
        # The device reads pinned memory while the host goes on.
        is_pinned = device.type == "cuda"
        self._hosts = [_Buffer(pin_memory=is_pinned) for _ in range(NUM_BUFFERS)]
        self._filled = 0
        self._table = BlockTable(limits.block_size)
        self._composition = Composition(Columns(), self._table)  # of the newest batch
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
            self._composition = Composition(columns, self._table)
        composition = self._composition
        starts = np.array(first_positions, dtype=np.int64)
        kv_lens = starts + composition.lengths
        self._table.extend(composition.rows, composition.sequences, kv_lens)
        views = self.host.fill(shape, composition)
        self._fill_tokens(views, starts, kv_lens)
        self._fill_feed_rows(views, newest)
        num_sequences = len(kv_lens)
        views["kv_lens"][:num_sequences] = kv_lens
        self._table.fill(views["block_table"][:num_sequences], composition.rows)
        if shape.tile_rows:
            parts, reductions = self._parts.of(composition.singles, kv_lens, shape)
            _put(views["parts"], parts, padding=PADDING)
            _put(views["reductions"], reductions, padding=PADDING)
        return composition.emitting

    def _fill_tokens(self, views: Views, starts: Ints, kv_lens: Ints) -> None:
        """Write token ids, positions and slots of the tokens from `starts` up to `kv_lens`."""
        composition = self._composition
        num_tokens = composition.num_tokens
        positions = starts[composition.owners] + composition.offsets
        views["positions"][:num_tokens] = positions
        table_rows = composition.rows[composition.owners]
        views["slots"][:num_tokens] = self._table.slots(table_rows, positions)

        token_ids = views["token_ids"]
        decodes = composition.decodes
        # A decode computes its newest output token.
        indices = starts[decodes] - composition.prompt_lens
        newest = list(map(getitem, composition.outputs, indices.tolist()))
        rows = composition.ends[decodes] - 1
        token_ids[rows] = newest
        for i in composition.others:
            end_row = composition.ends[i]
            first_row = end_row - composition.lengths[i]
            start = int(starts[i])
            end = int(kv_lens[i])
            token_ids[first_row:end_row] = token_ids_of(composition.sequences[i], start, end)

    def _fill_feed_rows(self, views: Views, newest: Sequence[SequenceState]) -> None:
        """Write for each token in flight its row among the tokens sampled last, of which `newest`
        has the sequences; PADDING for other tokens. Only the newest token of a sequence, in its
        last row, can be in flight.
        """
        composition = self._composition
        token_ids = views["token_ids"]
        feed_rows = views["feed_rows"]
        feed_rows[: composition.num_tokens] = PADDING
        last_rows = composition.ends - 1
        is_in_flight = token_ids[last_rows] == NO_TOKEN
        in_flight = is_in_flight.nonzero()[0]  # numbers of sequences
        if len(in_flight) == 0:
            return
        rows = last_rows[in_flight]
        token_ids[rows] = 0
        if newest == composition.emitting:  # mostly: the same sequences as in the batch before
            feed_rows[rows] = composition.sampled_rows[in_flight]
            return
        sampled_row_of = {sequence: row for row, sequence in enumerate(newest)}
        sequences = [composition.sequences[i] for i in in_flight.tolist()]
        feed_rows[rows] = [sampled_row_of[sequence] for sequence in sequences]

    @property
    def host(self) -> _Buffer:
        """Buffer that was filled last."""
        return self._hosts[self._filled]

    def send(self, shape: Shape, into: Tensor | None = None) -> PackedInputs:
        """Start to copy the filled buffer to `into`, or one that the next call overwrites."""
        fields = fields_of(shape)
        buffer = into
        if buffer is None:
            buffer = self._on_device.sized(fields.size)
        self.copy(buffer)
        views = fields.views(buffer)
        by_sequence = {name: views.pop(name) for name in BY_SEQUENCE}
        plan = AttentionPlan(**by_sequence, tile_rows=shape.tile_rows)
        return PackedInputs(attention=plan, **views)

    def for_torch(self, model: Transformer) -> PackedInputs:
        """Return the filled buffer as inputs of plain torch and C++, without padding: int64,
        attention by a `Segment` a sequence, and no `feed_rows`, as the host has all tokens.
        """
        views = self.host.views
        blocks = self._blocks_for_torch(model.device)
        starts = views["query_starts"].tolist()
        kv_lens = views["kv_lens"].tolist()
        segments = []
        for i, kv_len in enumerate(kv_lens):
            start = starts[i]
            end = starts[i + 1]
            num_queries = end - start
            segment = Segment(start, num_queries, kv_len, blocks[i], first_key=0, mask=None)
            segments.append(segment)
        tensors = {}
        for name in ("token_ids", "positions", "slots", "emit_rows"):
            numbers = views[name].astype(np.int64)
            tensors[name] = torch.from_numpy(numbers).to(model.device)
        inputs = PackedInputs(**tensors, attention=segments)
        return add_masks(inputs, model)

    def _blocks_for_torch(self, device: torch.device) -> list[slice | Tensor]:
        """Return the cache blocks of each sequence: as a slice where they are neighbours, which
        attention reads without copying, else as an index.
        """
        table = self.host.views["block_table"]
        kv_lens = self.host.views["kv_lens"]
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
    """Growing int32 tensor; on the host with the composition and shape that it was filled with."""

    def __init__(self, device: torch.device | None = None, *, pin_memory: bool = False) -> None:
        self._device = device
        self._pin_memory = pin_memory
        self._tensor = torch.empty(0, dtype=torch.int32)
        self._filled_with: tuple[Composition, Shape] | None = None
        self.views: Views = {}

    def sized(self, size: int) -> Tensor:
        if self._tensor.numel() < size:
            self._tensor = torch.empty(
                2 * size,
                dtype=torch.int32,
                device=self._device,
                pin_memory=self._pin_memory,
            )
        return self._tensor[:size]

    def fill(self, shape: Shape, composition: Composition) -> Views:
        """Return the fields of `shape`, with what stays equal of `composition` filled in."""
        if self._filled_with != (composition, shape):
            fields = fields_of(shape)
            buffer = self.sized(fields.size).numpy()
            self.views = fields.views(buffer)
            composition.fill(self.views, shape)
            self._filled_with = (composition, shape)
        return self.views
