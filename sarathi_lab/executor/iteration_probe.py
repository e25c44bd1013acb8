"""Timer of whole iterations, on any executor of a real device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from sarathi_lab.engine.block_manager import BlockManager
from sarathi_lab.engine.compositions import again, make_batch, run_once
from sarathi_lab.engine.request import Batch
from sarathi_lab.executor.timeline import CudaTimeline

REFERENCE = 64  # tokens
Timing = Literal["graph", "calls", "host"]  # replayed, launched one by one, of a CPU


class IterationProbe:
    """Timer of iterations of an `executor` with a `timeline` and blocks; `timing` is how the newest
    was taken. Batches must be of sequences that hold cache blocks.
    """

    def __init__(self, executor: Any) -> None:
        self.executor = executor
        self.timing: Timing = "host"

    def iterations(self, batch: Batch) -> Iterator[float]:
        """Yield the seconds of `batch` again and again, behind one that does not count; decodes go
        on where their sequences have room (`compositions.again`).
        """
        self.executor.start()  # which lets go of earlier sequences
        batch = again(run_once(self.executor, batch))
        while True:
            result = run_once(self.executor, batch)
            if isinstance(getattr(self.executor, "timeline", None), CudaTimeline):
                self.timing = "graph" if result.is_replayed else "calls"
            batch = again(result)
            yield result.busy

    def reference(self, num_tokens: int) -> float:
        """Return the seconds of a prompt of up to `REFERENCE` tokens, as a measure of the device's
        present speed.
        """
        blocks = BlockManager(self.executor.num_blocks, self.executor.block_size)
        tokens = min(num_tokens, REFERENCE, blocks.num_free * blocks.block_size)
        return run_once(self.executor, make_batch(prefill_tokens=tokens, blocks=blocks)).busy
