"""Packing of a batch into the tensors that the model reads; for kernels one buffer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, partial
from itertools import compress
from operator import getitem
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sarathi_kernels.attention.plan import PADDING, AttentionPlan, Views, tiles_of
from sarathi_kernels.attention.reference import Segment, make_segment
from sarathi_lab.engine.executor import NO_TOKEN
from sarathi_lab.engine.request import Batch, SequenceState
from sarathi_lab.executor.torch.block_table import BlockTable
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
    make = partial(
        make_segment,
        sliding_window=model.spec.sliding_window,
        device=model.device,
        dtype=model.dtype,
    )
    segments = [
        make(one.start, one.num_queries, one.kv_len, one.blocks) for one in inputs.attention
    ]
    return replace(inputs, attention=segments)


def token_ids_of(sequence: SequenceState, start: int, end: int) -> NDArray[np.int64]:
    """Return tokens `start` to `end` of prompt, output and drafts, which all may be recomputed."""
    request = sequence.request
    prompt_len = request.prompt_len
    if request.prompt_token_ids is None:
        raise ValueError(
            f"request {request.request_id} has no token ids; this executor computes tokens"
        )
    prompt = request.prompt_token_ids[start : min(end, prompt_len)]
    output = sequence.output_token_ids[max(0, start - prompt_len) : max(0, end - prompt_len)]
    drafts = sequence.draft_token_ids[: max(0, end - sequence.num_known)]
    return np.concatenate([prompt, output, drafts], dtype=np.int64, casting="unsafe")


class Fields:
    """Layout of the buffer for tensors of `shape`, which has `size` elements."""

    def __init__(self, shape: Shape) -> None:
        sizes: dict[str, tuple[int, ...]] = {
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
        self._places: list[tuple[str, slice, tuple[int, ...]]] = []
        for name, lengths in sizes.items():
            num_elements = math.prod(lengths)
            self._places.append((name, slice(self.size, self.size + num_elements), lengths))
            self.size += -(-num_elements // ALIGNMENT) * ALIGNMENT

    def views(self, buffer: Any) -> dict[str, Any]:
        """Return each field of a flat tensor or array, in its shape."""
        flat = ((name, buffer[place], lengths) for name, place, lengths in self._places)
        return {name: x if len(lengths) == 1 else x.reshape(lengths) for name, x, lengths in flat}


fields_of = lru_cache(maxsize=256)(Fields)


class Columns(NamedTuple):
    """Columns of a batch's chunks but `start`, and the preemptions of their sequences."""

    sequences: tuple[SequenceState, ...] = ()
    num_tokens: tuple[int, ...] = ()
    is_decode: tuple[bool, ...] = ()
    emits_token: tuple[bool, ...] = ()
    num_preemptions: tuple[int, ...] = ()


