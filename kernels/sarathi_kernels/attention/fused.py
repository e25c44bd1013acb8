"""Paged attention of a hybrid batch in one launch: some programs work on tiles of the chunk, others
on decodes, so that memory-bound decodes run on the multiprocessors where compute-bound tiles run.

The idea is POD-Attention's (arXiv 2410.18038), the assignment is not. There, a program asks on
which multiprocessor it has begun and draws a ticket from that multiprocessor's counter, which says
whether it takes prefill or decode: both meet everywhere, in whatever order the GPU hands programs
out. Here the host fixes the order of the programs (`interleave` in `plan.py`): waves of one program
for each multiprocessor, which are all tiles or all decodes. That needs no counter to be cleared
before each launch. It relies on two things that NVIDIA does not promise: that programs begin in the
order of their numbers, and that each multiprocessor gets one before any gets a second. Behind the
first waves a multiprocessor takes what comes next when something on it ends, so that the ratio of
tiles to decodes holds on average alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sarathi_kernels.attention import decode, prefill
from sarathi_kernels.attention.decode import decode_config, dot_rows, make_scratch, reduce_parts
from sarathi_kernels.attention.decode_part import attend_part
from sarathi_kernels.attention.paging import Cache, Rows, Sequences
from sarathi_kernels.attention.plan import AttentionPlan, interleave
from sarathi_kernels.attention.prefill import PrefillConfig, prefill_config
from sarathi_kernels.attention.prefill_tile import attend_tile
from sarathi_kernels.attention.support import (
    LARGE_SHARED_MEMORY,
    LOG2_E,
    SMALL_SHARED_MEMORY,
    check_inputs,
)
from sarathi_kernels.runtime.chip import Chip, chip_of
from sarathi_kernels.runtime.launch import launch

PROGRAMS_PER_SM = 2  # a tile, and a decode that reads its keys meanwhile
WAVE_ARGUMENTS = ["num_parts", "tile_waves", "part_waves"]
PLAN_ARGUMENTS = sorted({*prefill.PLAN_ARGUMENTS, *decode.PLAN_ARGUMENTS, *WAVE_ARGUMENTS})


@triton.jit
def place_in_order(
    program: tl.tensor,
    wave_size: tl.tensor,
    tile_waves: tl.tensor,
    part_waves: tl.tensor,
) -> tuple[tl.tensor, tl.tensor]:
    """Whether `program` works on a tile, and its number among those of its kind.

    Waves of either kind are spread over the waves of the other like the pixels of a sloping line:
    after w of all waves, w * part_waves / all of them were decodes'. The first is of tiles, the
    last of decodes, which are short.
    """
    wave = program // wave_size
    part_waves_before = wave * part_waves // (tile_waves + part_waves)
    part_waves_after = (wave + 1) * part_waves // (tile_waves + part_waves)
    is_tile = part_waves_before == part_waves_after
    waves_of_kind = tl.where(is_tile, wave - part_waves_before, part_waves_before)
    return is_tile, waves_of_kind * wave_size + program % wave_size


@triton.jit(do_not_specialize=PLAN_ARGUMENTS)
def fused_kernel(
    query: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    out: tl.tensor,
    partial: tl.tensor,
    log_sums: tl.tensor,
    query_starts: tl.tensor,
    kv_lens: tl.tensor,
    block_table: tl.tensor,
    tiles: tl.tensor,
    parts: tl.tensor,
    num_tiles: tl.tensor,
    num_parts: tl.tensor,
    tile_waves: tl.tensor,
    part_waves: tl.tensor,
    stride_query: tl.tensor,
    stride_out: tl.tensor,
    stride_block: tl.tensor,
    stride_slot: tl.tensor,
    stride_table: tl.tensor,
    window: tl.tensor,
    qk_scale: tl.tensor,
    WAVE_SIZE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PADDED_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TILE_PARTS: tl.constexpr,
    DECODE_BLOCK_N: tl.constexpr,
    DECODE_STAGES: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    IS_SPLIT: tl.constexpr,
) -> None:
    """Grid: whole waves of programs; the last of each kind has some without work."""
    is_tile, number = place_in_order(tl.program_id(0), WAVE_SIZE, tile_waves, part_waves)
    num_heads = NUM_KV_HEADS * GROUP
    queries = Rows(query, stride_query)
    cache = Cache(keys, values, stride_block, stride_slot)
    outputs = Rows(out, stride_out)
    sequences = Sequences(query_starts, kv_lens, block_table, stride_table)
    if is_tile:
        entry = num_tiles * TILE_PARTS - 1 - number // num_heads  # as in prefill_kernel
        if entry >= 0:
            attend_tile(
                entry, number % num_heads,
                queries, cache, outputs, sequences, tiles, window, qk_scale,
                GROUP, HEAD_SIZE, PADDED_SIZE, BLOCK_SIZE, BLOCK_M, BLOCK_N, TILE_PARTS, HAS_WINDOW,
                False,
            )  # fmt: skip
    else:
        part = number // NUM_KV_HEADS
        if part < num_parts:
            attend_part(
                part, number % NUM_KV_HEADS,
                queries, cache, outputs, partial, log_sums, sequences, parts, window, qk_scale,
                NUM_KV_HEADS, GROUP, ROWS, HEAD_SIZE, PADDED_SIZE, BLOCK_SIZE, DECODE_BLOCK_N,
                DECODE_STAGES, HAS_WINDOW, IS_SPLIT,
            )  # fmt: skip


def fused_config(chip: Chip, head_size: int, dtype: torch.dtype) -> PrefillConfig:
    """Small tiles, of which PROGRAMS_PER_SM fit on a multiprocessor of `chip`."""
    if dtype == torch.float32:
        return prefill_config(chip, head_size, dtype, tile_rows=64)
    if head_size > 128:
        num_stages = 1 if chip.shared_memory < SMALL_SHARED_MEMORY else 2
        return PrefillConfig(block_m=32, block_n=32, num_warps=4, num_stages=num_stages)
    if chip.shared_memory >= LARGE_SHARED_MEMORY:
        return PrefillConfig(block_m=64, block_n=64, num_warps=4, num_stages=3)
    return PrefillConfig(block_m=64, block_n=32, num_warps=4, num_stages=2)


def fused_attention(
    query: Tensor,  # [num_tokens, num_heads, head_size], rows may be strided
    key_cache: Tensor,  # [num_blocks, block_size, num_kv_heads, head_size]
    value_cache: Tensor,  # [num_blocks, block_size, num_kv_heads, head_size]
    plan: AttentionPlan,
    scale: float,
    *,
    sliding_window: int | None = None,
    out: Tensor,  # [num_tokens, num_heads, head_size], rows may be strided
) -> None:
    """Write softmax(scale q k^T) v of all rows of `plan` to `out`.

    A second, small launch joins the parts of contexts that are split. Raises ValueError for inputs
    that the kernel does not take (`check_inputs`).
    """
    check_inputs(query, key_cache, value_cache, plan, scale, sliding_window, out)
    num_heads, head_size = query.shape[1:]
    block_size, num_kv_heads = key_cache.shape[1:3]
    group = num_heads // num_kv_heads
    chip = chip_of(query.device)
    tile_config = fused_config(chip, head_size, query.dtype)
    part_config = decode_config(chip, head_size, query.dtype, group)
    tile_parts = plan.tile_rows // tile_config.block_m
    waves = interleave(
        plan.num_tiles * tile_parts * num_heads, plan.num_parts * num_kv_heads, chip.num_sms
    )
    if waves.num_programs == 0:
        return
    scratch = make_scratch(query, plan)
    is_half = query.dtype != torch.float32
    launch(
        fused_kernel,
        (waves.num_programs,),
        query, key_cache, value_cache, out, scratch.partial, scratch.log_sums,
        plan.query_starts, plan.kv_lens, plan.block_table, plan.tiles, plan.parts,
        plan.num_tiles, plan.num_parts, waves.of_tiles, waves.of_parts,
        query.stride(0), out.stride(0), *key_cache.stride()[:2], plan.block_table.stride(0),
        sliding_window or 0, scale * LOG2_E,
        is_hot=is_half,
        uses_tensor_cores=is_half,
        programs_per_sm=PROGRAMS_PER_SM if is_half else 1,
        WAVE_SIZE=waves.size,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        ROWS=dot_rows(group),
        HEAD_SIZE=head_size,
        PADDED_SIZE=triton.next_power_of_2(head_size),
        BLOCK_SIZE=block_size,
        BLOCK_M=tile_config.block_m,
        BLOCK_N=tile_config.block_n,
        TILE_PARTS=tile_parts,
        DECODE_BLOCK_N=part_config.block_n,
        DECODE_STAGES=part_config.num_stages,
        HAS_WINDOW=sliding_window is not None,
        IS_SPLIT=len(plan.reductions) > 0,
        num_warps=tile_config.num_warps,
        num_stages=tile_config.num_stages,
    )  # fmt: skip
    reduce_parts(plan, scratch, out)
