"""Paged attention of decodes: one query a sequence, its context split over programs
(Flash-Decoding).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from sarathi_kernels.attention.decode_part import attend_part
from sarathi_kernels.attention.paging import Cache, Rows, Sequences
from sarathi_kernels.attention.plan import MAX_PARTS, AttentionPlan
from sarathi_kernels.attention.support import (
    LOG2_E,
    SMALL_SHARED_MEMORY,
    check_inputs,
)
from sarathi_kernels.runtime.chip import Chip, chip_of
from sarathi_kernels.runtime.launch import launch
from sarathi_kernels.runtime.tuned import tuned

PLAN_ARGUMENTS = [
    "query_starts",
    "kv_lens",
    "block_table",
    "parts",
    "stride_table",
    "window",
]
MIN_DOT_ROWS = 16  # of a matrix instruction


@triton.jit(do_not_specialize=PLAN_ARGUMENTS)
def decode_kernel(
    query: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    out: tl.tensor,
    partial: tl.tensor,
    log_sums: tl.tensor,
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
    """Grid: KV heads, which lie side by side in the cache, then parts."""
    attend_part(
        tl.program_id(1), tl.program_id(0),
        Rows(query, stride_query),
        Cache(keys, values, stride_block, stride_slot),
        Rows(out, stride_out),
        partial, log_sums,
        Sequences(query_starts, kv_lens, block_table, stride_table),
        parts, window, qk_scale,
        NUM_KV_HEADS, GROUP, ROWS, HEAD_SIZE, PADDED_SIZE, BLOCK_SIZE, BLOCK_N, STAGES, HAS_WINDOW,
        IS_SPLIT,
    )  # fmt: skip


@triton.jit(do_not_specialize=["query_starts", "reductions"])
def reduce_kernel(
    partial: tl.tensor,
    log_sums: tl.tensor,
    out: tl.tensor,
    query_starts: tl.tensor,
    reductions: tl.tensor,
    stride_out: tl.tensor,
    HEAD_SIZE: tl.constexpr,
    PADDED_SIZE: tl.constexpr,
    MAX_PARTS: tl.constexpr,  # of a context, a power of two
) -> None:
    """Grid: heads, then split decodes. Joins the parts of one head's context, weighted by their
    sums.
    """
    head = tl.program_id(0)
    reduction = tl.program_id(1)
    sequence = tl.load(reductions + reduction * 3)
    if sequence >= 0:
        count = tl.load(reductions + reduction * 3 + 2)
        splits = tl.arange(0, MAX_PARTS)
        dims = tl.arange(0, PADDED_SIZE)
        first_part = tl.load(reductions + reduction * 3 + 1)
        # Rows of `partial` lie part by part, in each a row for every head.
        rows = (first_part + splits) * tl.num_programs(0) + head
        log_sum = tl.load(log_sums + rows, mask=splits < count, other=float("-inf"))
        exists = (splits[:, None] < count) & (dims[None, :] < HEAD_SIZE)
        parts = tl.load(partial + rows[:, None] * HEAD_SIZE + dims[None, :], mask=exists, other=0.0)
        # Each part is normalised by its own sum: weighted by these sums, whose logarithms are
        # shifted by the largest so that no power overflows. Some part has a visible key.
        share = tl.math.exp2(log_sum - tl.max(log_sum, 0))
        attended = tl.sum(parts * share[:, None], 0) / tl.sum(share, 0)
        row = tl.load(query_starts + sequence).to(tl.int64)
        pointers = out + row * stride_out + head * HEAD_SIZE + dims
        tl.store(pointers, attended.to(out.dtype.element_ty), mask=dims < HEAD_SIZE)


@dataclass(frozen=True)
class DecodeConfig:
    """How a part is worked on: keys at a time, warps, stages of the load pipeline."""

    block_n: int
    num_warps: int
    num_stages: int


def decode_config(chip: Chip, head_size: int, dtype: torch.dtype, group: int) -> DecodeConfig:
    """The configuration for `group` heads a KV head: enough bytes in flight, few enough that
    several programs fit.

    A stage holds the keys and values of block_n tokens. As measured (`tuned`), or else by rules.
    """
    measured = tuned("decode", chip, head_size, dtype, group)
    if measured is not None:
        return DecodeConfig(*measured)
    bytes_per_token = triton.next_power_of_2(head_size) * dtype.itemsize
    # A tile of keys has as many bytes for each head size and type: wide heads get fewer tokens.
    if group == 1:
        return DecodeConfig(block_n=8192 // bytes_per_token, num_warps=4, num_stages=3)
    # Before a matrix product, the pipeline holds a second tile of keys and values from five stages
    # on.
    tile_bytes = 8192 if chip.shared_memory < SMALL_SHARED_MEMORY else 16384
    return DecodeConfig(block_n=max(16, tile_bytes // bytes_per_token), num_warps=4, num_stages=5)


@dataclass(frozen=True)
class Scratch:
    """Results of the parts of contexts: normalised values and log2 of the softmax's sums; one
    element if no context may be split.
    """

    partial: Tensor  # [num_parts, num_heads, head_size] float32
    log_sums: Tensor  # [num_parts, num_heads] float32


def make_scratch(query: Tensor, plan: AttentionPlan) -> Scratch:
    """Room for the parts of `plan`'s decodes; torch's allocator hands it out inside graph capture,
    too.
    """
    _, num_heads, head_size = query.shape
    parts = (plan.num_parts, num_heads) if len(plan.reductions) else (1, 1)
    partial = torch.empty(*parts, head_size, device=query.device, dtype=torch.float32)
    return Scratch(partial, torch.empty(parts, device=query.device, dtype=torch.float32))


def dot_rows(group: int) -> int:
    """Rows that `group` heads of one KV head take: those of a matrix product, unless there is one
    head only.
    """
    return 1 if group == 1 else max(MIN_DOT_ROWS, triton.next_power_of_2(group))


def decode_attention(
    query: Tensor,  # [num_tokens, num_heads, head_size], rows may be strided
    key_cache: Tensor,  # [num_blocks, block_size, num_kv_heads, head_size]
    value_cache: Tensor,  # [num_blocks, block_size, num_kv_heads, head_size]
    plan: AttentionPlan,
    scale: float,
    *,
    sliding_window: int | None = None,
    out: Tensor,  # [num_tokens, num_heads, head_size], rows may be strided
    scratch: Scratch | None = None,
    config: DecodeConfig | None = None,
) -> None:
    """Write softmax(scale q k^T) v of the rows of `plan.decodes` to `out`; other rows stay as they
    are.

    `scratch` (made for this query and plan) may be passed in to be reused. Raises ValueError for
    inputs that the kernel does not take (`check_inputs`).
    """
    check_inputs(query, key_cache, value_cache, plan, scale, sliding_window, out)
    if plan.num_decodes == 0:
        return
    _, num_heads, head_size = query.shape
    block_size, num_kv_heads = key_cache.shape[1:3]
    group = num_heads // num_kv_heads
    config = config or decode_config(chip_of(query.device), head_size, query.dtype, group)
    scratch = scratch or make_scratch(query, plan)
    launch(
        decode_kernel,
        (num_kv_heads, plan.num_parts),
        query, key_cache, value_cache, out, scratch.partial, scratch.log_sums,
        plan.query_starts, plan.kv_lens, plan.block_table, plan.parts,
        query.stride(0), out.stride(0), *key_cache.stride()[:2], plan.block_table.stride(0),
        sliding_window or 0, scale * LOG2_E,
        is_hot=query.dtype != torch.float32,
        uses_tensor_cores=group > 1 and query.dtype != torch.float32,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        ROWS=dot_rows(group),
        HEAD_SIZE=head_size,
        PADDED_SIZE=triton.next_power_of_2(head_size),
        BLOCK_SIZE=block_size,
        BLOCK_N=config.block_n,
        STAGES=config.num_stages,
        HAS_WINDOW=sliding_window is not None,
        IS_SPLIT=len(plan.reductions) > 0,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )  # fmt: skip
    reduce_parts(plan, scratch, out)


def reduce_parts(plan: AttentionPlan, scratch: Scratch, out: Tensor) -> None:
    """Join the parts of the decodes' contexts in `out`; nothing where all contexts are
    whole.
    """
    if len(plan.reductions) == 0:
        return
    _, num_heads, head_size = out.shape
    launch(
        reduce_kernel,
        (num_heads, len(plan.reductions)),
        scratch.partial,
        scratch.log_sums,
        out,
        plan.query_starts,
        plan.reductions,
        out.stride(0),
        HEAD_SIZE=head_size,
        PADDED_SIZE=triton.next_power_of_2(head_size),
        MAX_PARTS=MAX_PARTS,
        num_warps=4,
        num_stages=1,
    )
