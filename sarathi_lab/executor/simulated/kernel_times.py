"""Time of single kernels on a GPU: matrix products, attention and all-reduces.

A product [rows, in] x [in, out] is cut into tiles of the output. Each tile occupies one
multiprocessor (SM), so `tiles` of them take ceil(tiles / num_sms) waves: one row more can cost a
tile of rows, and one tile more a whole wave (SARATHI, section 4.4 and Fig 7). The library picks
among a few tile shapes and may split the inner dimension (split-K) to occupy more SMs; the model
takes the fastest.

In attention, chunks are bound by compute and decodes by memory. Prefills and decodes are separate
calls (SARATHI, section 4.3.2), or one, as in vLLM. Constants here are shared by all GPUs, others
are fields of `Hardware`; `tools/cost_model/fit.py` fits both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import NamedTuple

from sarathi_lab.executor.simulated.hardware import Hardware
from sarathi_lab.model.layers import capped_sum

TILES = ((128, 256), (128, 128), (64, 128), (64, 64))  # rows x columns of the output
SPLITS = (1, 2, 4, 8)  # parts of the inner dimension
# A tile's step along the inner dimension loads rows + columns elements: FLOPs lost for each.
OPERAND_FLOPS = 20.0
OVERLAP = 3.0  # exponent of `overlapped`; the larger, the closer to max(compute, memory)
PARTIAL_SUM_BYTES = 8  # split-K writes and reads a 4-byte sum for each output and part
QUERY_TILE = 64  # queries of a head that an SM takes at once: Fig 7 steps between 700 and 750
FILL_KEYS = 256  # keys of a head on each SM with which decodes reach their bandwidth
# One call over chunks and decodes, as flash-attention 2 makes it. See
# experiments/lab/hybrid_attention/README.md for what each was fitted to.
UNEVENNESS = 1.5  # exponent of `uneven`
DECODE_RAMP = 40  # keys of a decode's tile beyond `query_ramp`
# Of starting a tile without queries on an SM: the call has as many tiles for every sequence as for
# the one with the most, and those of a decode but the first end at once.
EMPTY_TILE_TIME = 0.35e-6
# Keys of one KV head that start to fall out of the L2 cache, and that all do, in sizes of it.
CACHE_LEAVING = (0.75, 1.25)


def overlapped(compute: float, memory: float) -> float:
    """Compute the seconds of work that computes and streams at the same time: a smooth maximum, as
    near the roofline's ridge neither hides entirely behind the other.
    """
    longer = max(compute, memory)
    if longer == 0:
        return 0.0
    # Shares of the longer, as powers of microseconds would lose digits.
    compute_power = (compute / longer) ** OVERLAP
    memory_power = (memory / longer) ** OVERLAP
    ratio: float = (compute_power + memory_power) ** (1 / OVERLAP)
    return longer * ratio


@lru_cache(maxsize=2**17)
def matmul_time(
    rows: int,
    in_features: int,
    out_features: int,
    hardware: Hardware,
    dtype_bytes: int,
    weight_bytes: float | None = None,
) -> float:
    """Compute the seconds of [rows, in_features] x [in_features, out_features], of weights of
    `weight_bytes` (None: as the rest); 0 for no rows.
    """
    if rows == 0:
        return 0.0
    if weight_bytes is None:
        weight_bytes = dtype_bytes
    rate = hardware.flops_per_second * hardware.matmul_efficiency
    sm_rate = rate / hardware.num_sms
    weights = in_features * out_features * weight_bytes
    moved = weights + rows * (in_features + out_features) * dtype_bytes

    def seconds(tile: tuple[int, int], splits: int) -> float:
        tile_rows, tile_columns = tile
        row_tiles = math.ceil(rows / tile_rows)
        column_tiles = math.ceil(out_features / tile_columns)
        blocks = row_tiles * column_tiles * splits
        waves: float = -(-blocks // hardware.num_sms)
        if hardware.partial_waves:
            waves = max(1.0, blocks / hardware.num_sms)
        loading_flops = OPERAND_FLOPS * (tile_rows + tile_columns)
        flops_per_step = 2 * tile_rows * tile_columns + loading_flops
        num_steps = in_features / splits
        compute = waves * num_steps * flops_per_step / sm_rate
        if splits == 1:
            return overlapped(compute, moved / hardware.memory_rate)
        # A second kernel sums the parts.
        sum_bytes = splits * rows * out_features * PARTIAL_SUM_BYTES
        memory = (moved + sum_bytes) / hardware.memory_rate
        return hardware.kernel_launch + overlapped(compute, memory)

    candidates = []
    for tile, splits in product(TILES, SPLITS):
        candidates.append(seconds(tile, splits))
    return hardware.kernel_launch + min(candidates)


Chunks = Sequence[tuple[int, int]]  # start and tokens of each
CallTimes = tuple[float, float]  # seconds of prefills and of decodes


class Heads(NamedTuple):
    """Query heads, KV heads and head size, on one device."""

    num_heads: int
    num_kv_heads: int
    head_size: int


class Tiles(NamedTuple):
    """Sums over the query tiles of one head's chunks."""

    query_tiles: int
    dense_keys: int  # before the chunks, summed over tiles
    masked_tiles: int  # tiles of keys within the chunks that the causal mask leaves
    kv_tokens: int
    queries: int
    longest: int  # context of a chunk


