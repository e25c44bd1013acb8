"""Two ways to attend for the chunk and the decodes of a batch in one launch, which the engine does
not have until a GPU shows that they are faster than its kernels in series.

- unified: the prefill kernel, in which each decode is a tile of one query.
- fused: some programs work on tiles and others on decodes, so that on each multiprocessor
  memory-bound decodes run beside a compute-bound tile (the idea of POD-Attention, arXiv
  2410.18038).
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs
from triton.language.extra.cuda import smid

from sarathi_kernels.attention import decode, prefill
from sarathi_kernels.attention.decode import decode_attention, decode_config, dot_rows, make_scratch
from sarathi_kernels.attention.decode_part import attend_part
from sarathi_kernels.attention.kv_cache import Cache
from sarathi_kernels.attention.plan import AttentionPlan
from sarathi_kernels.attention.prefill import PrefillConfig, prefill_attention
from sarathi_kernels.attention.prefill_tile import attend_tile
from sarathi_kernels.attention.support import (
    LARGE_SHARED_MEMORY,
    LOG2_E,
    check_inputs,
)
from sarathi_kernels.runtime.chip import Chip, chip_of
from sarathi_kernels.runtime.launch import launch

PLAN_ARGUMENTS = sorted({*prefill.PLAN_ARGUMENTS, *decode.PLAN_ARGUMENTS, "num_parts"})


def unified_attention(
    query: Tensor,  # [num_tokens, num_heads, head_size], rows may be strided
    key_cache: Cache,  # [num_blocks, block_size, num_kv_heads, head_size]
    value_cache: Cache,  # [num_blocks, block_size, num_kv_heads, head_size]
    plan: AttentionPlan,
    scale: float,
    *,
    sliding_window: int | None = None,
    out: Tensor,  # [num_tokens, num_heads, head_size], rows may be strided
) -> None:
    """Write softmax(scale q k^T) v of all rows of `plan` to `out`, decodes last."""
    of_decodes = torch.nn.functional.pad(plan.decodes[:, None], (0, 1))
    plan = replace(plan, tiles=torch.cat([of_decodes, plan.tiles]))
    prefill_attention(
        query, key_cache, value_cache, plan, scale, sliding_window=sliding_window, out=out
    )


@triton.jit
def take_work(
    tickets: tl.tensor,
    sm: tl.tensor,
    num_tile_programs: tl.tensor,
    num_decode_programs: tl.tensor,
) -> tuple[tl.tensor, tl.tensor]:
    """Whether the program that asks works on a tile, and which one of its kind it takes.

    The programs of a multiprocessor `sm` alternate between tiles and decodes, in the order in which
    they ask; where a kind is used up, they take the other. `tickets` [2 + number of `sm`s] are all
    0 before the first program: tiles taken, decodes taken, programs begun on each. If there are as
    many programs as pieces of work, each piece is taken once in whatever order they ask: a program
    goes away from a kind only when that is used up, so none finds both used up but one too many.
    """
    is_tile = tl.atomic_add(tickets + 2 + sm, 1, sem="relaxed") % 2 == 0
    index = tl.atomic_add(tickets + tl.where(is_tile, 0, 1), 1, sem="relaxed")
    if index >= tl.where(is_tile, num_tile_programs, num_decode_programs):
        is_tile = not is_tile
        index = tl.atomic_add(tickets + tl.where(is_tile, 0, 1), 1, sem="relaxed")
    return is_tile, index


@triton.jit(do_not_specialize=PLAN_ARGUMENTS)
def fused_kernel(
    query: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    key_scales: tl.tensor,
    value_scales: tl.tensor,
    out: tl.tensor,
    partial: tl.tensor,
    log_sums: tl.tensor,
    tickets: tl.tensor,
    query_starts: tl.tensor,
    kv_lens: tl.tensor,
    block_table: tl.tensor,
    tiles: tl.tensor,
    parts: tl.tensor,
    num_tiles: tl.tensor,
    num_parts: tl.tensor,
    stride_query: tl.tensor,
    stride_out: tl.tensor,
    stride_block: tl.tensor,
    stride_slot: tl.tensor,
    stride_table: tl.tensor,
    window: tl.tensor,
    qk_scale: tl.tensor,
    NUM_SMS: tl.constexpr,
    HAS_SM_IDS: tl.constexpr,  # not in the interpreter
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
    """Grid: a program for each head of each part of a tile, and for each KV head of each part of a
    decode.
    """
    num_entries = num_tiles * TILE_PARTS
    num_heads = NUM_KV_HEADS * GROUP
    num_decode_programs = num_parts * NUM_KV_HEADS
    sm = (smid() if HAS_SM_IDS else tl.program_id(0)) % NUM_SMS
    is_tile, index = take_work(tickets, sm, num_entries * num_heads, num_decode_programs)
    if is_tile:
        entry = num_entries - 1 - index // num_heads
        sequence = tl.load(tiles + entry // TILE_PARTS * 2)
        first_row = tl.load(tiles + entry // TILE_PARTS * 2 + 1) + entry % TILE_PARTS * BLOCK_M
        if sequence >= 0:
            attend_tile(
                query, keys, values, key_scales, value_scales, out, query_starts, kv_lens,
                block_table,
                sequence, first_row, index % num_heads,
                stride_query, stride_out, stride_block, stride_slot, stride_table, window, qk_scale,
                GROUP, HEAD_SIZE, PADDED_SIZE, BLOCK_SIZE, BLOCK_M, BLOCK_N, HAS_WINDOW,
            )  # fmt: skip
    else:
        attend_part(
            query, keys, values, key_scales, value_scales, out, partial, log_sums, query_starts,
            kv_lens, block_table,
            parts, index // NUM_KV_HEADS, index % NUM_KV_HEADS,
            stride_query, stride_out, stride_block, stride_slot, stride_table, window, qk_scale,
            NUM_KV_HEADS, GROUP, ROWS, HEAD_SIZE, PADDED_SIZE, BLOCK_SIZE, DECODE_BLOCK_N,
            DECODE_STAGES,
            HAS_WINDOW, IS_SPLIT,
        )  # fmt: skip


def fused_config(chip: Chip, head_size: int, dtype: torch.dtype) -> PrefillConfig:
    """Tiles such that two programs fit on a multiprocessor, one of which may work on a decode."""
    wide = head_size > 128
    if dtype == torch.float32:
        return prefill.prefill_config(chip, head_size, dtype, 64)
    if chip.shared_memory >= LARGE_SHARED_MEMORY:
        return PrefillConfig(64, 16 if wide else 64, num_warps=4, num_stages=2 if wide else 3)
    return PrefillConfig(32 if wide else 64, 32, num_warps=4, num_stages=2)


def _fill_a_wave(query: Tensor, key_cache: Cache, plan: AttentionPlan) -> bool:
    """Whether heads of tiles and KV heads of decodes are both enough for all multiprocessors."""
    counts = (plan.num_tiles * query.shape[1], plan.num_decodes * key_cache.shape[2])
    return min(counts) >= chip_of(query.device).num_sms


def fused_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    plan: AttentionPlan,
    scale: float,
    *,
    sliding_window: int | None = None,
    out: Tensor,
) -> None:
    """As `unified_attention`; in series where the tiles or the decodes, of padding too, are fewer
    programs than there are multiprocessors: on some of them there would be nothing to overlap, and
    separate kernels have larger tiles. That is a rule of counting; none of it was measured.
    """
    if not _fill_a_wave(query, key_cache, plan):
        for attend in (prefill_attention, decode_attention):
            attend(
                query, key_cache, value_cache, plan, scale, sliding_window=sliding_window, out=out
            )
        return
    check_inputs(query, key_cache, value_cache, plan, scale, sliding_window, out)
    _, num_heads, head_size = query.shape
    block_size, num_kv_heads = key_cache.shape[1:3]
    group = num_heads // num_kv_heads
    chip = chip_of(query.device)
    tile = fused_config(chip, head_size, query.dtype)
    part = decode_config(chip, head_size, query.dtype, group)
    tile_parts = plan.tile_rows // tile.block_m
    scratch = make_scratch(query, plan)
    # Zeroed on the device, inside of captured graphs at every replay.
    tickets = torch.zeros(2 + chip.num_sms, dtype=torch.int32, device=query.device)
    is_half = query.dtype != torch.float32
    launch(
        fused_kernel,
        (plan.num_tiles * tile_parts * num_heads + plan.num_parts * num_kv_heads,),
        query, key_cache, value_cache, None, None, out, scratch.partial, scratch.log_sums, tickets,
        plan.query_starts, plan.kv_lens, plan.block_table, plan.tiles, plan.parts,
        plan.num_tiles, plan.num_parts,
        query.stride(0), out.stride(0), *key_cache.stride()[:2], plan.block_table.stride(0),
        sliding_window or 0, scale * LOG2_E,
        is_hot=is_half,
        uses_tensor_cores=is_half,
        NUM_SMS=chip.num_sms,
        HAS_SM_IDS=not knobs.runtime.interpret,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        ROWS=dot_rows(group),
        HEAD_SIZE=head_size,
        PADDED_SIZE=triton.next_power_of_2(head_size),
        BLOCK_SIZE=block_size,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        TILE_PARTS=tile_parts,
        DECODE_BLOCK_N=part.block_n,
        DECODE_STAGES=part.num_stages,
        HAS_WINDOW=sliding_window is not None,
        IS_SPLIT=len(plan.reductions) > 0,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )  # fmt: skip
    decode.reduce_parts(plan, scratch, out)
