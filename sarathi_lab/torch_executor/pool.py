"""How large the KV pool may be: what a real iteration of the largest kind leaves of the memory."""

from __future__ import annotations

import gc
from dataclasses import dataclass

import torch

from sarathi_lab.errors import RunError
from sarathi_lab.torch_executor.device import free_memory_bytes
from sarathi_lab.torch_executor.executor import TorchExecutor

SPARE = 0.02  # of the memory: CUDA graphs, fragments, what libraries take when they first need it
SPARE_BYTES = 1 << 30


@dataclass(frozen=True)
class Room:
    """Memory for KV beside weights and the activations of an iteration of `num_tokens`, in bytes."""

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
                f"the KV cache of {wanted} needs {(num_blocks or 1) * self.block / 1e9:.1f} GB; beside the weights and "
                f"{self.activations / 1e9:.1f} GB for an iteration of {self.num_tokens} tokens, {self.free / 1e9:.1f} "
                f"GB are free, room for {most} blocks; lower batch or chunk, or shorten the requests"
            )
        return num_blocks or most


def kv_blocks_beside(probe: TorchExecutor, num_tokens: int, num_emits: int) -> Room:
    """The room that `probe`, of one block, leaves while it computes `num_tokens` tokens and as many logits."""
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
    free = free_memory_bytes(device) - activations - max(SPARE_BYTES, int(SPARE * total))
    model = probe.model
    block = model.spec.kv_bytes_per_token(model.dtype.itemsize) * probe.block_size
    return Room(max(0, free), block, activations, num_tokens)
