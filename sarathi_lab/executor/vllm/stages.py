"""Executor of a pipeline of vLLM's workers, whose stages report when they compute."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from sarathi_lab.engine.executor import Bubble, Span, StepResult, bubbles_between
from sarathi_lab.engine.request import Batch
from sarathi_lab.executor.vllm.executor import VllmExecutor
from sarathi_lab.executor.vllm.stage_pipes import PATIENCE


class StagedExecutor(VllmExecutor):
    """`VllmExecutor` with as many micro-batches in flight as there are stages.

    Times are those of the stages: a micro-batch starts with the first and ends with the last.
    Their idle gaps are classified as in simulation (`bubbles_between`).
    """

    def _reset(self) -> None:
        self._last: Batch | None = None  # that was collected
        self._free_at: list[float] = []  # by stage, the end of that batch
        self._num_collected = 0
        self._num_unfilled = 0  # places in the pipeline without a request to put in
        self._are_starved: deque[bool] = deque()  # of the batches in flight

    def start(self) -> None:
        super().start()
        self._reset()
        with self._explained("the start of its stages' clocks"):
            self._pipes = self.workers.restart_stage_times()

    def submit(self, batch: Batch) -> None:
        super().submit(batch)
        self._are_starved.append(self._num_unfilled > 0)
        self._num_unfilled = max(0, self._num_unfilled - 1)

    def collect(self) -> StepResult:
        """Wait for the oldest micro-batch. Raises RunError if vLLM stops."""
        self._num_unfilled = self.capacity - self.num_in_flight
        # vLLM's queue of results is polled, on a CPU at the expense of the stages.
        self._pipes.has_report(timeout=PATIENCE)
        result = super().collect()
        reports = self._pipes.read()
        spans = []
        for start_mark, end_mark in reports:
            span = (self.timeline.at(start_mark), self.timeline.at(end_mark))
            spans.append(span)
        start_of_first, _ = spans[0]
        _, end_of_last = spans[-1]
        return replace(
            result,
            start=start_of_first,
            end=end_of_last,
            stages=spans,
            bubbles=self._bubbles_before(result.batch, spans),
            launching_time=0.0,
        )

    def _bubbles_before(self, batch: Batch, spans: Sequence[Span]) -> list[Bubble]:
        is_starved = self._are_starved.popleft()
        bubbles = bubbles_between(
            self._last, batch, self._free_at, spans, is_starved, self._num_collected
        )
        self._last = batch
        self._free_at = [end for _, end in spans]
        self._num_collected += 1
        return bubbles

    @property
    def next_end(self) -> float:
        """When the oldest micro-batch ends: `now` once it is done, infinite until then, so that
        the loop lets requests that come meanwhile enter the first stage.
        """
        return self.now if self._pipes.has_report(timeout=0.0) else math.inf

    def wait_until(self, time: float) -> None:
        """Wait until `time`, or until a micro-batch is done."""
        self._num_unfilled = self.capacity - self.num_in_flight
        if not self.num_in_flight:
            super().wait_until(time)
            return
        remaining = time - self.now
        if remaining > 0:
            self._pipes.has_report(timeout=remaining)
