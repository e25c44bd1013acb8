"""Paged attention of a hybrid batch, the chunk and the decodes of one iteration, in four
interchangeable ways.

- series: the prefill kernel, then the decode kernel.
- streams: the same two kernels side by side on two CUDA streams.
- unified: one launch of the prefill kernel, in which each decode is a tile of one query.
- fused: one launch, of which some programs work on tiles and others on decodes, so that on each
  multiprocessor
  memory-bound decodes run beside a compute-bound tile (the idea of POD-Attention, arXiv
  2410.18038).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal, get_args

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
    entries_and_scales,
)
from sarathi_kernels.runtime.chip import Chip, chip_of
from sarathi_kernels.runtime.launch import launch

Variant = Literal["series", "streams", "unified", "fused"]
DEFAULT_VARIANT: Variant = (
    "series"  # its kernels have the best tiles each; the others wait for a measurement
)

PLAN_ARGUMENTS = sorted({*prefill.PLAN_ARGUMENTS, *decode.PLAN_ARGUMENTS, "num_parts"})


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
                GROUP, HEAD_SIZE, PADDED_SIZE, BLOCK_SIZE, BLOCK_M, BLOCK_N, HAS_WINDOW, False,
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


def fused_config(
    chip: Chip, head_size: int, dtype: torch.dtype, *, is_8_bit: bool = False
) -> PrefillConfig:
    """Tiles such that two programs fit on a multiprocessor, one of which may work on a decode."""
    wide = head_size > 128
    if dtype == torch.float32:
        return prefill.prefill_config(chip, head_size, dtype, 64)
    if chip.shared_memory >= LARGE_SHARED_MEMORY:
        block_n = 16 if wide else 32 if is_8_bit else 64
        return PrefillConfig(64, block_n, num_warps=4, num_stages=2 if wide else 3)
    return PrefillConfig(32 if wide else 64, 16 if is_8_bit else 32, num_warps=4, num_stages=2)


def hybrid_attention(
    query: Tensor,  # [num_tokens, num_heads, head_size], rows may be strided
    key_cache: Cache,  # [num_blocks, block_size, num_kv_heads, head_size]
    value_cache: Cache,  # [num_blocks, block_size, num_kv_heads, head_size]
    plan: AttentionPlan,
    scale: float,
    *,
    variant: Variant = DEFAULT_VARIANT,
    sliding_window: int | None = None,
    out: Tensor,  # [num_tokens, num_heads, head_size], rows may be strided
) -> None:
    """Write softmax(scale q k^T) v of all rows of `plan` to `out`, whichever way `variant` names.

    "fused" is done in series where the tiles or the decodes, of padding too, are fewer programs
    than there are multiprocessors: on some of them there would be nothing to overlap, and separate
    kernels have larger tiles. That is a rule of counting; none of it was measured.

    Raises ValueError for an unknown variant and for inputs that the kernels do not take
    (`check_inputs`).
    """
    if variant not in get_args(Variant):
        raise ValueError(
            f"unknown variant {variant!r} of hybrid attention: choose one of {get_args(Variant)}"
        )
    inputs = (query, key_cache, value_cache, plan, scale)
    if variant == "unified":
        prefill_attention(*inputs, sliding_window=sliding_window, out=out, with_decodes=True)
    elif (
        plan.num_tiles == 0
        or plan.num_decodes == 0
        or variant == "series"
        or (variant == "fused" and not _fill_a_wave(query, key_cache, plan))
    ):
        prefill_attention(*inputs, sliding_window=sliding_window, out=out)
        decode_attention(*inputs, sliding_window=sliding_window, out=out)
    elif variant == "streams":
        _attend_on_streams(*inputs, sliding_window, out)
    else:
        _attend_fused(*inputs, sliding_window, out)


def _fill_a_wave(query: Tensor, key_cache: Cache, plan: AttentionPlan) -> bool:
    """Whether heads of tiles and KV heads of decodes are both enough for all multiprocessors."""
    counts = (plan.num_tiles * query.shape[1], plan.num_decodes * key_cache.shape[2])
    return min(counts) >= chip_of(query.device).num_sms


@lru_cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    # With priority, decodes take the places that the tiles leave instead of waiting behind all of
    # them.
    return torch.cuda.Stream(device, priority=-1)


def _attend_on_streams(
    query: Tensor,
    key_cache: Cache,
    value_cache: Cache,
    plan: AttentionPlan,
    scale: float,
    sliding_window: int | None,
    out: Tensor,
) -> None:
    """Decodes on a separate stream, joined to the current one by events; without CUDA, one
    after the other.
    """
    inputs = (query, key_cache, value_cache, plan, scale)
    if query.device.type != "cuda":
        decode_attention(*inputs, sliding_window=sliding_window, out=out)
        prefill_attention(*inputs, sliding_window=sliding_window, out=out)
        return
    current, side = torch.cuda.current_stream(query.device), _side_stream(query.device)
    side.wait_stream(current)
    with torch.cuda.stream(side):
        decode_attention(*inputs, sliding_window=sliding_window, out=out)
    prefill_attention(*inputs, sliding_window=sliding_window, out=out)
    current.wait_stream(side)


def _attend_fused(
    query: Tensor,
    key_cache: Cache,
    value_cache: Cache,
    plan: AttentionPlan,
    scale: float,
    sliding_window: int | None,
    out: Tensor,
) -> None:
    check_inputs(query, key_cache, value_cache, plan, scale, sliding_window, out)
    (keys, key_scales), (values, value_scales) = (
        entries_and_scales(key_cache),
        entries_and_scales(value_cache),
    )
    _, num_heads, head_size = query.shape
    block_size, num_kv_heads = key_cache.shape[1:3]
    group = num_heads // num_kv_heads
    chip = chip_of(query.device)
    tile = fused_config(chip, head_size, query.dtype, is_8_bit=key_scales is not None)
    part = decode_config(chip, head_size, query.dtype, group)
    tile_parts = plan.tile_rows // tile.block_m
    scratch = make_scratch(query, plan)
    # Zeroed on the device, inside of captured graphs at every replay.
    tickets = torch.zeros(2 + chip.num_sms, dtype=torch.int32, device=query.device)
    is_half = query.dtype != torch.float32
    launch(
        fused_kernel,
        (plan.num_tiles * tile_parts * num_heads + plan.num_parts * num_kv_heads,),
        query,
        keys,
        values,
        key_scales,
        value_scales,
        out,
        scratch.partial,
        scratch.log_sums,
        tickets,
        plan.query_starts,
        plan.kv_lens,
        plan.block_table,
        plan.tiles,
        plan.parts,
        plan.num_tiles,
        plan.num_parts,
        query.stride(0),
        out.stride(0),
        keys.stride(0),
        keys.stride(1),
        plan.block_table.stride(0),
        sliding_window or 0,
        scale * LOG2_E,
        is_hot=is_half
        and key_scales
        is None,  # what 8 bits are converted in takes registers that both halves lack
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
    )
    decode.reduce_parts(plan, scratch, out)
