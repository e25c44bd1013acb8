"""Memory of a GPU that an executor takes: a cache beside activations."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass

import torch

from sarathi_lab.config.errors import RunError
from sarathi_lab.executor.memory import free_memory_bytes
from sarathi_lab.executor.torch.shapes import LARGEST_HYBRID
from sarathi_lab.model.transformer import Transformer

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
        of_graphs = int(activations * min(1.0, LARGEST_HYBRID / num_tokens))
        spare = max(SPARE_BYTES, int(SPARE * total))
        free = free_memory_bytes(device) - activations - of_graphs - spare
        block = model.spec.kv_bytes_per_token(model.dtype.itemsize) * block_size
        return cls(max(0, free), block, activations, num_tokens)

    def fit(self, num_blocks: int | None) -> int:
        """Return `num_blocks` (None: all that fit). Raises RunError if they do not fit."""
        max_blocks = self.free // self.block
        if max_blocks < 1 or (num_blocks or 0) > max_blocks:
            wanted = f"{num_blocks} blocks" if num_blocks else "one block"
            raise RunError(
                f"the KV cache of {wanted} needs {(num_blocks or 1) * self.block / 1e9:.1f} GB; "
                f"beside the weights and {self.activations / 1e9:.1f} GB for an iteration of "
                f"{self.num_tokens} tokens, {self.free / 1e9:.1f} GB are free, room for "
                f"{max_blocks} blocks; lower batch or chunk, or shorten the requests"
            )
        return num_blocks or max_blocks
