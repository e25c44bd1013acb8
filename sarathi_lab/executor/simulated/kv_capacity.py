"""Tokens of KV cache that devices hold beside a model's weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

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
MOST_SPARE = 2  # times the devices that a model fills, the most to suggest
GRAPH_BYTES = 7.5 * 2**20  # of vLLM's CUDA graphs of all sizes, by layer: 0.23 GiB for 32 layers


def device_memory(
    spec: ModelSpec,
    hardware: Hardware,
    dtype_bytes: int,
    parallel: Parallel,
    setup: ServerSetup,
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
        iteration=iteration_bytes(
            spec,
            tokens,
            sequences,
            dtype_bytes,
            parallel.tensor,
        ),
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

    def tokens_of(spec: ModelSpec, layout: Parallel) -> int:
        device = device_memory(
            spec,
            hardware,
            dtype_bytes,
            layout,
            setup,
        )
        num_bytes = setup.cache_bytes(device)
        return tokens_in(
            spec,
            num_bytes,
            dtype_bytes,
            layout,
            setup.rule.window_pool,
        )

    def fits(spec: ModelSpec, layout: Parallel) -> bool:
        return tokens_of(spec, layout) >= setup.token_budget

    num_tokens = tokens_of(spec, parallel)
    if num_tokens >= 1:
        return num_tokens
    device = device_memory(
        spec,
        hardware,
        dtype_bytes,
        parallel,
        setup,
    )
    remedies = _remedies(
        spec,
        hardware,
        spec.weight_bytes(dtype_bytes),
        parallel,
        fits,
    )
    if setup.share is not None:
        remedies.insert(0, "raise cache.memory_share")
    raise UserError(
        f"model {spec.name} leaves no room for KV on each of {parallel.num_devices} x "
        f"{hardware.name}: {setup.describe(device)}; {', '.join(remedies)}"
    )


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
    # Each stage adds a micro-batch with its cache.
    stage_tokens = kv_tokens / parallel.pipeline

    def needed_bytes(spec: ModelSpec, layout: Parallel) -> tuple[float, float]:
        """Bytes of weights and cache on all devices, if each had as many as the fullest."""
        weights = layout.device_weight_bytes(spec, dtype_bytes)
        cache = stage_tokens * layout.cache_bytes_per_token(spec, dtype_bytes, window_pool)
        return layout.num_devices * weights, layout.num_devices * cache

    def fits(spec: ModelSpec, layout: Parallel) -> bool:
        return sum(needed_bytes(spec, layout)) <= layout.num_devices * hardware.memory_bytes

    if fits(spec, parallel):
        return
    weights, cache = needed_bytes(spec, parallel)
    memory = parallel.num_devices * hardware.memory_bytes
    num_bytes = spec.weight_bytes(dtype_bytes) + cache
    remedies = ", ".join(
        _remedies(
            spec,
            hardware,
            num_bytes,
            parallel,
            fits,
        )
    )
    if weights < memory:
        remedies = (
            "use cache.num_blocks=auto, lower batch, shorten the requests or max_model_len, or "
            f"{remedies}"
        )
    of_stages = " (each stage as the largest)" if parallel.pipeline > 1 else ""
    raise UserError(
        f"model {spec.name} needs {weights / 1e9:.1f} GB for weights{of_stages} and "
        f"{cache / 1e9:.1f} GB for KV, memory of {parallel.num_devices} x {hardware.name} is "
        f"{memory / 1e9:.0f} GB; {remedies}"
    )


Fits = Callable[[ModelSpec, Parallel], bool]  # whether a model has room on devices


def _remedies(
    spec: ModelSpec,
    hardware: Hardware,
    num_bytes: float,
    parallel: Parallel,
    fits: Fits,
) -> list[str]:
    """List what a model of `num_bytes`, its cache included, `fits` on: the fewest devices, weights
    of fewer bits, or both.
    """
    smaller = _with_fewer_bits(spec)
    fitting = [each.weight_dtype for each in smaller if fits(each, parallel)]
    layouts = _layouts(hardware, spec, num_bytes)
    smallest = _smallest(layouts, spec, fits)
    remedies = []
    if smallest is not None:
        remedies.append(f"take {smallest.num_devices} devices by {_settings_of(smallest)}")
    if spec.usual_weights in fitting:
        remedies.append(f"state its weights as published by {WEIGHTS}={spec.usual_weights}")
    elif fitting:
        names = " or ".join(fitting)
        remedies.append(f"state the weights of a quantised checkpoint by {WEIGHTS}={names}")
    if not remedies:
        for each in smaller:
            smallest = _smallest(layouts, each, fits)
            if smallest is not None:
                settings = _settings_of(smallest)
                remedies.append(f"take {WEIGHTS}={each.weight_dtype} with {settings}")
                break
    return [*remedies, "take a smaller model or another hardware"]


def _settings_of(layout: Parallel) -> str:
    settings = []
    if layout.tensor > 1:
        settings.append(f"executor.tensor_parallel={layout.tensor}")
    if layout.pipeline > 1:
        settings.append(f"executor.pipeline_parallel={layout.pipeline}")
    return " ".join(settings)


def _layouts(hardware: Hardware, spec: ModelSpec, num_bytes: float) -> list[Parallel]:
    """List the layouts on up to `MOST_SPARE` times the devices that `num_bytes` fill, the smallest
    first. Stages are of whole nodes, as servers are usually started.
    """
    # Without a link, or a network, devices can't share a layer, or the layers.
    max_tensor = MAX_TENSOR if hardware.link_bytes_per_second else 1
    max_pipeline = spec.num_layers if hardware.network_bytes_per_second else 1
    most_devices = MOST_SPARE * math.ceil(num_bytes / hardware.memory_bytes)
    layouts = [Parallel(tensor, 1) for tensor in range(1, max_tensor)]
    layouts += [Parallel(max_tensor, pipeline) for pipeline in range(1, max_pipeline + 1)]
    return [layout for layout in layouts if layout.num_devices <= most_devices]


def _smallest(layouts: Sequence[Parallel], spec: ModelSpec, fits: Fits) -> Parallel | None:
    """Return the first layout that a model `fits` on; None for none."""
    for layout in layouts:
        if layout.complaint(spec) is None and fits(spec, layout):
            return layout
    return None


def _with_fewer_bits(spec: ModelSpec) -> list[ModelSpec]:
    """List a model that is not quantised with weights of fewer bits, as its authors publish it
    first.
    """
    if spec.stored is not None:
        return []
    smaller = []
    for name in FEWER_BITS:
        if STORED[name].of != "experts" or spec.num_experts:
            smaller.append(replace(spec, weight_dtype=name))
    return sorted(smaller, key=lambda each: each.weight_dtype != spec.usual_weights)
