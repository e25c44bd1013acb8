"""Memory of a device and its host: what a model and its cache may take."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from sarathi_lab.config.errors import UserError
from sarathi_lab.model.spec import ModelSpec

USABLE = 0.9  # share of the free memory; the rest is for activations and logits
# For a cache of all free memory: a CPU has other tasks, too.
USABLE_WHEN_FILLED = {"cuda": 0.9, "cpu": 0.5}


def free_memory_bytes(device: torch.device) -> int:
    """Return the bytes that a model and its cache may take now."""
    if device.type == "cuda":
        # torch keeps memory of earlier runs, free for the next though taken for the driver.
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        free, _ = torch.cuda.mem_get_info(device)
        return free + unused
    with suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable"):
                return 1024 * int(line.split()[1])
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


class NoRoom(UserError):
    """Weights and cache exceed the free memory. The message ends with a fix for a run of requests;
    a task with other sizes takes the `reason` and adds another.
    """

    @property
    def reason(self) -> str:
        return str(self).partition("; use ")[0]


@dataclass(frozen=True)
class Memory:
    """Memory of `device` before `spec` is loaded in elements of `dtype_bytes`."""

    device: torch.device
    device_name: str
    spec: ModelSpec
    dtype_bytes: int

    @property
    def weights(self) -> int:
        return self.spec.weight_bytes(self.dtype_bytes)

    @property
    def token_bytes(self) -> int:
        return self.spec.kv_bytes_per_token(self.dtype_bytes)

    def check(self, kv_tokens: int) -> None:
        """Raise UserError if weights and cache exceed the free memory."""
        cache = kv_tokens * self.token_bytes
        free = free_memory_bytes(self.device)
        if self.weights + cache > USABLE * free:
            raise NoRoom(
                f"model {self.spec.name} needs {self.weights / 1e9:.1f} GB for weights and "
                f"{cache / 1e9:.1f} GB for KV, {self.device_name} has {free / 1e9:.1f} GB free, "
                "of which a tenth stays for activations; use cache.num_blocks=auto, lower "
                "batch, shorten the requests or max_model_len, use dtype=bfloat16, or take a "
                "smaller model"
            )

    def kv_blocks(self, block_size: int) -> int:
        """Return the blocks that fit beside the weights. Raises UserError for none."""
        free = USABLE_WHEN_FILLED[self.device.type] * free_memory_bytes(self.device)
        num_blocks = int((free - self.weights) // (self.token_bytes * block_size))
        if num_blocks < 1:
            raise UserError(
                f"model {self.spec.name} with {self.weights / 1e9:.1f} GB of weights leaves no "
                f"room for KV on {self.device_name}, of which {free / 1e9:.1f} GB are for both; "
                "take a smaller model"
            )
        return num_blocks
