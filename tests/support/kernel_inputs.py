"""What the tests of the Triton kernels share: where they run, the dtypes they take, and inputs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sarathi_kernels.elementwise.rotary import rotary_tables

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# The interpreter rounds to bfloat16 wrongly: a carry out of the significand is lost.
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE.type == "cuda" else [])]
BOUNDS = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}  # on the relative error


def random(*sizes: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Standard normal values, the same on every device."""
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


@dataclass(frozen=True)
class RotaryCase:
    """Heads and sizes of one call of `rotate_and_store`."""

    num_tokens: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    rotary_size: int
    block_size: int = 16


ROTARY_CASES = [
    RotaryCase(1, 40, 40, 128, 128),
    RotaryCase(3, 8, 2, 64, 64),
    RotaryCase(5, 4, 1, 80, 80, block_size=5),
    RotaryCase(3, 6, 2, 96, 96),
    RotaryCase(2, 3, 3, 256, 64),
    RotaryCase(7, 2, 1, 80, 20),
    RotaryCase(4, 1, 1, 6, 2),
    RotaryCase(17, 2, 2, 10, 10, block_size=1),
]


def rotary_inputs(case: RotaryCase, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """qkv (rows further apart than they are long), cosines, sines and scattered slots of which one
    is padding.
    """
    all_heads = case.num_heads + 2 * case.num_kv_heads
    qkv = random(case.num_tokens, all_heads + 1, case.head_size, dtype=dtype)[:, :all_heads]
    positions = torch.arange(case.num_tokens, device=DEVICE, dtype=torch.int32) * 8191
    frequencies = 1e4 ** -(torch.arange(0, case.rotary_size, 2, device=DEVICE) / case.rotary_size)
    cos, sin = rotary_tables(positions, frequencies, torch.float32)
    slots = torch.randperm(
        2 * case.num_tokens * case.block_size, generator=torch.Generator().manual_seed(1)
    )
    slots = slots[: case.num_tokens].to(DEVICE)
    if case.num_tokens > 1:
        slots[1] = -1
    return qkv, cos, sin, slots
