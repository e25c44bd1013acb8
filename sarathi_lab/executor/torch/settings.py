"""What is wanted of torch and its device, and what follows from it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, get_args

import torch

from sarathi_lab.config.checked import flag, one_of, whole
from sarathi_lab.executor.torch import device as devices
from sarathi_lab.executor.torch.kernel_selection import built_isa
from sarathi_lab.executor.torch.placement import place
from sarathi_lab.executor.torch.profiler import ProfileKind
from sarathi_lab.model.operations import Hybrid
from sarathi_lab.model.parts import Ranks
from sarathi_lab.model.spec import WEIGHT_DTYPES, WeightDtype

INT8 = "int8"  # the dtype whose products alone are in it


@dataclass(frozen=True)
class TorchSettings:
    """How torch runs a model on `device`; `seed` is that of random weights.

    `kernels` does what is not a matrix product: "triton" or plain "torch"; "native" computes whole
    iterations in C++ on a CPU. "auto" takes Triton's kernels on a GPU, and C++ on a CPU where it
    can be compiled, by the instructions `isa`, the CPU's best if "auto". With Triton's, `overlap`
    makes the next batch while one runs, `cuda_graphs` replays batches of a few padded shapes, and
    `hybrid` says how a chunk and decodes share the device in attention. `threads` compute on a CPU;
    None: as many as torch takes. `profile` looks into iterations (`watching`). `weights="fp8"` has
    weights and activations of the layers' products in 8 bits, which a CPU emulates. `dtype="int8"`
    has all products in int8, on a CPU, and the rest in bfloat16. `tensor_parallel` devices share a
    layer, `pipeline_parallel` stages the layers, each device with a process of its own (`ranks`),
    and of `rank_timeout` seconds to make progress in.
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
    hybrid: Hybrid = one_of("series", valid=get_args(Hybrid))
    threads: int | None = None
    profile: ProfileKind = one_of("none", valid=get_args(ProfileKind))
    weights: WeightDtype = one_of("auto", valid=WEIGHT_DTYPES)
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    rank_timeout: int = whole(
        300, minimum=1, fix="use seconds without progress after which a rank hangs, such as 300"
    )

    @property
    def ranks(self) -> Ranks:
        return Ranks(self.tensor_parallel, self.pipeline_parallel)

    @property
    def uses_gpus(self) -> bool:
        return self.torch_device.type == "cuda"

    @property
    def num_stages(self) -> int:
        return self.pipeline_parallel

    @property
    def uses_kernels(self) -> bool:
        """Whether Triton's kernels do the work between matrix products."""
        return self.kernels == "triton" or (self.kernels == "auto" and self.uses_gpus)

    @property
    def wants_native(self) -> bool:
        """Whether C++ is to compute, where it can be compiled."""
        return self.torch_device.type == "cpu" and self.kernels in ("auto", "native")

    @cached_property
    def torch_device(self) -> torch.device:
        device = devices.resolve_device(self.device)
        if device.type == "cuda":
            # Streams, events and Triton's launches go to the current one.
            torch.cuda.set_device(device)
        return device

    @cached_property
    def _dtype(self) -> tuple[str, torch.dtype]:
        return devices.resolve_dtype(self.dtype, self.torch_device)

    @property
    def torch_dtype(self) -> torch.dtype:
        return self._dtype[1]

    @property
    def device_name(self) -> str:
        isa = self.wants_native and built_isa(self.isa)
        name = devices.device_description(self.torch_device, self._threads, isa or None)
        return name if self.num_devices == 1 else f"{name}, {self.ranks.description}"

    @property
    def num_devices(self) -> int:
        return self.ranks.num_devices

    @property
    def num_threads(self) -> int | None:
        """How many threads compute, on each of several ranks; None on a GPU."""
        return self._threads if self.torch_device.type == "cpu" else None

    @property
    def placement(self) -> str | None:
        """Where the threads of a CPU's C++ are, in words; None where there are none."""
        return place(self._threads).describe() if self.wants_native else None

    @property
    def _threads(self) -> int:
        """Those of `threads`, or a rank's share of all."""
        return self.threads or max(1, devices.num_threads(None) // self.num_devices)

    @property
    def dtype_name(self) -> str:
        return self._dtype[0]

    @property
    def dtype_bytes(self) -> int:
        """Of an element of the cache, and of a weight unless those are in 8 bits."""
        return self.torch_dtype.itemsize

    @property
    def default_model(self) -> str:
        return devices.default_model_name(self.torch_device, self.dtype_bytes)
