"""Runs a sweep's jobs, here or by one of Hydra's launchers, and keeps how each ended."""

from __future__ import annotations

import signal
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from omegaconf import DictConfig, open_dict

from sarathi_lab.config.arguments import quoted
from sarathi_lab.config.command_line import CommandLine
from sarathi_lab.config.console import console, print_stopped
from sarathi_lab.config.cores import pin_process
from sarathi_lab.config.errors import UserError
from sarathi_lab.config.jobs import Job, Work, hydra_context, run_here
from sarathi_lab.config.paths import write_json
from sarathi_lab.config.sweep_progress import SweepProgress
from sarathi_lab.config.sweep_record import FAILED, FINISHED, OUTPUT, SweepRecord


@dataclass(frozen=True)
class RecordedJob:
    """A job that leaves finished.json or failed.json in its folder and raises nothing but Ctrl-C.

    In a process of its own (`is_apart`) it prints to output.txt, as the texts of several would mix.
    One of `num_processes` on this machine takes cores of its own; 0: all cores, or those that a
    cluster gave it.
    """

    work: Work
    record: SweepRecord
    swept: tuple[str, ...]
    is_apart: bool = True
    num_processes: int = 0
    job: Job | None = None  # the one that was checked, in the process that did so

    def __call__(self, cfg: DictConfig) -> None:
        """Run the job, whose folder Hydra has made."""
        run_dir = Path(HydraConfig.get().runtime.output_dir)
        with ExitStack() as stack:
            if self.is_apart:
                output = stack.enter_context((run_dir / OUTPUT).open("w", buffering=1))
                stack.enter_context(redirect_stdout(output))
                stack.enter_context(redirect_stderr(output))
                stack.enter_context(self.record.job_running())
            self._run(cfg, run_dir)

    def _run(self, cfg: DictConfig, run_dir: Path) -> None:
        start = time.monotonic()
        try:
            if self.num_processes:
                self._pin()
            run_here(self.work, cfg, self.swept, self.job)
        except UserError as error:
            print_stopped(error)
            _record_failure(run_dir, {"error": str(error)})
        except Exception as error:
            traceback.print_exc()
            told = f"{type(error).__name__}: {error}".splitlines()[0]
            _record_failure(run_dir, {"error": told, "traceback": traceback.format_exc()})
        else:
            write_json(run_dir / FINISHED, {"seconds": time.monotonic() - start})

    def _pin(self) -> None:
        cores = pin_process(self.num_processes).numbers
        told = (
            f"cores {', '.join(map(str, cores))}"
            if cores
            else "no cores of its own: too few are free"
        )
        console().print(told, soft_wrap=True)


def _record_failure(run_dir: Path, failure: Mapping[str, str]) -> None:
    if not (run_dir / FAILED).is_file():  # the run itself has said more
        write_json(run_dir / FAILED, failure)


class JobLauncher:
    """The launcher that a command line chose, for the jobs of one sweep."""

    def __init__(
        self, command_line: CommandLine, work: Work, record: SweepRecord, progress: SweepProgress
    ) -> None:
        self._command_line = command_line
        self._work = work
        self._record = record
        self._progress = progress
        self._master = command_line.master
        own = ["hydra.mode=MULTIRUN", f"hydra.sweep.dir={quoted(str(record.folder))}"]
        with open_dict(self._master.hydra):
            self._master.hydra.overrides.hydra.extend(own)
            self._master.hydra.sweep.dir = str(record.folder)

    def launch(self, jobs: Mapping[int, Sequence[str]]) -> None:
        """Run `jobs` (settings by number) and wait for all; how each ended is in its folder.

        Raises UserError if the launcher itself gives up.
        """
        self._progress.expect({number: self._name(number, job) for number, job in jobs.items()})
        if self._command_line.is_apart:
            self._launch_apart(jobs)
            return
        for number, settings in jobs.items():
            self._run_here(number, settings)
            self._progress.update()

    def _run_here(self, number: int, settings: Sequence[str]) -> None:
        job = self._command_line.job(settings)
        job.place(self._record.folder, number)
        swept = self._command_line.swept
        job.run(
            RecordedJob(self._work, self._record, swept, is_apart=False, job=job),
            self._command_line.loader,
        )

    def _launch_apart(self, jobs: Mapping[int, Sequence[str]]) -> None:
        left = dict(jobs)
        while left:
            try:
                with self._progress.watching(), _interrupts_kept_from_children():
                    self._launch(left)
                return
            except BrokenProcessPool:
                self._keep_lost(left)
            left = {number: job for number, job in left.items() if not self._has_ended(number)}

    def _launch(self, jobs: Mapping[int, Sequence[str]]) -> None:
        settings = [[*job, f"hydra.sweep.subdir={number}"] for number, job in jobs.items()]
        num_processes = _num_processes(self._master.hydra.launcher)
        swept = self._command_line.swept
        launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context(self._command_line.loader, self._master),
            task_function=RecordedJob(self._work, self._record, swept, num_processes=num_processes),
            config=self._master,
        )
        try:
            launcher.launch(settings, initial_job_idx=0)
        except (BrokenProcessPool, HydraException):
            raise
        except Exception as error:
            told = str(error).strip().splitlines()[0]
            raise UserError(
                f"the launcher gave up ({type(error).__name__}: {told}); jobs it queued may run on"
            ) from error

    def _keep_lost(self, jobs: Mapping[int, Sequence[str]]) -> None:
        """Record the jobs that ran when a worker was killed, one of which was its: the pool went
        with it.
        """
        lost = [
            number for number in jobs if self._has_begun(number) and not self._has_ended(number)
        ]
        if not lost:
            raise UserError(
                "the launcher's processes ended before any job began; see the messages above"
            )
        error = "its process was killed, or another's beside it; the system may have been out of "
        for number in lost:
            _record_failure(self._record.job_dir(number), {"error": f"{error}memory"})
        self._progress.update()

    def _has_begun(self, number: int) -> bool:
        return (self._record.job_dir(number) / OUTPUT).is_file()

    def _has_ended(self, number: int) -> bool:
        return self._record.is_finished(number) or self._record.failure(number) is not None

    def _name(self, number: int, job: Sequence[str]) -> str:
        """What sets the job apart in its sweep."""
        swept = self._command_line.swept
        own = [setting for setting in job if setting.partition("=")[0].lstrip("+") in swept]
        return " ".join(own) or f"run {number}"


def _num_processes(launcher: DictConfig) -> int:
    """How many processes of the launcher share this machine; 0 if none, or if that is a cluster's
    business.
    """
    num_jobs = launcher.get("n_jobs")  # joblib's
    if num_jobs is None:
        return 0
    import joblib

    return joblib.effective_n_jobs(num_jobs)


@contextmanager
def _interrupts_kept_from_children() -> Iterator[None]:
    """Start processes that a terminal's Ctrl-C does not reach: the launcher ends them, as one that
    is still importing would print a traceback. This process hears it in another thread.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
