"""Checks that the public functions of the kernels share."""

from __future__ import annotations

import torch
from torch import Tensor

SUPPORTED_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def require_dtype(name: str, *tensors: Tensor) -> None:
    """Raise ValueError unless all tensors have one of the dtypes that kernels are written for, and
    the same one.
    """
    dtypes = {tensor.dtype for tensor in tensors}
    if len(dtypes) > 1 or not dtypes <= set(SUPPORTED_DTYPES):
        names = ", ".join(sorted(map(str, dtypes)))
        raise ValueError(
            f"{name} takes tensors of one dtype, float16, bfloat16 or float32; got {names}"
        )
