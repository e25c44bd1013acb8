"""Whether the Triton kernels can run on a device, asked before weights are loaded. Imports without
Triton.
"""

from __future__ import annotations

import torch

from sarathi_kernels.runtime.chip import MIN_CAPABILITY, Chip
from sarathi_kernels.runtime.launch import launch

PROBED = 21.0  # any number whose double a kernel that did not run cannot leave


def require_chip(chip: Chip, name: str = "the GPU") -> None:
    """Raise ValueError, one line that says what `name` is and what is needed, for a GPU older than
    the kernels need.
    """
    if chip.capability < MIN_CAPABILITY:
        raise ValueError(
            f"{name} has compute capability {_version(chip.capability)}; the Triton kernels need "
            f"{_version(MIN_CAPABILITY)} (Ampere) or newer"
        )


def _version(capability: int) -> str:
    return f"{capability // 10}.{capability % 10}"


def probe(device: torch.device) -> None:
    """Compile and run one tiny kernel on `device`.

    Raises ValueError, one line with the cause, where that fails in any way: no Triton, no C
    compiler or headers, a GPU that this Triton does not know; torch.OutOfMemoryError for no memory.
    """
    try:
        result = doubled(device)
    except torch.OutOfMemoryError:
        raise
    # what Triton raises is not documented, and none of it may reach the user as a trace
    except Exception as error:
        raise ValueError(
            f"Triton can't compile and run a kernel on {device} ({_cause(error)})"
        ) from error
    if result != 2 * PROBED:
        raise ValueError(f"Triton's kernel on {device} gave {result:g} for {2 * PROBED:g}")


def doubled(device: torch.device) -> float:
    """Twice `PROBED`, by a kernel."""
    from sarathi_kernels.runtime.probe_kernel import (
        double,  # here, as this file must import without Triton
    )

    value = torch.full((1,), PROBED, device=device)
    launch(double, (1,), value)
    return float(value.item())


def _cause(error: Exception) -> str:
    """The first line of the message, with the type, as many are only a name or a number."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}".rstrip(".;")
