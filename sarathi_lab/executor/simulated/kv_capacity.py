"""Tokens of KV cache that devices hold beside a model's weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product

from sarathi_lab.config.errors import UserError
from sarathi_lab.engine.served_system import DeviceMemory, ServerSetup
from sarathi_lab.executor.simulated.hardware import ONE_DEVICE, WEIGHTS, Hardware, Parallel
from sarathi_lab.model.activations import iteration_bytes
from sarathi_lab.model.quantisation import STORED
from sarathi_lab.model.spec import ModelSpec, StoredDtype

MAX_TENSOR = 8  # devices of a node, the largest tensor-parallel degree to suggest
GIB = 2**30
# Of the driver's context on one device, and with the buffers of communication on several that share
# a layer, larger over fast links: vLLM's "non-torch memory" (experiments/lab/cache_sizes).
LIBRARIES = 0.25 * GIB
SHARING_LIBRARIES = 0.55 * GIB
FAST_LINK_LIBRARIES = 2.1 * GIB
FAST_LINK = 400e9  # bytes/s: NVLink of Hopper and later, which have further kernels of all-reduces
FEWER_BITS: tuple[StoredDtype, ...] = ("fp8", "mxfp4", "nvfp4", "int4")  # of usual checkpoints
GRAPH_BYTES = 7.5 * 2**20  # of vLLM's CUDA graphs of all sizes, by layer: 0.23 GiB for 32 layers


def device_memory(
    spec: ModelSpec, hardware: Hardware, dtype_bytes: int, parallel: Parallel, setup: ServerSetup
) -> DeviceMemory:
    """Return the memory of a device of the stage with the most beside its cache: the last, which
    samples.
    """
    libraries = LIBRARIES
    if parallel.tensor > 1:
        is_fast = (hardware.link_bytes_per_second or 0.0) >= FAST_LINK
        libraries = FAST_LINK_LIBRARIES if is_fast else SHARING_LIBRARIES
    tokens = setup.token_budget
    sequences = setup.num_sequences
    return DeviceMemory(
        total=hardware.memory_bytes,
        weights=parallel.device_weight_bytes(spec, dtype_bytes),
        libraries=libraries,
        iteration=iteration_bytes(spec, tokens, sequences, dtype_bytes, parallel.tensor),
        graphs=GRAPH_BYTES * parallel.layers_per_stage(spec),
        token_budget=tokens,
        num_devices=parallel.num_devices,
    )


def served_tokens(
    spec: ModelSpec,
    hardware: Hardware,
    dtype_bytes: int,
    setup: ServerSetup,
    parallel: Parallel = ONE_DEVICE,
) -> int:
    """Compute the tokens of cache that a server has there by its rule. Raises UserError for none.
    The device with the least room decides for all.
    """

    def device_of(spec: ModelSpec) -> DeviceMemory:
        return device_memory(spec, hardware, dtype_bytes, parallel, setup)

    def tokens_of(spec: ModelSpec) -> int:
        num_bytes = setup.cache_bytes(device_of(spec))
        return tokens_in(spec, num_bytes, dtype_bytes, parallel, setup.rule.window_pool)

    num_tokens = tokens_of(spec)
    if num_tokens < 1:
        device = device_of(spec)
        more = "" if setup.share is None else "raise cache.memory_share, "
        raise UserError(
            f"model {spec.name} leaves no room for KV on each of {parallel.num_devices} x "
            f"{hardware.name}: {setup.describe(device)}; {more}"
            f"{_fewer_bits(spec, lambda smaller: tokens_of(smaller) >= 1)}take more "
            f"devices ({_more_devices(parallel)}), a smaller model or another hardware"
        )
    return num_tokens


def tokens_in(
    spec: ModelSpec,
    num_bytes: float,
    dtype_bytes: int,
    parallel: Parallel = ONE_DEVICE,
    window_pool: float | None = None,
) -> int:
    """Compute the tokens of a cache of `num_bytes` on each device."""
    token_bytes = parallel.cache_bytes_per_token(spec, dtype_bytes, window_pool)
    return int(num_bytes // (token_bytes / parallel.pipeline))


def check_room(
    spec: ModelSpec,
    hardware: Hardware,
    dtype_bytes: int,
    parallel: Parallel = ONE_DEVICE,
    kv_tokens: int = 0,
    window_pool: float | None = None,
) -> None:
    """Raise UserError unless `kv_tokens` of stated cache, spread evenly over the stages, fit beside
    the weights of the largest stage, with nothing kept for a server's iterations. It names the
    smallest sufficient number of devices.
    """
    weights = _weights_of_stages(spec, parallel, dtype_bytes)
    token_bytes = parallel.cache_bytes_per_token(spec, dtype_bytes, window_pool)
    cache = kv_tokens * parallel.tensor * token_bytes
    memory = parallel.num_devices * hardware.memory_bytes
    if weights + cache <= memory:
        return

    def fits(smaller: ModelSpec) -> bool:
        return _weights_of_stages(smaller, parallel, dtype_bytes) + cache <= memory

    alternative = _sufficient(
        spec, hardware, dtype_bytes, kv_tokens / parallel.pipeline, window_pool
    )
    of_stages = " (each stage as the largest)" if parallel.pipeline > 1 else ""
    less_cache = ""
    if weights < memory:
        less_cache = (
            "use cache.num_blocks=auto, lower batch, shorten the requests or max_model_len, or "
        )
    raise UserError(
        f"model {spec.name} needs {weights / 1e9:.1f} GB for weights{of_stages} and "
        f"{cache / 1e9:.1f} GB for KV, memory of {parallel.num_devices} x {hardware.name} is "
        f"{memory / 1e9:.0f} GB{alternative}; {less_cache}"
        f"{_fewer_bits(spec, fits)}"
        "take a smaller model or another hardware"
    )


def _weights_of_stages(spec: ModelSpec, parallel: Parallel, dtype_bytes: int) -> float:
    """Return the bytes of weights on all devices if each had as many as one of the largest stage,
    which has the embedding or the output head.
    """
    return parallel.num_devices * parallel.device_weight_bytes(spec, dtype_bytes)


def _more_devices(parallel: Parallel) -> str:
    """Name a setting of twice the devices, or of a node's."""
    if parallel.tensor < MAX_TENSOR:
        return f"executor.tensor_parallel={MAX_TENSOR}"
    return f"executor.pipeline_parallel={2 * parallel.pipeline}"


