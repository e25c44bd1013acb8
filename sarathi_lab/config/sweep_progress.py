"""Says of every job of a sweep how it ended, in whatever process it ran."""

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from sarathi_lab.config.console import console, duration, progress_of, repeated
from sarathi_lab.config.sweep_record import FINISHED, SweepRecord

POLL_SECONDS = 0.5


class SweepProgress:
    """Reads the outcomes of jobs from their folders, so that any process may run them."""

    def __init__(self, record: SweepRecord, num_done: int) -> None:
        self._record = record
        self._done_before = self._done = num_done
        self._started = time.monotonic()
        self._pending: dict[int, str] = {}

    def expect(self, jobs: Mapping[int, str]) -> None:
        """Wait for these jobs, too: their numbers, and what to call them."""
        self._pending |= jobs

    def update(self) -> int:
        """Print a line for every job that has ended since the last call; returns how many."""
        before = self._done
        for number in sorted(self._pending):
            if (outcome := self._outcome(number)) is not None:
                name = self._pending.pop(number)
                self._done += 1
                place = f"[{self._done}/{self._record.num_jobs}]"
                console().print(f"{place} {name} {outcome}{self._time_left()}", soft_wrap=True)
        return self._done - before

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Print these lines, and how far the sweep is, while other processes run the jobs."""
        with (
            progress_of("running", len(self._pending), "runs") as advance,
            repeated(lambda: advance(self.update()), POLL_SECONDS),
        ):
            yield
        self.update()

    def _outcome(self, number: int) -> str | None:
        if self._record.is_finished(number):
            seconds = json.loads((self._record.job_dir(number) / FINISHED).read_text())["seconds"]
            return f"took {duration(seconds)}"
        failure = self._record.failure(number)
        return None if failure is None else f"failed: {failure['error']}"

    def _time_left(self) -> str:
        """From the pace of the jobs that this command ran."""
        if not (num_left := self._record.num_jobs - self._done):
            return ""
        pace = (time.monotonic() - self._started) / (self._done - self._done_before)
        return f", about {duration(pace * num_left)} left"
