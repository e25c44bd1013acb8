"""What the tests of the Triton kernels share: where they run, the dtypes they take, and random
tensors.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sarathi_kernels.runtime.chip import chip_of
from sarathi_kernels.runtime.launch import recorded
from sarathi_kernels.runtime.testing import poisoned

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# The interpreter rounds to bfloat16 wrongly: a carry out of the significand is lost.
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE.type == "cuda" else [])]
BOUNDS = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}  # on the relative error


def random(*sizes: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Standard normal values, the same on every device."""
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def writes_beyond(work: Callable[[], Tensor], output: int) -> bool:
    """Whether the one kernel of `work` writes behind its argument number `output`, the tensor that
    `work` returns.
    """
    with recorded(chip_of(DEVICE)) as recording:
        out = work()
    (launch,) = recording.launches
    guarded = poisoned(out.numel() + 4096, device=DEVICE, dtype=out.dtype)
    arguments = [
        guarded if i == output else argument for i, argument in enumerate(launch.arguments)
    ]
    launch.kernel[launch.grid](*arguments, **launch.options)
    assert not guarded[: out.numel()].isnan().any()
    return not bool(guarded[out.numel() :].isnan().all())
