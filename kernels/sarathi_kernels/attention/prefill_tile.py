"""Attention of one tile of queries to the keys of a paged context."""

from __future__ import annotations

import triton
import triton.language as tl

from sarathi_kernels.attention.paging import Cache, Rows, Sequences, slot_offsets


@triton.jit
def load_tile(
    first_slot: tl.tensor,  # keys or values of `cache`
    cache: Cache,
    table: tl.tensor,
    first_key: tl.tensor,
    kv_len: tl.tensor,
    HEAD_SIZE: tl.constexpr,
    PADDED_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
) -> tl.tensor:
    """[BLOCK_N, PADDED_SIZE] keys or values of one KV head; tokens from `kv_len` on are
    zero if MASKED.
    """
    tokens = tl.arange(0, BLOCK_N)[:, None]
    dims = tl.arange(0, PADDED_SIZE)[None, :]
    # One 64-bit address a tile, where it is in one block: one of each token takes registers that
    # then spill.
    if BLOCK_SIZE % BLOCK_N == 0:
        block = tl.load(table + first_key // BLOCK_SIZE).to(tl.int64)
        slot = first_key % BLOCK_SIZE
        first = first_slot + (block * cache.stride_block + slot * cache.stride_slot)
        pointers = first + (tokens * cache.stride_slot + dims)
    else:
        offsets = slot_offsets(cache, table, first_key, kv_len, BLOCK_SIZE, BLOCK_N)
        pointers = first_slot + offsets[:, None] + dims
    if MASKED:
        is_cached = first_key + tokens < kv_len
        tile = tl.load(pointers, mask=is_cached & (dims < HEAD_SIZE), other=0.0)
    elif HEAD_SIZE != PADDED_SIZE:
        tile = tl.load(pointers, mask=dims < HEAD_SIZE, other=0.0)
    else:
        tile = tl.load(pointers)
    return tile


@triton.jit
def attend_keys(
    acc: tl.tensor,  # [BLOCK_M, PADDED_SIZE] float32: weighted values so far
    row_max: tl.tensor,  # [BLOCK_M] float32: largest scaled score so far
    row_sum: tl.tensor,  # [BLOCK_M] float32: sum of exp2(score - row_max)
    query: tl.tensor,  # [BLOCK_M, PADDED_SIZE]
    cache: Cache,  # of the KV head
    table: tl.tensor,
    begin: tl.tensor,  # multiple of BLOCK_N
    end: tl.tensor,
    last_keys: tl.tensor,  # [BLOCK_M]: the newest token that each query sees
    window: tl.tensor,
    kv_len: tl.tensor,
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
    # The lines named below are those of Algorithm 1 of FlashAttention-2 (arXiv 2307.08691).
    if AHEAD:
        last_key = tl.maximum(end - BLOCK_N, 0)
        key = load_tile(
            cache.key,
            cache,
            table,
            tl.multiple_of(tl.minimum(begin, last_key), BLOCK_N),
            kv_len,
            HEAD_SIZE,
            PADDED_SIZE,
            BLOCK_SIZE,
            BLOCK_N,
            MASKED,
        )
        scores = tl.dot(query, key.T, input_precision="ieee")
    for first_key in tl.range(begin, end, BLOCK_N):
        first_key = tl.multiple_of(first_key, BLOCK_N)
        # Behind the last tile its product is taken again, and not used: the loop has no branch.
        next_key = tl.minimum(first_key + BLOCK_N, last_key) if AHEAD else first_key
        key = load_tile(
            cache.key,
            cache,
            table,
            tl.multiple_of(next_key, BLOCK_N),
            kv_len,
            HEAD_SIZE,
            PADDED_SIZE,
            BLOCK_SIZE,
            BLOCK_N,
            MASKED,
        )
        # Line 8: the scores. "ieee", as TF32 would keep 10 bits of a float32's mantissa.
        product = tl.dot(query, key.T, input_precision="ieee")
        if not AHEAD:
            scores = product
        if MASKED:
            tokens = first_key + tl.arange(0, BLOCK_N)[None, :]
            visible = tokens <= last_keys[:, None]
            if HAS_WINDOW:
                visible = visible & (tokens > last_keys[:, None] - window)
            scores = tl.where(visible, scores, float("-inf"))
        # Line 9. The scale is positive, so that it may follow the maximum: one product a row.
        new_max = tl.maximum(row_max, tl.max(scores, 1) * qk_scale)
        # A window may hide all keys so far from a query, whose maximum is then no number to
        # subtract.
        shift = new_max
        if MASKED and HAS_WINDOW:
            shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        rescale = tl.math.exp2(row_max - shift)
        weights = tl.math.exp2(scores * qk_scale - shift[:, None])
        row_sum = row_sum * rescale + tl.sum(weights, 1)
        value = load_tile(
            cache.value,
            cache,
            table,
            first_key,
            kv_len,
            HEAD_SIZE,
            PADDED_SIZE,
            BLOCK_SIZE,
            BLOCK_N,
            MASKED,
        )
        # Line 10. The division by the sums comes once, behind the loop (`attend_tile`).
        acc *= rescale[:, None]
        acc = tl.dot(weights.to(value.dtype), value, acc, input_precision="ieee")
        row_max = new_max
        if AHEAD:
            scores = product
    return acc, row_max, row_sum


@triton.jit
def attend_tile(
    entry: tl.tensor,  # part of a tile, counted over all tiles
    head: tl.tensor,
    query: Rows,
    cache: Cache,
    out: Rows,
    sequences: Sequences,
    tiles: tl.tensor,
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
    tile_entry = tiles + entry // TILE_PARTS * 2
    sequence = tl.load(tile_entry)
    # The part's first query, counted from the sequence's first new token.
    first_row = tl.load(tile_entry + 1) + entry % TILE_PARTS * BLOCK_M
    if sequence >= 0:
        start = tl.load(sequences.query_starts + sequence)
        num_queries = tl.load(sequences.query_starts + sequence + 1) - start
        kv_len = tl.load(sequences.kv_lens + sequence)
        if first_row < num_queries:
            rows = first_row + tl.arange(0, BLOCK_M)
            dims = tl.arange(0, PADDED_SIZE)[None, :]
            exists = (rows[:, None] < num_queries) & (dims < HEAD_SIZE)
            columns = head * HEAD_SIZE + dims
            # 64 bits: the offset of a late row in a wide tensor exceeds 32.
            packed = (start + rows).to(tl.int64)[:, None]
            pointers = query.first + packed * query.stride + columns
            tile = tl.load(pointers, mask=exists, other=0.0)

            # Queries are the newest tokens: the first one's position is that of the tokens before.
            num_earlier = kv_len - num_queries
            first_position = num_earlier + first_row
            # Rows behind the last query see what it sees, so that no row is without keys.
            last_keys = tl.minimum(num_earlier + rows, kv_len - 1)
            end = tl.minimum(first_position + BLOCK_M, kv_len)
            # Every query of the tile sees the keys up to its first one's position.
            masked_from = (first_position + 1) // BLOCK_N * BLOCK_N
            table = sequences.block_table + sequence.to(tl.int64) * sequences.stride_table
            column = head // GROUP * HEAD_SIZE  # of the KV head that the query's head shares
            keys = cache.key + column
            values = cache.value + column
            of_group = Cache(keys, values, cache.stride_block, cache.stride_slot)
            acc = tl.zeros([BLOCK_M, PADDED_SIZE], tl.float32)
            row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
            row_sum = tl.zeros([BLOCK_M], tl.float32)
            begin = 0
            if HAS_WINDOW:
                oldest_key = tl.maximum(first_position - window + 1, 0)
                window_begin = oldest_key // BLOCK_N * BLOCK_N
                seen_by_all = tl.maximum(end - window, 0)
                begin = tl.cdiv(seen_by_all, BLOCK_N) * BLOCK_N
                begin = tl.minimum(tl.maximum(begin, window_begin), masked_from)
                # Keys that have left the window of the tile's last queries, not of its first.
                acc, row_max, row_sum = attend_keys(
                    acc, row_max, row_sum, tile, of_group, table,
                    window_begin, begin, last_keys, window, kv_len, qk_scale,
                    HEAD_SIZE, PADDED_SIZE, BLOCK_SIZE, BLOCK_N, True, True, False,
                )  # fmt: skip
            # Keys that all queries see, most of a long context: no mask (FlashAttention-2, section
            # 3.1.1, "Causal masking").
            acc, row_max, row_sum = attend_keys(
                acc, row_max, row_sum, tile, of_group, table,
                begin, masked_from, last_keys, window, kv_len, qk_scale,
                HEAD_SIZE, PADDED_SIZE, BLOCK_SIZE, BLOCK_N, False, HAS_WINDOW, AHEAD,
            )  # fmt: skip
            # Keys on the diagonal of the causal mask.
            acc, row_max, row_sum = attend_keys(
                acc, row_max, row_sum, tile, of_group, table,
                masked_from, end, last_keys, window, kv_len, qk_scale,
                HEAD_SIZE, PADDED_SIZE, BLOCK_SIZE, BLOCK_N, True, HAS_WINDOW, False,
            )  # fmt: skip
            # Line 12 of Algorithm 1.
            attended = (acc / row_sum[:, None]).to(out.first.dtype.element_ty)
            tl.store(out.first + packed * out.stride + columns, attended, mask=exists)
