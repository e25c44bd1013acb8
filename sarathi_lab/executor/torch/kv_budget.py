"""The cache that fits a GPU beside the activations of a run's largest iteration."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch

from sarathi_lab.engine.executor import Sizes
from sarathi_lab.executor.torch.executor import TorchExecutor
from sarathi_lab.executor.torch.memory import KvBudget, free_memory_bytes
from sarathi_lab.executor.torch.shapes import LARGEST_HYBRID

WARM_UP_TOKENS = 256
SPARE = 0.02  # of the memory: CUDA graphs, fragments, what libraries take at first use
SPARE_BYTES = 1 << 30


def fitting_blocks(make: Callable[..., TorchExecutor], sizes: Sizes) -> int:
    """Return the planned number of blocks if executors of `make` have room for them, or all that
    fit. Raises RunError.
    """
    num_emits = sizes.batch_size * (1 + sizes.num_drafts)
    tokens = sizes.max_batch_tokens or WARM_UP_TOKENS
    budget = measure_kv_budget(make(num_blocks=1), tokens, num_emits)
    return budget.fit(None if sizes.fills_memory else sizes.num_blocks)


def measure_kv_budget(probe: TorchExecutor, num_tokens: int, num_emits: int) -> KvBudget:
    """Measure the memory that `probe`, of one block, leaves beside an iteration of such sizes."""
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
    return KvBudget(max(0, free), block, activations, num_tokens)
