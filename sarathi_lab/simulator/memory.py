"""Whether a model and its cache fit the memory of the devices that it is spread over, and which would do."""

from __future__ import annotations

from sarathi_lab.errors import UserError
from sarathi_lab.model.spec import ModelSpec
from sarathi_lab.simulator.hardware import Hardware
from sarathi_lab.simulator.parallel import Parallel

MAX_TENSOR = 8  # devices of a node; a suggestion goes no further within a layer


def check_memory(
    spec: ModelSpec, hardware: Hardware, dtype_bytes: int, kv_tokens: int, parallel: Parallel | None = None
) -> None:
    """Raise UserError if the weights and a KV cache of `kv_tokens` tokens exceed the memory of the devices.

    Both are taken to be spread evenly. The message names the least number of devices that would do.
    """
    parallel = parallel or Parallel()
    weights = spec.weight_bytes(dtype_bytes)
    cache = kv_tokens * spec.kv_bytes_per_token(dtype_bytes)
    num_devices = parallel.num_devices
    if weights + cache <= num_devices * hardware.memory_bytes:
        return
    devices = f"one {hardware.name} has" if num_devices == 1 else f"{num_devices} {hardware.name} have"
    advice = _advice(spec, hardware, weights, cache / parallel.pipeline)
    raise UserError(
        f"model {spec.name} needs {weights / 1e9:.1f} GB for weights and {cache / 1e9:.1f} GB for KV, {devices} "
        f"{num_devices * hardware.memory_bytes / 1e9:.0f} GB{advice}; lower batch, shorten the requests or "
        "max_model_len, or take a smaller model or another hardware"
    )


def kv_capacity(spec: ModelSpec, hardware: Hardware, dtype_bytes: int, parallel: Parallel | None = None) -> int:
    """Tokens of KV cache that fit the devices beside the weights. Raises UserError if the weights alone do not."""
    parallel = parallel or Parallel()
    check_memory(spec, hardware, dtype_bytes, 0, parallel)
    free = parallel.num_devices * hardware.memory_bytes - spec.weight_bytes(dtype_bytes)
    return int(free // spec.kv_bytes_per_token(dtype_bytes))


def _advice(spec: ModelSpec, hardware: Hardware, weights: float, cache_per_stage: float) -> str:
    """The fewest devices that hold the model, and their settings; a stage brings a micro-batch, so its own cache."""
    max_tensor = MAX_TENSOR if hardware.link_bytes_per_second else 1
    max_pipeline = spec.num_layers if hardware.network_bytes_per_second else 1
    fitting = [
        parallel
        for tensor in range(1, max_tensor + 1)
        for pipeline in range(1, max_pipeline + 1)
        if (parallel := Parallel(tensor, pipeline)).divides(spec)
        and weights + pipeline * cache_per_stage <= parallel.num_devices * hardware.memory_bytes
    ]
    if not fitting:
        return ""
    best = min(fitting, key=lambda parallel: (parallel.num_devices, parallel.pipeline))
    return (
        f" ({best.num_devices} would do: executor.tensor_parallel={best.tensor} "
        f"executor.pipeline_parallel={best.pipeline})"
    )
