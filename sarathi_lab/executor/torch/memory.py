"""Memory of a device and its host: what a model and its cache may take, and swapped blocks."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from sarathi_lab.config.errors import RunError, UserError
from sarathi_lab.engine.request import Copy
from sarathi_lab.executor.torch.shapes import LARGEST_HYBRID
from sarathi_lab.model.spec import ModelSpec
from sarathi_lab.model.transformer import KVCache, Transformer

CPU = torch.device("cpu")
USABLE = 0.9  # share of the free memory; the rest is for activations and logits
# For a cache of all free memory: a CPU has other tasks, too.
USABLE_WHEN_FILLED = {"cuda": 0.9, "cpu": 0.5}
# Bytes of device memory, at most, that swapped blocks are gathered in (or one block).
STAGED_BYTES = 64 << 20
SPARE = 0.02  # of a GPU: CUDA graphs, fragments, what libraries take at first use
SPARE_BYTES = 1 << 30


def free_memory_bytes(device: torch.device) -> int:
    """Return the bytes that a model and its cache may take now."""
    if device.type == "cuda":
        # torch keeps memory of earlier runs, free for the next though taken for the driver.
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + kept
    with suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable"):
                return 1024 * int(line.split()[1])
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


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

    def check(self, kv_tokens: int, host_kv_tokens: int) -> None:
        """Raise UserError if weights, cache and swapped blocks exceed the free memory."""
        cache = kv_tokens * self.token_bytes
        free = free_memory_bytes(self.device)
        if self.weights + cache > USABLE * free:
            raise UserError(
                f"model {self.spec.name} needs {self.weights / 1e9:.1f} GB for weights and "
                f"{cache / 1e9:.1f} GB for KV, {self.device_name} has {free / 1e9:.1f} GB free, "
                "of which a tenth stays for activations; lower batch, shorten the requests or "
                "max_model_len, use dtype=bfloat16, or take a smaller model"
            )
        taken = self.weights + cache if self.device == CPU else 0
        left = max(0.0, USABLE * free_memory_bytes(CPU) - taken)
        if (swapped := host_kv_tokens * self.token_bytes) > left:
            raise UserError(
                f"cache.num_host_blocks: swapped blocks need {swapped / 1e9:.1f} GB of "
                f"host memory, of which {left / 1e9:.1f} GB are left; lower it, or use "
                "preemption=recompute"
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


@dataclass(frozen=True)
class KvBudget:
    """Bytes for KV beside weights and the activations of an iteration of `num_tokens`."""

    free: int
    block: int
    activations: int
    num_tokens: int

    @classmethod
    def measure(
        cls, model: Transformer, block_size: int, num_tokens: int, iterate: Callable[[], None]
    ) -> KvBudget:
        """Measure what a cache of one block leaves beside an iteration, which `iterate` runs."""
        device = model.device
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        iterate()
        torch.cuda.synchronize(device)
        activations = torch.cuda.max_memory_allocated(device) - before
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(device).total_memory
        # Graphs keep those of the largest of them, beside what fits none.
        kept = int(activations * min(1.0, LARGEST_HYBRID / num_tokens))
        spare = max(SPARE_BYTES, int(SPARE * total))
        free = free_memory_bytes(device) - activations - kept - spare
        block = model.spec.kv_bytes_per_token(model.dtype.itemsize) * block_size
        return cls(max(0, free), block, activations, num_tokens)

    def fit(self, num_blocks: int | None) -> int:
        """Return `num_blocks` (None: all that fit). Raises RunError if they do not fit."""
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


class HostPool:
    """Host memory for `num_blocks` swapped blocks of `cache`, [num_blocks, num_layers, ...] each.

    Blocks are gathered on the device, so that neighbours move in one copy. On a GPU the pages are
    locked and copies are queued between kernels; the host does not wait.
    """

    def __init__(self, cache: KVCache, num_blocks: int) -> None:
        # 8 bits as uint8: torch can't index every 8-bit type.
        tensors = [
            tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
            for tensor in cache.tensors
        ]
        self._tensors = [(tensor, _allocate_on_host(tensor, num_blocks)) for tensor in tensors]
        largest = max(tensor.nbytes // tensor.shape[1] for tensor in cache.tensors)
        self._max_staged = max(1, STAGED_BYTES // largest)

    @torch.inference_mode()
    def make(self, copies: Sequence[Copy]) -> None:
        """Make `copies` in their order; successive ones of one direction move together."""
        for is_out, group in groupby(copies, key=lambda copy: copy.is_out):
            row = list(group)
            for first in range(0, len(row), self._max_staged):
                self._move(is_out, row[first : first + self._max_staged])

    def warm_up(self) -> None:
        """Copy a block out and back in, to load what the first measured copy needs."""
        self.make([Copy(True, 0, 0), Copy(False, 0, 0)])

    def _move(self, is_out: bool, copies: Sequence[Copy]) -> None:
        numbers = [copy.host_block for copy in copies]
        cuts = [0, *(np.flatnonzero(np.diff(numbers) != 1) + 1).tolist(), len(copies)]
        for on_device, on_host in self._tensors:
            blocks = on_device.transpose(0, 1)  # as on the host
            index = index_of([copy.device_block for copy in copies], on_device.device)
            if is_out:
                staged = blocks.index_select(0, index)
            else:
                staged = blocks.new_empty((len(copies), *blocks.shape[1:]))
            for begin, end in pairwise(cuts):  # whose blocks on the host count up by one
                host = on_host[numbers[begin] : numbers[begin] + end - begin]
                pair = (host, staged[begin:end]) if is_out else (staged[begin:end], host)
                pair[0].copy_(pair[1], non_blocking=True)
            if not is_out:
                blocks.index_copy_(0, index, staged)


def _allocate_on_host(tensor: Tensor, num_blocks: int) -> Tensor:
    """Return zeros for blocks of `tensor` [num_layers, num_blocks, ...]; locked for a GPU."""
    num_layers, _, *sizes = tensor.shape
    pool = torch.zeros((num_blocks, num_layers, *sizes), dtype=tensor.dtype)
    if tensor.device.type == "cuda" and num_blocks:
        # Not pin_memory=True: it takes the next power of two for the life of the process.
        runtime, address = torch.cuda.cudart(), pool.data_ptr()
        if runtime.cudaHostRegister(address, pool.nbytes, 0) != runtime.cudaError.success:
            raise RunError(
                f"{pool.nbytes / 1e9:.1f} GB of host memory can't be locked for swapped blocks; "
                "lower cache.num_host_blocks, or raise the limit of locked memory (ulimit -l)"
            )
        weakref.finalize(pool, runtime.cudaHostUnregister, address).atexit = False
    return pool


def index_of(blocks: list[int], device: torch.device) -> Tensor:
    """Return the numbers of `blocks` on `device`, int64; sent to a GPU from pinned memory."""
    index = torch.tensor(blocks)
    return index.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else index
