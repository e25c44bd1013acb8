"""Paged attention of prefill chunks: tiles of one sequence's queries against its cached context.

One program attends for one head of one tile with an online softmax (FlashAttention-2, arXiv
2307.08691). The keys that every query of the tile sees go through a loop without masks; only the
diagonal, the end of the context and the lower edge of a sliding window are masked. Longer contexts
come first, so that the last programs to end are short ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from sarathi_kernels.attention.paging import Cache, Rows, Sequences
from sarathi_kernels.attention.plan import AttentionPlan
from sarathi_kernels.attention.prefill_tile import attend_tile
from sarathi_kernels.attention.support import (
    LARGE_SHARED_MEMORY,
    LOG2_E,
    SMALL_SHARED_MEMORY,
    check_inputs,
)
from sarathi_kernels.runtime.chip import Chip, chip_of
from sarathi_kernels.runtime.launch import launch
from sarathi_kernels.runtime.tuned import tuned

# Triton 3.6 waits for the scores of the next keys before the softmax that they should run beside.
CAN_COMPUTE_AHEAD = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 7)

# Launching must not compile again because a plan's tensors start elsewhere in their buffer or its
# sizes change.
PLAN_ARGUMENTS = [
    "query_starts",
    "kv_lens",
    "block_table",
    "tiles",
    "stride_table",
    "num_tiles",
    "window",
]


@triton.jit(do_not_specialize=PLAN_ARGUMENTS)
def prefill_kernel(
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
    num_tiles: tl.tensor,
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
    """Grid: heads, then the parts of tiles from the last to the first."""
    attend_tile(
        num_tiles * TILE_PARTS - 1 - tl.program_id(1), tl.program_id(0),
        Rows(query, stride_query),
        Cache(keys, values, stride_block, stride_slot),
        Rows(out, stride_out),
        Sequences(query_starts, kv_lens, block_table, stride_table),
        tiles, window, qk_scale,
        GROUP, HEAD_SIZE, PADDED_SIZE, BLOCK_SIZE, BLOCK_M, BLOCK_N, TILE_PARTS, HAS_WINDOW, AHEAD,
    )  # fmt: skip


@dataclass(frozen=True)
class PrefillConfig:
    """How a tile is worked on: queries and keys at a time, warps, stages of the load pipeline, and
    whether scores are computed `ahead` of the softmax (see `attend_keys`).
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    ahead: bool = False


def prefill_config(
    chip: Chip,
    head_size: int,
    dtype: torch.dtype,
    tile_rows: int,
    *,
    has_window: bool = False,
) -> PrefillConfig:
    """The configuration for tiles of `tile_rows` queries; its block_m divides them.

    As measured (`tuned`), or else chosen such that nothing spills and the stages fit the chip's
    shared memory.
    """
    measured = tuned("prefill", chip, head_size, dtype, tile_rows)
    if measured is not None and not has_window:
        block_m, block_n, num_warps, num_stages, ahead = measured
        return PrefillConfig(block_m, block_n, num_warps, num_stages, bool(ahead))
    wide = head_size > 128
    if dtype == torch.float32:  # matrix products without tensor cores: only their registers count
        block_m = min(tile_rows, 32)
        if wide:
            return PrefillConfig(block_m, 16, num_warps=8, num_stages=1)
        return PrefillConfig(block_m, 32, num_warps=4, num_stages=1)
    largest_block = 64 if wide else 128
    block_m = min(tile_rows, largest_block)
    num_warps = 8 if block_m == 128 or wide else 4
    if CAN_COMPUTE_AHEAD and chip.is_hopper and block_m == 128 and not has_window:
        # One such program fills a multiprocessor: nothing else multiplies while its softmax works
        # alone. Twice the keys spill, as there are two tiles of scores; with a window, the compiler
        # waits for each product.
        return PrefillConfig(block_m, 64, num_warps, num_stages=3, ahead=True)
    if chip.shared_memory >= LARGE_SHARED_MEMORY:
        block_n = 64 if wide or block_m == 64 else 128
        return PrefillConfig(block_m, block_n, num_warps, num_stages=3)
    # Without wgmma, the pipeline holds a second tile of keys and values from five stages on.
    block_n = 32 if num_warps == 4 or wide or has_window else 64
    num_stages = 2 if wide and chip.shared_memory < SMALL_SHARED_MEMORY else 5
    return PrefillConfig(block_m, block_n, num_warps, num_stages)


def prefill_attention(
    query: Tensor,  # [num_tokens, num_heads, head_size], rows may be strided
    key_cache: Tensor,  # [num_blocks, block_size, num_kv_heads, head_size]
    value_cache: Tensor,  # [num_blocks, block_size, num_kv_heads, head_size]
    plan: AttentionPlan,
    scale: float,
    *,
    sliding_window: int | None = None,
    out: Tensor,  # [num_tokens, num_heads, head_size], rows may be strided
    config: PrefillConfig | None = None,
) -> None:
    """Write softmax(scale q k^T) v of the rows of `plan.tiles` to `out`; other rows stay as they
    are. Raises ValueError for inputs that the kernel does not take (`check_inputs`).
    """
    check_inputs(query, key_cache, value_cache, plan, scale, sliding_window, out)
    num_heads, head_size = query.shape[1:]
    block_size, num_kv_heads = key_cache.shape[1:3]
    if config is None:
        config = prefill_config(
            chip_of(query.device),
            head_size,
            query.dtype,
            plan.tile_rows,
            has_window=sliding_window is not None,
        )
    tile_parts = plan.tile_rows // config.block_m
    if plan.num_tiles == 0:
        return
    is_half = query.dtype != torch.float32
    launch(
        prefill_kernel,
        (num_heads, plan.num_tiles * tile_parts),
        query, key_cache, value_cache, out, plan.query_starts, plan.kv_lens,
        plan.block_table, plan.tiles,
        query.stride(0), out.stride(0), *key_cache.stride()[:2], plan.block_table.stride(0),
        plan.num_tiles, sliding_window or 0, scale * LOG2_E,
        is_hot=is_half,
        uses_tensor_cores=is_half,
        GROUP=num_heads // num_kv_heads,
        HEAD_SIZE=head_size,
        PADDED_SIZE=triton.next_power_of_2(head_size),
        BLOCK_SIZE=block_size,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        TILE_PARTS=tile_parts,
        HAS_WINDOW=sliding_window is not None,
        AHEAD=config.ahead,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )  # fmt: skip
