"""Batches on a virtual clock, which advances by a cost model's times. A pipeline of stages has
bubbles between its micro-batches (SARATHI, section 3.3 and Fig 12).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from sarathi_lab.config.errors import require_int
from sarathi_lab.engine.executor import Span, StepResult, bubbles_between
from sarathi_lab.engine.request import Batch
from sarathi_lab.executor.simulated.hardware import NO_HOST, Host


@dataclass(eq=False)
class SimulatedExecutor:
    """An `Executor` for one simulated device.

    `iteration_time` gives the seconds of a batch on the device, `host` those of scheduling and
    launching it. A host that overlaps has the next batch ready when one ends, if it is fast enough;
    a request that arrives meanwhile waits for one batch more.
    """

    iteration_time: Callable[[Batch], float]
    host: Host = NO_HOST

    capacity = 1
    feeds_tokens = False
    num_blocks = None

    def __post_init__(self) -> None:
        if self.host.overlaps:
            self.capacity = 2
            self.feeds_tokens = True
        self.start()

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    def start(self) -> None:
        self.now = 0.0  # seconds since `start`, at the end of the last collected batch
        self._in_flight: deque[StepResult] = deque()
        self._launched = 0.0  # when the host finished the last batch

    def submit(self, batch: Batch) -> None:
        """Queue `batch` and compute its end; the clock advances when it is collected."""
        # The host begins when the batch before is collected, and when it has launched that.
        host_time = self.host.seconds(batch)
        self._launched = max(self.now, self._launched) + host_time
        start = self._launched
        if self._in_flight:  # the device runs one batch after another
            free = self._in_flight[-1].end + self.host.between(batch)
            start = max(start, free)
        end = start + self.iteration_time(batch)
        self._in_flight.append(
            StepResult(
                batch,
                start,
                end,
                [],
                host_time=host_time,
            )
        )

    def collect(self) -> StepResult:
        result = self._in_flight.popleft()
        self.now = max(self.now, result.end)
        return result

    @property
    def next_end(self) -> float:
        return self._in_flight[0].end

    def wait_until(self, time: float) -> None:
        self.now = max(self.now, time)

    def write_profile(self, directory: Path) -> None:
        """Nothing: the cost model has the times of operations."""


class PipelineExecutor(SimulatedExecutor):
    """An `Executor` for `num_stages` stages that micro-batches pass in order of submission.

    `stage_times` gives a batch's seconds on each stage, `send_time` those between two stages, which
    occupy neither. A stage starts a micro-batch when it has received it and finished the previous
    one, after which its worker takes the seconds of `turnarounds`, by stage, to go on; the first
    stage's host takes them after the submission, too, as it collects and schedules. Raises
    UserError for less than one stage.
    """

    def __init__(
        self,
        num_stages: int,
        stage_times: Callable[[Batch], Sequence[float]],
        send_time: Callable[[Batch], float] = lambda batch: 0.0,
        turnarounds: Sequence[float] = (),
    ) -> None:
        self.capacity = require_int(
            "num_stages", num_stages, 1, "use the number of pipeline stages, such as 8"
        )
        self._stage_times = stage_times
        self._send_time = send_time
        self._turnarounds = turnarounds or [0.0] * num_stages
        self.start()

    def start(self) -> None:
        super().start()
        self._free_at: list[float] = []  # by stage, the end of its last batch; empty at first
        self._free_slots = deque([0.0] * self.capacity)  # times since which slots are empty
        self._last: Batch | None = None
        self._num_submitted = 0

    def submit(self, batch: Batch) -> None:
        """Send `batch` through the pipeline; as batches keep their order, its times are final."""
        seconds = self._stage_times(batch)
        # A slot that was empty before this moment had no batch to take.
        is_starved = self._free_slots.popleft() < self.now
        spans = self._spans(seconds, self._send_time(batch))
        number = self._num_submitted
        bubbles = bubbles_between(
            self._last,
            batch,
            self._free_at,
            spans,
            is_starved,
            number,
        )
        self._free_at = [end for _, end in spans]
        self._last = batch
        self._num_submitted += 1
        start, _ = spans[0]
        _, end = spans[-1]
        self._in_flight.append(
            StepResult(
                batch,
                start,
                end,
                [],
                spans,
                bubbles,
            )
        )

    def collect(self) -> StepResult:
        """Advance the clock to the end of the oldest micro-batch, and free its slot."""
        result = super().collect()
        self._free_slots.append(self.now)
        return result

    def _spans(self, seconds: Sequence[float], send_time: float) -> list[Span]:
        """Compute start and end on each stage of a micro-batch submitted now."""
        spans = []
        free_at = self._free_at or [0.0] * self.capacity
        # The first stage's host has collected and scheduled when it submits.
        ready = max(self.now, free_at[0]) + self._turnarounds[0]
        for duration, free, turnaround in zip(seconds, free_at, self._turnarounds, strict=True):
            start = max(ready, free + turnaround)
            end = start + duration
            spans.append((start, end))
            # Sends occupy no stage: this one goes on while the next waits.
            ready = end + send_time
        return spans
