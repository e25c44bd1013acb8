"""What the simulator asks of a cost model, and the two levels that there are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, Protocol, get_args

from sarathi_lab.config.errors import UserError, require_one_of
from sarathi_lab.config.paths import REPOSITORY
from sarathi_lab.engine.request import Batch
from sarathi_lab.executor.simulated.analytic import AnalyticCostModel
from sarathi_lab.executor.simulated.hardware import ONE_DEVICE, Hardware, Parallel
from sarathi_lab.executor.simulated.profile import Profile, ProfiledCostModel
from sarathi_lab.model.spec import ModelSpec

Level = Literal["analytic", "profiled"]
OperationTimes = Callable[[Batch], dict[str, float]]  # seconds by operation

# Operations by kind, as the paper's figures call them. What is in none is overhead.
KINDS: Mapping[str, tuple[str, ...]] = {
    "preproj": ("qkv_proj",),
    "attn": ("prefill_attention", "decode_attention", "kv_write"),
    "postproj": ("out_proj",),
    "ffn": ("ffn_up", "ffn_down", "activation", "ffn"),
    "elementwise": ("norms", "elementwise"),
    "others": ("lm_head", "sampling", "logits", "overhead", "others"),
    "communication": ("all_reduce", "send", "swap"),
}


class CostModel(Protocol):
    """Seconds of an iteration on some device."""

    @property
    def uncertainty(self) -> Mapping[str, float]:
        """Mean relative error of "matmul" and "attention" on shapes that nothing was fitted to."""

    def iteration_time(self, batch: Batch) -> float: ...

    def operation_times(self, batch: Batch) -> dict[str, float]:
        """Seconds by operation, summed over layers."""


def make_cost_model(
    level: str,
    spec: ModelSpec,
    hardware: Hardware,
    dtype_bytes: int,
    parallel: Parallel = ONE_DEVICE,
) -> CostModel:
    """The cost model of one device, or of those that `parallel` spreads the model over.

    Raises UserError for a level that is unknown, has no table for the model or its cache, or can't
    spread it.
    """
    require_one_of("executor.cost_model", level, get_args(Level))
    if level == "analytic":
        return AnalyticCostModel(spec, hardware, dtype_bytes, parallel)
    if parallel.num_devices > 1:
        raise UserError(
            f"executor.cost_model=profiled holds for one device, not for {parallel.description}; "
            "use executor.cost_model=analytic, or tensor_parallel=1 and pipeline_parallel=1"
        )
    if spec.kv_dtype != "auto":
        raise UserError(
            "executor.cost_model=profiled holds for a cache in the model's own type, in which it "
            f"was measured, not for cache.dtype={spec.kv_dtype}; use executor.cost_model=analytic, "
            "or cache.dtype=auto"
        )
    if spec.name not in hardware.profiles:
        raise UserError(
            f"executor.cost_model=profiled: hardware {hardware.name} has no profile of model "
            f"{spec.name} (it has: {', '.join(hardware.profiles) or 'none'}); measure one on the "
            "device with task=calibrate, or use executor.cost_model=analytic"
        )
    rate = hardware.host_bytes_per_second
    seconds = rate and spec.kv_bytes_per_token(dtype_bytes) / rate
    return ProfiledCostModel(Profile.read(REPOSITORY / hardware.profiles[spec.name]), seconds)
