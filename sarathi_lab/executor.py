"""The one interface between the engine loop and whatever owns time: a CPU, a GPU, a cost model, a pipeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

from sarathi_lab.request import Batch

NO_TOKEN = -1  # what executors without a model emit: a token was due, nobody computed it

Span = tuple[float, float]  # start and end, in seconds since `Executor.start`
Cause = Literal["PB1", "PB2", "PB3", "starved"]


class Bubble(NamedTuple):
    """A stage of a pipeline idle between two micro-batches, from `start` to `end` (seconds).

    `iteration` counts submissions from zero and names the micro-batch that ends the gap; the one before it began it.
    `cause` is the paper's (section 3.3) by what the two carry: "PB1" prefills of different length, "PB2" a prefill
    beside decodes only, "PB3" as many prompt tokens in both (as a rule none), so that only their contexts differ; or
    "starved", where the pipeline had room before and no request to put in. Sending and unequal stages leave gaps, too;
    they count under what the neighbours carry.
    """

    stage: int
    start: float
    end: float
    cause: Cause
    iteration: int


@dataclass(frozen=True, slots=True)
class StepResult:
    """One finished iteration. Times in seconds since `Executor.start`."""

    batch: Batch
    start: float
    end: float
    token_ids: list[int]  # one per chunk with emits_token, in the order of the chunks
    stages: Sequence[Span] = ()  # by stage of a pipeline; empty where one device does it all
    bubbles: Sequence[Bubble] = ()  # the idle gaps that this micro-batch ended
    host_time: float = 0.0  # seconds that the host spent on packing and launching it
    num_padding_tokens: int = 0  # computed beside the batch's own, to reach a fixed shape
    is_replayed: bool = False  # whether it ran as a recorded CUDA graph

    @property
    def busy(self) -> float:
        """Seconds that it kept a stage busy, in the mean over the stages; `end` - `start` on one device."""
        if not self.stages:
            return self.end - self.start
        return sum(end - start for start, end in self.stages) / len(self.stages)


class Executor(Protocol):
    """Runs batches and owns the clock.

    `capacity` is how many batches may be in flight: 1 for a device, the number of stages for a pipeline, 2 for a device
    whose next batch is made while one runs. Batches are collected in the order of submission. With `feeds_tokens` the
    tokens of one batch reach the next without the host, so a sequence in flight may be submitted again.
    """

    capacity: int
    feeds_tokens: bool

    @property
    def num_blocks(self) -> int | None:
        """Blocks of its cache; None where there is no real one."""
        ...

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

    @property
    def next_end(self) -> float:
        """When the oldest batch in flight ends; `now` where only waiting tells."""
        ...

    def wait_until(self, time: float) -> None:
        """Let the clock reach `time`; nothing in flight ends before."""
        ...

    def write_profile(self, directory: Path) -> Mapping[str, float]:
        """Leave what was asked to be watched of the run in `directory`; returns what the summary should hold of it."""
        ...
