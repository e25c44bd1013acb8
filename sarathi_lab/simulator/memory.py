"""Whether a model and its cache fit the memory of the devices that it is spread over, and which would do."""

from __future__ import annotations

import math

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
    if weights + cache <= parallel.num_devices * hardware.memory_bytes:
        return
    num_devices = math.ceil((weights + cache) / hardware.memory_bytes)
    memory = hardware.memory_bytes / 1e9
    have = (
        f"one {hardware.name} has {memory:.0f} GB"
        if parallel.num_devices == 1
        else f"{parallel.num_devices} {hardware.name} have {parallel.num_devices * memory:.0f} GB"
    )
    raise UserError(
        f"model {spec.name} needs {weights / 1e9:.1f} GB for weights and {cache / 1e9:.1f} GB for KV, {have} "
        f"({num_devices} would do); lower batch, shorten the requests or max_model_len, take a smaller model or "
        f"another hardware{_suggestion(spec, hardware, weights, cache / parallel.pipeline)}"
    )


def _suggestion(spec: ModelSpec, hardware: Hardware, weights: float, cache_per_stage: float) -> str:
    """The settings of the fewest devices that hold the model, the tensors cut first; a stage brings its own cache."""
    fitting = [
        Parallel(tensor, pipeline)
        for tensor in range(1, MAX_TENSOR + 1)
        for pipeline in range(1, spec.num_layers + 1)
        if Parallel(tensor, pipeline).divides(spec)
        and weights + pipeline * cache_per_stage <= tensor * pipeline * hardware.memory_bytes
    ]
    if not fitting:
        return ""
    best = min(fitting, key=lambda parallel: (parallel.num_devices, parallel.pipeline))
    return (
        f", or spread it over {best.num_devices} devices: executor.tensor_parallel={best.tensor} "
        f"executor.pipeline_parallel={best.pipeline}"
    )
