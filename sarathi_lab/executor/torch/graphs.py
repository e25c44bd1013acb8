"""Iterations recorded once and replayed: what a launch costs the host is paid once per shape."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Protocol

import torch

from sarathi_lab.engine.block_manager import BlockManager
from sarathi_lab.engine.executor import Executor
from sarathi_lab.engine.request import Batch, Request, SequenceState
from sarathi_lab.executor.torch.shapes import Shape
from sarathi_lab.executor.torch.watching import Watch


class Graphs(Protocol):
    """Work that is the same for every batch of a shape, as it reads its inputs from fixed
    places.
    """

    def capture(self, shape: Shape, work: Callable[[], None]) -> None:
        """Record `work`, which must have run once before."""
        ...

    def replay(self, shape: Shape) -> bool:
        """Do what was recorded for `shape`; False if nothing was."""
        ...

    def drop(self, shape: Shape) -> None:
        """Forget what was recorded for `shape`, if anything."""
        ...


class NoGraphs:
    """Everything is launched anew, operation by operation."""

    def capture(self, shape: Shape, work: Callable[[], None]) -> None:
        """See `Graphs`."""

    def replay(self, shape: Shape) -> bool:
        """See `Graphs`."""
        return False

    def drop(self, shape: Shape) -> None:
        """See `Graphs`."""


class CudaGraphs:
    """CUDA graphs, whose intermediate results share one pool of memory: only one runs at a time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: dict[Shape, torch.cuda.CUDAGraph] = {}

    def capture(self, shape: Shape, work: Callable[[], None]) -> None:
        """See `Graphs`."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            work()
        self._graphs[shape] = graph

    def replay(self, shape: Shape) -> bool:
        """See `Graphs`."""
        graph = self._graphs.get(shape)
        if graph is None:
            return False
        graph.replay()
        return True

    def drop(self, shape: Shape) -> None:
        """See `Graphs`."""
        self._graphs.pop(shape, None)


REPETITIONS = 7


@dataclass(frozen=True)
class Rehearsal:
    """The common kinds of iterations of up to `batch_size` sequences, shortened to what the cache
    holds.
    """

    executor: Executor
    num_blocks: int
    block_size: int
    batch_size: int
    chunk_tokens: int

    def run(self) -> float:
        """A chunk at the start of a prompt, one at an offset, and single decodes; returns their
        seconds.
        """
        half = max(1, min(self.chunk_tokens, self.num_blocks * self.block_size // 2))
        blocks = BlockManager(self.num_blocks, self.block_size)
        seconds = 0.0
        if 2 * half <= self.num_blocks * self.block_size:
            prompt = throw_away(2 * half, blocks)
            for start in (0, half):
                prompt.num_computed = start
                seconds += self._run_once([prompt], half)
            blocks.free(prompt)
        decodes = [throw_away(1, blocks) for _ in range(min(self.batch_size, self.num_blocks))]
        return seconds + self._run_once(decodes, 1)

    def slowdown(self, watch: Watch) -> float:
        """Seconds while `watch` tells operations apart, over those of the same left alone (medians,
        in turn).
        """
        seconds: dict[bool, list[float]] = {True: [], False: []}
        for _ in range(REPETITIONS):
            for is_apart in (True, False):
                watch.is_apart = is_apart
                seconds[is_apart].append(self.run())
        return median(seconds[True]) / median(seconds[False])

    def _run_once(self, sequences: list[SequenceState], num_tokens: int) -> float:
        batch = Batch()
        for sequence in sequences:
            batch.add(sequence, num_tokens)
        self.executor.submit(batch)
        result = self.executor.collect()
        for sequence in sequences:
            sequence.in_flight = False
        return result.busy


def throw_away(num_tokens: int, blocks: BlockManager) -> SequenceState:
    """A sequence whose prompt of `num_tokens` zeros nobody misses, with its cache blocks."""
    sequence = SequenceState(Request(0, 0.0, num_tokens, 1, [0] * num_tokens), order=0)
    blocks.grow(sequence, num_tokens)
    return sequence
