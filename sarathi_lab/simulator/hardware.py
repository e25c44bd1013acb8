"""A GPU in a few figures: datasheet peaks, and the share of them that real kernels reach."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from sarathi_lab.errors import UserError, require_int, require_number
from sarathi_lab.model.spec import ModelSpec

PEAK_DTYPE_BYTES = 2  # of the elements that `Hardware.flops_per_second` holds for
EFFICIENCIES = (
    "matmul_efficiency",
    "attention_efficiency",
    "causal_efficiency",
    "memory_efficiency",
    "kv_efficiency",
)
FIXED_COSTS = ("kernel_launch", "attention_launch", "iteration_overhead")
UNCERTAIN = ("matmul", "attention")  # the kinds of operation that `Hardware.uncertainty` speaks of


@dataclass(frozen=True)
class Hardware:
    """One device as `cost_model.CostModel` sees it; `conf/hardware/*.yaml` gives each figure's source.

    Peaks are dense 16-bit FLOP/s, bytes/s of memory and bytes of memory; `num_sms` multiprocessors share them. The
    efficiencies are the shares of a peak, in (0, 1], that real kernels reach in the best of shapes: of compute in
    matrix products (`matmul`), attention to the tokens before a chunk (`attention`) and within it (`causal`); of
    bandwidth in streaming (`memory`) and reading the KV cache (`kv`). Costs whatever the shape, in seconds: of a
    kernel (`kernel_launch`), of an attention call (`attention_launch`), of an iteration (`iteration_overhead`).
    `uncertainty` is the mean absolute relative error by kind of operation, on shapes that the fit did not see.
    `profiles` names tables of measured operation times (`profile.Profile`) by model, as paths from the repository.
    """

    name: str
    flops_per_second: float
    bytes_per_second: float
    memory_bytes: float
    num_sms: int
    matmul_efficiency: float
    attention_efficiency: float
    causal_efficiency: float
    memory_efficiency: float
    kv_efficiency: float
    kernel_launch: float
    attention_launch: float
    iteration_overhead: float
    # Costs are cached by hardware, and don't depend on the next two.
    uncertainty: Mapping[str, float] = field(compare=False)
    profiles: Mapping[str, str] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        fix = "correct the hardware file"
        require_int("hardware.num_sms", self.num_sms, 1, fix)
        for name in ("flops_per_second", "bytes_per_second", "memory_bytes"):
            require_number(f"hardware.{name}", getattr(self, name), above=0, fix=fix)
        for name in EFFICIENCIES:
            if require_number(f"hardware.{name}", getattr(self, name), above=0, fix=fix) > 1:
                raise UserError(f"hardware.{name}={getattr(self, name)} exceeds 1, the peak; {fix}")
        for name in FIXED_COSTS:
            require_number(f"hardware.{name}", getattr(self, name), minimum=0, fix="use seconds from 0")
        if not isinstance(self.uncertainty, Mapping) or set(self.uncertainty) != set(UNCERTAIN):
            raise UserError(f"hardware.uncertainty={self.uncertainty} does not map {' and '.join(UNCERTAIN)}; {fix}")
        for kind in UNCERTAIN:
            require_number(f"hardware.uncertainty.{kind}", self.uncertainty[kind], minimum=0, fix="use a share from 0")

    @property
    def memory_rate(self) -> float:
        """Bytes/s that streaming reaches."""
        return self.bytes_per_second * self.memory_efficiency

    @property
    def kv_rate(self) -> float:
        """Bytes/s at which attention reads the KV cache with all multiprocessors at work."""
        return self.bytes_per_second * self.kv_efficiency


def kv_capacity(spec: ModelSpec, hardware: Hardware, dtype_bytes: int) -> int:
    """Tokens of KV cache that fit one device beside the weights. Raises UserError if the weights alone do not."""
    check_memory(spec, hardware, dtype_bytes, kv_tokens=0)
    return int((hardware.memory_bytes - spec.weight_bytes(dtype_bytes)) // spec.kv_bytes_per_token(dtype_bytes))


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
