"""From a batch to the tensors that the model reads; for kernels one buffer, copied at once."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache, partial
from itertools import compress
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sarathi_kernels.attention.plan import PADDING, AttentionPlan, tiles_of
from sarathi_kernels.attention.reference import Segment, make_segment
from sarathi_lab.engine.executor import NO_TOKEN
from sarathi_lab.engine.request import Batch, Chunk, SequenceState
from sarathi_lab.executor.torch.block_table import BlockTable
from sarathi_lab.executor.torch.shapes import Limits, Shape
from sarathi_lab.model.operations import PackedInputs

Views = dict[str, NDArray[Any]]
BY_TOKEN = ("token_ids", "positions", "slots", "feed_rows")
BY_SEQUENCE = (
    "query_starts", "kv_lens", "block_table", "tiles", "decodes", "parts", "reductions"
)  # fmt: skip
ALIGNMENT = 32  # int32 elements: kernels are compiled for aligned pointers, once only if all are
ITERATIONS = 64  # that parts are kept for: how much longer than planned they may get, in tokens
NUM_BUFFERS = 2  # batches in flight at most: a buffer is filled again when its batch is done


def pack(
    batch: Batch,
    table: BlockTable,
    sliding_window: int | None,
    device: torch.device,
    dtype: torch.dtype,
    *,
    with_masks: bool = True,
) -> PackedInputs:
    """The chunks of `batch` one after the other, int64; `dtype` is that of attention masks."""
    block_size = table.block_size
    fields = {name: np.empty(batch.num_tokens, dtype=np.int64) for name in BY_TOKEN}
    _fill_tokens(fields, _columns(batch), table, {})
    del fields["feed_rows"]  # the host knows all tokens
    tensors = {name: torch.from_numpy(field).to(device) for name, field in fields.items()}
    with_mask = partial(make_segment, sliding_window=sliding_window, device=device, dtype=dtype)
    segments, emit_rows, row = [], [], 0
    for chunk in batch.chunks:
        end = chunk.start + chunk.num_tokens
        held = chunk.sequence.block_ids
        # Neighbouring blocks as a slice, which attention reads without copying; else an index.
        blocks: slice | Tensor = slice(held[0], held[0] + -(-end // block_size))
        if not chunk.sequence.blocks_are_neighbours:
            blocks = torch.tensor(held[: -(-end // block_size)], device=device)
        if with_masks:
            segments.append(with_mask(row, chunk.num_tokens, end, blocks))
        else:
            segments.append(Segment(row, chunk.num_tokens, end, blocks, first_key=0, mask=None))
        row += chunk.num_tokens
        if chunk.emits_token:
            emit_rows.append(row - 1)
    emits = torch.tensor(emit_rows, dtype=torch.int64, device=device)
    return PackedInputs(**tensors, emit_rows=emits, attention=segments)


def token_ids_of(sequence: SequenceState, start: int, end: int) -> NDArray[np.int64]:
    """Tokens `start` to `end`; after a preemption they may span the prompt and what followed."""
    request = sequence.request
    prompt_len = request.prompt_len
    if request.prompt_token_ids is None:
        raise ValueError(
            f"request {request.request_id} has no token ids; this executor computes tokens"
        )
    prompt = request.prompt_token_ids[start : min(end, prompt_len)]
    output = sequence.output_token_ids[max(0, start - prompt_len) : max(0, end - prompt_len)]
    return np.concatenate([np.asarray(prompt, dtype=np.int64), np.asarray(output, dtype=np.int64)])


class Fields:
    """Where each field lies in the buffer for tensors of `shape`, which has `size` elements."""

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
        """Each field of a flat tensor or array, in its shape."""
        return {name: buffer[place].reshape(lengths) for name, place, lengths in self._places}


fields_of = lru_cache(maxsize=256)(Fields)


class Packer:
    """Packs batches for one device: `fill` on the host, then `send` to the device."""

    def __init__(self, limits: Limits, device: torch.device) -> None:
        # The device reads pinned memory while the host goes on.
        is_pinned = device.type == "cuda"
        self._hosts = [_Buffer(pin_memory=is_pinned) for _ in range(NUM_BUFFERS)]
        self._filled = 0
        self._table = BlockTable(limits.block_size)
        self._parts = Parts(limits)
        self._on_device = _Buffer(device=device)

    def fill(self, batch: Batch, shape: Shape, newest: Mapping[SequenceState, int]) -> None:
        """Write `batch` in tensors of `shape`, and padding behind it, to the buffer that the batch
        before last has read.

        A token that the host does not know yet is to be fed from the row `newest` says of the
        tokens sampled last.
        """
        self._filled = (self._filled + 1) % NUM_BUFFERS
        fields = fields_of(shape)
        views = fields.views(self._hosts[self._filled].sized(fields.size).numpy())
        columns = _columns(batch)
        _fill_tokens(views, columns, self._table, newest)
        _, lengths, ends, kv_lens, _, are_emitting = columns
        _put(views["kv_lens"], kv_lens, padding=0)
        self._table.fill(views["block_table"])
        _put(views["query_starts"][1:], ends, padding=batch.num_tokens)
        views["query_starts"][0] = 0
        _put(views["emit_rows"], ends[are_emitting] - 1, padding=0)
        decodes = np.flatnonzero(lengths == 1)
        parts, reductions = self._parts.of(decodes, kv_lens, shape)
        _put(views["decodes"], decodes, padding=PADDING)
        _put(views["parts"], parts, padding=PADDING)
        _put(views["reductions"], reductions, padding=PADDING)
        _put(views["tiles"], tiles_of(lengths.tolist(), shape.tile_rows), padding=PADDING)

    def send(self, shape: Shape, into: Tensor | None = None) -> PackedInputs:
        """Copy what was filled to `into`, or a buffer that the next call overwrites, unawaited."""
        fields = fields_of(shape)
        buffer = self._on_device.sized(fields.size) if into is None else into
        self.copy(buffer)
        views = fields.views(buffer)
        plan = AttentionPlan(
            **{name: views.pop(name) for name in BY_SEQUENCE},
            tile_rows=shape.tile_rows,
        )
        return PackedInputs(attention=plan, **views)

    def copy(self, into: Tensor) -> None:
        """Copy what was filled, for whoever has the inputs of that buffer already."""
        into.copy_(self._hosts[self._filled].sized(len(into)), non_blocking=True)


class _Buffer:
    """An int32 tensor that grows when it must."""

    def __init__(self, **where: Any) -> None:
        self._where = where
        self._tensor = torch.empty(0, dtype=torch.int32)

    def sized(self, size: int) -> Tensor:
        if len(self._tensor) < size:
            self._tensor = torch.empty(2 * size, dtype=torch.int32, **self._where)
        return self._tensor[:size]


class Columns(NamedTuple):
    """The chunks of a batch: `ends` is the row behind each one's last token."""

    sequences: tuple[SequenceState, ...]
    lengths: NDArray[np.int64]
    ends: NDArray[np.int64]
    kv_lens: NDArray[np.int64]
    are_decodes: NDArray[np.bool_]
    are_emitting: NDArray[np.bool_]


