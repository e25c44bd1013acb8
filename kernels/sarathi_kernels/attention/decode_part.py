"""Attention of one decode's heads to a part of its paged context, in the loop over its keys.

A decode reads all its keys and values once and hardly computes, so that memory is the limit: the
heads of a group that share one KV head are rows of one matrix product, and where nothing is shared,
the products are summed element by element, each row of the tile of keys with a separate softmax,
so that the loop needs no exchange between warps.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sarathi_kernels.attention.paging import slot_offsets


@triton.jit
def attend_alone(
    query: tl.tensor,  # pointer to the head's row
    keys: tl.tensor,  # pointers to the KV head of the first slot
    values: tl.tensor,
    table: tl.tensor,
    begin: tl.tensor,  # multiple of BLOCK_N
    end: tl.tensor,
    first_visible: tl.tensor,
    stride_block: tl.tensor,
    stride_slot: tl.tensor,
    qk_scale: tl.tensor,
    HEAD_SIZE: tl.constexpr,
    PADDED_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """One head with a separate KV head: normalised values [1, PADDED_SIZE] and log2 of the sum of
    powers [1].
    """
    dims = tl.arange(0, PADDED_SIZE)
    row = tl.load(query + dims, mask=dims < HEAD_SIZE, other=0.0).to(tl.float32) * qk_scale
    # Every row of the tile of keys has a separate softmax: they are joined once, behind the loop.
    acc = tl.zeros([BLOCK_N, PADDED_SIZE], tl.float32)
    row_max = tl.full([BLOCK_N], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_N], tl.float32)
    for first_key in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        first_key = tl.multiple_of(first_key, BLOCK_N)
        tokens = first_key + tl.arange(0, BLOCK_N)
        visible = (tokens < end) & (tokens >= first_visible)
        mask = visible[:, None] & (dims[None, :] < HEAD_SIZE)
        slots = slot_offsets(table, first_key, end, stride_block, stride_slot, BLOCK_SIZE, BLOCK_N)
        offsets = slots[:, None] + dims[None, :]
        key = tl.load(keys + offsets, mask=mask, other=0.0)
        value = tl.load(values + offsets, mask=mask, other=0.0)
        scores = tl.sum(key.to(tl.float32) * row[None, :], 1)
        scores = tl.where(visible, scores, float("-inf"))
        new_max = tl.maximum(row_max, scores)
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights = tl.math.exp2(scores - shift)
        rescale = tl.math.exp2(row_max - shift)
        row_sum = row_sum * rescale + weights
        acc = acc * rescale[:, None] + value.to(tl.float32) * weights[:, None]
        row_max = new_max
    highest = tl.max(row_max, 0)
    share = tl.math.exp2(row_max - tl.where(highest == float("-inf"), 0.0, highest))
    total = tl.sum(row_sum * share, 0)
    total = tl.where(
        total > 0, total, 1.0
    )  # an empty part: its maximum alone makes the logarithm -inf
    attended = tl.sum(acc * share[:, None], 0) / total
    return attended[None, :], highest + tl.math.log2(total) + tl.zeros([1], tl.float32)


@triton.jit
def attend_group(
    query: tl.tensor,  # pointer to the row of the group's first head
    keys: tl.tensor,
    values: tl.tensor,
    table: tl.tensor,
    begin: tl.tensor,  # multiple of BLOCK_N
    end: tl.tensor,
    first_visible: tl.tensor,
    stride_block: tl.tensor,
    stride_slot: tl.tensor,
    qk_scale: tl.tensor,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PADDED_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """The heads of one KV head: normalised values [ROWS, PADDED_SIZE] and log2 of the sums of
    powers [ROWS].
    """
    dims = tl.arange(0, PADDED_SIZE)[None, :]
    heads = tl.arange(0, ROWS)[:, None]
    tile = tl.load(
        query + heads * HEAD_SIZE + dims, mask=(heads < GROUP) & (dims < HEAD_SIZE), other=0.0
    )
    acc = tl.zeros([ROWS, PADDED_SIZE], tl.float32)
    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    for first_key in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        first_key = tl.multiple_of(first_key, BLOCK_N)
        tokens = first_key + tl.arange(0, BLOCK_N)
        visible = (tokens < end) & (tokens >= first_visible)
        mask = visible[:, None] & (dims < HEAD_SIZE)
        slots = slot_offsets(table, first_key, end, stride_block, stride_slot, BLOCK_SIZE, BLOCK_N)
        offsets = slots[:, None] + dims
        key = tl.load(keys + offsets, mask=mask, other=0.0)
        scores = tl.dot(tile, key.T, input_precision="ieee") * qk_scale
        scores = tl.where(visible[None, :], scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        rescale = tl.math.exp2(row_max - shift)
        weights = tl.math.exp2(scores - shift[:, None])
        row_sum = row_sum * rescale + tl.sum(weights, 1)
        acc *= rescale[:, None]
        value = tl.load(values + offsets, mask=mask, other=0.0)
        acc = tl.dot(weights.to(value.dtype), value, acc, input_precision="ieee")
        row_max = new_max
    row_sum = tl.where(
        row_sum > 0, row_sum, 1.0
    )  # an empty part: its maximum alone makes the logarithm -inf
    log_sum = row_max + tl.math.log2(row_sum)
    return acc / row_sum[:, None], log_sum


@triton.jit
def attend_part(
    part: tl.tensor,
    kv_head: tl.tensor,
    query: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    out: tl.tensor,
    partial: tl.tensor,  # [num_parts, num_heads, HEAD_SIZE] float32
    log_sums: tl.tensor,  # [num_parts, num_heads] float32
    query_starts: tl.tensor,
    kv_lens: tl.tensor,
    block_table: tl.tensor,
    parts: tl.tensor,
    stride_query: tl.tensor,
    stride_out: tl.tensor,
    stride_block: tl.tensor,
    stride_slot: tl.tensor,
    stride_table: tl.tensor,
    window: tl.tensor,
    qk_scale: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PADDED_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    IS_SPLIT: tl.constexpr,
) -> None:
    """Attend for the heads of one KV head to one part of a decode's context. The result goes to
    `out` if that is all of it, else to `partial` and `log_sums`: the log2 of the sum, -inf for an
    empty part.
    """
    sequence = tl.load(parts + part * 4)
    if sequence >= 0:
        row = tl.load(query_starts + sequence).to(tl.int64)
        kv_len = tl.load(kv_lens + sequence)
        first_visible = tl.maximum(kv_len - window, 0) if HAS_WINDOW else 0
        begin = tl.maximum(tl.load(parts + part * 4 + 1), first_visible // BLOCK_N * BLOCK_N)
        end = tl.load(parts + part * 4 + 2)
        table = block_table + sequence.to(tl.int64) * stride_table
        queries = query + row * stride_query + kv_head * GROUP * HEAD_SIZE
        keys += kv_head * HEAD_SIZE
        values += kv_head * HEAD_SIZE
        if GROUP == 1:
            attended, log_sum = attend_alone(
                queries, keys, values, table, begin, end, first_visible,
                stride_block, stride_slot, qk_scale,
                HEAD_SIZE, PADDED_SIZE, BLOCK_SIZE, BLOCK_N, STAGES,
            )  # fmt: skip
        else:
            attended, log_sum = attend_group(
                queries, keys, values, table, begin, end, first_visible,
                stride_block, stride_slot, qk_scale,
                GROUP, ROWS, HEAD_SIZE, PADDED_SIZE, BLOCK_SIZE, BLOCK_N, STAGES,
            )  # fmt: skip
        heads = tl.arange(0, ROWS)
        dims = tl.arange(0, PADDED_SIZE)[None, :]
        exists = (heads[:, None] < GROUP) & (dims < HEAD_SIZE)
        is_split = tl.load(parts + part * 4 + 3) != 0 if IS_SPLIT else False
        if is_split:
            rows = (part * NUM_KV_HEADS + kv_head) * GROUP + heads
            tl.store(partial + rows[:, None] * HEAD_SIZE + dims, attended, mask=exists)
            tl.store(log_sums + rows, log_sum, mask=heads < GROUP)
        else:
            pointers = (
                out + row * stride_out + (kv_head * GROUP + heads[:, None]) * HEAD_SIZE + dims
            )
            tl.store(pointers, attended.to(out.dtype.element_ty), mask=exists)
