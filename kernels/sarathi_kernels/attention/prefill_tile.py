"""Attention of one tile of queries to the keys of a paged context."""

from __future__ import annotations

import triton
import triton.language as tl

from sarathi_kernels.attention.paging import slot_offsets


@triton.jit
def load_tile(
    cache: tl.tensor,  # pointer to the KV head's first element
    table: tl.tensor,
    first_key: tl.tensor,
    kv_len: tl.tensor,
    stride_block: tl.tensor,
    stride_slot: tl.tensor,
    HEAD_SIZE: tl.constexpr,
    PADDED_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
) -> tl.tensor:
    """[BLOCK_N, PADDED_SIZE] keys or values of one KV head; tokens from `kv_len` on are
    zero if MASKED.
    """
    tokens = first_key + tl.arange(0, BLOCK_N)
    dims = tl.arange(0, PADDED_SIZE)
    # One 64-bit address a tile, where it is in one block: one of each token takes registers that
    # then spill.
    if BLOCK_SIZE % BLOCK_N == 0:
        block = tl.load(table + first_key // BLOCK_SIZE).to(tl.int64)
        first = cache + (block * stride_block + first_key % BLOCK_SIZE * stride_slot)
        pointers = first + (tl.arange(0, BLOCK_N)[:, None] * stride_slot + dims[None, :])
    else:
        offsets = slot_offsets(
            table, first_key, kv_len, stride_block, stride_slot, BLOCK_SIZE, BLOCK_N
        )
        pointers = cache + offsets[:, None] + dims[None, :]
    if MASKED:
        tile = tl.load(
            pointers, mask=(tokens[:, None] < kv_len) & (dims[None, :] < HEAD_SIZE), other=0.0
        )
    elif HEAD_SIZE != PADDED_SIZE:
        tile = tl.load(pointers, mask=dims[None, :] < HEAD_SIZE, other=0.0)
    else:
        tile = tl.load(pointers)
    return tile


@triton.jit
def attend_keys(
    acc: tl.tensor,  # [BLOCK_M, PADDED_SIZE] float32: weighted values so far
    row_max: tl.tensor,  # [BLOCK_M] float32: largest scaled score so far
    row_sum: tl.tensor,  # [BLOCK_M] float32: sum of exp2(score - row_max)
    query: tl.tensor,  # [BLOCK_M, PADDED_SIZE]
    keys: tl.tensor,  # pointer to the KV head's first element, as `values`
    values: tl.tensor,
    table: tl.tensor,
    begin: tl.tensor,  # multiple of BLOCK_N
    end: tl.tensor,
    last_keys: tl.tensor,  # [BLOCK_M]: the newest token that each query sees
    window: tl.tensor,
    kv_len: tl.tensor,
    stride_block: tl.tensor,
    stride_slot: tl.tensor,
    qk_scale: tl.tensor,
    HEAD_SIZE: tl.constexpr,
    PADDED_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    AHEAD: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Take the tokens from `begin` to `end` into the softmax of a tile of queries.

    With AHEAD, which takes whole tiles of keys, the scores of the next tile are
    computed while the softmax works on those of this one: products that are asynchronous (wgmma)
    need not wait for each other. It takes one product more than there are tiles.
    """
    if AHEAD:
        last_key = tl.maximum(end - BLOCK_N, 0)
        key = load_tile(
            keys, table, tl.multiple_of(tl.minimum(begin, last_key), BLOCK_N), kv_len,
            stride_block, stride_slot,
            HEAD_SIZE, PADDED_SIZE, BLOCK_SIZE, BLOCK_N, MASKED,
        )  # fmt: skip
        scores = tl.dot(query, key.T, input_precision="ieee")
    for first_key in tl.range(begin, end, BLOCK_N):
        first_key = tl.multiple_of(first_key, BLOCK_N)
        next_key = tl.minimum(first_key + BLOCK_N, last_key) if AHEAD else first_key
        key = load_tile(
            keys, table, tl.multiple_of(next_key, BLOCK_N), kv_len, stride_block,
            stride_slot,
            HEAD_SIZE, PADDED_SIZE, BLOCK_SIZE, BLOCK_N, MASKED,
        )  # fmt: skip
        product = tl.dot(query, key.T, input_precision="ieee")
        if not AHEAD:
            scores = product
        if MASKED:
            tokens = first_key + tl.arange(0, BLOCK_N)[None, :]
            visible = tokens <= last_keys[:, None]
            if HAS_WINDOW:
                visible = visible & (tokens > last_keys[:, None] - window)
            scores = tl.where(visible, scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1) * qk_scale)
        # A window may hide all keys so far from a query, whose maximum is then no number to
        # subtract.
        shift = (
            tl.where(new_max == float("-inf"), 0.0, new_max) if MASKED and HAS_WINDOW else new_max
        )
        rescale = tl.math.exp2(row_max - shift)
        weights = tl.math.exp2(scores * qk_scale - shift[:, None])
        row_sum = row_sum * rescale + tl.sum(weights, 1)
        value = load_tile(
            values, table, first_key, kv_len, stride_block, stride_slot,
            HEAD_SIZE, PADDED_SIZE, BLOCK_SIZE, BLOCK_N, MASKED,
        )  # fmt: skip
        acc = tl.dot(weights.to(value.dtype), value, acc * rescale[:, None], input_precision="ieee")
        row_max = new_max
        if AHEAD:
            scores = product
    return acc, row_max, row_sum


@triton.jit
def attend_tile(
    entry: tl.tensor,  # part of a tile, counted over all tiles
    head: tl.tensor,
    query: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    out: tl.tensor,
    query_starts: tl.tensor,
    kv_lens: tl.tensor,
    block_table: tl.tensor,
    tiles: tl.tensor,
    stride_query: tl.tensor,
    stride_out: tl.tensor,
    stride_block: tl.tensor,
    stride_slot: tl.tensor,
    stride_table: tl.tensor,
    window: tl.tensor,
    qk_scale: tl.tensor,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PADDED_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TILE_PARTS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    AHEAD: tl.constexpr,
) -> None:
    """Attend for one head of up to BLOCK_M queries of one sequence and store the result; without
    queries, nothing.
    """
    sequence = tl.load(tiles + entry // TILE_PARTS * 2)
    # The tile's first query, counted from the sequence's first new token.
    first_row = tl.load(tiles + entry // TILE_PARTS * 2 + 1) + entry % TILE_PARTS * BLOCK_M
    if sequence >= 0:
        start = tl.load(query_starts + sequence)
        num_queries = tl.load(query_starts + sequence + 1) - start
        kv_len = tl.load(kv_lens + sequence)
        if first_row < num_queries:
            rows = first_row + tl.arange(0, BLOCK_M)
            dims = tl.arange(0, PADDED_SIZE)
            exists = (rows[:, None] < num_queries) & (dims[None, :] < HEAD_SIZE)
            columns = head * HEAD_SIZE + dims[None, :]
            packed = (start + rows).to(tl.int64)[:, None]
            tile = tl.load(query + packed * stride_query + columns, mask=exists, other=0.0)

            first_position = kv_len - num_queries + first_row
            last_keys = tl.minimum(kv_len - num_queries + rows, kv_len - 1)
            end = tl.minimum(first_position + BLOCK_M, kv_len)
            masked_from = (first_position + 1) // BLOCK_N * BLOCK_N
            table = block_table + sequence.to(tl.int64) * stride_table
            keys += head // GROUP * HEAD_SIZE
            values += head // GROUP * HEAD_SIZE
            acc = tl.zeros([BLOCK_M, PADDED_SIZE], tl.float32)
            row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
            row_sum = tl.zeros([BLOCK_M], tl.float32)
            begin = 0
            if HAS_WINDOW:
                window_begin = tl.maximum(first_position - window + 1, 0) // BLOCK_N * BLOCK_N
                begin = tl.cdiv(tl.maximum(end - window, 0), BLOCK_N) * BLOCK_N
                begin = tl.minimum(tl.maximum(begin, window_begin), masked_from)
                acc, row_max, row_sum = attend_keys(
                    acc, row_max, row_sum, tile, keys, values, table,
                    window_begin, begin, last_keys, window, kv_len, stride_block, stride_slot,
                    qk_scale, HEAD_SIZE, PADDED_SIZE, BLOCK_SIZE, BLOCK_N, True, True, False,
                )  # fmt: skip
            acc, row_max, row_sum = attend_keys(
                acc, row_max, row_sum, tile, keys, values, table,
                begin, masked_from, last_keys, window, kv_len, stride_block, stride_slot, qk_scale,
                HEAD_SIZE, PADDED_SIZE, BLOCK_SIZE, BLOCK_N, False, HAS_WINDOW, AHEAD,
            )  # fmt: skip
            acc, row_max, row_sum = attend_keys(
                acc, row_max, row_sum, tile, keys, values, table,
                masked_from, end, last_keys, window, kv_len, stride_block, stride_slot, qk_scale,
                HEAD_SIZE, PADDED_SIZE, BLOCK_SIZE, BLOCK_N, True, HAS_WINDOW, False,
            )  # fmt: skip
            attended = (acc / row_sum[:, None]).to(out.dtype.element_ty)
            tl.store(out + packed * stride_out + columns, attended, mask=exists)
