"""From a batch to the tensors that the model reads; for kernels one buffer, copied at once."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sarathi_kernels.attention.plan import PADDING, AttentionPlan, tiles_of
from sarathi_kernels.attention.reference import Segment, make_segment
from sarathi_lab.engine.executor import NO_TOKEN
from sarathi_lab.engine.request import Batch, SequenceState
from sarathi_lab.executor.torch.shapes import Limits, Shape
from sarathi_lab.model.operations import PackedInputs

Views = dict[str, NDArray[Any]]
BY_TOKEN = ("token_ids", "positions", "slots", "feed_rows")
BY_SEQUENCE = (
    "query_starts", "kv_lens", "block_table", "tiles", "decodes", "parts", "reductions"
)  # fmt: skip
ALIGNMENT = 32  # int32 elements: kernels are compiled for aligned pointers, once only if all are
NUM_BUFFERS = 2  # batches in flight at most: a buffer is filled again when its batch is done


def pack(
    batch: Batch,
    block_size: int,
    sliding_window: int | None,
    device: torch.device,
    dtype: torch.dtype,
    *,
    with_masks: bool = True,
) -> PackedInputs:
    """The chunks of `batch` one after the other, int64; `dtype` is that of attention masks."""
    fields = {name: np.empty(batch.num_tokens, dtype=np.int64) for name in BY_TOKEN}
    _fill_tokens(fields, batch, block_size, {})
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
        self._limits = limits
        self.block_size = limits.block_size
        # The device reads pinned memory while the host goes on.
        is_pinned = device.type == "cuda"
        self._hosts = [_Buffer(pin_memory=is_pinned) for _ in range(NUM_BUFFERS)]
        self._filled = 0
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
        query_lens = [chunk.num_tokens for chunk in batch.chunks]
        _fill_tokens(views, batch, self.block_size, newest)
        kv_lens, table = views["kv_lens"], views["block_table"]
        table.fill(0)
        for i, chunk in enumerate(batch.chunks):
            kv_len = chunk.start + chunk.num_tokens
            num_blocks = -(-kv_len // self.block_size)
            kv_lens[i] = kv_len
            table[i, :num_blocks] = chunk.sequence.block_ids[:num_blocks]
        kv_lens[len(batch) :] = 0
        ends = np.cumsum(query_lens, dtype=np.int32)
        _put(views["query_starts"][1:], ends, padding=batch.num_tokens)
        views["query_starts"][0] = 0
        emitting = [chunk.emits_token for chunk in batch.chunks]
        _put(views["emit_rows"], ends[emitting] - 1, padding=0)
        decodes = np.flatnonzero(np.array(query_lens) == 1)
        parts, reductions = self._limits.parts(decodes, kv_lens[decodes], shape)
        _put(views["decodes"], decodes, padding=PADDING)
        _put(views["parts"], parts, padding=PADDING)
        _put(views["reductions"], reductions, padding=PADDING)
        _put(views["tiles"], tiles_of(query_lens, shape.tile_rows), padding=PADDING)

    def send(self, shape: Shape, into: Tensor | None = None) -> PackedInputs:
        """Copy what was filled to `into`, or a buffer that the next call overwrites, unawaited."""
        fields = fields_of(shape)
        buffer = self._on_device.sized(fields.size) if into is None else into
        buffer.copy_(self._hosts[self._filled].sized(fields.size), non_blocking=True)
        views = fields.views(buffer)
        plan = AttentionPlan(
            **{name: views.pop(name) for name in BY_SEQUENCE},
            tile_rows=shape.tile_rows,
        )
        return PackedInputs(attention=plan, **views)


class _Buffer:
    """An int32 tensor that grows when it must."""

    def __init__(self, **where: Any) -> None:
        self._where = where
        self._tensor = torch.empty(0, dtype=torch.int32)

    def sized(self, size: int) -> Tensor:
        if len(self._tensor) < size:
            self._tensor = torch.empty(2 * size, dtype=torch.int32, **self._where)
        return self._tensor[:size]


def _fill_tokens(
    views: Views, batch: Batch, block_size: int, newest: Mapping[SequenceState, int]
) -> None:
    token_ids, positions, slots, feed_rows = (views[name] for name in BY_TOKEN)
    feed_rows.fill(PADDING)
    row = 0
    for sequence, start, num_tokens, _, _ in batch.chunks:
        end = start + num_tokens
        blocks = sequence.block_ids
        if num_tokens == 1:  # as a rule: worth a way without arrays
            positions[row] = start
            slots[row] = blocks[start // block_size] * block_size + start % block_size
        else:
            where = np.arange(start, end, dtype=np.int32)
            first_block = start // block_size
            new_blocks = np.array(blocks[first_block : -(-end // block_size)], dtype=np.int32)
            positions[row : row + num_tokens] = where
            slots[row : row + num_tokens] = (
                new_blocks[where // block_size - first_block] * block_size + where % block_size
            )
        token_ids[row : row + num_tokens] = token_ids_of(sequence, start, end)
        row += num_tokens
        if token_ids[row - 1] == NO_TOKEN:  # only the newest token can be on its way
            feed_rows[row - 1] = newest[sequence]
            token_ids[row - 1] = 0
    token_ids[row:], positions[row:], slots[row:] = 0, 0, PADDING


def _put(field: NDArray[Any], values: NDArray[Any], padding: int) -> None:
    field[: len(values)] = values
    field[len(values) :] = padding
