"""The floor: the least time that work can take on a device whose ceilings are known. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from sarathi_lab.model.spec import ModelSpec, Work

TILE = 128  # tokens of a tile of large matrix products on a GPU, in which they are computed (section 4.4)


@dataclass(frozen=True)
class Ceilings:
    """What a device can do at best, in FLOP/s and bytes/s, and where the figures are from."""

    flops_per_second: float
    bytes_per_second: float
    source: str

    def describe(self) -> str:
        """In words, such as "measured: 1.2 TFLOP/s, 20 GB/s"."""
        return f"{self.source}: {self.flops_per_second / 1e12:.3g} TFLOP/s, {self.bytes_per_second / 1e9:.3g} GB/s"


def floor_time(spec: ModelSpec, work: Work, dtype_bytes: int, ceilings: Ceilings) -> Any:
    """Seconds of the roofline floor of one iteration: max(FLOPs / peak, bytes / bandwidth).

    Elementwise if `work` holds arrays. Whole-iteration maximum, so it assumes perfect overlap of all operations.
    """
    compute = spec.flops(work) / ceilings.flops_per_second
    memory = spec.min_bytes(work, dtype_bytes) / ceilings.bytes_per_second
    return np.maximum(compute, memory)
