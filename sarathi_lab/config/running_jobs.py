"""The jobs of a sweep that run: which have ended, and how."""

from __future__ import annotations

import time
from collections.abc import Sequence

from sarathi_lab.config.console import console, duration
from sarathi_lab.config.errors import EXIT_FAILED, UserError
from sarathi_lab.config.jobs import Job
from sarathi_lab.config.run_context import JobEnd, SweepRecord
from sarathi_lab.config.tracked_jobs import track_ended

DID_NOT_END: JobEnd = {"error": "it did not end", "traceback": ""}


class RunningJobs:
    """The jobs of a sweep that are not finished, by their numbers."""

    def __init__(self, jobs: Sequence[Job], record: SweepRecord) -> None:
        self.jobs: dict[int, Job] = {}
        for number, job in enumerate(jobs):
            if not record.is_finished(number):
                self.jobs[number] = job
        self._record = record
        self._pending = dict(self.jobs)  # of these, those that have not ended
        self._started = time.monotonic()
        self._counts_by_error: dict[str, str] = {}  # of the first run that ended by each

    def print_ended(self) -> int:
        """Print a line for every job that has ended since the last call; return how many."""
        record = self._record
        num_ended = 0
        for number in sorted(self._pending):
            end = record.end(number)
            if end is None:
                continue
            num_ended += 1
            job = self._pending.pop(number)
            num_done = record.num_jobs - len(self._pending)
            count = f"[{num_done}/{record.num_jobs}]"
            name = job.named(record.swept) or f"run {number}"
            outcome = self._outcome(end, count)
            console().print(f"{count} {name} {outcome}{self._time_left()}", soft_wrap=True)
            track_ended(job, record.job_dir(number))
        return num_ended

    def _outcome(self, end: JobEnd, count: str) -> str:
        """Say how a job ended, an error in words for the first that it ended."""
        if "error" not in end:
            return f"took {duration(end['seconds'])}"
        error = end["error"]
        if error in self._counts_by_error:
            return f"failed as {self._counts_by_error[error]}"
        self._counts_by_error[error] = count
        return f"failed: {error}"

    def _time_left(self) -> str:
        """Say about how long the pending jobs take; empty without any."""
        num_pending = len(self._pending)
        if num_pending == 0:
            return ""
        elapsed = time.monotonic() - self._started
        num_ended = len(self.jobs) - num_pending
        seconds_left = elapsed / num_ended * num_pending
        return f", about {duration(seconds_left)} left"

    def failure(self) -> UserError | None:
        """Return what to raise for jobs that failed or did not end; None if none did."""
        ends = [self._record.end(number) or DID_NOT_END for number in self.jobs]
        messages = [str(end["error"]) for end in ends if "error" in end]
        if not messages:
            return None
        message = messages[0]
        if len(messages) > 1:
            first = ", the first as"
            if len(set(messages)) == 1:
                first = ""
            message = f"{len(messages)} runs stopped{first}: {message}"
        failure = UserError(message)
        has_bug = any("traceback" in end for end in ends)
        if has_bug:  # which no user can mend
            failure.exit_code = EXIT_FAILED
        return failure
