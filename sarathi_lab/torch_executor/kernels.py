"""Whether Triton's kernels can do a model's work on a device, and their way into it. Triton is imported when asked."""

from __future__ import annotations

import os
from typing import get_args

import torch

from sarathi_lab.errors import UserError
from sarathi_lab.model.operations import Hybrid
from sarathi_lab.model.spec import ModelSpec
from sarathi_lab.model.transformer import Transformer

HYBRIDS = get_args(Hybrid)
FIX = "use executor.kernels=torch"


def is_interpreting() -> bool:
    """Whether kernels run in Triton's interpreter, which needs no GPU and has no hurry."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def require_supported(spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> None:
    """Raise UserError unless the kernels run on `device`, and take the model's heads and `dtype`."""
    try:
        from sarathi_kernels.attention_support import check_supported
        from sarathi_kernels.chip import chip_of
        from sarathi_kernels.support import probe, require_chip
    except ImportError as error:
        raise UserError(f"Triton is not installed ({error}); {FIX}") from None
    try:
        check_supported(spec.head_size, dtype, block_size=1)  # they take blocks of any size
        require_chip(chip_of(device))
        if device.type == "cuda":
            probe(device)
    except ValueError as error:
        raise UserError(f"model {spec.name}: {error}; {FIX}") from None


def install(model: Transformer, hybrid: Hybrid) -> None:
    """Let kernels do what is between the model's matrix products."""
    from sarathi_lab.model.kernel_operations import KernelOperations

    model.operations = KernelOperations(model.spec, model.inverse_frequencies, hybrid)
