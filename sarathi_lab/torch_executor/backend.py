"""The real device as a backend: a CPU or a GPU through torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import torch

from sarathi_lab.errors import UserError
from sarathi_lab.floor import Ceilings
from sarathi_lab.model.spec import DTYPE_BYTES, ModelSpec
from sarathi_lab.model.weights import load_model
from sarathi_lab.torch_executor.device import (
    default_model_name,
    device_description,
    device_size,
    free_memory_bytes,
    keep_freed_memory,
    measure_ceilings,
    resolve_device,
    resolve_dtype,
)
from sarathi_lab.torch_executor.executor import TorchExecutor

WARM_UP_TOKENS = 256
USABLE_MEMORY = 0.9  # the rest is for activations and logits


@dataclass(frozen=True)
class TorchBackend:
    """Runs the model with torch on `device`; `seed` is that of random weights."""

    name: ClassVar[str] = "torch"
    computes_tokens: ClassVar[bool] = True
    num_stages: ClassVar[int] = 1
    device: str = "auto"
    dtype: str = "auto"
    seed: int = 0

    def __post_init__(self) -> None:
        _ = self._dtype  # a device that is not there is refused at once

    @cached_property
    def _device(self) -> torch.device:
        return resolve_device(self.device)

    @cached_property
    def _dtype(self) -> tuple[str, torch.dtype]:
        return resolve_dtype(self.dtype, self._device)

    @property
    def device_name(self) -> str:
        return device_description(self._device)

    @property
    def dtype_name(self) -> str:
        return self._dtype[0]

    @property
    def dtype_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype_name]

    @property
    def default_model(self) -> str:
        return default_model_name(self._device, self.dtype_bytes)

    def check(self, spec: ModelSpec, kv_tokens: int) -> None:
        """Raise UserError if weights and cache exceed the free memory, or the shape exists for simulation only."""
        spec.require_runnable()
        weights = spec.weight_bytes(self.dtype_bytes)
        cache = kv_tokens * spec.kv_bytes_per_token(self.dtype_bytes)
        free = free_memory_bytes(self._device)
        if weights + cache > USABLE_MEMORY * free:
            raise UserError(
                f"model {spec.name} needs {weights / 1e9:.1f} GB for weights and {cache / 1e9:.1f} GB for KV, "
                f"{self.device_name} has {free / 1e9:.1f} GB free, of which a tenth stays for activations; "
                "lower batch, shorten the requests or max_model_len, or take a smaller model"
            )

    def ceilings(self) -> Ceilings:
        """Measured on this device; the best so far."""
        return measure_ceilings(self._device, self._dtype[1])

    def size(self) -> tuple[int, int]:
        """Bytes of the device's memory, free or not, and how many multiprocessors or CPU threads compute."""
        return device_size(self._device)

    def cautions(self, spec: ModelSpec) -> Sequence[str]:
        """None: what runs here is measured."""
        return ()

    def predictor(self, spec: ModelSpec) -> None:
        """A real device is measured, not predicted."""
        return

    def build(
        self, spec: ModelSpec, checkpoint: Path | None, *, num_blocks: int, block_size: int, batch_size: int
    ) -> TorchExecutor:
        """Load the weights, make the cache and warm up."""
        if self._device.type == "cpu":
            keep_freed_memory()
        model = load_model(spec, checkpoint, self._device, self._dtype[1], self.seed)
        executor = TorchExecutor(model, num_blocks=num_blocks, block_size=block_size)
        executor.warm_up(batch_size=batch_size, chunk_tokens=WARM_UP_TOKENS)
        return executor
