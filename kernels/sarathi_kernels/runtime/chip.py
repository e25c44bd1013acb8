"""What a kernel's launch configuration depends on: the GPU it is for. Imports neither Triton nor
the lab.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache

import torch

MIN_CAPABILITY = 80  # Ampere: bf16 tensor cores and asynchronous copies


@dataclass(frozen=True)
class Chip:
    """A GPU: compute capability as 10 * major + minor, multiprocessors, bytes of shared memory that
    a block may use.
    """

    capability: int
    num_sms: int
    shared_memory: int

    @property
    def is_hopper(self) -> bool:
        """Whether it has wgmma and the tensor memory accelerator as sm_90 has them."""
        return self.capability == 90


# NVIDIA's tuning guides: the largest shared memory of a block after opting in.
CHIPS = {
    80: Chip(80, num_sms=108, shared_memory=166_912),  # A100
    89: Chip(89, num_sms=128, shared_memory=101_376),  # RTX 4090
    90: Chip(90, num_sms=132, shared_memory=232_448),  # H100, H200
    100: Chip(100, num_sms=148, shared_memory=232_448),  # B200
    120: Chip(120, num_sms=170, shared_memory=101_376),  # RTX 5090
}

_assumed: ContextVar[Chip | None] = ContextVar("assumed_chip", default=None)


@contextmanager
def assumed(chip: Chip) -> Iterator[None]:
    """Let launches be configured for `chip`, whatever the tensors lie on: to compile for it, or in
    the interpreter.
    """
    token = _assumed.set(chip)
    try:
        yield
    finally:
        _assumed.reset(token)


def chip_of(device: torch.device) -> Chip:
    """The chip that holds `device`'s tensors; without a GPU the assumed one, else an H200."""
    chip = _assumed.get()
    if chip is not None:
        return chip
    return _cuda_chip(device.index or 0) if device.type == "cuda" else CHIPS[90]


@lru_cache
def _cuda_chip(index: int) -> Chip:
    properties = torch.cuda.get_device_properties(index)
    return Chip(
        capability=10 * properties.major + properties.minor,
        num_sms=properties.multi_processor_count,
        shared_memory=properties.shared_memory_per_block_optin,  # type: ignore[attr-defined]  # not in the stub
    )
