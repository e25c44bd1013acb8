"""Memory that an executor takes: a cache beside activations, and swapped blocks on the host."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

import numpy as np
import torch
from torch import Tensor

from sarathi_lab.config.errors import RunError
from sarathi_lab.engine.request import Copy
from sarathi_lab.executor.memory import free_memory_bytes
from sarathi_lab.executor.torch.shapes import LARGEST_HYBRID
from sarathi_lab.model.transformer import KVCache, Transformer

# Bytes of device memory, at most, that swapped blocks are gathered in (or one block).
STAGED_BYTES = 64 << 20
SPARE = 0.02  # of a GPU: CUDA graphs, fragments, what libraries take at first use
SPARE_BYTES = 1 << 30


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
        self._tensors = [
            (tensor, _allocate_on_host(tensor, num_blocks)) for tensor in cache.tensors
        ]
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
