"""Rows in e4m3 with a scale each, for products in 8 bits, in one pass; the reference is `quantize`
of `attention/kv_cache.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sarathi_kernels.attention.eight_bit import quantized, scale_of
from sarathi_kernels.runtime.checks import require_dtype
from sarathi_kernels.runtime.launch import launch

LARGEST_BLOCK = 4096  # columns at a time: 16 a thread


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return `x` [n, size], rows of any stride, as float8_e4m3fn [n, size] and its float32 scales
    [n]. The scale of a row with an entry that is not finite is no number.
    """
    require_dtype("quantize_rows", x)
    if x.dim() != 2 or x.stride(1) != 1:
        raise ValueError(
            f"quantize_rows takes [n, size] with contiguous rows, not {tuple(x.shape)} of "
            f"{x.stride()}"
        )
    num_rows, size = x.shape
    out = torch.empty(x.shape, device=x.device, dtype=torch.float8_e4m3fn)
    scales = torch.empty(num_rows, device=x.device, dtype=torch.float32)
    if out.numel():
        block = min(triton.next_power_of_2(size), LARGEST_BLOCK)
        launch(
            quantize_rows_kernel, (num_rows,), x, out.view(torch.uint8), scales, x.stride(0),
            SIZE=size, BLOCK=block, num_warps=8,
        )  # fmt: skip
    return out, scales


@triton.jit
def quantize_rows_kernel(
    x: tl.tensor,
    out: tl.tensor,
    scales: tl.tensor,
    row_stride: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One row, read twice: the second time from the cache."""
    row = tl.program_id(0).to(tl.int64)
    largest = tl.zeros([BLOCK], tl.float32)
    poison = tl.zeros([BLOCK], tl.float32)
    for first in range(0, SIZE, BLOCK):
        column = first + tl.arange(0, BLOCK)
        entries = tl.load(x + row * row_stride + column, mask=column < SIZE, other=0.0)
        largest = tl.maximum(largest, tl.abs(entries.to(tl.float32)))
        poison += 0.0 * entries.to(tl.float32)
    scale = scale_of(tl.max(largest, 0), tl.sum(poison, 0), tl.uint8)
    inverse = tl.where(scale > 0, 1 / scale, 0.0)
    tl.store(scales + row, scale)
    for first in range(0, SIZE, BLOCK):
        column = first + tl.arange(0, BLOCK)
        entries = tl.load(x + row * row_stride + column, mask=column < SIZE, other=0.0)
        steps = quantized(entries.to(tl.float32) * inverse, tl.uint8)
        tl.store(out + row * SIZE + column, steps, mask=column < SIZE)
