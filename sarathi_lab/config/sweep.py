"""Runs what a sweep has left to do, here or by one of Hydra's launchers, and says at the end how it
went.
"""

from __future__ import annotations

import json
import platform
import signal
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from datetime import UTC, datetime
from multiprocessing import resource_tracker

from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from omegaconf import open_dict

from sarathi_lab.config.arguments import name_of, quoted
from sarathi_lab.config.command_line import CommandLine
from sarathi_lab.config.console import console, duration, print_place, progress_of, repeated
from sarathi_lab.config.errors import EXIT_FAILED, EXIT_USER_ERROR, UserError, no_room
from sarathi_lab.config.jobs import RecordedJob, Work, hydra_context, stopped
from sarathi_lab.config.launchers import prepare
from sarathi_lab.config.sweep_record import FINISHED, OUTPUT, SweepRecord, record_failure
from sarathi_lab.config.sweep_resume import fingerprint

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


class Sweep:
    """One command's part in a sweep: all of it, or what an earlier one left undone."""

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
        """Run what is not finished. Raises UserError if the sweep is running already."""
        command_line = self._command_line
        with self.record.running():
            finished = self._begin()
            self._progress = SweepProgress(self.record, num_done=len(finished))
            if command_line.search is not None:
                command_line.search.run(self.record, command_line.settings, self._launch)
                return
            jobs = enumerate(command_line.jobs)
            self._launch({number: job.settings for number, job in jobs if number not in finished})

    def _begin(self) -> list[int]:
        """Leave the sweep's record; returns the jobs that an earlier command finished."""
        record, hydra = self.record, self._command_line.master.hydra
        with open_dict(hydra):
            own = ["hydra.mode=MULTIRUN", f"hydra.sweep.dir={quoted(str(record.folder))}"]
            hydra.overrides.hydra.extend(own)
            hydra.sweep.dir = str(record.folder)
        for note in self._command_line.notes:
            console().print(note, soft_wrap=True)
        if not self._is_resumed:
            record.write()
            return []
        record.clear_unfinished()
        finished = [number for number in record.begun() if record.is_finished(number)]
        how_far = f"{len(finished)} of {record.num_jobs} runs finished"
        print_place("resume", f"{record.folder} ({how_far})")
        return finished

    def failure(self) -> tuple[str, int] | None:
        """What to say of jobs that did not come to an end, and the exit code; None if all did."""
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

    def _launch(self, jobs: Mapping[int, Sequence[str]]) -> None:
        """Run `jobs` (settings by number) and wait for all; how each ended is in its folder.

        Raises UserError if the launcher itself gives up.
        """
        command_line = self._command_line
        self._launched += jobs
        self._progress.expect({number: self._name(number, job) for number, job in jobs.items()})
        if not command_line.is_apart:
            for number, settings in jobs.items():
                job = command_line.job(settings)
                job.place(self.record.folder, number)
                recorded = RecordedJob(self._work, self.record, command_line.swept, job=job)
                try:
                    job.run(recorded, command_line.composer.loader)
                except OSError as error:  # of the files that Hydra writes
                    if (told := no_room(error)) is None:
                        raise
                    stopped(self.record.job_dir(number), told)
                self._progress.update()
            return
        left = dict(jobs)
        while left:
            try:
                with self._progress.watching(), _interrupts_kept_from_children():
                    self._launch_apart(left)
                return
            except BrokenProcessPool:
                self._keep_lost(left)
            left = {number: left[number] for number in self._not_ended(left)}

    def _launch_apart(self, jobs: Mapping[int, Sequence[str]]) -> None:
        settings = [[*job, f"hydra.sweep.subdir={number}"] for number, job in jobs.items()]
        command_line, num_processes = self._command_line, 0  # those on a cluster take its cores
        if (num_jobs := command_line.master.hydra.launcher.get("n_jobs")) is not None:
            import joblib

            num_processes = joblib.effective_n_jobs(num_jobs)
        prepare(command_line.launcher, command_line.master.hydra.launcher)
        launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context(command_line.composer.loader, command_line.master),
            task_function=RecordedJob(self._work, self.record, command_line.swept, num_processes),
            config=command_line.master,
        )
        try:
            ends = launcher.launch(settings, initial_job_idx=0)
        except (BrokenProcessPool, HydraException):
            raise
        except Exception as error:
            told = str(error).strip().splitlines()[0]
            raise UserError(
                f"the launcher gave up ({type(error).__name__}: {told}); jobs it queued may run on"
            ) from error
        for number, how in zip(jobs, ends, strict=True):
            if isinstance(how, str) and not self.record.has_ended(number):
                folder = self.record.job_dir(number)
                folder.mkdir(exist_ok=True)  # of a job that never began
                record_failure(folder, error=how or "its process ended before it did")

    def _keep_lost(self, jobs: Mapping[int, Sequence[str]]) -> None:
        """Record the jobs that ran when a worker was killed, one of them its."""
        folders = [self.record.job_dir(number) for number in self._not_ended(jobs)]
        lost = [folder for folder in folders if (folder / OUTPUT).is_file()]
        if not lost:
            raise UserError(
                "the launcher's processes ended before any job began; see the messages above"
            )
        error = "its process was killed, or another's beside it; the system may have been out of "
        for folder in lost:
            record_failure(folder, error=f"{error}memory")
        self._progress.update()

    def _not_ended(self, jobs: Iterable[int]) -> list[int]:
        return [number for number in jobs if not self.record.has_ended(number)]

    def _name(self, number: int, job: Sequence[str]) -> str:
        swept = self._command_line.swept
        own = [setting for setting in job if name_of(setting) in swept]
        return " ".join(own) or f"run {number}"


def _new_record(command_line: CommandLine) -> SweepRecord:
    search = command_line.search
    return SweepRecord(
        folder=command_line.results_dir.absolute(),
        arguments=list(command_line.arguments),
        fingerprint=fingerprint(command_line),
        num_jobs=len(command_line.jobs) if search is None else search.n_trials,
        is_search=search is not None,
        started_at=datetime.now(UTC).isoformat(),
        host=platform.node(),
    )


@contextmanager
def _interrupts_kept_from_children() -> Iterator[None]:
    """Start processes that a terminal's Ctrl-C does not reach: the launcher ends them, as one that
    is still importing would print a traceback, and one that is sending its result would leave half
    of it, for which this process would wait. This process hears it in another thread.
    """
    resource_tracker.ensure_running()  # which, begun later, would unblock the signal again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
