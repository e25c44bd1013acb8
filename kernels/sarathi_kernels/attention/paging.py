"""Where cached tokens lie in a paged cache [num_blocks, block_size, num_kv_heads, head_size], and
the arguments that kernels of attention hand to their parts.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl


class Rows(NamedTuple):
    """Queries or outputs [num_tokens, num_heads, head_size]."""

    first: tl.tensor  # pointer
    stride: tl.tensor  # of a token


class Cache(NamedTuple):
    """Pointers to the first slot, of one head where a part works on one, and strides."""

    key: tl.tensor
    value: tl.tensor  # not "values", a name of Triton's tuples
    stride_block: tl.tensor
    stride_slot: tl.tensor


class Sequences(NamedTuple):
    """Pointers to the entries of a plan."""

    query_starts: tl.tensor
    kv_lens: tl.tensor
    block_table: tl.tensor
    stride_table: tl.tensor


@triton.jit
def slot_offsets(
    cache: Cache,
    table: tl.tensor,  # pointer to the sequence's row of the block table
    first_key: tl.tensor,  # multiple of BLOCK_N
    kv_len: tl.tensor,
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
        slots = first_key % BLOCK_SIZE + tokens
        offsets = block * cache.stride_block + slots * cache.stride_slot
    else:
        # Unsigned: a division by a power of two is then a shift, without a case for negative keys.
        keys = (first_key + tokens).to(tl.uint32)
        blocks = tl.load(table + keys // BLOCK_SIZE, mask=keys < kv_len, other=0).to(tl.int64)
        offsets = blocks * cache.stride_block + (keys % BLOCK_SIZE) * cache.stride_slot
    return offsets
