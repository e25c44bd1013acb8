"""The part of the KV cache in host memory, and the copies of swapped blocks there and back."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from sarathi_lab.config.errors import RunError
from sarathi_lab.engine.request import Copy
from sarathi_lab.model.transformer import KVCache

# Of the device's memory, at most, that blocks pass through on their way (or one block).
STAGED_BYTES = 64 << 20


class HostPool:
    """Room for `num_blocks` blocks of `cache` in host memory, [num_blocks, num_layers, ...] there.

    So neighbours move in one copy, once the device has gathered them. On a GPU the pages are
    locked, and copies are queued behind what was launched before them: they are made when the
    kernels launched next need them, and the host does not wait.
    """

    def __init__(self, cache: KVCache, num_blocks: int) -> None:
        # Eight bits as numbers without a meaning: torch can't index all kinds of them.
        tensors = [
            tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
            for tensor in cache.tensors
        ]
        self._tensors = [(tensor, _on_host(tensor, num_blocks)) for tensor in tensors]
        largest = max(tensor.nbytes // tensor.shape[1] for tensor in cache.tensors)
        self._most_blocks = max(1, STAGED_BYTES // largest)

    @torch.inference_mode()
    def make(self, copies: Sequence[Copy]) -> None:
        """Make `copies` in their order; those of one direction in a row go together."""
        for is_out, group in groupby(copies, key=lambda copy: copy.is_out):
            row = list(group)
            for first in range(0, len(row), self._most_blocks):
                self._move(is_out, row[first : first + self._most_blocks])

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Copy a block out and back in, so that the first one that counts finds all loaded."""
        self.make([Copy(True, 0, 0), Copy(False, 0, 0)])

    def _move(self, is_out: bool, copies: Sequence[Copy]) -> None:
        neighbours = _neighbours([copy.host_block for copy in copies])
        for on_device, on_host in self._tensors:
            blocks = on_device.transpose(0, 1)  # as on the host
            index = index_of([copy.device_block for copy in copies], on_device.device)
            if is_out:
                staged = blocks.index_select(0, index)
            else:
                staged = blocks.new_empty((len(copies), *blocks.shape[1:]))
            for place, first, length in neighbours:
                there, here = on_host[first : first + length], staged[place : place + length]
                (there if is_out else here).copy_(here if is_out else there, non_blocking=True)
            if not is_out:
                blocks.index_copy_(0, index, staged)


def _on_host(tensor: Tensor, num_blocks: int) -> Tensor:
    """Zeros for blocks of `tensor` [num_layers, num_blocks, ...]; for a GPU in locked pages."""
    num_layers, _, *sizes = tensor.shape
    made = torch.zeros((num_blocks, num_layers, *sizes), dtype=tensor.dtype)
    if tensor.device.type == "cuda" and num_blocks:
        # Not pin_memory=True: that takes the next power of two, and keeps it for the life of the
        # process.
        runtime, address = torch.cuda.cudart(), made.data_ptr()
        if runtime.cudaHostRegister(address, made.nbytes, 0) != runtime.cudaError.success:
            raise RunError(
                f"{made.nbytes / 1e9:.1f} GB of host memory can't be locked for what is swapped "
                "out; lower cache.num_host_blocks, or raise the limit of locked memory (ulimit -l)"
            )
        weakref.finalize(made, runtime.cudaHostUnregister, address).atexit = False
    return made


def index_of(blocks: list[int], device: torch.device) -> Tensor:
    """The numbers of `blocks` on `device`, int64; of a GPU from pinned memory of their own."""
    index = torch.tensor(blocks)
    return index.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else index


def _neighbours(blocks: Sequence[int]) -> list[tuple[int, int, int]]:
    """Runs of `blocks` that count up by one: where each begins, its first block, its length."""
    begins = [0, *(np.flatnonzero(np.diff(blocks) != 1) + 1).tolist()]
    ends = [*begins[1:], len(blocks)]
    return [(begin, blocks[begin], end - begin) for begin, end in zip(begins, ends, strict=True)]
