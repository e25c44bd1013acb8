"""Rotary position embedding (RoFormer, arXiv 2104.09864), in the half-split layout that checkpoints
use.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rotary_tables(
    positions: Tensor, inverse_frequencies: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every angle, each [num_tokens, 1, rotary_size / 2]; angles are worked out
    in float32.
    """
    by_frequency = torch.outer(positions.float(), inverse_frequencies.float())
    angles = by_frequency[:, None]  # the same for all heads
    cos = angles.cos()
    sin = angles.sin()
    return cos.to(dtype), sin.to(dtype)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate `x` [num_tokens, heads, head_size] pairwise; returns a tensor of the same shape.

    Pairs are (j, j + rotary_size / 2) for j below rotary_size / 2; entries from rotary_size on stay
    as they are.
    """
    num_tokens, _, head_size = x.shape
    half = cos.shape[-1]
    rotary_size = 2 * half
    if rotary_size > head_size or len(cos) != num_tokens:
        raise ValueError(f"tables {tuple(cos.shape)} do not match {tuple(x.shape)}")
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    first = x[..., :half]
    second = x[..., half:rotary_size]
    out_first = out[..., :half]
    out_second = out[..., half:rotary_size]
    # Two passes per half straight into the result: on a CPU the memory of temporaries costs more
    # than the arithmetic.
    torch.mul(first, cos, out=out_first)
    out_first.addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=out_second)
    out_second.addcmul_(first, sin)
    out[..., rotary_size:] = x[..., rotary_size:]
    return out
