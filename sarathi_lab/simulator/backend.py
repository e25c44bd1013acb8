"""A device that is only computed: hardware figures, a cost model and a virtual clock. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from sarathi_lab.backend import Predictor
from sarathi_lab.errors import UserError
from sarathi_lab.executor import Executor
from sarathi_lab.floor import Ceilings
from sarathi_lab.model.spec import DTYPE_BYTES, ModelSpec
from sarathi_lab.simulator.cost_model import make_cost_model
from sarathi_lab.simulator.executor import SimulatedExecutor
from sarathi_lab.simulator.hardware import PEAK_DTYPE_BYTES, Hardware, check_memory
from sarathi_lab.simulator.matmul import TILE_ROWS

DEFAULT_DTYPE = "float16"  # the paper's figures fit 2-byte elements


@dataclass(frozen=True)
class SimulatedBackend:
    """Predicts times of `hardware`; token ids are not computed."""

    name: ClassVar[str] = "simulated"
    computes_tokens: ClassVar[bool] = False
    default_model: ClassVar[str] = "13b"
    hardware: Hardware
    dtype: str = "auto"
    cost_model: str = "analytic"

    def __post_init__(self) -> None:
        valid = ["auto", *(name for name, size in DTYPE_BYTES.items() if size == PEAK_DTYPE_BYTES)]
        if self.dtype not in valid:
            known = self.dtype in DTYPE_BYTES
            why = "can't be simulated, as the hardware files hold 16-bit peaks" if known else "is unknown"
            raise UserError(f"dtype={self.dtype} {why}; use one of {', '.join(valid)}")

    @property
    def device_name(self) -> str:
        return f"simulated {self.hardware.name}"

    @property
    def dtype_name(self) -> str:
        return DEFAULT_DTYPE if self.dtype == "auto" else self.dtype

    @property
    def dtype_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype_name]

    def check(self, spec: ModelSpec, kv_tokens: int) -> None:
        """Raise UserError if weights and cache do not fit the hardware's memory, or nothing is known of the model."""
        check_memory(spec, self.hardware, self.dtype_bytes, kv_tokens)
        self.predictor(spec)

    def ceilings(self) -> Ceilings:
        """The datasheet's peaks."""
        hardware = self.hardware
        return Ceilings(hardware.flops_per_second, hardware.bytes_per_second, f"datasheet of {hardware.name}")

    def predictor(self, spec: ModelSpec) -> Predictor:
        """The cost model of the hardware."""
        cost = make_cost_model(self.cost_model, spec, self.hardware, self.dtype_bytes)
        return Predictor(cost.operation_times, TILE_ROWS)

    def build(
        self, spec: ModelSpec, checkpoint: Path | None, *, num_blocks: int, block_size: int, batch_size: int
    ) -> Executor:
        """The virtual clock over the cost model; cache and batch sizes cost nothing here."""
        return SimulatedExecutor(self.predictor(spec))
