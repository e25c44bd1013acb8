"""A batch as one small tensor of int64, for ranks that compute it beside rank 0."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, fields
from functools import partial

import torch
from torch import Tensor

from sarathi_kernels.attention.reference import Segment, make_segment
from sarathi_lab.engine.request import Batch, Copy
from sarathi_lab.executor.torch.shapes import Shape
from sarathi_lab.model.operations import PackedInputs

HEAD = 3  # numbers before the rest: of copies, of tokens or -1, of tokens sampled
SHAPE = len(fields(Shape))
PADDED = -1  # in place of tokens: a buffer packed for kernels follows


def packed(inputs: PackedInputs, copies: Sequence[Copy]) -> Tensor:
    """Inputs packed for torch, and the blocks to move before."""
    segments: Sequence[Segment] = inputs.attention
    numbers: list[int] = []
    for one in segments:
        blocks = one.blocks
        is_slice = isinstance(blocks, slice)
        ids = [blocks.start, blocks.stop] if isinstance(blocks, slice) else blocks.tolist()
        numbers += [one.num_queries, one.kv_len, is_slice, len(ids), *ids]
    by_token = (inputs.token_ids, inputs.positions, inputs.slots)
    head = torch.tensor([len(copies), len(inputs.token_ids), len(inputs.emit_rows)])
    parts = [head, _numbers(copies), *by_token, inputs.emit_rows, torch.tensor(numbers)]
    return torch.cat([part.cpu() for part in parts])


def packed_for_kernels(shape: Shape, buffer: Tensor, batch: Batch) -> Tensor:
    """The buffer (int32) that `Packer` has filled, in tensors of `shape`."""
    head = torch.tensor([len(batch.copies), PADDED, batch.num_emits])
    return torch.cat([head, _numbers(batch.copies), torch.tensor(astuple(shape)), buffer.long()])


def _numbers(copies: Sequence[Copy]) -> Tensor:
    return torch.tensor([tuple(map(int, one)) for one in copies], dtype=torch.int64).flatten()


def num_tokens(payload: Tensor) -> int:
    """Of a batch, padding included."""
    copies, tokens, _ = payload[:HEAD].tolist()
    return int(payload[HEAD + 3 * copies]) if tokens == PADDED else tokens


def num_emits(payload: Tensor) -> int:
    """Tokens that a batch samples, without padding."""
    return int(payload[2])


def copies_of(payload: Tensor) -> tuple[list[Copy], Tensor]:
    """The blocks to move, and what follows them."""
    count = int(payload[0])
    rows = payload[HEAD : HEAD + 3 * count].view(-1, 3).tolist()
    return [Copy(bool(out), *blocks) for out, *blocks in rows], payload[HEAD + 3 * count :]


def unpacked_for_kernels(payload: Tensor) -> tuple[Shape, Tensor]:
    """What `packed_for_kernels` was given."""
    _, rest = copies_of(payload)
    return Shape(*rest[:SHAPE].tolist()), rest[SHAPE:].int()


def unpacked(
    payload: Tensor,
    sliding_window: int | None,
    device: torch.device,
    dtype: torch.dtype,
    *,
    with_masks: bool,
) -> PackedInputs:
    """What `packed` was given, on `device`."""
    tokens, emits = payload[1:HEAD].tolist()
    _, rest = copies_of(payload)
    *by_token, emit_rows, rows = rest.split([tokens] * 3 + [emits, len(rest) - 3 * tokens - emits])
    numbers, segments, at, row = rows.tolist(), [], 0, 0
    with_mask = partial(make_segment, sliding_window=sliding_window, device=device, dtype=dtype)
    while at < len(numbers):
        num_queries, kv_len, is_slice, count = numbers[at : at + 4]
        ids = numbers[at + 4 : at + 4 + count]
        blocks = slice(*ids) if is_slice else torch.tensor(ids, device=device)
        if with_masks:
            segments.append(with_mask(row, num_queries, kv_len, blocks))
        else:
            segments.append(Segment(row, num_queries, kv_len, blocks, first_key=0, mask=None))
        row, at = row + num_queries, at + 4 + count
    token_ids, positions, slots, emits_at = (
        tensor.clone().to(device) for tensor in (*by_token, emit_rows)
    )
    return PackedInputs(token_ids, positions, slots, emits_at, attention=segments)
