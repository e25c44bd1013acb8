"""The real device as a backend: a CPU or a GPU through torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import ClassVar, get_args

import torch

from sarathi_kernels.runtime.chip import chip_of
from sarathi_lab.config.checked import check_fields, flag, one_of, whole
from sarathi_lab.config.errors import UserError
from sarathi_lab.engine.executor import Sizes
from sarathi_lab.executor.torch import device as devices
from sarathi_lab.executor.torch.computing import (
    FIX,
    INT8,
    built_isa,
    check_int8,
    check_of_kernels,
    in_weights,
    require_isa,
    require_supported,
    use_native,
    use_triton,
    why_not_built,
)
from sarathi_lab.executor.torch.device import has_fast_path, measure_peaks, num_threads
from sarathi_lab.executor.torch.executor import TorchExecutor
from sarathi_lab.executor.torch.faults import faults_explained
from sarathi_lab.executor.torch.graphs import CudaGraphs, NoGraphs
from sarathi_lab.executor.torch.maker import Maker
from sarathi_lab.executor.torch.memory import Memory, kv_blocks_beside
from sarathi_lab.executor.torch.placement import place
from sarathi_lab.executor.torch.ranks.checks import check_ranks, check_split
from sarathi_lab.executor.torch.shapes import Limits
from sarathi_lab.executor.torch.watching import ProfileKind, make_watch, timeline_of
from sarathi_lab.model import native_operations
from sarathi_lab.model.operations import Hybrid
from sarathi_lab.model.parts import Ranks
from sarathi_lab.model.roofline import Peaks
from sarathi_lab.model.spec import WEIGHT_DTYPES, ModelSpec, WeightDtype
from sarathi_lab.model.transformer import Transformer

HYBRIDS = get_args(Hybrid)
WARM_UP_TOKENS = 256
WHOLE = ("none", "operations")  # profiles that C++ has of an iteration in one call


@dataclass(frozen=True)
class TorchBackend:
    """Runs the model with torch on `device`; `seed` is that of random weights.

    `kernels` does what is not a matrix product: "triton" or plain "torch"; "native" computes whole
    iterations in C++ on a CPU. "auto" takes Triton's kernels on a GPU, and C++ on a CPU where it
    can be compiled, by the instructions `isa`, the CPU's best if "auto". With Triton's, `overlap`
    makes the next batch while one runs, `cuda_graphs` replays batches of a few padded shapes, and
    `hybrid` says how a chunk and decodes share the device in attention. `threads` compute on a CPU;
    None: as many as torch takes. `profile` looks into iterations (`watching`). `weights="fp8"` has
    weights and activations of the layers' products in 8 bits, which a CPU emulates. `dtype="int8"`
    has all products in int8, on a CPU, and the rest in bfloat16. `tensor_parallel` devices share a
    layer, `pipeline_parallel` stages the layers, each device with a process of its own (`ranks`),
    and of `rank_timeout` seconds to make progress in. Raises UserError for what is not there.
    """

    name: ClassVar[str] = "torch"
    computes_tokens: ClassVar[bool] = True
    power: ClassVar[None] = None  # not measured
    device: str = "auto"
    dtype: str = "auto"
    seed: int = 0
    kernels: str = one_of("auto", valid=("auto", "triton", "native", "torch"))
    isa: str = "auto"
    cuda_graphs: bool = flag(True)
    overlap: bool = flag(True)
    hybrid: Hybrid = one_of("series", valid=HYBRIDS)
    threads: int | None = None
    profile: ProfileKind = one_of("none", valid=get_args(ProfileKind))
    weights: WeightDtype = one_of("auto", valid=WEIGHT_DTYPES)
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    rank_timeout: int = whole(
        300, minimum=1, fix="use seconds without progress after which a rank hangs, such as 300"
    )

    def __post_init__(self) -> None:
        _ = self._dtype  # a device that is not there is refused at once
        check_fields(self, "executor.")
        is_cpu = self._device.type == "cpu"
        if devices.require_threads("executor.threads", self.threads) is not None and not is_cpu:
            raise UserError(
                f"executor.threads={self.threads} is for a CPU, the device is {self.device_name}; "
                "leave it out"
            )
        if self.profile == "nvtx" and is_cpu:
            raise UserError(
                "executor.profile=nvtx names ranges of a GPU, the device is a CPU; use "
                "operations or trace"
            )
        if self.kernels == "native" and not is_cpu:
            raise UserError(
                f"executor.kernels=native needs a CPU, the device is {self.device_name}; use "
                "triton or auto"
            )
        # Triton's interpreter needs no GPU.
        is_interpreting = os.environ.get("TRITON_INTERPRET") == "1"
        if self.kernels == "triton" and is_cpu and not is_interpreting:
            raise UserError(f"executor.kernels=triton needs a GPU, the device is a CPU; {FIX}")
        if self.dtype == INT8:
            check_int8(self)
        check_ranks(self)
        require_isa(self.isa, is_wanted=self._wants_native)
        check_of_kernels(self)

    @property
    def ranks(self) -> Ranks:
        return Ranks(self.tensor_parallel, self.pipeline_parallel)

    @property
    def uses_gpus(self) -> bool:
        return self._device.type == "cuda"

    def on_rank(self, local_rank: int) -> TorchBackend:
        """The same on the GPU of a rank of this machine."""
        return replace(self, device=f"cuda:{local_rank}") if self.uses_gpus else self

    @property
    def num_stages(self) -> int:
        return self.pipeline_parallel

    @property
    def uses_kernels(self) -> bool:
        """Whether Triton's kernels do the work between matrix products."""
        return self.kernels == "triton" or (self.kernels == "auto" and self._device.type == "cuda")

    @property
    def _wants_native(self) -> bool:
        return self._device.type == "cpu" and self.kernels in ("auto", "native")

    def _why_not_native(self, spec: ModelSpec) -> str | None:
        """Why C++ does not compute `spec`, though it is wanted; None if it does, or is not."""
        if not self._wants_native:
            return None
        if self.weights == "fp8":
            return "its products in 8 bits are those of dtype=int8"
        return native_operations.why_not(spec, self._dtype[1]) or why_not_built(self.isa)

    @cached_property
    def _device(self) -> torch.device:
        device = devices.resolve_device(self.device)
        if device.type == "cuda":
            # Streams, events and Triton's launches go to the current one.
            torch.cuda.set_device(device)
        return device

    @cached_property
    def _dtype(self) -> tuple[str, torch.dtype]:
        return devices.resolve_dtype(self.dtype, self._device)

    @property
    def device_name(self) -> str:
        isa = self._wants_native and built_isa(self.isa)
        name = devices.device_description(self._device, self._threads, isa or None)
        return name if self.num_devices == 1 else f"{name}, {self.ranks.description}"

    @property
    def num_devices(self) -> int:
        return self.ranks.num_devices

    @property
    def num_threads(self) -> int | None:
        """How many threads compute, on each of several ranks; None on a GPU."""
        return self._threads if self._device.type == "cpu" else None

    @property
    def placement(self) -> str | None:
        """Where the threads of a CPU's C++ are, in words; None where there are none."""
        return place(self._threads).describe() if self._wants_native else None

    @property
    def _threads(self) -> int:
        """Those of `threads`, or a rank's share of all."""
        return self.threads or max(1, num_threads(None) // self.num_devices)

    @property
    def dtype_name(self) -> str:
        return self._dtype[0]

    @property
    def dtype_bytes(self) -> int:
        """Of an element of the cache, and of a weight unless those are in 8 bits."""
        return self._dtype[1].itemsize

    @property
    def default_model(self) -> str:
        return devices.default_model_name(self._device, self.dtype_bytes)

    def check(self, spec: ModelSpec, kv_tokens: int, host_kv_tokens: int = 0) -> None:
        """Raise UserError for what can't run: a shape, kernels, or more than the free memory."""
        spec = in_weights(self, spec, self._device, self._dtype[1])
        check_split(self, spec)
        if self.uses_kernels:
            with faults_explained(self._device, "the run of a first kernel"):
                require_supported(spec, self._device, self._dtype[1])
        is_forced = self.kernels == "native" or self.isa != "auto"
        if is_forced and (reason := self._why_not_native(spec)):
            raise UserError(f"executor.kernels=native does not run here: {reason}; {FIX}")
        self._memory(spec).check(kv_tokens, host_kv_tokens)

    def _memory(self, spec: ModelSpec) -> Memory:
        """Before weights are in 8 bits they are there as they are loaded. A GPU holds one rank's
        part, a machine's memory all of them.
        """
        spec = replace(spec, weight_dtype="auto")
        if self._device.type == "cuda" and self.num_devices > 1:
            spec = self.ranks.part(0).spec(spec)
        return Memory(self._device, self.device_name, spec, self.dtype_bytes)

    def kv_blocks(self, spec: ModelSpec, block_size: int) -> int:
        return self._memory(spec).kv_blocks(block_size)

    def peaks(self) -> Peaks:
        """Measured on this device; the best so far."""
        threads, count = self.num_threads, self.num_devices
        devices.use_threads(threads if count == 1 or threads is None else None)  # of all ranks here
        with faults_explained(self._device, "the measurement of its peaks"):
            in_int8 = self.dtype == INT8 and self._wants_native and not why_not_built(self.isa)
            found = measure_peaks(self._device, torch.int8 if in_int8 else self._dtype[1], self.isa)
        devices.use_threads(threads)
        if threads is not None or count == 1:
            return found
        flops, rate = found.flops_per_second, found.bytes_per_second
        return Peaks(count * flops, count * rate, f"{found.source} x {count}")

    def size(self) -> tuple[int, int]:
        """Bytes of the device's memory, and how many multiprocessors or CPU threads compute."""
        return devices.device_size(self._device, num_threads(self.threads))

    def cautions(self, spec: ModelSpec) -> Sequence[str]:
        """What makes a CPU slower than it could be; nothing else, as what runs here is measured."""
        cautions = []
        if reason := self._why_not_native(spec):
            cautions.append(f"plain torch computes this, not C++: {reason}")
        uses_torch = reason is not None or not self._wants_native
        if self._device.type == "cpu" and uses_torch and not has_fast_path(self._dtype[1]):
            cautions.append(
                f"torch has no fast {self.dtype_name} on this CPU; dtype=float32 may well be faster"
            )
        if self.weights == "fp8" and self._device.type == "cpu":
            cautions.append("a CPU emulates products in 8 bits: their numbers, not their speed")
        elif self.dtype == INT8 and uses_torch:
            cautions.append("plain torch emulates products in int8: their numbers, not their speed")
        elif self.weights == "fp8":
            cautions.append(f"the roofline is that of products in {self.dtype_name}, not in 8 bits")
        return cautions

    def predictor(self, spec: ModelSpec) -> None:
        """None: a real device is measured, not predicted."""

    def build(self, spec: ModelSpec, checkpoint: Path | None, sizes: Sizes) -> TorchExecutor:
        """Load weights, make the cache and warm up. Raises RunError if memory does not suffice, or
        a rank is gone.
        """
        if self.num_devices > 1:
            from sarathi_lab.executor.torch.ranks.build import build  # which needs this module

            return build(self, spec, checkpoint, sizes)
        executor = self.built(spec, checkpoint, sizes)
        self.warm_up(executor, sizes)
        return executor

    def built(
        self, spec: ModelSpec, checkpoint: Path | None, sizes: Sizes, maker: Maker | None = None
    ) -> TorchExecutor:
        """The executor, not warmed up; a `maker` has it of a part of the model."""
        maker = maker or Maker()
        spec = in_weights(self, spec, self._device, self._dtype[1])
        devices.use_threads(self.num_threads)
        devices.prepare_memory(self._device)
        with faults_explained(self._device, f"the loading of {spec.name}"):
            model = maker.load(spec, checkpoint, self._device, self._dtype[1], self.seed)
            if self.uses_kernels:
                use_triton(model, self.hybrid)
            elif self._wants_native and self._why_not_native(spec) is None:
                is_whole = maker.is_whole and self.profile in WHOLE
                use_native(model, is_whole=is_whole, isa=self.isa)
            make = partial(self._executor, maker, model)
            num_blocks = maker.agreed(self._num_blocks(make, sizes))
            return make(num_blocks, sizes.block_size, sizes.num_host_blocks)

    def warm_up(self, executor: TorchExecutor, sizes: Sizes) -> None:
        executor.warm_up(
            batch_size=sizes.batch_size,
            chunk_tokens=sizes.chunk or WARM_UP_TOKENS,
            longest=sizes.max_model_len or executor.num_blocks * sizes.block_size,
            max_tokens=sizes.max_batch_tokens,
        )

    def _num_blocks(self, make: Callable[..., TorchExecutor], sizes: Sizes) -> int:
        """The planned cache, if it fits beside an iteration's activations, or all that does."""
        if self._device.type != "cuda" or not self.uses_kernels:
            return sizes.num_blocks
        probe = make(1, sizes.block_size)
        num_emits = sizes.batch_size * (1 + sizes.num_drafts)
        most = kv_blocks_beside(probe, sizes.max_batch_tokens or WARM_UP_TOKENS, num_emits)
        return most.checked(None if sizes.fills_memory else sizes.num_blocks)

    def _executor(
        self,
        maker: Maker,
        model: Transformer,
        num_blocks: int,
        block_size: int,
        num_host_blocks: int = 0,
    ) -> TorchExecutor:
        uses_kernels = self.uses_kernels
        # A stage's waiting for the one before is no part of its work: it stays out of graphs.
        uses_graphs = uses_kernels and self.cuda_graphs and self.num_stages == 1
        uses_graphs = uses_graphs and self._device.type == "cuda"
        timeline = timeline_of(self._device)
        limits = None
        if uses_kernels:
            limits = Limits(model.spec, block_size, chip_of(self._device).num_sms)
        return maker.executor(
            model,
            num_blocks=num_blocks,
            block_size=block_size,
            num_host_blocks=num_host_blocks,
            timeline=timeline,
            watch=make_watch(self.profile, timeline),
            limits=limits,
            capacity=2 if uses_kernels and self.overlap else 1,
            graphs=CudaGraphs() if uses_graphs else NoGraphs(),
        )
