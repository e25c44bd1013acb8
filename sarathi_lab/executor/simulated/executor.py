"""Runs batches on a virtual clock: iterations take what a cost model says, and no time passes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from sarathi_lab.engine.executor import NO_TOKEN, StepResult
from sarathi_lab.engine.request import Batch


class VirtualClock:
    """What all executors without a device have in common."""

    feeds_tokens = False
    num_blocks = None

    def __init__(self) -> None:
        self._now = 0.0

    @property
    def now(self) -> float:
        """Seconds since `start`, at the end of what was collected last."""
        return self._now

    def start(self) -> None:
        """Set the clock to zero."""
        self._now = 0.0

    def wait_until(self, time: float) -> None:
        """Let the clock jump to `time`."""
        self._now = max(self._now, time)

    def write_profile(self, directory: Path) -> dict[str, float]:
        """Nothing is watched: what an iteration is made of is the cost model's to tell."""
        return {}


class SimulatedExecutor(VirtualClock):
    """An `Executor` for one simulated device; `iteration_time` gives the seconds of a batch."""

    capacity = 1

    def __init__(self, iteration_time: Callable[[Batch], float]) -> None:
        super().__init__()
        self._iteration_time = iteration_time
        self._in_flight: Batch | None = None

    @property
    def num_in_flight(self) -> int:
        return int(self._in_flight is not None)

    def submit(self, batch: Batch) -> None:
        """Take `batch`; the clock stands until it is collected."""
        if self._in_flight is not None:
            raise RuntimeError("a batch is in flight; collect it first")
        self._in_flight = batch

    def collect(self) -> StepResult:
        """Let the clock pass the batch in flight."""
        if self._in_flight is None:
            raise RuntimeError("nothing is in flight; submit a batch first")
        batch, self._in_flight = self._in_flight, None
        start = self._now
        self._now += self._iteration_time(batch)
        return StepResult(batch, start, self._now, [NO_TOKEN] * batch.num_emits)

    @property
    def next_end(self) -> float:
        """Not asked for: one batch at a time leaves no room for another."""
        return self._now
