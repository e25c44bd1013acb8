"""What the tests of the Triton kernels share: where they run, the dtypes they take, and random tensors."""

from __future__ import annotations

import torch
from torch import Tensor

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# The interpreter rounds to bfloat16 wrongly: a carry out of the significand is lost.
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE.type == "cuda" else [])]
BOUNDS = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}  # on the relative error


def random(*sizes: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Standard normal values, the same on every device."""
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)
