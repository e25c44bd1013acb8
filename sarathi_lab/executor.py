"""The one interface between the engine loop and whatever owns time: a CPU, a GPU, a cost model, a pipeline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from sarathi_lab.request import Batch

NO_TOKEN = -1  # what executors without a model emit: a token was due, nobody computed it


@dataclass(frozen=True, slots=True)
class StepResult:
    """One finished iteration. Times in seconds since `Executor.start`."""

    batch: Batch
    start: float
    end: float
    token_ids: list[int]  # one per chunk with emits_token, in the order of the chunks


class Executor(Protocol):
    """Runs batches and owns the clock.

    `capacity` is how many batches may be in flight: 1 for a device, the number of stages for a pipeline.
    Batches are collected in the order of submission.
    """

    capacity: int

    @property
    def now(self) -> float:
        """Seconds since `start`."""
        ...

    @property
    def num_in_flight(self) -> int: ...

    def start(self) -> None:
        """Set the clock to zero; whatever ran before (warm-up, loading) is not part of the run."""
        ...

    def submit(self, batch: Batch) -> None: ...

    def collect(self) -> StepResult:
        """Wait for the oldest batch in flight."""
        ...

    def wait_until(self, time: float) -> None:
        """Let the clock reach `time`; nothing is in flight."""
        ...
