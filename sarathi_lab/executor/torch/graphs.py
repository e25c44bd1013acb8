"""Iterations recorded once and replayed, and iterations that are thrown away."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import numpy as np
import torch

from sarathi_lab.engine.block_manager import BlockManager
from sarathi_lab.engine.executor import Executor
from sarathi_lab.engine.request import Batch, Request, SequenceState
from sarathi_lab.executor.torch.shapes import Shape
from sarathi_lab.executor.torch.watching import Nothing

REPETITIONS = 7


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
        with torch.cuda.graph(graph, pool=self._pool):
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


@dataclass(frozen=True)
class Rehearsal:
    """The common iterations of up to `batch_size` sequences, cut to what the cache holds."""

    executor: Executor
    num_blocks: int
    block_size: int
    batch_size: int
    chunk_tokens: int

    def run(self) -> float:
        """A chunk at the start of a prompt, one at an offset, and single decodes; their seconds."""
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

    def slowdown(self, watch: Nothing) -> float:
        """Seconds while `watch` tells operations apart, over those without (medians, in turn)."""
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


def throw_away(
    num_tokens: int, blocks: BlockManager, *, start: int = 0, is_decode: bool = False
) -> SequenceState:
    """A sequence of zeros whose next `num_tokens` tokens, behind `start` cached ones, have blocks.

    They are the prompt's, or the pending token of a decode. Raises RuntimeError for no room.
    """
    end = start + num_tokens
    prompt_len = start if is_decode else end
    zeros = np.zeros(prompt_len, dtype=np.int32)
    sequence = SequenceState(Request(0, 0.0, prompt_len, 2, zeros), order=0)
    sequence.num_computed = start
    if is_decode:
        sequence.output_token_ids.append(0)
    if not blocks.grow(sequence, end):
        raise RuntimeError(f"no cache blocks for {end} tokens")
    return sequence
