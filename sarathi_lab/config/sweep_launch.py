"""Hands jobs to Hydra's launchers and keeps how each ended, in whatever process it ran."""

from __future__ import annotations

import json
import os
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager, nullcontext, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TextIO

from hydra._internal.callbacks import Callbacks
from hydra._internal.core_plugins.basic_launcher import BasicLauncher
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig

from sarathi_lab.config.command_line import CommandLine, run_job
from sarathi_lab.config.console import console, print_stopped
from sarathi_lab.config.errors import UserError
from sarathi_lab.config.paths import try_lock, write_json
from sarathi_lab.config.sweep_record import FAILED, FINISHED, OUTPUT, SweepRecord


@dataclass(frozen=True)
class Cores:
    """The cores of this process; empty if there were too few. The open files keep other processes
    from them.
    """

    numbers: tuple[int, ...]
    claims: tuple[TextIO, ...]


@cache
def pin_process(num_processes: int) -> Cores:
    """Bind this process, once, to the `num_processes`-th part of the cores it may use, none of them
    another's.

    It stays unbound where other sweeps on the machine have taken too many, or where the system
    binds no processes.
    """
    if not hasattr(os, "sched_setaffinity"):
        return Cores((), ())
    share = max(1, len(os.sched_getaffinity(0)) // num_processes)
    cores = _claim(share, Path(tempfile.gettempdir()) / f"sarathi-lab-cores-{os.getuid()}")
    if cores.numbers:
        os.sched_setaffinity(0, cores.numbers)
    return cores


def _claim(share: int, folder: Path) -> Cores:
    numbers: list[int] = []
    claims: list[TextIO] = []
    for number in sorted(os.sched_getaffinity(0), key=lambda number: (_physical(number), number)):
        if (claim := try_lock(folder / str(number))) is not None:
            numbers.append(number)
            claims.append(claim)
        if len(numbers) == share:
            return Cores(tuple(numbers), tuple(claims))
    for claim in claims:
        claim.close()
    return Cores((), ())


def _physical(number: int) -> int:
    """The first of the hardware threads that share a core with `number`: they belong to one
    process.
    """
    path = Path(f"/sys/devices/system/cpu/cpu{number}/topology/thread_siblings_list")
    try:
        return int(path.read_text().replace("-", ",").split(",")[0])
    except (OSError, ValueError):
        return number


POLL_SECONDS = 0.5


class SweepProgress:
    """Reads the outcomes of jobs from their folders, so that any process may run them."""

    def __init__(self, record: SweepRecord, num_done: int) -> None:
        self._record = record
        self._done_before = self._done = num_done
        self._started = time.monotonic()
        self._pending: dict[int, str] = {}
        self._lock = threading.Lock()

    def expect(self, jobs: Mapping[int, str]) -> None:
        """Wait for these jobs, too: their numbers, and what to call them."""
        with self._lock:
            self._pending |= jobs

    def update(self) -> None:
        """Print a line for every job that has ended since the last call."""
        with self._lock:
            for number in sorted(self._pending):
                if (outcome := self._outcome(number)) is not None:
                    name = self._pending.pop(number)
                    self._done += 1
                    line = (
                        f"[{self._done}/{self._record.num_jobs}] {name} "
                        f"{outcome}{self._time_left()}"
                    )
                    console().print(line, soft_wrap=True)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Print these lines while other processes run the jobs."""
        stop = threading.Event()

        def watch() -> None:
            while not stop.wait(POLL_SECONDS):
                self.update()

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()
            self.update()

    def _outcome(self, number: int) -> str | None:
        if self._record.is_finished(number):
            seconds = json.loads((self._record.job_dir(number) / FINISHED).read_text())["seconds"]
            return f"took {duration(seconds)}"
        failure = self._record.failure(number)
        return None if failure is None else f"failed: {failure['error']}"

    def _time_left(self) -> str:
        """From the pace of the jobs that this command ran; those that it found done took it no
        time.
        """
        num_left = self._record.num_jobs - self._done
        elapsed = time.monotonic() - self._started
        return (
            f", about {duration(elapsed / (self._done - self._done_before) * num_left)} left"
            if num_left
            else ""
        )


def duration(seconds: float) -> str:
    """Seconds as people say them: 40 s, 4 min, 2 h 10 min."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"


@dataclass(frozen=True)
class RecordedJob:
    """A job that leaves finished.json or failed.json in its folder and raises nothing but Ctrl-C.

    In a process of its own (`is_apart`) it prints to output.txt, as the texts of several would mix.
    One of `num_processes` on this machine takes cores of its own; 0: all cores, or those that a
    cluster gave it.
    """

    record: SweepRecord
    swept: tuple[str, ...]
    is_apart: bool
    num_processes: int

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
            run_job(cfg, self.swept)
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
        self, command_line: CommandLine, record: SweepRecord, progress: SweepProgress
    ) -> None:
        hydra = GlobalHydra.instance().hydra
        assert hydra is not None
        quoted = str(record.folder).replace("\\", "\\\\").replace("'", "\\'")
        overrides = [*command_line.overrides, "hydra.mode=MULTIRUN", f"hydra.sweep.dir='{quoted}'"]
        self._cfg = hydra.compose_config("config", overrides, run_mode=RunMode.MULTIRUN)
        self._context = HydraContext(
            config_loader=hydra.config_loader, callbacks=Callbacks(self._cfg)
        )
        self._swept = command_line.swept
        self._record = record
        self._progress = progress

    @property
    def _is_apart(self) -> bool:
        return not self._cfg.hydra.launcher["_target_"].endswith(BasicLauncher.__name__)

    def launch(self, jobs: Mapping[int, Sequence[str]]) -> None:
        """Run `jobs` (settings by number) and wait for all; how each ended is in its folder.

        Raises UserError if the launcher itself gives up.
        """
        self._progress.expect({number: self._name(number, job) for number, job in jobs.items()})
        left = dict(jobs)
        while left:
            try:
                with self._progress.watching() if self._is_apart else nullcontext():
                    self._launch(left)
                return
            except BrokenProcessPool:
                self._keep_lost(left)
            left = {number: job for number, job in left.items() if not self._has_ended(number)}

    def _launch(self, jobs: Mapping[int, Sequence[str]]) -> None:
        settings = [[*job, f"hydra.sweep.subdir={number}"] for number, job in jobs.items()]
        launcher = Plugins.instance().instantiate_launcher(
            hydra_context=self._context, task_function=self._task(), config=self._cfg
        )
        try:
            launcher.launch(settings, initial_job_idx=0)
        except BrokenProcessPool:
            raise
        except Exception as error:
            if not self._is_apart or isinstance(error, HydraException):
                raise
            told = str(error).strip().splitlines()[0]
            raise UserError(
                f"the launcher gave up ({type(error).__name__}: {told}); jobs it queued may run on"
            ) from error

    def _task(self) -> Callable[[DictConfig], None]:
        num_processes = _num_processes(self._cfg.hydra.launcher)
        job = RecordedJob(self._record, tuple(self._swept), self._is_apart, num_processes)
        if self._is_apart:
            return job

        def run(cfg: DictConfig) -> None:
            job(cfg)
            self._progress.update()

        return run

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
        for number in lost:
            error = (
                "its process was killed, or another's beside it; the system may have been out "
                "of memory"
            )
            _record_failure(self._record.job_dir(number), {"error": error})
        self._progress.update()

    def _has_begun(self, number: int) -> bool:
        return (self._record.job_dir(number) / OUTPUT).is_file()

    def _has_ended(self, number: int) -> bool:
        return self._record.is_finished(number) or self._record.failure(number) is not None

    def _name(self, number: int, job: Sequence[str]) -> str:
        """What sets the job apart in its sweep."""
        return (
            " ".join(setting for setting in job if setting.partition("=")[0] in self._swept)
            or f"run {number}"
        )


def _num_processes(launcher: DictConfig) -> int:
    """How many processes of the launcher share this machine; 0 if none, or if that is a cluster's
    business.
    """
    num_jobs = launcher.get("n_jobs")  # joblib's
    if num_jobs is None:
        return 0
    import joblib

    return joblib.effective_n_jobs(num_jobs)
