"""A GPU in a few figures: datasheet peaks, and the share of them that real kernels reach."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sarathi_lab.errors import UserError, require_int, require_number
from sarathi_lab.model.spec import ModelSpec

PEAK_DTYPE_BYTES = 2  # of the elements that `Hardware.flops_per_second` holds for


@dataclass(frozen=True)
class Hardware:
    """One device as `cost_model.CostModel` sees it; `conf/hardware/*.yaml` gives each figure's source.

    Peaks are dense 16-bit FLOP/s, bytes/s of memory and bytes of memory. The efficiencies are the shares of a peak,
    in (0, 1], that matrix products, attention and memory traffic reach. Matrix products run in tiles of `tile`
    tokens (section 4.4), and each iteration costs `iteration_overhead` seconds whatever it does.
    """

    name: str
    flops_per_second: float
    bytes_per_second: float
    memory_bytes: float
    tile: int
    matmul_efficiency: float
    attention_efficiency: float
    memory_efficiency: float
    iteration_overhead: float

    def __post_init__(self) -> None:
        fix = "correct the hardware file"
        require_int("hardware.tile", self.tile, 1, fix)
        for name in ("flops_per_second", "bytes_per_second", "memory_bytes"):
            require_number(f"hardware.{name}", getattr(self, name), above=0, fix=fix)
        for name in ("matmul_efficiency", "attention_efficiency", "memory_efficiency"):
            if require_number(f"hardware.{name}", getattr(self, name), above=0, fix=fix) > 1:
                raise UserError(f"hardware.{name}={getattr(self, name)} exceeds 1, the peak; {fix}")
        require_number("hardware.iteration_overhead", self.iteration_overhead, minimum=0, fix="use seconds from 0")


def check_memory(spec: ModelSpec, hardware: Hardware, dtype_bytes: int, kv_tokens: int) -> None:
    """Raise UserError if the weights and a KV cache of `kv_tokens` tokens exceed the memory of one device."""
    weights = spec.weight_bytes(dtype_bytes)
    cache = kv_tokens * spec.kv_bytes_per_token(dtype_bytes)
    if weights + cache > hardware.memory_bytes:
        num_devices = math.ceil((weights + cache) / hardware.memory_bytes)
        raise UserError(
            f"model {spec.name} needs {weights / 1e9:.1f} GB for weights and {cache / 1e9:.1f} GB for KV, one "
            f"{hardware.name} has {hardware.memory_bytes / 1e9:.0f} GB ({num_devices} would do); lower batch, "
            "shorten the requests or max_model_len, or take a smaller model or another hardware"
        )
