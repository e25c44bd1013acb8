"""Backend of vLLM's workers: settings, checks, and the engine that the runs of a sweep share."""

from __future__ import annotations

import atexit
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch

from sarathi_lab.config.checked import check_fields, flag, one_of, whole
from sarathi_lab.config.errors import UserError
from sarathi_lab.engine.block_manager import BlockManager
from sarathi_lab.engine.compositions import make_batch, run_once
from sarathi_lab.engine.executor import Sizes
from sarathi_lab.executor import device as devices
from sarathi_lab.executor.memory import Memory
from sarathi_lab.executor.placement import allowed_cores
from sarathi_lab.executor.timeline import HostTimeline, timeline_of
from sarathi_lab.executor.vllm.executor import VllmExecutor, explained
from sarathi_lab.executor.vllm.workers import (
    FIRST_BLOCK,
    RUNNERS,
    Workers,
    check_options,
    device_type,
    make_config,
    vllm_version,
)
from sarathi_lab.model.roofline import Peaks
from sarathi_lab.model.seeded_checkpoint import path_of, seeded_checkpoint
from sarathi_lab.model.spec import Degrees, ModelSpec

AUTO = "auto"
BLOCK_MULTIPLES = {"cpu": 32, "cuda": 16}  # of tokens, that its attention reads
DEVICES_FIX = "use a number of devices"
CACHE_SPARE = 1 << 20  # bytes beside the cache, of a CPU
WARM_UP_TOKENS, WARM_UPS = 256, 3


