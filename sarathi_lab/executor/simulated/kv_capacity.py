"""Tokens of KV cache that devices hold beside a model's weights."""

from __future__ import annotations

from itertools import product

from sarathi_lab.config.errors import UserError
from sarathi_lab.executor.simulated.hardware import ONE_DEVICE, Hardware, Parallel
from sarathi_lab.model.spec import ModelSpec

MAX_TENSOR = 8  # devices of a node, the largest tensor-parallel degree to suggest


def kv_capacity(
    spec: ModelSpec,
    hardware: Hardware,
    dtype_bytes: int,
    parallel: Parallel = ONE_DEVICE,
    kv_tokens: int = 0,
) -> int:
    """Compute the tokens of KV cache that fit beside the weights, all spread evenly. Raises
    UserError if `kv_tokens` do not; it names the smallest sufficient number of devices.
    """
    weights, copies = spec.weight_bytes(dtype_bytes), parallel.cache_copies(spec)
    token_bytes = copies * spec.kv_bytes_per_token(dtype_bytes)
    memory, cache = parallel.num_devices * hardware.memory_bytes, kv_tokens * token_bytes
    if weights + cache > memory:
        alternative = _sufficient(spec, hardware, weights, cache / copies / parallel.pipeline)
        fix = "use cache.num_blocks=auto, lower batch, shorten the requests or max_model_len, or "
        raise UserError(
            f"model {spec.name} needs {weights / 1e9:.1f} GB for weights and {cache / 1e9:.1f} GB "
            f"for KV, memory of {parallel.num_devices} x {hardware.name} is {memory / 1e9:.0f} GB"
            f"{alternative}; {fix * (weights < memory)}take a smaller model or another hardware"
        )
    return int((memory - weights) // token_bytes)


def _sufficient(spec: ModelSpec, hardware: Hardware, weights: float, stage_cache: float) -> str:
    """Name the fewest devices that hold the model; each stage adds a micro-batch with its cache."""
    tensors = range(1, MAX_TENSOR + 1 if hardware.link_bytes_per_second else 2)
    pipelines = range(1, spec.num_layers + 1 if hardware.network_bytes_per_second else 2)
    fitting = []
    for tensor, pipeline in product(tensors, pipelines):
        layout = Parallel(tensor, pipeline)
        if layout.complaint(spec) is not None:
            continue
        caches = layout.cache_copies(spec) * pipeline * stage_cache
        if weights + caches <= layout.num_devices * hardware.memory_bytes:
            fitting.append(layout)
    if not fitting:
        return ""
    least = min(fitting, key=lambda layout: (layout.num_devices, layout.pipeline))
    return (
        f" ({least.num_devices} would do: executor.tensor_parallel={least.tensor} "
        f"executor.pipeline_parallel={least.pipeline})"
    )
