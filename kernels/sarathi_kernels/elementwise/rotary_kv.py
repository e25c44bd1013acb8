"""Rotation of queries and keys and the write of keys and values to the paged cache, in one pass
over their product.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sarathi_kernels.attention.kv_cache import write_kv
from sarathi_kernels.elementwise.rotary import apply_rotary
from sarathi_kernels.runtime.checks import require_dtype
from sarathi_kernels.runtime.launch import launch

PADDING_SLOT = -1
PAIRS_PER_PROGRAM = 1024  # eight a thread of four warps: 16 bytes of a 16-bit dtype a load


def rotate_and_store(
    # [num_tokens, num_heads + 2 * num_kv_heads, head_size], the two inner dimensions contiguous
    qkv: Tensor,
    cos: Tensor,  # [num_tokens, 1, rotary_size / 2] float32, contiguous
    sin: Tensor,  # [num_tokens, 1, rotary_size / 2] float32, contiguous
    # [num_tokens] int32 or int64: block * block_size + offset within the block, distinct; -1:
    # padding
    slots: Tensor,
    key_cache: Tensor,  # [num_blocks, block_size, num_kv_heads, head_size]
    value_cache: Tensor,  # [num_blocks, block_size, num_kv_heads, head_size]
    num_heads: int,
) -> Tensor:
    """Rotate the queries in place, write the rotated keys and the values to their slots, and return
    the queries.

    The result is the view qkv[:, :num_heads]; the keys in `qkv` stay as they were. A token of slot
    -1 writes nothing to the cache. The tables are `rotary.rotary_tables(..., torch.float32)`: all
    layers of an iteration share them, and the sine of a large angle costs more than reading it.
    Raises ValueError for shapes or dtypes that do not match.
    """
    num_tokens, all_heads, head_size = qkv.shape
    num_kv_heads = key_cache.shape[2]
    half = cos.shape[-1]
    _check(qkv, cos, sin, slots, key_cache, value_cache, num_heads)
    if num_tokens == 0:
        return qkv[:, :num_heads]
    half_block = triton.next_power_of_2(half)
    heads_block = max(1, min(PAIRS_PER_PROGRAM // half_block, triton.next_power_of_2(all_heads)))
    rest = head_size - 2 * half
    launch(
        rotate_and_store_kernel,
        (num_tokens, triton.cdiv(all_heads, heads_block)),
        qkv,
        cos,
        sin,
        slots,
        key_cache,
        value_cache,
        qkv.stride(0),
        key_cache.stride(1),
        value_cache.stride(1),
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_SIZE=head_size,
        HALF=half,
        HEADS_BLOCK=heads_block,
        HALF_BLOCK=half_block,
        REST_BLOCK=triton.next_power_of_2(rest) if rest else 0,
        num_warps=4,
    )
    return qkv[:, :num_heads]


def rotate_and_store_reference(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    num_heads: int,
) -> Tensor:
    """`rotate_and_store` in plain torch, on float32 tables; leaves `qkv` as it is. Not to be
    captured in a graph.
    """
    num_kv_heads = key_cache.shape[2]
    query_key, value = qkv.split((num_heads + num_kv_heads, num_kv_heads), dim=1)
    rotated = apply_rotary(query_key.float(), cos, sin).to(qkv.dtype)
    query, key = rotated.split((num_heads, num_kv_heads), dim=1)
    rows = (slots >= 0).nonzero()[:, 0]
    write_kv(key[rows], value[rows], key_cache, value_cache, slots[rows].long())
    return query


def _check(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    num_heads: int,
) -> None:
    require_dtype("rotate_and_store", qkv, key_cache, value_cache)
    num_tokens, all_heads, head_size = qkv.shape
    cache = tuple(key_cache.shape)
    if (
        cache != tuple(value_cache.shape)
        or cache[3] != head_size
        or all_heads != num_heads + 2 * cache[2]
    ):
        raise ValueError(
            f"{num_heads} query heads in {tuple(qkv.shape)} do not match caches {cache}, "
            f"{tuple(value_cache.shape)}"
        )
    half = cos.shape[-1]
    if (
        cos.shape != (num_tokens, 1, half)
        or sin.shape != cos.shape
        or len(slots) != num_tokens
        or 2 * half > head_size
    ):
        raise ValueError(
            f"tables {tuple(cos.shape)}, {tuple(sin.shape)} and {len(slots)} slots do not match "
            f"{tuple(qkv.shape)}"
        )
    if (
        cos.dtype != torch.float32
        or sin.dtype != torch.float32
        or slots.dtype not in (torch.int32, torch.int64)
    ):
        raise ValueError(
            f"tables must be float32 and slots int32 or int64, not {cos.dtype}, {sin.dtype} and "
            f"{slots.dtype}"
        )
    if qkv.stride()[1:] != (head_size, 1) or not (cos.is_contiguous() and sin.is_contiguous()):
        raise ValueError(
            f"heads and tables must be contiguous; the heads' strides are {qkv.stride()[1:]}"
        )
    for each in (key_cache, value_cache):
        if each.stride(0) != each.shape[1] * each.stride(1) or each.stride()[2:] != (head_size, 1):
            raise ValueError(
                f"a cache of shape {cache} must not have gaps between blocks; strides "
                f"{each.stride()}"
            )


@triton.jit
def rotate_and_store_kernel(
    qkv: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    slots: tl.tensor,
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    qkv_stride: tl.tensor,
    key_stride: tl.tensor,
    value_stride: tl.tensor,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HALF: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
) -> None:
    """HEADS_BLOCK heads, of queries, keys and values alike, of one token."""
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS_BLOCK + tl.arange(0, HEADS_BLOCK)
    head = heads[:, None]
    key_head = head - NUM_HEADS
    value_head = key_head - NUM_KV_HEADS
    pair = tl.arange(0, HALF_BLOCK)[None, :]
    is_pair = pair < HALF
    slot = tl.load(slots + token).to(tl.int64)
    is_query = head < NUM_HEADS
    is_stored = slot >= 0
    is_key = (key_head >= 0) & (value_head < 0) & is_stored
    is_value = (value_head >= 0) & (value_head < NUM_KV_HEADS) & is_stored
    # Values have pairs, too: they are not rotated, but move to the cache in the same pass.
    is_wanted_pair = (is_query | is_key | is_value) & is_pair

    row = qkv + token * qkv_stride + head * HEAD_SIZE
    key_row = key_cache + slot * key_stride + key_head * HEAD_SIZE
    value_row = value_cache + slot * value_stride + value_head * HEAD_SIZE
    # Both elements of a pair lie in the same thread, so that writing in place overtakes no other
    # thread's read.
    first = tl.load(row + pair, mask=is_wanted_pair)
    second = tl.load(row + HALF + pair, mask=is_wanted_pair)
    c = tl.load(cos + token * HALF + pair, mask=is_pair)
    s = tl.load(sin + token * HALF + pair, mask=is_pair)
    x = first.to(tl.float32)
    y = second.to(tl.float32)
    rotated_first = (x * c - y * s).to(first.dtype)
    rotated_second = (y * c + x * s).to(first.dtype)

    tl.store(row + pair, rotated_first, mask=is_query & is_pair)
    tl.store(row + HALF + pair, rotated_second, mask=is_query & is_pair)
    # Entries that are not rotated (a rotary size below the head size): queries have them already.
    if REST_BLOCK > 0:
        column = 2 * HALF + tl.arange(0, REST_BLOCK)[None, :]
        exists = column < HEAD_SIZE
        rest = tl.load(row + column, mask=(is_key | is_value) & exists, other=0.0)
    tl.store(key_row + pair, rotated_first, mask=is_key & is_pair)
    tl.store(key_row + HALF + pair, rotated_second, mask=is_key & is_pair)
    tl.store(value_row + pair, first, mask=is_value & is_pair)
    tl.store(value_row + HALF + pair, second, mask=is_value & is_pair)
    if REST_BLOCK > 0:
        tl.store(key_row + column, rest, mask=is_key & exists)
        tl.store(value_row + column, rest, mask=is_value & exists)