@dataclass(frozen=True)
class VllmBackend:
    """Backend that runs batches of the lab's scheduler on vLLM's workers. Raises UserError for
    invalid settings, and without a vLLM of a version that it knows.

    `seed` draws random weights. `tensor_parallel` devices share a layer, `pipeline_parallel` stages
    share the layers. `eager` leaves out graphs and compilation. With `async_scheduling` ("auto": as
    vLLM chooses) the next batch is made while one runs. `runner` is vLLM's model runner. `options`
    are further engine arguments, by vLLM's names.
    """

    name: ClassVar[str] = "vllm"
    computes_tokens: ClassVar[bool] = True
    power: ClassVar[None] = None  # not measured
    device: str = AUTO
    dtype: str = one_of(AUTO, valid=(AUTO, "float32", "bfloat16", "float16"))
    seed: int = 0
    tensor_parallel: int = whole(1, minimum=1, fix=DEVICES_FIX)
    pipeline_parallel: int = whole(1, minimum=1, fix=DEVICES_FIX)
    eager: bool = flag(False)
    async_scheduling: bool | str = one_of(AUTO, valid=(AUTO, True, False))
    runner: str = one_of(AUTO, valid=RUNNERS)
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_fields(self, "executor.")
        vllm_version()
        _ = self.torch_device  # refuse a device that is not there
        if self.async_scheduling is True and self.pipeline_parallel > 1:
            raise UserError(
                f"executor.async_scheduling=true with executor.pipeline_parallel="
                f"{self.pipeline_parallel}: stages overlap by micro-batches; leave one out"
            )
        check_options(self.options)

    @cached_property
    def torch_device(self) -> torch.device:
        device, kind = devices.resolve_device(self.device), device_type()
        if device.type != kind and self.device == AUTO:
            device = devices.resolve_device(kind)
        if device.type != kind or device.index:
            fix = "CUDA_VISIBLE_DEVICES chooses a GPU" if device.index else f"use device={kind}"
            raise UserError(f"device={self.device}: the installed vLLM runs on {kind}; {fix}")
        return device

    @cached_property
    def _dtype(self) -> tuple[str, torch.dtype]:
        return devices.resolve_dtype(self.dtype, self.torch_device)

    @property
    def dtype_name(self) -> str:
        return self._dtype[0]

    @property
    def dtype_bytes(self) -> int:
        return self._dtype[1].itemsize

    @property
    def degrees(self) -> Degrees:
        return Degrees(self.tensor_parallel, self.pipeline_parallel)

    @property
    def num_stages(self) -> int:
        return self.pipeline_parallel

    @property
    def num_devices(self) -> int:
        return self.degrees.num_devices

    @property
    def device_name(self) -> str:
        name = devices.device_description(self.torch_device, devices.num_threads(None))
        several = f", {self.degrees.description}" if self.num_devices > 1 else ""
        return f"{name}{several}, vLLM's workers, the lab's host"

    @property
    def default_model(self) -> str:
        return devices.default_model_name(self.torch_device, self.dtype_bytes)

    @property
    def facts(self) -> dict[str, Any] | None:
        """What ran the last batches (`Workers.facts`); None before the first."""
        return None if _shared.workers is None else _shared.facts

    def check(self, spec: ModelSpec, kv_tokens: int, host_kv_tokens: int = 0) -> None:
        """Raise UserError for a model, cache or preemption that does not run here."""
        spec.require_runnable()
        if host_kv_tokens:
            raise UserError("preemption=swap: executor=vllm swaps nothing; use recompute")
        if spec.kv_dtype == "int8" or spec.weight_dtype != "auto":
            raise UserError(f"cache.dtype={spec.kv_dtype}: vLLM has no int8 cache; use fp8 or auto")
        self._memory(spec).check(math.ceil(kv_tokens / self._share), 0)

    @property
    def _share(self) -> int:
        """Parts of weights and cache, of which a GPU holds one."""
        return 1 if self.torch_device.type == "cpu" else self.num_devices

    def _memory(self, spec: ModelSpec) -> Memory:
        bytes_of_part = replace(spec, num_layers=math.ceil(spec.num_layers / self._share))
        return Memory(self.torch_device, self.device_name, bytes_of_part, self.dtype_bytes)

    def cautions(self, spec: ModelSpec) -> Sequence[str]:
        """Say what of the times is the lab's."""
        return ["vLLM's workers compute; scheduling and its host time are the lab's"]

    def kv_blocks(self, spec: ModelSpec, block_size: int) -> int:
        return self._memory(spec).kv_blocks(block_size)

    def peaks(self) -> Peaks:
        """Measure the peaks of this device, times the number of devices on GPUs."""
        with devices.explain_device_errors("the measurement of its peaks"):
            peaks = devices.measure_peaks(self.torch_device, self._dtype[1])
        flops, rate = peaks.flops_per_second, peaks.bytes_per_second
        return Peaks(self._share * flops, self._share * rate, peaks.source)

    def predictor(self, spec: ModelSpec) -> None:
        """Return None: a real device is measured, not predicted."""

    def expect(self, spec: ModelSpec, checkpoint: Path | None, sizes: Sizes) -> None:
        """Have the engine that serves `sizes` made with room for them, if it is not there yet."""
        _shared.expect(self._key(spec, checkpoint, sizes), sizes)

    def build(self, spec: ModelSpec, checkpoint: Path | None, sizes: Sizes) -> VllmExecutor:
        """Return a warmed-up executor on the engine of earlier runs, or on a new one. Raises
        RunError for what vLLM refuses, and for memory that is short.
        """
        self._check_sizes(sizes)
        if checkpoint is None:
            devices.prepare_memory(self.torch_device)
            seeded_checkpoint(spec, self.torch_device, self._dtype[1], self.seed)
        workers = _shared.get(self, spec, checkpoint, sizes)
        on_stream = workers.in_process and self.torch_device.type == "cuda"
        executor = VllmExecutor(
            workers,
            num_blocks=None if sizes.fills_memory else sizes.num_blocks,
            timeline=timeline_of(self.torch_device) if on_stream else HostTimeline(),
            close=_shared.close,
        )
        _warm_up(executor, sizes)
        return executor

    def _check_sizes(self, sizes: Sizes) -> None:
        multiple = BLOCK_MULTIPLES.get(self.torch_device.type, 1)
        if sizes.block_size % multiple:
            raise UserError(
                f"cache.block_size={sizes.block_size}: vLLM's attention on a "
                f"{self.torch_device.type} takes multiples of {multiple}; use "
                f"cache.block_size={multiple}"
            )

    def _folder(self, spec: ModelSpec, checkpoint: Path | None) -> Path:
        return checkpoint or path_of(spec, self.torch_device, self._dtype[1], self.seed)

    def _key(self, spec: ModelSpec, checkpoint: Path | None, sizes: Sizes) -> str:
        """Return what engines that can't be shared differ in."""
        parts = (self._folder(spec, checkpoint), spec.kv_dtype, sizes.block_size, self)
        return json.dumps([*map(str, parts), sizes.fills_memory])

    def arguments(self, spec: ModelSpec, checkpoint: Path | None, sizes: Sizes) -> dict[str, Any]:
        """Return vLLM's engine arguments."""
        max_num_seqs = sizes.batch_size * self.num_stages
        longest = sizes.max_model_len or sizes.num_blocks * sizes.block_size
        arguments: dict[str, Any] = {
            "model": str(self._folder(spec, checkpoint)),
            "dtype": self.dtype_name,
            "kv_cache_dtype": spec.kv_dtype,
            "seed": self.seed,
            "skip_tokenizer_init": True,
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": max(sizes.max_batch_tokens or WARM_UP_TOKENS, max_num_seqs),
            "max_model_len": longest,
            "block_size": sizes.block_size,
            "num_gpu_blocks_override": sizes.num_blocks + FIRST_BLOCK,
            "enable_prefix_caching": False,  # the lab's block ids have it
            "disable_hybrid_kv_cache_manager": True,  # one list of blocks a sequence
            "tensor_parallel_size": self.tensor_parallel,
            "pipeline_parallel_size": self.pipeline_parallel,
            "enforce_eager": self.eager,
            "async_scheduling": self._async_scheduling,
            "disable_log_stats": True,
            "use_tqdm_on_load": False,
            "cudagraph_metrics": True,
        }
        if checkpoint is None and longest > spec.max_position:
            arguments["hf_overrides"] = {"max_position_embeddings": longest}
        if self.torch_device.type == "cpu":  # whose free memory others take meanwhile
            block = sizes.block_size * spec.kv_bytes_per_token(self.dtype_bytes)
            arguments["kv_cache_memory_bytes"] = (sizes.num_blocks + 2) * block + CACHE_SPARE
        elif sizes.fills_memory:
            del arguments["num_gpu_blocks_override"]
        return arguments | dict(self.options)

    @property
    def cores(self) -> str | None:
        """Return the cores of each of several workers on a CPU, in vLLM's notation: it would give
        each a memory node, of which there may be fewer.
        """
        number, allowed = self.num_devices, allowed_cores()
        if number == 1 or self.torch_device.type != "cpu" or len(allowed) < number:
            return None
        size = len(allowed) // number
        parts = [allowed[i * size : (i + 1) * size] for i in range(number)]
        return "|".join(",".join(map(str, part)) for part in parts)

    @property
    def _async_scheduling(self) -> bool | None:
        """None: as vLLM chooses."""
        if self.pipeline_parallel > 1:
            return False
        return None if self.async_scheduling == AUTO else bool(self.async_scheduling)


