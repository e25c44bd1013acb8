"""Iterations recorded once and replayed, and those that are thrown away to warm up."""

from __future__ import annotations

from collections.abc import Callable

import torch

from sarathi_lab.engine.block_manager import BlockManager
from sarathi_lab.engine.compositions import make_batch, make_sequence, run_once
from sarathi_lab.engine.executor import Executor
from sarathi_lab.engine.request import Batch
from sarathi_lab.executor.torch.shapes import Shape


class NoGraphs:
    """Everything is launched anew, operation by operation.

    Subclasses record work that is the same for every batch of a shape, as it reads its inputs from
    fixed places: what a launch costs the host is paid once per shape.
    """

    def capture(self, shape: Shape, work: Callable[[], None]) -> None:
        """Record `work`, which must have run once before."""

    def replay(self, shape: Shape) -> bool:
        """Do what was recorded for `shape`; False if nothing was."""
        return False

    def drop(self, shape: Shape) -> None:
        """Forget what was recorded for `shape`, if anything."""


class CudaGraphs(NoGraphs):
    """CUDA graphs, whose intermediate results share one pool of memory: only one runs at a time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: dict[Shape, torch.cuda.CUDAGraph] = {}

    def capture(self, shape: Shape, work: Callable[[], None]) -> None:
        graph = torch.cuda.CUDAGraph()
        # The outer one, as torch leaves its own stream the current one where a capture ends badly.
        current = torch.cuda.stream(torch.cuda.current_stream())
        with current, torch.cuda.graph(graph, pool=self._pool):
            work()
        self._graphs[shape] = graph

    def replay(self, shape: Shape) -> bool:
        graph = self._graphs.get(shape)
        if graph is None:
            return False
        graph.replay()
        return True

    def drop(self, shape: Shape) -> None:
        self._graphs.pop(shape, None)


def rehearse(
    executor: Executor, num_blocks: int, block_size: int, batch_size: int, chunk_tokens: int
) -> float:
    """Run a chunk at the start of a prompt, one at an offset and `batch_size` single tokens, cut to
    what the cache holds; their seconds.
    """
    half = max(1, min(chunk_tokens, num_blocks * block_size // 2))
    blocks = BlockManager(num_blocks, block_size)
    seconds = 0.0
    if 2 * half <= num_blocks * block_size:
        prompt = make_sequence(0, 2 * half, emits=True, blocks=blocks)
        for start in (0, half):
            prompt.num_computed = start
            batch = Batch()
            batch.add(prompt, half)
            seconds += run_once(executor, batch).busy
        blocks.free(prompt)
    num_prefills = min(batch_size, num_blocks)
    singles = make_batch(prefill_tokens=1, num_prefills=num_prefills, emits=True, blocks=blocks)
    return seconds + run_once(executor, singles).busy
