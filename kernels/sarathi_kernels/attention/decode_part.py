"""Attention of one decode's heads to a part of its paged context, in the loop over its keys.

A decode reads all its keys and values once and hardly computes, so that memory is the limit: the
heads of a group that share one KV head are rows of one matrix product, and where nothing is shared,
the products are summed element by element, each row of the tile of keys with a separate softmax,
so that the loop needs no exchange between warps.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sarathi_kernels.attention.paging import Cache, Rows, Sequences, slot_offsets


@triton.jit
def attend_alone(
    query: tl.tensor,  # pointer to the head's row
    cache: Cache,  # of the KV head
    table: tl.tensor,
    begin: tl.tensor,  # multiple of BLOCK_N
    end: tl.tensor,
    first_visible: tl.tensor,
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
    exists = dims < HEAD_SIZE
    row = tl.load(query + dims, mask=exists, other=0.0).to(tl.float32)
    row *= qk_scale  # once, instead of every score
    # Every row of the tile of keys has a separate softmax: they are joined once, behind the loop.
    acc = tl.zeros([BLOCK_N, PADDED_SIZE], tl.float32)
    row_max = tl.full([BLOCK_N], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_N], tl.float32)
    for first_key in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        first_key = tl.multiple_of(first_key, BLOCK_N)
        tokens = first_key + tl.arange(0, BLOCK_N)
        visible = (tokens < end) & (tokens >= first_visible)
        mask = visible[:, None] & exists[None, :]
        slots = slot_offsets(cache, table, first_key, end, BLOCK_SIZE, BLOCK_N)
        offsets = slots[:, None] + dims[None, :]
        key = tl.load(cache.key + offsets, mask=mask, other=0.0).to(tl.float32)
        value = tl.load(cache.value + offsets, mask=mask, other=0.0)
        scores = tl.sum(key * row[None, :], 1)
        scores = tl.where(visible, scores, float("-inf"))
        new_max = tl.maximum(row_max, scores)
        # Where no key was visible so far, -inf less itself would be NaN.
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights = tl.math.exp2(scores - shift)
        rescale = tl.math.exp2(row_max - shift)
        row_sum = row_sum * rescale + weights
        acc = acc * rescale[:, None] + value.to(tl.float32) * weights[:, None]
        row_max = new_max
    # The rows' softmaxes are joined as `reduce_kernel` joins those of parts.
    highest = tl.max(row_max, 0)
    shift = tl.where(highest == float("-inf"), 0.0, highest)
    share = tl.math.exp2(row_max - shift)
    total = tl.sum(row_sum * share, 0)
    # Of an empty part the maximum alone makes the logarithm -inf.
    total = tl.where(total > 0, total, 1.0)
    attended = tl.sum(acc * share[:, None], 0) / total
    log_sum = highest + tl.math.log2(total)
    return attended[None, :], log_sum + tl.zeros([1], tl.float32)


@triton.jit
def attend_group(
    query: tl.tensor,  # pointer to the row of the group's first head
    cache: Cache,
    table: tl.tensor,
    begin: tl.tensor,  # multiple of BLOCK_N
    end: tl.tensor,
    first_visible: tl.tensor,
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
    exists = dims < HEAD_SIZE
    pointers = query + heads * HEAD_SIZE + dims
    tile = tl.load(pointers, mask=(heads < GROUP) & exists, other=0.0)
    acc = tl.zeros([ROWS, PADDED_SIZE], tl.float32)
    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    for first_key in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        first_key = tl.multiple_of(first_key, BLOCK_N)
        tokens = first_key + tl.arange(0, BLOCK_N)
        visible = (tokens < end) & (tokens >= first_visible)
        mask = visible[:, None] & exists
        slots = slot_offsets(cache, table, first_key, end, BLOCK_SIZE, BLOCK_N)
        offsets = slots[:, None] + dims
        key = tl.load(cache.key + offsets, mask=mask, other=0.0)
        # One product for all heads of the group, which read the keys once (grouped queries).
        scores = tl.dot(tile, key.T, input_precision="ieee") * qk_scale
        scores = tl.where(visible[None, :], scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        # Where no key was visible so far, -inf less itself would be NaN.
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        rescale = tl.math.exp2(row_max - shift)
        weights = tl.math.exp2(scores - shift[:, None])
        row_sum = row_sum * rescale + tl.sum(weights, 1)
        # The softmax so far, as in `attend_keys`: Algorithm 1 of FlashAttention-2, lines 9 and 10.
        acc *= rescale[:, None]
        value = tl.load(cache.value + offsets, mask=mask, other=0.0)
        acc = tl.dot(weights.to(value.dtype), value, acc, input_precision="ieee")
        row_max = new_max
    # Of an empty part the maximum alone makes the logarithm -inf. Parts of one context are joined
    # by these logarithms, so an empty one then has no share.
    row_sum = tl.where(row_sum > 0, row_sum, 1.0)
    log_sum = row_max + tl.math.log2(row_sum)
    return acc / row_sum[:, None], log_sum


@triton.jit
def attend_part(
    part: tl.tensor,
    kv_head: tl.tensor,
    query: Rows,
    cache: Cache,
    out: Rows,
    partial: tl.tensor,  # [num_parts, num_heads, HEAD_SIZE] float32
    log_sums: tl.tensor,  # [num_parts, num_heads] float32
    sequences: Sequences,
    parts: tl.tensor,
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
    entry = parts + part * 4
    sequence = tl.load(entry)
    if sequence >= 0:
        row = tl.load(sequences.query_starts + sequence).to(tl.int64)
        kv_len = tl.load(sequences.kv_lens + sequence)
        first_visible = tl.maximum(kv_len - window, 0) if HAS_WINDOW else 0
        # A part may begin before the window: its tiles without a visible key are left out.
        first_tile = first_visible // BLOCK_N * BLOCK_N
        begin = tl.maximum(tl.load(entry + 1), first_tile)
        end = tl.load(entry + 2)
        table = sequences.block_table + sequence.to(tl.int64) * sequences.stride_table
        first_head = kv_head * GROUP
        queries = query.first + row * query.stride + first_head * HEAD_SIZE
        keys = cache.key + kv_head * HEAD_SIZE
        values = cache.value + kv_head * HEAD_SIZE
        of_group = Cache(keys, values, cache.stride_block, cache.stride_slot)
        if GROUP == 1:
            attended, log_sum = attend_alone(
                queries,
                of_group,
                table,
                begin,
                end,
                first_visible,
                qk_scale,
                HEAD_SIZE,
                PADDED_SIZE,
                BLOCK_SIZE,
                BLOCK_N,
                STAGES,
            )
        else:
            attended, log_sum = attend_group(
                queries,
                of_group,
                table,
                begin,
                end,
                first_visible,
                qk_scale,
                GROUP,
                ROWS,
                HEAD_SIZE,
                PADDED_SIZE,
                BLOCK_SIZE,
                BLOCK_N,
                STAGES,
            )
        heads = tl.arange(0, ROWS)
        dims = tl.arange(0, PADDED_SIZE)[None, :]
        exists = (heads[:, None] < GROUP) & (dims < HEAD_SIZE)
        columns = (first_head + heads[:, None]) * HEAD_SIZE + dims
        # A context in one part needs no reduction, and is rounded here.
        is_split = tl.load(entry + 3) != 0 if IS_SPLIT else False
        if is_split:
            first_row = part * NUM_KV_HEADS * GROUP
            tl.store(partial + first_row * HEAD_SIZE + columns, attended, mask=exists)
            rows = first_row + first_head + heads
            tl.store(log_sums + rows, log_sum, mask=heads < GROUP)
        else:
            pointers = out.first + row * out.stride + columns
            tl.store(pointers, attended.to(out.first.dtype.element_ty), mask=exists)
