"""CUDA graphs of iterations, and throw-away iterations that warm up an executor."""

from __future__ import annotations

from collections.abc import Callable

import torch

from sarathi_lab.engine.block_manager import BlockManager
from sarathi_lab.engine.compositions import make_batch, make_sequence, run_once
from sarathi_lab.engine.executor import Executor
from sarathi_lab.engine.request import Batch
from sarathi_lab.executor.torch.shapes import Shape


class NoGraphs:
    """Launches of each operation by itself; the base of recorders of work by shape."""

    def capture(self, shape: Shape, work: Callable[[], None]) -> None:
        """Record `work`, which must have run once before."""

    def replay(self, shape: Shape) -> bool:
        """Replay the work of `shape`; return False if none is recorded."""
        return False

    def drop(self, shape: Shape) -> None:
        """Discard the record of `shape`, if any."""


class CudaGraphs(NoGraphs):
    """CUDA graphs; intermediate results share one memory pool, so only one runs at a time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: dict[Shape, torch.cuda.CUDAGraph] = {}

    def capture(self, shape: Shape, work: Callable[[], None]) -> None:
        graph = torch.cuda.CUDAGraph()
        # The outer context: torch keeps its own stream current where a capture fails.
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
    """Run a chunk at the start of a prompt, one at an offset and `batch_size` single tokens, as
    far as the cache holds them; return their seconds.
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
