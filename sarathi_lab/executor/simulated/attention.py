"""Time of one layer's attention on a GPU: chunks are bound by compute, decodes by memory.

Prefills and decodes are separate calls (SARATHI, section 4.3.2), or one, as in vLLM. What differs
by GPU is a field of `Hardware`, fitted by `experiments/lab/cost_model/fit.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from sarathi_lab.executor.simulated.hardware import Hardware
from sarathi_lab.executor.simulated.matmul import num_waves, overlapped

QUERY_TILE = 64  # queries of a head that an SM takes at once: Fig 7 steps between 700 and 750
FILL_KEYS = 256  # keys of a head on each SM with which decodes reach their bandwidth

# Exponent of `uneven`: chosen among four by the mixed batches of two GPUs, as
# experiments/lab/hybrid_attention/README.md says.
UNEVENNESS = 1.5


class Tiles(NamedTuple):
    """Sums over the tiles of queries of some chunks, of one head: their number, the keys before
    their chunks, the tiles of keys within them that a mask leaves; and over the chunks: tokens in
    the cache, their own tokens, and the longest context.
    """

    query_tiles: int
    dense_keys: int
    masked_tiles: int
    kv_tokens: int
    queries: int
    longest: int


def tiles_of(chunks: Iterable[tuple[int, int]]) -> Tiles:
    """Those of `chunks` (start, num_tokens): a chunk of 65 tokens has two, as one of 128."""
    query_tiles = dense_keys = masked_tiles = kv_tokens = queries = longest = 0
    for start, num_tokens in chunks:
        tiles = -(-num_tokens // QUERY_TILE)
        query_tiles += tiles
        dense_keys += tiles * start
        masked_tiles += tiles * (tiles + 1) // 2
        kv_tokens += start + num_tokens
        queries += num_tokens
        longest = max(longest, start + num_tokens)
    return Tiles(query_tiles, dense_keys, masked_tiles, kv_tokens, queries, longest)


def prefill_attention_time(
    chunks: Iterable[tuple[int, int]],
    *,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    kv_head_bytes: int,
    hardware: Hardware,
) -> float:
    """Seconds of one layer's attention of `chunks` (start, num_tokens), all in one call.

    4 FLOPs per head entry and causal query-key pair, in whole tiles of queries: a chunk of 65
    computes 128. The keys before a chunk are dense and run at `attention_efficiency`, those within
    it are masked and run at `causal_efficiency`; each tile adds `query_ramp` keys for its start and
    end. Each chunk reads its whole context from the cache again, which is what chunking costs.
    """
    query_tiles, dense_keys, masked_tiles, kv_tokens, queries, _ = tiles_of(chunks)
    if query_tiles == 0:
        return 0.0
    blocks = query_tiles * num_heads
    max_splits = hardware.chunk_splits if blocks < hardware.num_sms else 1
    dense_pairs = QUERY_TILE * (dense_keys + query_tiles * hardware.query_ramp)
    masked_pairs = QUERY_TILE * QUERY_TILE * masked_tiles
    weighted_pairs = (
        dense_pairs / hardware.attention_efficiency + masked_pairs / hardware.causal_efficiency
    )
    compute = 4 * num_heads * head_size * weighted_pairs / hardware.flops_per_second
    kv_bytes = 2 * kv_tokens * num_kv_heads * kv_head_bytes
    query_bytes = 2 * queries * num_heads * head_size * hardware.dtype_bytes  # and their outputs
    memory = kv_bytes / hardware.kv_rate
    if hardware.prompt_efficiency is not None:
        rate = hardware.prompt_efficiency * hardware.bytes_per_second
        memory = (kv_bytes + query_bytes) / rate
    share = occupancy(blocks, hardware.num_sms, max_splits)
    return hardware.attention_launch + overlapped(compute, memory) / share


def decode_attention_time(
    num_sequences: int,
    kv_tokens: int,
    *,
    num_heads: int,
    num_kv_heads: int,
    kv_head_bytes: int,
    hardware: Hardware,
) -> float:
    """Seconds of one layer's attention of `num_sequences` decodes that see `kv_tokens` in all. Keys
    and values are read once, at the share of the bandwidth that the occupied SMs draw, and after
    `decode_fill` if there is enough to reach it, while each sequence and KV head keeps an SM for
    `decode_block_time` at least.
    """
    if num_sequences == 0:
        return 0.0
    blocks = num_sequences * num_kv_heads
    streaming = 2 * kv_tokens * num_kv_heads * kv_head_bytes / hardware.kv_rate
    grouped = num_heads > num_kv_heads
    share = occupancy(blocks, hardware.num_sms, hardware.splits_of_decodes(grouped))
    working = hardware.decode_block_time * blocks / hardware.num_sms
    launch = hardware.launch_of_decodes
    if grouped and num_sequences > 1 and num_kv_heads > 1:
        launch += hardware.regroup_time
    filled = min(1.0, kv_tokens * num_kv_heads / (hardware.num_sms * FILL_KEYS))
    return launch + overlapped(working, hardware.decode_fill * filled + streaming / share)


def hybrid_attention_time(
    chunks: Iterable[tuple[int, int]],
    num_decodes: int,
    decode_kv_tokens: int,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    kv_head_bytes: int,
    hardware: Hardware,
) -> float:
    """Seconds of one layer's attention of `chunks` (start, num_tokens) and of `num_decodes` decodes
    that see `decode_kv_tokens` in all, in one call.

    As in flash-attention 2, a decode is a chunk of one token there: each of its heads takes a whole
    tile of queries, which is computed over all its keys, and nobody splits these. So the call takes
    long if all of its tiles do, or one (`uneven`): the mean decode's, or the last of a chunk.
    """
    of = tiles_of(chunks)
    query_tiles, queries = of.query_tiles + num_decodes, of.queries + num_decodes
    kv_tokens = of.kv_tokens + decode_kv_tokens
    longest = max(of.longest, -(-decode_kv_tokens // num_decodes))
    dense_keys = of.dense_keys + decode_kv_tokens + query_tiles * hardware.query_ramp
    masked_keys = QUERY_TILE * of.masked_tiles
    weighted = dense_keys / hardware.attention_efficiency + masked_keys / hardware.causal_efficiency
    key_time = 4 * QUERY_TILE * head_size / hardware.flops_per_second  # of a tile, on all SMs
    compute = uneven(
        num_heads * weighted * key_time,
        hardware.num_sms * longest / hardware.attention_efficiency * key_time,
    )
    kv_bytes = 2 * kv_tokens * num_kv_heads * kv_head_bytes
    query_bytes = 2 * queries * num_heads * head_size * hardware.dtype_bytes
    rate = (hardware.prompt_efficiency or hardware.kv_efficiency) * hardware.bytes_per_second
    return hardware.attention_launch + overlapped(compute, (kv_bytes + query_bytes) / rate)


def uneven(all_pieces: float, longest: float) -> float:
    """Seconds of pieces of work of different length that take `all_pieces` seconds if they fill all
    multiprocessors to the end, and `longest` for the longest alone: more than either, less than
    both one after the other, which a list of pieces never exceeds.
    """
    return float((all_pieces**UNEVENNESS + longest**UNEVENNESS) ** (1 / UNEVENNESS))


@lru_cache(maxsize=2**14)
def occupancy(blocks: int, num_sms: int, max_splits: int) -> float:
    """Share of the SMs' time in use, in (0, 1], with each block cut into up to `max_splits`."""
    splits = range(1, max_splits + 1)
    return max(blocks * n / (num_sms * num_waves(blocks * n, num_sms)) for n in splits)
