"""Where cached tokens lie in a paged cache [num_blocks, block_size, num_kv_heads, head_size], and
their scales.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def slot_offsets(
    table: tl.tensor,  # pointer to the sequence's row of the block table
    first_key: tl.tensor,  # multiple of BLOCK_N
    kv_len: tl.tensor,
    stride_block: tl.tensor,
    stride_slot: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> tl.tensor:
    """Offsets in elements of the tokens first_key to first_key + BLOCK_N, [BLOCK_N] int64.

    The table is read for tokens below `kv_len` only; the offset of any other stays inside a block
    of the cache.
    """
    tokens = tl.arange(0, BLOCK_N)
    if BLOCK_SIZE % BLOCK_N == 0:  # one entry of the table serves the whole tile
        block = tl.load(table + first_key // BLOCK_SIZE).to(tl.int64)
        offsets = block * stride_block + (first_key % BLOCK_SIZE + tokens) * stride_slot
    else:
        keys = (first_key + tokens).to(tl.uint32)
        blocks = tl.load(table + keys // BLOCK_SIZE, mask=keys < kv_len, other=0).to(tl.int64)
        offsets = blocks * stride_block + (keys % BLOCK_SIZE) * stride_slot
    return offsets


@triton.jit
def load_scales(
    # pointer to the KV head's first scale, of [num_blocks, block_size, num_kv_heads]
    scales: tl.tensor,
    table: tl.tensor,
    first_key: tl.tensor,
    kv_len: tl.tensor,
    stride_block: tl.tensor,  # of the entries that are scaled, HEAD_SIZE times those of the scales
    stride_slot: tl.tensor,
    HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
) -> tl.tensor:
    """The scales of the tokens first_key to first_key + BLOCK_N, [BLOCK_N]; zero from `kv_len` on
    if MASKED.
    """
    offsets = slot_offsets(
        table,
        first_key,
        kv_len,
        stride_block // HEAD_SIZE,
        stride_slot // HEAD_SIZE,
        BLOCK_SIZE,
        BLOCK_N,
    )
    if MASKED:
        found = tl.load(
            scales + offsets, mask=first_key + tl.arange(0, BLOCK_N) < kv_len, other=0.0
        )
    else:
        found = tl.load(scales + offsets)
    return found
