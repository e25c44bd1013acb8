"""RMSNorm and LayerNorm, with the addition to the residual stream that comes before them."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from sarathi_kernels.runtime.checks import require_dtype
from sarathi_kernels.runtime.launch import launch

NormKind = Literal["rms", "layer"]
MAX_SIZE = 16_384  # a row lies in the registers of one program
ELEMENTS_PER_PROGRAM = 2048  # of rows shorter than that, a program takes several
ELEMENTS_PER_WARP = 512  # 16 a thread: two loads of 16 bytes of a 16-bit dtype


def add_norm(
    hidden: Tensor,  # [n, size] or [n, heads, size], of any strides but 1 in the last dimension
    update: Tensor | None,  # as `hidden`, of any strides but 1 in the last dimension
    weight: Tensor,  # [size]
    bias: Tensor | None,  # [size]
    eps: float,
    kind: NormKind,
    *,
    out: Tensor | None = None,  # as `hidden`, of any strides but 1 in the last dimension
) -> Tensor:
    """Add `update` to `hidden` in place; return the sum, normalised over its last dimension, in
    `out` or a new tensor.

    "rms" divides by the root of the mean square (arXiv 1910.07467), "layer" subtracts the mean and
    divides by the deviation (arXiv 1607.06450). The sum is rounded to the dtype first, as it is
    without this fusion; statistics are float32. `out` may be `hidden` itself where there is no
    update: queries and keys are normalised by head in place. Raises ValueError for shapes, dtypes
    or strides that do not match, or a size above 16,384.
    """
    _check(hidden, update, weight, bias, kind, out)
    if out is None:
        out = torch.empty(hidden.shape, device=hidden.device, dtype=hidden.dtype)
    if hidden.numel() == 0:
        return out
    size = hidden.shape[-1]
    num_inner = hidden.shape[1] if hidden.dim() == 3 else 1
    num_rows = hidden.shape[0] * num_inner
    block = triton.next_power_of_2(size)
    rows_block = max(1, ELEMENTS_PER_PROGRAM // block)
    launch(
        add_norm_kernel,
        (triton.cdiv(num_rows, rows_block),),
        hidden,
        update,
        weight,
        bias,
        out,
        num_rows,
        *_row_strides(hidden),
        *_row_strides(hidden if update is None else update),
        *_row_strides(out),
        eps,
        NUM_INNER=num_inner,
        SIZE=size,
        BLOCK=block,
        ROWS_BLOCK=rows_block,
        IS_RMS=kind == "rms",
        num_warps=max(1, min(16, rows_block * block // ELEMENTS_PER_WARP)),
    )
    return out


def add_norm_reference(
    hidden: Tensor,
    update: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    kind: NormKind,
) -> Tensor:
    """`add_norm` in plain torch."""
    if update is not None:
        hidden += update
    size = hidden.shape[-1:]
    wide_bias = None if bias is None else bias.float()
    if kind == "layer":
        return F.layer_norm(hidden.float(), size, weight.float(), wide_bias, eps).to(hidden.dtype)
    normalised = F.rms_norm(hidden.float(), size, weight.float(), eps)
    if wide_bias is not None:
        normalised += wide_bias
    return normalised.to(hidden.dtype)


def _row_strides(x: Tensor) -> tuple[int, int]:
    """Strides of the outer and of the inner row index."""
    if x.dim() == 3:
        return x.stride(0), x.stride(1)
    return x.stride(0), 0


def _check(
    hidden: Tensor,
    update: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    kind: str,
    out: Tensor | None,
) -> None:
    rows = [x for x in (hidden, update, out) if x is not None]
    vectors = [x for x in (weight, bias) if x is not None]
    require_dtype("add_norm", *rows, *vectors)
    if kind not in ("rms", "layer"):
        raise ValueError(f"unknown kind of norm {kind!r}; known: rms, layer")
    if hidden.dim() not in (2, 3) or hidden.shape[-1] > MAX_SIZE:
        raise ValueError(
            f"add_norm takes [n, size] or [n, heads, size] of size up to {MAX_SIZE}, not "
            f"{hidden.shape}"
        )
    if any(x.shape != hidden.shape or x.stride(-1) != 1 for x in rows):
        raise ValueError(
            f"shapes {[tuple(x.shape) for x in rows]} must be equal and contiguous in the last "
            "dimension"
        )
    if any(x.shape != hidden.shape[-1:] or x.stride(0) != 1 for x in vectors):
        raise ValueError(
            f"weight and bias {[tuple(x.shape) for x in vectors]} do not match "
            f"{tuple(hidden.shape)}"
        )


# Not specialized: another number of rows would make the engine stop to compile.
@triton.jit(do_not_specialize=["num_rows"])
def add_norm_kernel(
    hidden: tl.tensor,
    update: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    num_rows: tl.tensor,
    hidden_outer: tl.tensor,
    hidden_inner: tl.tensor,
    update_outer: tl.tensor,
    update_inner: tl.tensor,
    out_outer: tl.tensor,
    out_inner: tl.tensor,
    eps: tl.tensor,
    NUM_INNER: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS_BLOCK: tl.constexpr,
    IS_RMS: tl.constexpr,
) -> None:
    """ROWS_BLOCK whole rows."""
    row = tl.program_id(0) * ROWS_BLOCK + tl.arange(0, ROWS_BLOCK)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    outer = (row // NUM_INNER).to(tl.int64)  # offsets of late rows exceed 32 bits
    inner = row % NUM_INNER
    is_column = column < SIZE
    mask = (row < num_rows) & is_column

    hidden_at = hidden + outer * hidden_outer + inner * hidden_inner + column
    stored = tl.load(hidden_at, mask=mask, other=0.0)
    x = stored.to(tl.float32)
    if update is not None:
        update_at = update + outer * update_outer + inner * update_inner + column
        change = tl.load(update_at, mask=mask, other=0.0)
        # Rounded before it is normalised, as without fusion: the residual stream has this value.
        total = (x + change.to(tl.float32)).to(stored.dtype)
        tl.store(hidden_at, total, mask=mask)
        x = total.to(tl.float32)
    if not IS_RMS:
        mean = tl.sum(x, axis=1)[:, None] / SIZE
        # Padding must stay zero, which adds nothing to the variance.
        x = tl.where(is_column, x - mean, 0.0)
    variance = tl.sum(x * x, axis=1)[:, None] / SIZE
    scale = tl.load(weight + column, mask=is_column, other=0.0).to(tl.float32)
    y = x * tl.rsqrt(variance + eps) * scale
    if bias is not None:
        y += tl.load(bias + column, mask=is_column, other=0.0).to(tl.float32)
    out_at = out + outer * out_outer + inner * out_inner + column
    tl.store(out_at, y.to(stored.dtype), mask=mask)
