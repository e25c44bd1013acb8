"""Times by operation of iterations that vLLM's workers run."""

from __future__ import annotations

import math
from collections.abc import Iterator

from sarathi_lab.engine.request import Batch
from sarathi_lab.engine.single_iteration import SingleIteration
from sarathi_lab.executor.iteration_probe import DeviceProbe
from sarathi_lab.executor.vllm.executor import VllmExecutor
from sarathi_lab.executor.vllm.operation_hooks import (
    ATTENTION,
    ELEMENTWISE,
    EMBEDDING,
    FFN,
    LOGITS,
    OUT,
    QKV,
)

OPERATIONS = (QKV, ATTENTION, OUT, FFN, ELEMENTWISE, LOGITS)
OTHERS = "others"


class HookedProbe(DeviceProbe):
    """Timer of operations within iterations, by hooks on the modules of a model that runs eagerly
    (`OperationTimer`). `operation_share` is the share of the newest iteration that they sum to;
    the rest is launches, what is between modules, and the host's work where that is not hidden.
    """

    has_operations = reports_operations = True

    def __init__(self, executor: VllmExecutor) -> None:
        super().__init__(executor)
        self._workers = executor.workers
        self.operation_share = math.nan
        self._batch: Batch | None = None  # of `_iterations`
        self._iterations: Iterator[SingleIteration] = iter(())

    def operation_times(self, batch: Batch) -> dict[str, float]:
        """Return the seconds by operation of one iteration of `batch`, `OTHERS` for the rest."""
        if batch is not self._batch:
            self._iterations = self.iterations(batch)
            self._batch = batch
        with self._workers.timed_operations() as reports:
            iteration = next(self._iterations)
        newest = reports[-1]  # others ran before it, to warm up or to keep the device at work
        timed = sum(newest.values())
        self.operation_share = timed / iteration.seconds
        times = {name: newest.get(name, 0.0) for name in OPERATIONS}
        untimed = max(0.0, iteration.seconds - timed)
        times[OTHERS] = untimed + newest.get(EMBEDDING, 0.0)
        return times
