"""Timer of whole iterations, on any executor of a real device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from sarathi_lab.engine.block_manager import BlockManager
from sarathi_lab.engine.compositions import again, make_batch, run_once
from sarathi_lab.engine.executor import Executor, GraphUse
from sarathi_lab.engine.request import Batch
from sarathi_lab.engine.single_iteration import SingleIteration, single_iteration
from sarathi_lab.executor.measured_backend import DeviceExecutor
from sarathi_lab.executor.timeline import WallClock

REFERENCE = 64  # tokens
# Replayed, replayed in pieces, launched one by one, of a CPU.
Timing = Literal["graph", "piecewise", "calls", "host"]
TIMINGS: dict[GraphUse, Timing] = {"full": "graph", "piecewise": "piecewise", "none": "calls"}


class IterationProbe:
    """Timer of iterations of an `executor`; `timing` is how the newest was taken. Batches must be
    of sequences that hold cache blocks.
    """

    has_operations = False  # whether `operation_times` has more than the whole
    reports_operations = False  # whether these are of the same iteration

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self.timing: Timing = "host"

    def iterations(self, batch: Batch) -> Iterator[SingleIteration]:
        """Yield the time of `batch` again and again, behind one that does not count.

        Where one batch is in flight at a time, decodes go on where their sequences have room
        (`compositions.again`): a sequence that is rewound comes to the workers as a new one.
        """
        self.executor.start()  # which lets go of earlier sequences
        if self.executor.feeds_tokens:
            while True:
                yield self._timed(batch)
        batch = again(run_once(self.executor, batch))
        while True:
            iteration = self._timed(batch)
            batch = again(iteration.result)
            yield iteration

    def _timed(self, batch: Batch) -> SingleIteration:
        iteration = single_iteration(self.executor, batch)
        # Simulated ones have no timeline, and a CPU has no graphs.
        if isinstance(self.executor, WallClock) and self.executor.timeline.has_stream:
            self.timing = TIMINGS[iteration.result.graph_use]
        return iteration


class DeviceProbe(IterationProbe):
    """Timer of iterations of a real device, with a measure of its present speed."""

    def __init__(self, executor: DeviceExecutor) -> None:
        super().__init__(executor)
        self.num_blocks = executor.num_blocks
        self.block_size = executor.block_size

    def reference(self, num_tokens: int) -> float:
        """Return the seconds of a prompt of up to `REFERENCE` tokens, as a measure of the device's
        present speed.
        """
        blocks = BlockManager(self.num_blocks, self.block_size)
        tokens = min(num_tokens, REFERENCE, blocks.num_free * blocks.block_size)
        batch = make_batch(prefill_tokens=tokens, blocks=blocks)
        return single_iteration(self.executor, batch).seconds