class Composition:
    """Part of packed batches that stays equal while the same sequences take as many tokens each,
    mostly for many iterations: while their `columns` are equal.
    """

    def __init__(self, columns: Columns, table: BlockTable) -> None:
        self.columns = columns
        self.sequences, num_tokens, flags, emits, preemptions = columns
        self.rows = table.rows_of(self.sequences, preemptions)
        self.lengths = np.array(num_tokens, dtype=np.int64)
        self.ends = np.cumsum(self.lengths)  # the row behind each one's last token
        self.num_tokens = int(self.ends[-1]) if num_tokens else 0
        are_emitting = np.array(emits, dtype=bool)
        self.emitting = tuple(compress(self.sequences, emits))
        self.emit_rows = self.ends[are_emitting] - 1
        self.sampled_rows = np.cumsum(are_emitting) - 1  # of the tokens sampled, by sequence
        self.singles = (self.lengths == 1).nonzero()[0]  # decodes to the kernels
        self.owners = np.repeat(np.arange(len(num_tokens)), self.lengths)
        self.offsets = np.arange(self.num_tokens) - (self.ends - self.lengths)[self.owners]
        are_decodes = np.array(flags, dtype=bool)
        if (have_drafts := are_decodes & (self.lengths > 1)).any():
            rows = np.where(are_decodes, self.lengths, 1) * are_emitting
            self.emit_rows = np.repeat(self.ends - np.cumsum(rows), rows) + np.arange(rows.sum())
            are_decodes &= ~have_drafts
            flags = are_decodes.tolist()
        # Mostly all but one are decodes: a faster way without an array for each.
        self.decodes = are_decodes.nonzero()[0]
        self.outputs = [one.output_token_ids for one in compress(self.sequences, flags)]
        prompt_lens = [one.request.prompt_len for one in compress(self.sequences, flags)]
        self.prompt_lens = np.array(prompt_lens, dtype=np.int64)
        self.others = [i for i, is_decode in enumerate(flags) if not is_decode]

    def fill(self, views: Views, shape: Shape) -> None:
        """Write the part that stays equal, and padding, in tensors of `shape`."""
        num_sequences = len(self.sequences)
        for name, padding in (("token_ids", 0), ("positions", 0), ("slots", PADDING)):
            views[name][self.num_tokens :] = padding
        views["feed_rows"].fill(PADDING)
        views["kv_lens"][num_sequences:] = 0
        views["block_table"][num_sequences:] = 0
        _put(views["query_starts"][1:], self.ends, padding=self.num_tokens)
        views["query_starts"][0] = 0
        _put(views["emit_rows"], self.emit_rows, padding=0)
        if shape.tile_rows:
            _put(views["decodes"], self.singles, padding=PADDING)
            _put(views["tiles"], tiles_of(self.lengths.tolist(), shape.tile_rows), padding=PADDING)


