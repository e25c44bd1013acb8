"""What the backends of real devices share: degrees, types, peaks and memory."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from functools import cached_property
from pathlib import Path
from typing import ClassVar, Protocol

import torch

from sarathi_lab.config.errors import UserError
from sarathi_lab.engine.executor import Backend, Executor, Sizes
from sarathi_lab.engine.served_system import ServerSetup
from sarathi_lab.executor import device as devices
from sarathi_lab.executor.memory import Memory
from sarathi_lab.executor.timeline import HostTimeline
from sarathi_lab.model.degrees import Degrees
from sarathi_lab.model.layers import CachedWindow
from sarathi_lab.model.roofline import Peaks
from sarathi_lab.model.spec import ModelSpec


class DeviceExecutor(Executor, Protocol):
    """An executor of a real device, which has a cache of its own."""

    num_blocks: int
    block_size: int  # tokens
    timeline: HostTimeline


class MeasuredBackend(Backend, ABC):
    """Base of the backends whose times are measured; the fields are those of a subclass."""

    computes_tokens: ClassVar[bool] = True
    name: ClassVar[str]
    dtype: str
    tensor_parallel: int = 1  # devices, where the subclass has no field for them
    pipeline_parallel: int = 1

    @property
    @abstractmethod
    def torch_device(self) -> torch.device:
        """The first device. Raises UserError for one that is not there."""

    @abstractmethod
    def build(
        self,
        spec: ModelSpec,
        checkpoint: Path | None,
        sizes: Sizes,
    ) -> DeviceExecutor:
        """Return a warmed-up executor."""

    @property
    def block_multiple(self) -> int:
        """Tokens that the size of a block must be a multiple of."""
        return 1

    @property
    def uses_gpus(self) -> bool:
        return self.torch_device.type == "cuda"

    @property
    def degrees(self) -> Degrees:
        return Degrees(self.tensor_parallel, self.pipeline_parallel)

    @property
    def num_devices(self) -> int:
        return self.degrees.num_devices

    @property
    def num_stages(self) -> int:
        return self.pipeline_parallel

    @cached_property
    def _dtype(self) -> tuple[str, torch.dtype]:
        return devices.resolve_dtype(self.dtype, self.torch_device)

    @property
    def torch_dtype(self) -> torch.dtype:
        return self._dtype[1]

    @property
    def dtype_name(self) -> str:
        return self._dtype[0]

    def dtype_of(self, spec: ModelSpec) -> str:
        return self.dtype_name

    @property
    def dtype_bytes(self) -> int:
        """Bytes of an element of the cache, and of a weight unless weights are in 8 bits."""
        return self.torch_dtype.itemsize

    @property
    def default_model(self) -> str:
        self._free_memory()
        return devices.default_model_name(self.torch_device, self.dtype_bytes)

    def memory(self, spec: ModelSpec) -> Memory:
        """Return the memory of one part on a GPU, of all on a CPU."""
        if self.uses_gpus and self.num_devices > 1:
            # Each has about its share of the layers, or of every layer.
            spec = spec.of_part(self.num_devices)
        return Memory(self.torch_device, self.device_name, spec, self.dtype_bytes)

    def _free_memory(self) -> None:
        """End engines of earlier runs, whose memory would count as taken on a GPU."""
        if self.uses_gpus:
            devices.prepare_memory(self.torch_device)

    def check_memory(self, spec: ModelSpec, kv_tokens: int) -> None:
        """Raise UserError if weights and cache do not fit, also without earlier runs' engines."""
        try:
            self.memory(spec).check(kv_tokens)
        except UserError:
            self._free_memory()
            self.memory(spec).check(kv_tokens)

    def kv_blocks(
        self,
        spec: ModelSpec,
        block_size: int,
        setup: ServerSetup,
    ) -> int:
        if setup.share is not None:
            raise UserError(
                f"cache.memory_share={setup.share} is of simulated servers; drop it, as "
                f"executor={self.name} takes what is free, or size the cache by cache.num_blocks"
            )
        self._free_memory()
        return self.memory(spec).kv_blocks(block_size)

    def describe_cache(self, spec: ModelSpec, setup: ServerSetup) -> str:
        return "what the device has free beside the weights"

    def state_tokens(self, spec: ModelSpec) -> int:
        return spec.state_tokens(self.dtype_bytes)

    def window_in_cache(self, spec: ModelSpec, pool: float | None) -> CachedWindow | None:
        return spec.window_in_cache(pool)

    def of_all_devices(self, peaks: Peaks) -> Peaks:
        """Return the peaks of all GPUs by those of one; on a CPU all share them."""
        if not self.uses_gpus:
            return peaks
        return peaks.times(self.num_devices)

    def size(self) -> tuple[int, int]:
        """Return the bytes of memory and the multiprocessors of all GPUs, or those of this machine
        and the CPU's threads.
        """
        if self.uses_gpus:
            gpu = torch.cuda.get_device_properties(self.torch_device)
            number = self.num_devices
            return number * gpu.total_memory, number * gpu.multi_processor_count
        num_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return num_bytes, devices.num_threads(self.num_threads)
