"""Throw-away iterations: to warm up before a run, and to see what watching it costs."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from sarathi_lab.block_manager import BlockManager
from sarathi_lab.executor import Executor
from sarathi_lab.request import Batch, Request, Sequence
from sarathi_lab.torch_executor.watching import Watch

REPETITIONS = 7


@dataclass(frozen=True)
class Rehearsal:
    """The common kinds of iterations of up to `batch_size` sequences, shortened to what the cache holds."""

    executor: Executor
    num_blocks: int
    block_size: int
    batch_size: int
    chunk_tokens: int

    def run(self) -> float:
        """A chunk at the start of a prompt, one at an offset, and single decodes; returns their seconds."""
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
        """Seconds while `watch` tells operations apart, over those of the same left alone (medians, in turn)."""
        seconds: dict[bool, list[float]] = {True: [], False: []}
        for _ in range(REPETITIONS):
            for is_apart in (True, False):
                watch.is_apart = is_apart
                seconds[is_apart].append(self.run())
        return median(seconds[True]) / median(seconds[False])

    def _run_once(self, sequences: list[Sequence], num_tokens: int) -> float:
        batch = Batch()
        for sequence in sequences:
            batch.add(sequence, num_tokens)
        self.executor.submit(batch)
        result = self.executor.collect()
        for sequence in sequences:
            sequence.in_flight = False
        return result.busy


def throw_away(num_tokens: int, blocks: BlockManager) -> Sequence:
    """A sequence whose prompt of `num_tokens` zeros nobody misses, with its cache blocks."""
    sequence = Sequence(Request(0, 0.0, num_tokens, 1, [0] * num_tokens), order=0)
    blocks.grow(sequence, num_tokens)
    return sequence