def _put(field: NDArray[Any], values: NDArray[Any], padding: int) -> None:
    field[: len(values)] = values
    field[len(values) :] = padding


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
        self._newest = Composition(Columns(), self._table)
        self._parts = Parts(limits)
        self._on_device = _Buffer(device=device)
        self._held: tuple[bytes, ...] = ()  # numbers of blocks, and tables, that `_blocks` are of
        self._blocks: list[slice | Tensor] = []

    def fill(
        self, batch: Batch, shape: Shape, newest: Sequence[SequenceState]
    ) -> Sequence[SequenceState]:
        """Write `batch` and padding, in tensors of `shape`, to the buffer of the batch before last.

        Tokens in flight are fed from the tokens sampled last, a row for each sequence of `newest`.
        Returns the sequences that `batch` samples tokens of.
        """
        self._filled = (self._filled + 1) % len(self._hosts)
        starts: tuple[int, ...] = ()
        columns = Columns()
        if batch.chunks:
            sequences, starts, num_tokens, are_decodes, emits = zip(*batch.chunks, strict=True)
            preemptions = tuple([one.num_preemptions for one in sequences])
            columns = Columns(sequences, num_tokens, are_decodes, emits, preemptions)
        if columns != self._newest.columns:
            self._newest = Composition(columns, self._table)
        kept = self._newest  # from batch to batch
        views = self.host.fill(shape, kept)
        kv_lens = self._fill_tokens(views, kept, np.array(starts, dtype=np.int64), newest)
        views["kv_lens"][: len(kv_lens)] = kv_lens
        self._table.fill(views["block_table"][: len(kv_lens)], kept.rows)
        if shape.tile_rows:
            parts, reductions = self._parts.of(kept.singles, kv_lens, shape)
            _put(views["parts"], parts, padding=PADDING)
            _put(views["reductions"], reductions, padding=PADDING)
        return kept.emitting

    def _fill_tokens(
        self,
        views: Views,
        kept: Composition,
        starts: NDArray[np.int64],
        newest: Sequence[SequenceState],
    ) -> NDArray[np.int64]:
        """Write the fields of BY_TOKEN for the tokens behind `starts`; return the cached tokens of
        each sequence after them.
        """
        sequences, ends = kept.sequences, kept.ends
        token_ids, positions, slots, feed_rows = (views[name] for name in BY_TOKEN)
        kv_lens = starts + kept.lengths
        at = starts[kept.owners] + kept.offsets
        self._table.extend(kept.rows, sequences, kv_lens)
        positions[: len(at)] = at
        slots[: len(at)] = self._table.slots(kept.rows[kept.owners], at)
        places = (starts[kept.decodes] - kept.prompt_lens).tolist()
        token_ids[ends[kept.decodes] - 1] = list(map(getitem, kept.outputs, places))
        for i in kept.others:
            start, end = int(starts[i]), int(kv_lens[i])
            token_ids[ends[i] - kept.lengths[i] : ends[i]] = token_ids_of(sequences[i], start, end)
        last = ends - 1  # only the newest token of a sequence can be in flight
        unknown = (token_ids[last] == NO_TOKEN).nonzero()[0]
        feed_rows[: len(at)] = PADDING
        if len(unknown) == 0:
            return kv_lens
        if newest == kept.emitting:
            feed_rows[last[unknown]] = kept.sampled_rows[unknown]
        else:
            row_of = {one: row for row, one in enumerate(newest)}
            feed_rows[last[unknown]] = [row_of[sequences[i]] for i in unknown.tolist()]
        token_ids[last[unknown]] = 0
        return kv_lens

    @property
    def host(self) -> _Buffer:
        """Buffer that was filled last."""
        return self._hosts[self._filled]

    def send(self, shape: Shape, into: Tensor | None = None) -> PackedInputs:
        """Start to copy the filled buffer to `into`, or one that the next call overwrites."""
        fields = fields_of(shape)
        buffer = self._on_device.sized(fields.size) if into is None else into
        self.copy(buffer)
        views = fields.views(buffer)
        by_sequence = {name: views.pop(name) for name in BY_SEQUENCE}
        plan = AttentionPlan(**by_sequence, tile_rows=shape.tile_rows)
        return PackedInputs(attention=plan, **views)

    def for_torch(self, model: Transformer) -> PackedInputs:
        """Return the filled buffer as inputs of plain torch and C++, without padding: int64,
        attention by a `Segment` a sequence, and no `feed_rows`, as the host has all tokens.
        """
        views, device = self.host.views, model.device
        numbers, table = -(-views["kv_lens"] // self._table.block_size), views["block_table"]
        if (held := (numbers.tobytes(), table.tobytes())) != self._held:  # seldom by decodes
            self._held, firsts = held, table[:, 0]
            columns = np.arange(table.shape[1], dtype=np.int32)
            # Neighbouring blocks as a slice, which attention reads without copying; else an index.
            self._blocks = [*map(slice, firsts.tolist(), (firsts + numbers).tolist())]
            are_apart = (table - columns != table[:, :1]) & (columns < numbers[:, None])
            for i in are_apart.any(axis=1).nonzero()[0].tolist():
                self._blocks[i] = torch.tensor(table[i, : numbers[i]].tolist(), device=device)
        starts, kv_lens = views["query_starts"].tolist(), views["kv_lens"].tolist()
        rows = zip(starts, starts[1:], kv_lens, self._blocks, strict=False)
        segments = [Segment(row, end - row, seen, one, 0, None) for row, end, seen, one in rows]
        fields = {
            name: torch.from_numpy(views[name].astype(np.int64)).to(device)
            for name in ("token_ids", "positions", "slots", "emit_rows")
        }
        return add_masks(PackedInputs(**fields, attention=segments), model)

    def copy(self, into: Tensor) -> None:
        """Start to copy the filled buffer to one with inputs from `send`."""
        into.copy_(self.host.sized(into.numel()), non_blocking=True)


class _Buffer:
    """Growing int32 tensor; on the host with the composition and shape that it was filled with."""

    def __init__(self, **where: Any) -> None:
        self._where = where
        self._tensor = torch.empty(0, dtype=torch.int32)
        self._filled_with: tuple[Composition, Shape] | None = None
        self.views: Views = {}

    def sized(self, size: int) -> Tensor:
        if self._tensor.numel() < size:
            self._tensor = torch.empty(2 * size, dtype=torch.int32, **self._where)
        return self._tensor[:size]

    def fill(self, shape: Shape, kept: Composition) -> Views:
        """Return the fields of `shape`, with the part of `kept` filled in."""
        if self._filled_with != (kept, shape):
            fields = fields_of(shape)
            self.views = fields.views(self.sized(fields.size).numpy())
            self._filled_with = kept, shape
            kept.fill(self.views, shape)
        return self.views
