"""Where cached tokens lie in a paged cache [num_blocks, block_size, num_kv_heads, head_size]."""

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