def _fewer_bits(spec: ModelSpec, fits: Callable[[ModelSpec], bool]) -> str:
    """Name the weights with which a model `fits` whose weights are not quantised: those that its
    authors publish, else of usual checkpoints.
    """
    if spec.stored is not None:
        return ""
    usual = spec.usual_weights
    if usual != "auto" and fits(replace(spec, weight_dtype=usual)):
        return f"state its weights as published by {WEIGHTS}={usual}, "
    fitting = []
    for name in FEWER_BITS:
        is_of_model = STORED[name].of != "experts" or spec.num_experts > 0
        if is_of_model and fits(replace(spec, weight_dtype=name)):
            fitting.append(name)
    if not fitting:
        return ""
    names = " or ".join(fitting)
    return f"state the weights of a quantised checkpoint by {WEIGHTS}={names}, "


def _sufficient(
    spec: ModelSpec,
    hardware: Hardware,
    dtype_bytes: int,
    stage_tokens: float,
    window_pool: float | None,
) -> str:
    """Name the fewest devices that hold the model; each stage adds a micro-batch with its cache of
    `stage_tokens`.
    """
    # Without a link, or a network, devices can't share a layer, or the layers.
    max_tensor = MAX_TENSOR if hardware.link_bytes_per_second else 1
    max_pipeline = spec.num_layers if hardware.network_bytes_per_second else 1
    fitting = []
    for tensor, pipeline in product(range(1, max_tensor + 1), range(1, max_pipeline + 1)):
        layout = Parallel(tensor, pipeline)
        if layout.complaint(spec) is not None:
            continue
        bytes_on_device = layout.cache_bytes_per_token(spec, dtype_bytes, window_pool)
        # In bytes of all devices together:
        cache_bytes = pipeline * stage_tokens * tensor * bytes_on_device
        weight_bytes = _weights_of_stages(spec, layout, dtype_bytes)
        memory_bytes = layout.num_devices * hardware.memory_bytes
        if weight_bytes + cache_bytes <= memory_bytes:
            fitting.append(layout)
    if not fitting:
        return ""
    smallest = min(fitting, key=lambda layout: (layout.num_devices, layout.pipeline))
    return (
        f" ({smallest.num_devices} would do: executor.tensor_parallel={smallest.tensor} "
        f"executor.pipeline_parallel={smallest.pipeline})"
    )
