"""Backend of a CPU or GPU through torch: settings, checks and assembly of the executor."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import ClassVar, get_args

import torch

from sarathi_kernels.cpu.build import cpu_flags, instruction_set
from sarathi_kernels.runtime.chip import chip_of
from sarathi_lab.config.checked import check_fields, flag, one_of, whole
from sarathi_lab.config.errors import UserError
from sarathi_lab.engine.executor import Sizes
from sarathi_lab.executor import device as devices
from sarathi_lab.executor.device import explain_device_errors, measure_peaks
from sarathi_lab.executor.measured_backend import MeasuredBackend
from sarathi_lab.executor.placement import allowed_cores
from sarathi_lab.executor.timeline import OperationProfiler, timeline_of
from sarathi_lab.executor.torch import checks
from sarathi_lab.executor.torch.checks import (
    require_supported,
    use_native,
    use_triton,
    why_not_built,
)
from sarathi_lab.executor.torch.executor import TorchExecutor
from sarathi_lab.executor.torch.memory import KvBudget
from sarathi_lab.executor.torch.shapes import CudaGraphs, Limits, NoGraphs
from sarathi_lab.model import native_operations
from sarathi_lab.model.operations import Hybrid
from sarathi_lab.model.roofline import Peaks
from sarathi_lab.model.spec import ModelSpec
from sarathi_lab.model.transformer import Transformer
from sarathi_lab.model.weights import load_model

WARM_UP_TOKENS = 256


@dataclass(frozen=True)
class TorchBackend(MeasuredBackend):
    """Backend that runs a model with torch on `device`. Raises UserError for invalid settings.

    `seed` draws random weights. `kernels` compute all but matrix products: "triton", or plain
    "torch"; "native" computes whole iterations in C++ on a CPU, by the instructions `isa`. "auto"
    is Triton on a GPU, and C++ on a CPU that can compile it. With Triton, `overlap` makes the next
    batch while one runs, `cuda_graphs` replays batches of a few padded shapes, and `hybrid` is how
    a chunk and decodes share the device in attention. `threads` compute on a CPU (None: torch's
    number). `profile` times operations. Unless `is_model_stated` or a `dtype` is, a CPU whose C++
    has matrix tiles has the model and the dtype that suit them (`default_on_cpu`).
    """

    name: ClassVar[str] = "torch"
    device: str = "auto"
    dtype: str = "auto"
    is_model_stated: bool = flag(True)
    seed: int = 0
    kernels: str = one_of("auto", valid=("auto", "triton", "native", "torch"))
    isa: str = one_of("auto", valid=checks.ISAS)
    cuda_graphs: bool = flag(True)
    overlap: bool = flag(True)
    hybrid: Hybrid = one_of("series", valid=get_args(Hybrid))
    threads: int | None = whole(
        None, minimum=1, fix="use a number of cores, or null for as many as torch takes"
    )
    profile: str = one_of("none", valid=("none", "operations"))

    def __post_init__(self) -> None:
        _ = self.torch_dtype  # refuse a device that is not there
        check_fields(self, "executor.")
        self._check_device()

    @cached_property
    def torch_device(self) -> torch.device:
        device = devices.resolve_device(self.device)
        if device.type == "cuda":
            torch.cuda.set_device(device)  # streams, events and Triton use the current one
        return device

    @cached_property
    def _cpu_default(self) -> devices.CpuDefault:
        is_open = not self.is_model_stated and self.dtype == "auto"
        may_use_tiles = self.wants_native and self.isa in ("auto", "avx512")
        # Only C++ computes with tiles: without a compiler there is no use for the larger model.
        if not is_open or not may_use_tiles or why_not_built(self.isa) is not None:
            return devices.USUAL_CPU
        return devices.default_on_cpu(cpu_flags())

    @cached_property
    def _dtype(self) -> tuple[str, torch.dtype]:
        is_chosen_on_cpu = self.dtype == "auto" and not self.uses_gpus
        name = self._cpu_default.dtype if is_chosen_on_cpu else self.dtype
        return devices.resolve_dtype(name, self.torch_device)

    @property
    def default_model(self) -> str:
        return super().default_model if self.uses_gpus else self._cpu_default.model

    @property
    def uses_kernels(self) -> bool:
        """True if Triton's kernels compute all but matrix products."""
        return self.kernels == "triton" or (self.kernels == "auto" and self.uses_gpus)

    @property
    def wants_native(self) -> bool:
        """True if C++ is to compute, where it can be compiled."""
        return not self.uses_gpus and self.kernels in ("auto", "native")

    @property
    def device_name(self) -> str:
        has_native = self.wants_native and why_not_built(self.isa) is None
        isa = instruction_set(self.isa) if has_native else None
        return devices.device_description(self.torch_device, self._threads, isa)

    @property
    def without_overlap(self) -> str:
        return "executor.overlap=false" if self.uses_kernels and self.overlap else ""

    @property
    def num_threads(self) -> int | None:
        """Threads that compute; None on a GPU."""
        return None if self.uses_gpus else self._threads

    @property
    def _threads(self) -> int:
        return self.threads or devices.num_threads(None)

    def _check_device(self) -> None:
        """Raise UserError for settings of another kind of device."""
        num_cores = len(allowed_cores()) or os.cpu_count() or 1
        if self.threads is not None and self.threads > num_cores:
            raise UserError(
                f"executor.threads={self.threads} is more than the {num_cores} cores present; use "
                "fewer, or null for as many as torch takes"
            )
        is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"
        if self.uses_gpus and self.threads is not None:
            raise UserError(
                f"executor.threads={self.threads} needs a CPU, the device is {self.device_name}; "
                "leave it out"
            )
        needed = None
        if self.kernels == "native" and self.uses_gpus:
            needed = "CPU"
        if self.kernels == "triton" and not self.uses_gpus and not is_interpreted:
            needed = "GPU"
        if needed is not None:
            raise UserError(
                f"executor.kernels={self.kernels} needs a {needed}, the device is "
                f"{self.device_name}; use executor.kernels=auto"
            )
        # A setting that nothing here would read is refused, not dropped.
        if self.isa != "auto" and not self.wants_native:
            raise UserError(
                f"executor.isa={self.isa} is for a CPU's C++, which does not compute here; use auto"
            )
        of_kernels = {
            "overlap": (self.overlap, TorchBackend.overlap),
            "cuda_graphs": (self.cuda_graphs, TorchBackend.cuda_graphs),
            "hybrid": (self.hybrid, TorchBackend.hybrid),
        }
        for name, (value, default) in of_kernels.items():
            if not self.uses_kernels and value != default:
                raise UserError(
                    f"executor.{name}={value} is for Triton's kernels, which do not run here "
                    f"(device {self.torch_device.type}, executor.kernels={self.kernels}); leave it "
                    "out"
                )

    def check(self, spec: ModelSpec, kv_tokens: int, window_pool: float | None = None) -> None:
        """Raise UserError for a model that does not run here: shape, kernels, free memory."""
        checks.require_computed(spec)
        if self.uses_kernels:
            with explain_device_errors("the run of a first kernel"):
                require_supported(spec, self.torch_device, self.torch_dtype)
        for name, value, alternative in (
            ("isa", self.isa, "auto"),
            ("kernels", self.kernels, "torch"),
        ):
            if value in ("auto", "torch"):
                continue
            reason = self._why_not_native(spec)
            if reason is not None:
                raise UserError(
                    f"executor.{name}={value} does not run here: {reason}; "
                    f"use executor.{name}={alternative}"
                )
        self.check_memory(spec, kv_tokens)

    def _why_not_native(self, spec: ModelSpec) -> str | None:
        """Return why C++ does not compute `spec` though wanted; None if it does or is not."""
        if not self.wants_native:
            return None
        return native_operations.why_not(spec, self.torch_dtype) or why_not_built(self.isa)

    def cautions(self, spec: ModelSpec) -> Sequence[str]:
        """Return what makes a CPU slower than it could be; all else is measured."""
        reason = self._why_not_native(spec)
        return [] if reason is None else [f"plain torch computes this, not C++: {reason}"]

    def peaks(self) -> Peaks:
        """Measure the peaks of this device; the best so far count."""
        devices.use_threads(self.num_threads)
        with explain_device_errors("the measurement of its peaks"):
            return measure_peaks(self.torch_device, self.torch_dtype, self.isa)

    def build(self, spec: ModelSpec, checkpoint: Path | None, sizes: Sizes) -> TorchExecutor:
        """Load weights, make the cache and warm up. Raises RunError without memory."""
        model = self._load(spec, checkpoint)
        executor = self._assemble(model, sizes)
        executor.warm_up(
            batch_size=sizes.batch_size,
            chunk_tokens=sizes.chunk or WARM_UP_TOKENS,
            longest=sizes.max_model_len or executor.num_blocks * sizes.block_size,
            max_tokens=sizes.max_batch_tokens,
            num_drafts=sizes.num_drafts,
        )
        return executor

    def _load(self, spec: ModelSpec, checkpoint: Path | None) -> Transformer:
        """Load a model and select its kernels."""
        devices.use_threads(self.num_threads)
        devices.prepare_memory(self.torch_device)
        with explain_device_errors(f"the loading of {spec.name}"):
            model = load_model(spec, checkpoint, self.torch_device, self.torch_dtype, self.seed)
            if self.uses_kernels:
                use_triton(model, self.hybrid)
            elif self.wants_native and self._why_not_native(spec) is None:
                use_native(model, isa=self.isa)
        return model

    def _assemble(self, model: Transformer, sizes: Sizes) -> TorchExecutor:
        """Make an executor of `model`, not warmed up."""
        timeline = timeline_of(self.torch_device)
        limits = None
        capacity = 1
        graphs = NoGraphs()
        profiler: OperationProfiler | None = None
        if self.uses_kernels:
            limits = Limits(model.spec, sizes.block_size, chip_of(self.torch_device).num_sms)
            if self.overlap:
                capacity = 2  # the host packs a batch while the device runs the one before
            if self.cuda_graphs and self.uses_gpus:
                graphs = CudaGraphs()
        if self.profile == "operations":
            profiler = OperationProfiler(timeline)
        make = partial(
            TorchExecutor,
            model,
            block_size=sizes.block_size,
            timeline=timeline,
            profiler=profiler,
            limits=limits,
            capacity=capacity,
            graphs=graphs,
        )
        with explain_device_errors(f"the loading of {model.spec.name}"):
            num_blocks = self._num_blocks(make, sizes)
            return make(num_blocks=num_blocks)

    def _num_blocks(self, make: Callable[..., TorchExecutor], sizes: Sizes) -> int:
        """Return the planned number of blocks, or on a GPU what fits it."""
        if not self.uses_gpus or not self.uses_kernels:
            return sizes.num_blocks
        tokens = sizes.max_batch_tokens or WARM_UP_TOKENS
        tokens_of_decode = 1 + sizes.num_drafts
        num_emits = sizes.batch_size * tokens_of_decode
        # With a cache of one block, so that the memory of the real one is still free.
        probe = make(num_blocks=1)
        iterate = partial(probe.compute_padding, tokens, num_emits)
        budget = KvBudget.measure(probe.model, sizes.block_size, tokens, iterate)
        return budget.fit(None if sizes.fills_memory else sizes.num_blocks)
