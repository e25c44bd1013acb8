"""Runs what a sweep has left to do, and says at the end how it went."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from sarathi_lab.config import console
from sarathi_lab.config.command_line import CommandLine
from sarathi_lab.config.errors import EXIT_FAILED, EXIT_USER_ERROR
from sarathi_lab.config.jobs import Work
from sarathi_lab.config.sweep_launch import JobLauncher
from sarathi_lab.config.sweep_progress import SweepProgress
from sarathi_lab.config.sweep_record import SweepRecord
from sarathi_lab.config.sweep_resume import fingerprint


class Sweep:
    """One command's part in a sweep: all of it, or what an earlier one left undone in the same
    folder.
    """

    def __init__(self, command_line: CommandLine, work: Work, *, is_resumed: bool) -> None:
        folder = command_line.results_dir.absolute()
        self.record = SweepRecord.read(folder) if is_resumed else _new_record(command_line)
        self._command_line = command_line
        self._work = work
        self._is_resumed = is_resumed
        self._launched: list[int] = []

    @property
    def num_jobs(self) -> int:
        """How many runs there should be; a search has as many as it has begun, for some trials
        repeat another's.
        """
        return len(self.record.begun()) if self.record.is_search else self.record.num_jobs

    def run(self) -> None:
        """Run what is not finished. Raises UserError if the sweep is running already,
        KeyboardInterrupt for Ctrl-C.
        """
        record, command_line = self.record, self._command_line
        with record.running():
            finished = self._begin()
            progress = SweepProgress(record, len(finished))
            launcher = JobLauncher(command_line, self._work, record, progress)

            def launch(jobs: Mapping[int, Sequence[str]]) -> None:
                self._launched += jobs
                record.forget(jobs)
                launcher.launch(jobs)

            if command_line.search is not None:
                command_line.search.run(record, command_line.settings, launch)
                return
            jobs = enumerate(command_line.jobs)
            launch({number: job.settings for number, job in jobs if number not in finished})

    def _begin(self) -> list[int]:
        """Leave the sweep's record; returns the jobs that an earlier command finished."""
        record = self.record
        if not self._is_resumed:
            record.write()
            return []
        record.clear_unfinished()
        finished = [number for number in record.begun() if record.is_finished(number)]
        console.print_place(
            "resume", f"{record.folder} ({len(finished)} of {record.num_jobs} runs finished)"
        )
        return finished

    def failure(self) -> tuple[str, int] | None:
        """What to say of the jobs that did not come to their end, and the exit code; None if all
        did.
        """
        missing = [number for number in self._launched if not self.record.is_finished(number)]
        failures = [failure for number in missing if (failure := self.record.failure(number))]
        if not missing:
            return None
        if not failures:
            return f"{len(missing)} runs did not end", EXIT_FAILED
        is_bug = len(failures) < len(missing) or any("traceback" in failure for failure in failures)
        first = str(failures[0]["error"])
        told = first if len(missing) == 1 else f"{len(missing)} runs stopped, the first as: {first}"
        return told, EXIT_FAILED if is_bug else EXIT_USER_ERROR


def _new_record(command_line: CommandLine) -> SweepRecord:
    search = command_line.search
    return SweepRecord(
        folder=command_line.results_dir.absolute(),
        arguments=list(command_line.arguments),
        fingerprint=fingerprint(command_line),
        num_jobs=len(command_line.jobs) if search is None else search.n_trials,
        is_search=search is not None,
        started_at=datetime.now(UTC).isoformat(),
    )