def tiles_of(chunks: Chunks, tile: int = QUERY_TILE, window: int | None = None) -> Tiles:
    """Sum over `chunks` (start, num_tokens): one of `tile` + 1 tokens has two tiles of queries.

    Where a token sees at most `window` tokens, a tile of queries starts with the keys that its
    first one sees.
    """
    query_tiles = dense_keys = masked_tiles = kv_tokens = queries = longest = 0
    for start, num_tokens in chunks:
        tiles = -(-num_tokens // tile)
        context = start + num_tokens
        seen_before = tiles * start  # summed over tiles
        # A chunk's first tile of queries has one tile of its own keys, the second two.
        tiles_of_keys = tiles * (tiles + 1) // 2
        seen = context
        if window is not None:
            within = capped_sum(tiles, 0, tile, window)  # keys of the chunk before each tile
            seen_before = capped_sum(tiles, start, tile, window) - within
            tiles_of_keys = tiles + -(-within // tile)
            context = min(context, window + tile)
            seen = min(start, window - 1) + num_tokens
        query_tiles += tiles
        dense_keys += seen_before
        masked_tiles += tiles_of_keys
        kv_tokens += seen
        queries += num_tokens
        longest = max(longest, context)
    return Tiles(
        query_tiles,
        dense_keys,
        masked_tiles,
        kv_tokens,
        queries,
        longest,
    )


@dataclass(eq=False)
class AttentionTimes:
    """Seconds of one layer's attention calls, by a device's heads. FLOPs are 4 per head entry and
    causal query-key pair, in whole tiles of queries; with a `window`, of pairs within it.
    """

    hardware: Hardware
    num_heads: int
    num_kv_heads: int
    head_size: int
    kv_head_bytes: float
    window: int | None = None

    def __post_init__(self) -> None:
        hardware = self.hardware
        self._tile = hardware.block_queries or QUERY_TILE
        # Seconds of a query tile and a key at the peak of all SMs.
        flops = 4 * self._tile * self.head_size
        self._key_time = flops / hardware.flops_per_second
        # Of a cached token, and of a query and its output.
        self._kv_bytes = 2 * self.num_kv_heads * self.kv_head_bytes
        self._query_bytes = 2 * self.num_heads * self.head_size * hardware.dtype_bytes
        self._prompt_efficiency = first_stated(hardware.prompt_efficiency, hardware.kv_efficiency)
        self._decode_launch = first_stated(hardware.decode_launch, hardware.attention_launch)
        self._decode_block_time = hardware.decode_block_time
        self._decode_splits = hardware.decode_splits
        if self.num_heads == self.num_kv_heads:  # ungrouped
            self._decode_launch = first_stated(hardware.ungrouped_launch, self._decode_launch)
            block_time = hardware.ungrouped_block_time
            self._decode_block_time = first_stated(block_time, self._decode_block_time)
            self._decode_splits = hardware.ungrouped_splits or self._decode_splits

    def prefill(self, chunks: Chunks) -> float:
        """Compute the seconds of `chunks` (start, num_tokens) in one call.

        The keys before a chunk are dense and run at `attention_efficiency`, those within it are
        masked and run at `causal_efficiency`; each tile adds `query_ramp` keys. Each chunk reads
        its whole context from the cache again, the cost of chunking. With `block_queries` the
        longest tile bounds the call; otherwise all tiles are taken for equally long.
        """
        hardware = self.hardware
        tiles = tiles_of(chunks, self._tile, self.window)
        if tiles.query_tiles == 0:
            return 0.0
        queries = tiles.queries
        if hardware.prompt_efficiency is None:  # of keys and values alone
            queries = 0
        memory = self._prompt_memory(tiles.kv_tokens, queries)
        compute = self._compute(tiles)
        if hardware.block_queries is not None:
            compute = overlapped(compute, self._block_time(tiles.longest))
            return hardware.attention_launch + overlapped(compute, memory)
        blocks = tiles.query_tiles * self.num_heads
        max_splits = 1
        if blocks < hardware.num_sms:
            max_splits = hardware.chunk_splits
        busy_share = occupancy(blocks, hardware.num_sms, max_splits)
        return hardware.attention_launch + overlapped(compute, memory) / busy_share

    def decode(self, num_sequences: int, kv_tokens: int) -> float:
        """Compute the seconds of `num_sequences` decodes that see `kv_tokens` in total.

        Keys and values are read once, at the bandwidth share of the occupied SMs, and after
        `decode_fill` if there is enough to reach it; each sequence and KV head occupies an SM for
        `decode_block_time` at least.
        """
        if num_sequences == 0:
            return 0.0
        hardware = self.hardware
        launch = self._decode_launch
        is_grouped = self.num_heads > self.num_kv_heads
        if is_grouped and num_sequences > 1 and self.num_kv_heads > 1:
            launch += hardware.regroup_time
        blocks = num_sequences * self.num_kv_heads
        working = self._decode_block_time * blocks / hardware.num_sms
        busy_share = occupancy(blocks, hardware.num_sms, self._decode_splits)
        streaming = self._kv_bytes * kv_tokens / hardware.kv_rate
        num_keys = kv_tokens * self.num_kv_heads
        keys_to_fill = hardware.num_sms * FILL_KEYS
        filled = min(1.0, num_keys / keys_to_fill)
        filling = hardware.decode_fill * filled
        reading = filling + streaming / busy_share
        return launch + overlapped(working, reading)

    def hybrid(
        self,
        chunks: Chunks,
        num_decodes: int,
        decode_kv_tokens: int,
    ) -> float:
        """Compute the seconds of `chunks` (start, num_tokens) and `num_decodes` decodes that see
        `decode_kv_tokens` in total, in one call.

        As in flash-attention 2, a decode is a chunk of one token: each of its heads takes a whole
        query tile over all its keys, which are not split. Tiles that fit on the SMs together last
        as long as the longest, the mean decode's or the last of a chunk; more are bound by all or
        by the longest (`uneven`).
        """
        hardware = self.hardware
        prompts = tiles_of(chunks, self._tile, self.window)
        # A decode has a tile of its own, which sees all keys of its context without a mask.
        keys_of_decodes = decode_kv_tokens + num_decodes * DECODE_RAMP
        tiles = prompts._replace(
            query_tiles=prompts.query_tiles + num_decodes,
            dense_keys=prompts.dense_keys + keys_of_decodes,
        )
        decode_keys = math.ceil(decode_kv_tokens / num_decodes) + DECODE_RAMP
        most_keys = max(prompts.longest, decode_keys)
        longest = self._block_time(most_keys + hardware.query_ramp)
        compute = longest  # of tiles that all run at once
        if tiles.query_tiles * self.num_heads > hardware.num_sms:
            empty = self._empty_tiles(chunks, num_decodes, tiles.query_tiles)
            empty_on_sm = empty * self.num_heads / hardware.num_sms
            starting = empty_on_sm * EMPTY_TILE_TIME
            all_tiles = self._compute(tiles) + starting
            compute = uneven(all_tiles, longest)
        queries = prompts.queries + num_decodes
        moving_prompts = self._prompt_memory(prompts.kv_tokens, queries)
        reads = self._reads_of_keys(decode_kv_tokens, tiles.query_tiles)
        decode_bytes = reads * self._kv_bytes * decode_kv_tokens
        reading_decodes = decode_bytes / hardware.kv_rate
        memory = moving_prompts + reading_decodes
        return hardware.attention_launch + overlapped(compute, memory)

    def times(
        self,
        chunks: Chunks,
        num_decodes: int,
        decode_kv_tokens: int,
        in_one_call: bool | None,
    ) -> CallTimes:
        """Compute the seconds of `chunks` (start, num_tokens) and of decodes; in one call, decodes
        count as what they add to the chunks.
        """
        prefill = self.prefill(chunks)
        decode = self.decode(num_decodes, decode_kv_tokens)
        if in_one_call and chunks and num_decodes:
            both = self.hybrid(chunks, num_decodes, decode_kv_tokens)
            decode = max(0.0, both - prefill)
        return prefill, decode

    def uniform(
        self,
        prefill_chunk: float = 0,
        kv_prefill: float = 0,
        n_decode: float = 0,
        kv_decode: float = 0,
        num_prefills: float = 1,
    ) -> float:
        """Compute the seconds of equal chunks and equal decodes, in one call if there are both:
        sizes as in attention.csv (`tables`), rounded.
        """
        chunk = (round(kv_prefill), round(prefill_chunk))
        chunks = [chunk] * round(num_prefills)
        if not prefill_chunk:
            chunks = []
        num_decodes = round(n_decode)
        kv_tokens = round(n_decode * kv_decode)
        if chunks and n_decode:
            return self.hybrid(chunks, num_decodes, kv_tokens)
        return self.prefill(chunks) + self.decode(num_decodes, kv_tokens)

    def _empty_tiles(
        self,
        chunks: Chunks,
        num_decodes: int,
        query_tiles: int,
    ) -> int:
        """Count a head's tiles without queries, where every sequence has as many as the longest."""
        most_tokens = max(num_tokens for _, num_tokens in chunks)
        tiles_of_longest = math.ceil(most_tokens / self._tile)
        num_sequences = len(chunks) + num_decodes
        return num_sequences * tiles_of_longest - query_tiles

    def _reads_of_keys(self, decode_kv_tokens: int, query_tiles: int) -> float:
        """Compute how often memory reads the keys of decodes in a call with chunks.

        SMs take one query head after another, all of its `query_tiles`. Heads that share keys read
        them once if the SMs have them at the same time, or if the L2 cache holds them until the
        next head's turn.
        """
        hardware = self.hardware
        sharing = self.num_heads / self.num_kv_heads
        if hardware.l2_bytes is None or sharing == 1:
            return 1.0
        heads_at_once = hardware.num_sms * hardware.tiles_per_sm / query_tiles
        heads_of_read = min(sharing, max(1.0, heads_at_once))
        rereads = sharing / heads_of_read - 1
        token_bytes = self._kv_bytes / self.num_kv_heads  # of a head
        sizes_of_cache = token_bytes * decode_kv_tokens / hardware.l2_bytes
        first, last = CACHE_LEAVING
        leaving = (sizes_of_cache - first) / (last - first)
        evicted_share = min(1.0, max(0.0, leaving))
        return 1 + evicted_share * rereads

    def _compute(self, tiles: Tiles) -> float:
        """Compute the seconds of all heads' tiles on all SMs."""
        hardware = self.hardware
        dense = tiles.dense_keys + tiles.query_tiles * hardware.query_ramp
        masked = self._tile * tiles.masked_tiles
        dense_at_peak = dense / hardware.attention_efficiency
        masked_at_peak = masked / hardware.causal_efficiency
        keys_at_peak = dense_at_peak + masked_at_peak
        return self.num_heads * keys_at_peak * self._key_time

    def _block_time(self, keys: float) -> float:
        """Compute the seconds of a query tile and `keys` keys on one SM."""
        hardware = self.hardware
        keys_at_peak = hardware.num_sms * keys / hardware.attention_efficiency
        return keys_at_peak * self._key_time

    def _prompt_memory(self, kv_tokens: int, queries: int) -> float:
        """Compute the seconds of moving queries, outputs, keys and values."""
        num_bytes = self._kv_bytes * kv_tokens + self._query_bytes * queries
        rate = self._prompt_efficiency * self.hardware.bytes_per_second
        return num_bytes / rate


def first_stated(*figures: float | None) -> float:
    """Return the first figure that is not None."""
    return next(figure for figure in figures if figure is not None)


def uneven(all_pieces: float, longest: float) -> float:
    """Compute the seconds of pieces of work of different length that take `all_pieces` seconds if
    they fill all SMs to the end, and `longest` for the longest alone: more than either, less than
    their sum, which list scheduling never exceeds.
    """
    both: float = all_pieces**UNEVENNESS + longest**UNEVENNESS
    return both ** (1 / UNEVENNESS)


@lru_cache(maxsize=2**14)
def occupancy(blocks: int, num_sms: int, max_splits: int) -> float:
    """Compute the share of SM time in use, in (0, 1], with each block cut into up to `max_splits`
    parts.
    """
    shares = []
    for splits in range(1, max_splits + 1):
        num_parts = blocks * splits
        waves = -(-num_parts // num_sms)
        places = num_sms * waves
        shares.append(num_parts / places)
    return max(shares)


def all_reduce_time(num_bytes: float, num_devices: int, hardware: Hardware) -> float:
    """Compute the seconds in which `num_devices` devices sum `num_bytes` each; 0 for one device.
    Raises UserError if the links are unknown.

    Each sends its part to all others (one shot), or, after `two_shot_latency`, 2 (n - 1) times an
    n-th of it as in a ring; the faster of the two.
    """
    if num_devices == 1:
        return 0.0
    others = num_devices - 1
    beyond_two = num_devices - 2
    rate = hardware.link_rate / (1 + hardware.link_sharing * beyond_two)
    latency = hardware.link_latency + hardware.link_step * beyond_two
    one_shot = others * num_bytes / rate
    ring_share = 2 * others / num_devices
    ring = hardware.two_shot_latency + ring_share * num_bytes / rate
    return latency + min(one_shot, ring)
