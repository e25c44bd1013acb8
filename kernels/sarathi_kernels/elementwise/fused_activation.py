"""Activations of the feed-forward block in one pass over the first product's output; references in
`activation.py`.
"""

from __future__ import annotations

from typing import get_args

import torch
import triton
import triton.language as tl
from torch import Tensor

from sarathi_kernels.elementwise.activation import Activation
from sarathi_kernels.runtime.checks import require_dtype
from sarathi_kernels.runtime.launch import launch

COLUMNS_PER_PROGRAM = 1024  # eight a thread of four warps: 16 bytes of a 16-bit dtype a load


def gated_activation(gate_up: Tensor, activation: Activation) -> Tensor:
    """act(gate) * up of `gate_up` [n, 2 * size], gates first, rows of any stride; returns a new [n,
    size].

    Worked out in float32 and rounded once. Raises ValueError for an unknown activation, dtype or
    shape.
    """
    _check(gate_up, activation)
    num_rows, both = gate_up.shape
    if both % 2:
        raise ValueError(f"gates and ups side by side need an even number of columns, not {both}")
    size = both // 2
    out = torch.empty((num_rows, size), device=gate_up.device, dtype=gate_up.dtype)
    if out.numel():
        launch(
            gated_activation_kernel,
            (num_rows, triton.cdiv(size, COLUMNS_PER_PROGRAM)),
            gate_up,
            out,
            gate_up.stride(0),
            size,
            ACTIVATION=activation,
            BLOCK=COLUMNS_PER_PROGRAM,
            num_warps=4,
        )
    return out


def activation_(x: Tensor, activation: Activation) -> Tensor:
    """act(x) in place for `x` [n, size], rows of any stride; returns `x`. Raises ValueError as
    `gated_activation`.
    """
    _check(x, activation)
    num_rows, size = x.shape
    if x.numel():
        launch(
            activation_kernel,
            (num_rows, triton.cdiv(size, COLUMNS_PER_PROGRAM)),
            x,
            x.stride(0),
            size,
            ACTIVATION=activation,
            BLOCK=COLUMNS_PER_PROGRAM,
            num_warps=4,
        )
    return x


def _check(x: Tensor, activation: str) -> None:
    require_dtype("an activation", x)
    if activation not in get_args(Activation):
        raise ValueError(
            f"unknown activation {activation!r}; known: {', '.join(get_args(Activation))}"
        )
    if x.dim() != 2 or x.stride(1) != 1:
        raise ValueError(
            f"an activation takes [n, size] with contiguous rows, not {tuple(x.shape)} of "
            f"{x.stride()}"
        )


@triton.jit
def _activated(x: tl.tensor, ACTIVATION: tl.constexpr) -> tl.tensor:
    """act(x) of float32."""
    if ACTIVATION == "silu":
        y = x * tl.sigmoid(x)
    elif ACTIVATION == "gelu":
        y = 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))
    else:  # gelu by tanh (arXiv 1606.08415, section 2): (1 + tanh u) / 2 is the sigmoid of 2u
        y = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    return y


@triton.jit
def gated_activation_kernel(
    gate_up: tl.tensor,
    out: tl.tensor,
    row_stride: tl.tensor,
    size: tl.tensor,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """BLOCK columns of one row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < size
    gate = tl.load(gate_up + row * row_stride + column, mask=mask)
    up = tl.load(gate_up + row * row_stride + size + column, mask=mask)
    y = _activated(gate.to(tl.float32), ACTIVATION) * up.to(tl.float32)
    tl.store(out + row * size + column, y.to(gate.dtype), mask=mask)


@triton.jit
def activation_kernel(
    x: tl.tensor,
    row_stride: tl.tensor,
    size: tl.tensor,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """BLOCK columns of one row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < size
    before = tl.load(x + row * row_stride + column, mask=mask)
    y = _activated(before.to(tl.float32), ACTIVATION)
    tl.store(x + row * row_stride + column, y.to(before.dtype), mask=mask)
