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
    angles = positions[:, None].float() * inverse_frequencies.float()[None, :]
    return angles.cos().to(dtype)[:, None], angles.sin().to(dtype)[:, None]


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate `x` [num_tokens, heads, head_size] pairwise; returns a tensor of the same shape.

    Pairs are (j, j + rotary_size / 2) for j below rotary_size / 2; entries from rotary_size on stay
    as they are.
    """
    half = cos.shape[-1]
    if x.shape[-1] < 2 * half or len(cos) != len(x):
        raise ValueError(f"tables {tuple(cos.shape)} do not match {tuple(x.shape)}")
    first, second, rest = x.split((half, half, x.shape[-1] - 2 * half), dim=-1)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    # Two passes per half straight into the result: on a CPU the memory of temporaries costs more
    # than the arithmetic.
    torch.mul(first, cos, out=out[..., :half]).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=out[..., half : 2 * half]).addcmul_(first, sin)
    out[..., 2 * half :] = rest
    return out