class SharedEngine:
    """The engine of this process: one for all runs whose sizes were expected before it was made, so
    that memory, buffers and graphs are the same for all policies.
    """

    def __init__(self) -> None:
        self.workers: Workers | None = None
        self.facts: dict[str, Any] = {}
        self._key = ""
        self._sizes: dict[str, Sizes] = {}  # the largest expected of each key

    def expect(self, key: str, sizes: Sizes) -> None:
        known = self._sizes.get(key)
        self._sizes[key] = sizes if known is None else _largest(known, sizes)

    def get(
        self, backend: VllmBackend, spec: ModelSpec, checkpoint: Path | None, sizes: Sizes
    ) -> Workers:
        """Return workers with room for `sizes`."""
        key = backend._key(spec, checkpoint, sizes)
        before = self._sizes.get(key)
        self.expect(key, sizes)
        wanted = self._sizes[key]
        if self.workers is not None and key == self._key and before == wanted:
            return self.workers
        self.close()
        try:
            with explained(f"the start of its engine for {spec.name}"):
                arguments = backend.arguments(spec, checkpoint, wanted)
                config = make_config(arguments, backend.runner, backend.cores)
                if (
                    backend.async_scheduling is True
                    and not config.scheduler_config.async_scheduling
                ):
                    raise UserError(
                        "executor.async_scheduling=true: this vLLM does not have it on a "
                        f"{backend.torch_device.type}; use auto"
                    )
                self.workers = Workers(config)
        except UserError:
            del self._sizes[key]  # smaller ones may fit
            raise
        self._key, self.facts = key, self.workers.facts()
        return self.workers

    def close(self) -> None:
        """End the workers, if there are any."""
        workers, self.workers = self.workers, None
        if workers is not None:
            workers.close()


_shared = SharedEngine()
atexit.register(_shared.close)


def _largest(one: Sizes, other: Sizes) -> Sizes:
    def most(name: str) -> Any:
        return max(getattr(one, name) or 0, getattr(other, name) or 0) or None

    names = ("num_blocks", "batch_size", "max_model_len", "max_batch_tokens")
    return replace(one, **{name: most(name) for name in names})


def _warm_up(executor: VllmExecutor, sizes: Sizes) -> None:
    """Run throw-away iterations like those of the run, so that the first one is like the rest."""
    num_blocks, block_size = executor.num_blocks, sizes.block_size
    num_decodes = max(1, min(sizes.batch_size, num_blocks) - 1)
    most = min(
        (num_blocks - num_decodes) * block_size,
        (sizes.max_batch_tokens or WARM_UP_TOKENS) - num_decodes,
    )
    tokens = min(sizes.chunk or WARM_UP_TOKENS, most, sizes.max_model_len or most)
    executor.start()
    for prefill_tokens in (max(0, tokens), 0):
        blocks = BlockManager(num_blocks, block_size)
        batch = make_batch(
            prefill_tokens=prefill_tokens, num_decodes=num_decodes, context=2, blocks=blocks
        )
        for _ in range(WARM_UPS):
            run_once(executor, batch)
