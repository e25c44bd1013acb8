"""From a batch to the tensors of one iteration. Work does not grow with the contexts, unless their
blocks are scattered: then their ids are copied."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from sarathi_kernels.attention import Segment, make_segment
from sarathi_lab.model.operations import PackedInputs
from sarathi_lab.request import Batch, Sequence


def pack(
    batch: Batch,
    block_size: int,
    sliding_window: int | None,
    device: torch.device,
    dtype: torch.dtype,
    *,
    with_masks: bool = True,
) -> PackedInputs:
    """The chunks of `batch` one after the other; `dtype` is that of the attention masks, where they are wanted."""
    token_ids, positions, slots, emit_rows, segments = [], [], [], [], []
    row = 0
    for chunk in batch.chunks:
        end = chunk.start + chunk.num_tokens
        where = np.arange(chunk.start, end)
        first_block = chunk.start // block_size
        new_blocks = np.asarray(chunk.sequence.block_ids[first_block : -(-end // block_size)])
        token_ids.append(token_ids_of(chunk.sequence, chunk.start, end))
        positions.append(where)
        slots.append(new_blocks[where // block_size - first_block] * block_size + where % block_size)
        blocks = _context_blocks(chunk.sequence, -(-end // block_size), device)
        if with_masks:
            window = sliding_window
            segment = make_segment(
                row, chunk.num_tokens, end, blocks, sliding_window=window, device=device, dtype=dtype
            )
        else:
            segment = Segment(row, chunk.num_tokens, end, blocks, first_key=0, mask=None)
        segments.append(segment)
        row += chunk.num_tokens
        if chunk.emits_token:
            emit_rows.append(row - 1)
    return PackedInputs(
        token_ids=torch.from_numpy(np.concatenate(token_ids)).to(device),
        positions=torch.from_numpy(np.concatenate(positions)).to(device),
        slots=torch.from_numpy(np.concatenate(slots)).to(device),
        emit_rows=torch.tensor(emit_rows, dtype=torch.int64, device=device),
        attention=segments,
    )


def token_ids_of(sequence: Sequence, start: int, end: int) -> NDArray[np.int64]:
    """Tokens `start` to `end` of a sequence; after a preemption they may span the prompt and what was generated."""
    request = sequence.request
    prompt_len = request.prompt_len
    if request.prompt_token_ids is None:
        raise ValueError(f"request {request.request_id} has no token ids; this executor computes tokens")
    prompt = request.prompt_token_ids[start : min(end, prompt_len)]
    output = sequence.output_token_ids[max(0, start - prompt_len) : max(0, end - prompt_len)]
    return np.concatenate([np.asarray(prompt, dtype=np.int64), np.asarray(output, dtype=np.int64)])


def _context_blocks(sequence: Sequence, num_blocks: int, device: torch.device) -> slice | torch.Tensor:
    """Neighbouring blocks as a slice, which attention reads without copying; others as an index."""
    if sequence.blocks_are_neighbours:
        first = sequence.block_ids[0]
        return slice(first, first + num_blocks)
    return torch.tensor(sequence.block_ids[:num_blocks], device=device)
