"""The memory of a device: what a model and its cache may take of it."""

from __future__ import annotations

import gc
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from sarathi_lab.config.errors import RunError, UserError
from sarathi_lab.executor.torch.executor import TorchExecutor
from sarathi_lab.executor.torch.shapes import LARGEST_HYBRID
from sarathi_lab.model.spec import ModelSpec

CPU = torch.device("cpu")
USABLE = 0.9  # share of the free memory; the rest is for activations and logits
# For a cache as large as there is room: a CPU has other tasks, too.
USABLE_WHEN_FILLED = {"cuda": 0.9, "cpu": 0.5}
SPARE = 0.02  # of the memory: CUDA graphs, fragments, what libraries take when they first need it
SPARE_BYTES = 1 << 30


def free_memory_bytes(device: torch.device) -> int:
    """Memory that a model and its cache may take now."""
    if device.type == "cuda":
        # What torch keeps of earlier runs is free for the next, though taken for the driver.
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + kept
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        found = [line.split()[1] for line in lines if line.startswith("MemAvailable")]
        return 1024 * int(found[0])
    except (OSError, IndexError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Memory:
    """The memory of `device` before `spec` is loaded to it in elements of `dtype_bytes`."""

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

    def check(self, kv_tokens: int, host_kv_tokens: int) -> None:
        """Raise UserError if weights and caches, on the device and swapped, exceed what is free."""
        cache = kv_tokens * self.token_bytes
        free = free_memory_bytes(self.device)
        if self.weights + cache > USABLE * free:
            raise UserError(
                f"model {self.spec.name} needs {self.weights / 1e9:.1f} GB for weights and "
                f"{cache / 1e9:.1f} GB for KV, {self.device_name} has {free / 1e9:.1f} GB free, "
                f"of which a tenth stays for activations; {self._what_fits(free)}"
            )
        taken = self.weights + cache if self.device == CPU else 0
        left = max(0.0, USABLE * free_memory_bytes(CPU) - taken)
        if (swapped := host_kv_tokens * self.token_bytes) > left:
            raise UserError(
                f"cache.num_host_blocks: what is swapped out needs {swapped / 1e9:.1f} GB of "
                f"host memory, of which {left / 1e9:.1f} GB are left; lower it, or use "
                "preemption=recompute"
            )

    def _what_fits(self, free: int) -> str:
        """What to do about a model or cache that is too large."""
        tokens = int((USABLE * free - self.weights) // self.token_bytes)
        if tokens > 0:
            return (
                f"there is room for {tokens} tokens of KV: lower batch, shorten the requests or "
                "max_model_len"
            )
        halved = self.spec.weight_bytes(2) < USABLE * free and self.dtype_bytes > 2
        fix = "use dtype=bfloat16" if halved else "take a smaller model"
        return f"its weights alone do not fit: {fix}"

    def kv_blocks(self, block_size: int) -> int:
        """Blocks that fit beside the weights. Raises UserError for none."""
        free = USABLE_WHEN_FILLED[self.device.type] * free_memory_bytes(self.device)
        num_blocks = int((free - self.weights) // (self.token_bytes * block_size))
        if num_blocks < 1:
            self.check(block_size, 0)
            raise UserError(
                f"model {self.spec.name} leaves no room for KV on {self.device_name}; take a "
                "smaller model"
            )
        return num_blocks


@dataclass(frozen=True)
class Room:
    """Bytes for KV beside weights and the activations of an iteration of `num_tokens`."""

    free: int
    block: int
    activations: int
    num_tokens: int

    def checked(self, num_blocks: int | None) -> int:
        """`num_blocks` if they fit, or as many as do if None. Raises RunError if they do not."""
        most = self.free // self.block
        if most < 1 or (num_blocks or 0) > most:
            wanted = f"{num_blocks} blocks" if num_blocks else "one block"
            raise RunError(
                f"the KV cache of {wanted} needs {(num_blocks or 1) * self.block / 1e9:.1f} GB; "
                f"beside the weights and {self.activations / 1e9:.1f} GB for an iteration of "
                f"{self.num_tokens} tokens, {self.free / 1e9:.1f} GB are free, room for {most} "
                "blocks; lower batch or chunk, or shorten the requests"
            )
        return num_blocks or most


def kv_blocks_beside(probe: TorchExecutor, num_tokens: int, num_emits: int) -> Room:
    """The room that `probe`, of one block, leaves while it computes so many tokens and logits."""
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
    return Room(max(0, free), block, activations, num_tokens)
