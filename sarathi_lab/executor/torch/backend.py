"""The real device as a backend: a CPU or a GPU through torch."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from sarathi_kernels.runtime.chip import chip_of
from sarathi_lab.config.errors import UserError
from sarathi_lab.engine.executor import Sizes
from sarathi_lab.executor.torch import device as devices
from sarathi_lab.executor.torch.checks import check_settings, check_split, in_weights
from sarathi_lab.executor.torch.device import has_fast_path, measure_peaks, num_threads
from sarathi_lab.executor.torch.device_errors import explain_device_errors
from sarathi_lab.executor.torch.executor import TorchExecutor
from sarathi_lab.executor.torch.graphs import CudaGraphs, NoGraphs
from sarathi_lab.executor.torch.kernel_selection import (
    FIX,
    require_supported,
    use_native,
    use_triton,
    why_not_built,
)
from sarathi_lab.executor.torch.maker import Maker
from sarathi_lab.executor.torch.memory import KvBudget, Memory, free_memory_bytes
from sarathi_lab.executor.torch.profiler import make_profiler
from sarathi_lab.executor.torch.ranks.build import build as build_on_ranks
from sarathi_lab.executor.torch.settings import INT8, TorchSettings
from sarathi_lab.executor.torch.shapes import LARGEST_HYBRID, Limits
from sarathi_lab.executor.torch.timeline import timeline_of
from sarathi_lab.model import native_operations
from sarathi_lab.model.roofline import Peaks
from sarathi_lab.model.spec import ModelSpec
from sarathi_lab.model.transformer import Transformer

WARM_UP_TOKENS = 256
SPARE = 0.02  # of the memory: CUDA graphs, fragments, what libraries take at first use
SPARE_BYTES = 1 << 30
WHOLE = ("none", "operations")  # profiles that C++ has of an iteration in one call


@dataclass(frozen=True)
class TorchBackend(TorchSettings):
    """Runs the model with torch, as its settings say. Raises UserError for what is not there."""

    def __post_init__(self) -> None:
        _ = self.torch_dtype  # a device that is not there is refused at once
        check_settings(self)

    def on_rank(self, local_rank: int) -> TorchBackend:
        """The same on the GPU of a rank of this machine."""
        return replace(self, device=f"cuda:{local_rank}") if self.uses_gpus else self

    def _why_not_native(self, spec: ModelSpec) -> str | None:
        """Why C++ does not compute `spec`, though it is wanted; None if it does, or is not."""
        if not self.wants_native:
            return None
        if self.weights == "fp8":
            return "its products in 8 bits are those of dtype=int8"
        return native_operations.why_not(spec, self.torch_dtype) or why_not_built(self.isa)

    def check(self, spec: ModelSpec, kv_tokens: int, host_kv_tokens: int = 0) -> None:
        """Raise UserError for what can't run: a shape, kernels, or more than the free memory."""
        spec = in_weights(self, spec)
        check_split(self, spec)
        if self.uses_kernels:
            with explain_device_errors(self.torch_device, "the run of a first kernel"):
                require_supported(spec, self.torch_device, self.torch_dtype)
        is_forced = self.kernels == "native" or self.isa != "auto"
        if is_forced and (reason := self._why_not_native(spec)):
            raise UserError(f"executor.kernels=native does not run here: {reason}; {FIX}")
        self._memory(spec).check(kv_tokens, host_kv_tokens)

    def _memory(self, spec: ModelSpec) -> Memory:
        """Before weights are in 8 bits they are there as they are loaded. A GPU holds one rank's
        part, a machine's memory all of them.
        """
        spec = replace(spec, weight_dtype="auto")
        if self.uses_gpus and self.num_devices > 1:
            spec = self.ranks.part(0).spec(spec)
        return Memory(self.torch_device, self.device_name, spec, self.dtype_bytes)

    def kv_blocks(self, spec: ModelSpec, block_size: int) -> int:
        return self._memory(spec).kv_blocks(block_size)

    def peaks(self) -> Peaks:
        """Measured on this device; the best so far."""
        threads, count = self.num_threads, self.num_devices
        devices.use_threads(threads if count == 1 or threads is None else None)  # of all ranks here
        with explain_device_errors(self.torch_device, "the measurement of its peaks"):
            in_int8 = self.dtype == INT8 and self.wants_native and not why_not_built(self.isa)
            dtype = torch.int8 if in_int8 else self.torch_dtype
            found = measure_peaks(self.torch_device, dtype, self.isa)
        devices.use_threads(threads)
        if threads is not None or count == 1:
            return found
        flops, rate = found.flops_per_second, found.bytes_per_second
        return Peaks(count * flops, count * rate, f"{found.source} x {count}")

    def size(self) -> tuple[int, int]:
        """Bytes of the device's memory, and how many multiprocessors or CPU threads compute."""
        return devices.device_size(self.torch_device, num_threads(self.threads))

    def cautions(self, spec: ModelSpec) -> Sequence[str]:
        """What makes a CPU slower than it could be; nothing else, as what runs here is measured."""
        cautions = []
        if reason := self._why_not_native(spec):
            cautions.append(f"plain torch computes this, not C++: {reason}")
        uses_torch = reason is not None or not self.wants_native
        if self.torch_device.type == "cpu" and uses_torch and not has_fast_path(self.torch_dtype):
            cautions.append(
                f"torch has no fast {self.dtype_name} on this CPU; dtype=float32 may well be faster"
            )
        if self.weights == "fp8" and self.torch_device.type == "cpu":
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
            return build_on_ranks(self, spec, checkpoint, sizes)
        executor = self.built(spec, checkpoint, sizes)
        self.warm_up(executor, sizes)
        return executor

    def built(
        self, spec: ModelSpec, checkpoint: Path | None, sizes: Sizes, maker: Maker | None = None
    ) -> TorchExecutor:
        """The executor, not warmed up; a `maker` has it of a part of the model."""
        maker = maker or Maker()
        spec = in_weights(self, spec)
        devices.use_threads(self.num_threads)
        devices.prepare_memory(self.torch_device)
        with explain_device_errors(self.torch_device, f"the loading of {spec.name}"):
            model = maker.load(spec, checkpoint, self.torch_device, self.torch_dtype, self.seed)
            if self.uses_kernels:
                use_triton(model, self.hybrid)
            elif self.wants_native and self._why_not_native(spec) is None:
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
        if not self.uses_gpus or not self.uses_kernels:
            return sizes.num_blocks
        probe = make(1, sizes.block_size)
        num_emits = sizes.batch_size * (1 + sizes.num_drafts)
        budget = measure_kv_budget(probe, sizes.max_batch_tokens or WARM_UP_TOKENS, num_emits)
        return budget.fit(None if sizes.fills_memory else sizes.num_blocks)

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
        uses_graphs = uses_graphs and self.uses_gpus
        timeline = timeline_of(self.torch_device)
        limits = None
        if uses_kernels:
            limits = Limits(model.spec, block_size, chip_of(self.torch_device).num_sms)
        return maker.executor(
            model,
            num_blocks=num_blocks,
            block_size=block_size,
            num_host_blocks=num_host_blocks,
            timeline=timeline,
            profiler=make_profiler(self.profile, timeline),
            limits=limits,
            capacity=2 if uses_kernels and self.overlap else 1,
            graphs=CudaGraphs() if uses_graphs else NoGraphs(),
        )


def measure_kv_budget(probe: TorchExecutor, num_tokens: int, num_emits: int) -> KvBudget:
    """Measure the memory that `probe`, of one block, leaves beside an iteration of such sizes."""
    device = probe.model.device
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    probe.compute_padding(num_tokens, num_emits)
    torch.cuda.synchronize(device)
    activations = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(device).total_memory
    # Graphs keep those of the largest of them, beside what fits none.
    kept = int(activations * min(1.0, LARGEST_HYBRID / num_tokens))
    free = free_memory_bytes(device) - activations - kept - max(SPARE_BYTES, int(SPARE * total))
    model = probe.model
    block = model.spec.kv_bytes_per_token(model.dtype.itemsize) * probe.block_size
    return KvBudget(max(0, free), block, activations, num_tokens)
