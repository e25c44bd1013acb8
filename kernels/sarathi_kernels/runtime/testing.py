"""What tests and benchmarks of all kernels share: one error metric, poisoned outputs."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def relative_error(out: Tensor, reference: Tensor) -> float:
    """‖out - reference‖ / ‖reference‖ in float64; infinite where `out` has an element that is not a
    number.
    """
    if out.shape != reference.shape:
        raise ValueError(f"shapes {tuple(out.shape)} and {tuple(reference.shape)} differ")
    if not torch.isfinite(out).all():
        return math.inf
    wide_reference = reference.double()
    error = (out.double() - wide_reference).norm()
    size = wide_reference.norm().clamp_min(1e-30)
    return float(error / size)


def poisoned(*sizes: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """A tensor of NaN: what a kernel leaves unwritten, or reads without need, shows."""
    return torch.full(sizes, math.nan, device=device, dtype=dtype)