def _columns(batch: Batch) -> Columns:
    of_chunks = zip(*batch.chunks, strict=True) if batch.chunks else ((),) * len(Chunk._fields)
    sequences, starts, num_tokens, are_decodes, are_emitting = of_chunks
    lengths = np.array(num_tokens, dtype=np.int64)
    kv_lens = np.array(starts, dtype=np.int64) + lengths
    flags = (np.frombuffer(bytes(each), dtype=bool) for each in (are_decodes, are_emitting))
    return Columns(sequences, lengths, np.cumsum(lengths), kv_lens, *flags)


def _fill_tokens(
    views: Views, columns: Columns, table: BlockTable, newest: Mapping[SequenceState, int]
) -> None:
    """Write what is known of each token, and let `table` be that of the batch."""
    token_ids, positions, slots, feed_rows = (views[name] for name in BY_TOKEN)
    sequences, lengths, ends, kv_lens, are_decodes, _ = columns
    num_tokens = int(ends[-1]) if sequences else 0
    owners = np.repeat(np.arange(len(sequences)), lengths)
    at = np.arange(num_tokens) + (kv_lens - ends)[owners]
    table.take(sequences, kv_lens)
    _put(positions, at, padding=0)
    _put(slots, table.slots(owners, at), padding=PADDING)
    # As a rule all but one are decodes: worth a way without an array for each.
    places = zip(sequences, (kv_lens - 1).tolist(), strict=True)
    token_ids[ends[are_decodes] - 1] = [
        one.output_token_ids[place - one.request.prompt_len]
        for (one, place) in compress(places, are_decodes)
    ]
    for i in np.flatnonzero(~are_decodes).tolist():
        start, end = int(kv_lens[i] - lengths[i]), int(kv_lens[i])
        token_ids[ends[i] - lengths[i] : ends[i]] = token_ids_of(sequences[i], start, end)
    token_ids[num_tokens:] = 0
    last = ends - 1  # only the newest token of a sequence can be on its way
    unknown = np.flatnonzero(token_ids[last] == NO_TOKEN)
    feed_rows.fill(PADDING)
    feed_rows[last[unknown]] = [newest[sequences[i]] for i in unknown.tolist()]
    token_ids[last[unknown]] = 0


def _put(field: NDArray[Any], values: NDArray[Any], padding: int) -> None:
    field[: len(values)] = values
    field[len(values) :] = padding


class Parts:
    """The parts of decodes' contexts: planned once for many iterations, in which the same decodes
    go on, a token longer in each. So do their last parts.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._left = 0  # iterations of this plan

    def of(
        self, decodes: NDArray[np.int64], kv_lens: NDArray[np.int64], shape: Shape
    ) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """`parts` and `reductions` (see AttentionPlan) of the sequences `decodes`, of those with
        `kv_lens` cached tokens, as many as `shape` has room for.
        """
        contexts, room = kv_lens[decodes], (shape.num_parts, shape.num_reductions)
        if self._left and room == self._room and self._go_on(decodes, contexts):
            self._parts[self._are_last, 2] += 1
            self._left -= 1
        else:
            self._parts, self._reductions = self._limits.parts(decodes, contexts, shape)
            self._are_last = self._parts[:, 2] == kv_lens[self._parts[:, 0]]
            self._decodes, self._room, self._left = decodes, room, ITERATIONS
        self._contexts = contexts
        return self._parts, self._reductions

    def _go_on(self, decodes: NDArray[np.int64], contexts: NDArray[np.int64]) -> bool:
        """Whether these are the decodes of the iteration before, each with one more token."""
        before = self._decodes, self._contexts + 1
        return np.array_equal(decodes, before[0]) and np.array_equal(contexts, before[1])
