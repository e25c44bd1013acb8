"""Runs of a command line: composed and checked before the first one begins, then launched."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.core.utils import run_job
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, RunMode, TaskFunction
from omegaconf import DictConfig, open_dict, read_write

from sarathi_lab.config.arguments import name_of, quoted, read_arguments
from sarathi_lab.config.console import console, duration, print_place, progress_of, repeated
from sarathi_lab.config.errors import EXIT_FAILED, UserError, no_room, require_bool
from sarathi_lab.config.hydra_errors import explained
from sarathi_lab.config.instantiate import build, make_loader, resolved
from sarathi_lab.config.paths import make_folder
from sarathi_lab.config.processes import interrupts_kept_from_children
from sarathi_lab.config.sweep_jobs import (
    ROUND,
    Job,
    JobMaker,
    combine,
    in_rounds,
    swept_names,
)
from sarathi_lab.config.sweep_record import (
    JobStatus,
    SweepRecord,
    check_unused,
    error_of,
    find_sweep,
    fingerprint,
    record_stop,
)
from sarathi_lab.config.unused_settings import check_names, check_single, check_sweep

POLL_SECONDS = 0.5
MULTIRUN = "hydra.mode=MULTIRUN"  # for -m


class LabSweeper(Sweeper):
    """Runs all combinations of the settings' values, or the one run of a command line without -m.

    Every job is composed and checked before the first one runs; jobs that would be equal are run
    once, those that an earlier command finished not again.
    """

    config: DictConfig
    hydra_context: HydraContext

    def __init__(self, params: Mapping[str, str] | None = None, *, dry_run: bool = False) -> None:
        self._params = [f"{name}={value}" for name, value in (params or {}).items()]
        self._is_dry_run = dry_run

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        self.hydra_context, self.config = hydra_context, config
        self._task_function: Callable[..., Any] = task_function

    def sweep(self, arguments: list[str]) -> None:
        """Run the jobs of `arguments`. Raises UserError, with nothing written, for mistakes."""
        self.compose(arguments)
        self.check()
        if self._is_dry_run:
            self._task.print_estimates(self)
        else:
            self.run()

    def compose(self, arguments: Sequence[str]) -> None:
        """Compose all jobs of `arguments`, and find their folder. Raises UserError for settings
        that are unknown or that nothing reads.
        """
        hydra = self.config.hydra
        require_bool("hydra.verbose", hydra.verbose, "use true to log more, else false")
        loader = self.hydra_context.config_loader
        parser = OverridesParser.create(loader)
        parsed = parser.parse_overrides([*self._params, *arguments])
        self.settings = [one for one in parsed if name_of(str(one.input_line)) != "resume"]
        typed: list[str] = list(hydra.overrides.hydra)
        self.is_sweep = MULTIRUN in typed or bool(self._params)
        maker = JobMaker(self.config, loader, swept_names(self.settings))
        if self.is_sweep:
            check_sweep(typed, maker.varied, hydra.launcher.get("n_jobs"))
            self.jobs = self.make_jobs(maker)
        else:
            check_single([*typed, *arguments])
            self.jobs = [maker.compose(arguments)]
            maker.check(self.jobs)
        self.notes = list(maker.notes)
        self.record = self._make_record(typed, arguments)
        self._find_sweep()

    def check(self) -> None:
        """Let the tasks check and prepare all jobs. Raises UserError."""
        with progress_of("checking", len(self.jobs), "runs") as advance:
            for job in self.jobs:
                job.check()
                if self.is_remote and not self._is_dry_run:
                    job.take_prepared()  # other processes prepare their own
                advance(1)

    def make_jobs(self, maker: JobMaker) -> list[Job]:
        """Compose the jobs of the sweep, in their order."""
        jobs = maker.all_jobs(combine(self.settings))
        maker.check(jobs)
        num_rounds = [maker.num_rounds(job, is_search=False) for job in jobs]
        if (most := max(num_rounds)) > 1:
            jobs = in_rounds(jobs, num_rounds)
            self.settings.append(OverridesParser.create().parse_override(f"{ROUND}=range({most})"))
        return jobs

    @property
    def _task(self) -> Any:
        return build(self.jobs[0].cfg.task)

    @property
    def is_remote(self) -> bool:
        """Whether other processes run the jobs, by one of Hydra's launchers."""
        return self.is_sweep and self.config.hydra.runtime.choices["hydra/launcher"] != "basic"

    def _make_record(self, typed: Sequence[str], arguments: Sequence[str]) -> SweepRecord:
        hydra = self.config.hydra
        flags = ["-m"] if MULTIRUN in typed else []
        others = [one for one in typed if one not in (MULTIRUN, "hydra.sweeper.dry_run=true")]
        own = [one for one in arguments if name_of(one) != "resume"]
        folder = hydra.sweep.dir if self.is_sweep else hydra.run.dir
        return SweepRecord(
            folder=Path(str(folder)).absolute(),
            arguments=[*flags, *own, *others],
            fingerprint=fingerprint([resolved(job.cfg) for job in self.jobs], self.search_settings),
            num_jobs=self.num_planned,
            is_search=self.search_settings is not None,
            started_at=datetime.now(UTC).isoformat(),
            host=platform.node(),
            swept=swept_names(self.settings),
        )

    @property
    def search_settings(self) -> Mapping[str, Any] | None:
        """The settings that make a search another one; None for all combinations."""
        return None

    @property
    def num_planned(self) -> int:
        """The runs of the whole sweep."""
        return len(self.jobs)

    @property
    def num_jobs(self) -> int:
        """The runs that there should be by now."""
        return self.record.num_jobs

    def _find_sweep(self) -> None:
        resume = str(self.config.resume)
        self._is_resumed = self.is_sweep and resume.lower() != "false"
        if self._is_resumed:
            self.record = find_sweep(resume, self.record, Path(str(self.config.output)))
        elif self.is_sweep:
            check_unused(self.record.folder)

    def run(self, *, reports: bool = True) -> None:
        """Run the checked jobs; a sweep then `reports` on all. Raises UserError for runs that
        stopped.
        """
        cfg, setting = self.jobs[0].cfg, "hydra.sweep.dir" if self.is_sweep else "hydra.run.dir"
        make_folder(Path(str(cfg.output)), "output")
        make_folder(self.record.folder, setting)
        for job in self.jobs:
            build(job.cfg.tracking).check()
        if self.is_sweep:
            self._run_sweep(reports=reports)
        else:
            self._run_single()

    def _run_single(self) -> None:
        (job,), folder = self.jobs, self.record.folder
        try:
            hydra = job.composed.hydra
            with read_write(hydra), open_dict(hydra):
                hydra.mode, hydra.run.dir = RunMode.RUN, str(folder)
            if (error := self._run_job(job, "hydra.run.dir", None)) is not None:
                if isinstance(error, UserError):  # a new one, as its traceback holds memory
                    error = UserError(str(error))
                raise error from None
        finally:
            if (folder / "run.json").is_file():
                print_place("results", Path(str(self.config.hydra.run.dir)))
            self._print_hint()

    def _run_job(self, job: Job, folder: str, subfolder: str | None) -> Exception | None:
        """Run a job in this process; returns what it raised."""
        function = partial(self._task_function, prepared=job.take_prepared())
        return error_of(run_job(function, job.composed, folder, subfolder, self.hydra_context))

    def _run_sweep(self, *, reports: bool) -> None:
        is_interrupted = False
        try:
            with self.record.running():
                self._begin()
                self.run_jobs()
        except KeyboardInterrupt:
            is_interrupted = True
            raise KeyboardInterrupt(f"{self.record.resume_command} continues") from None
        finally:
            if reports:
                job, record = self.jobs[0], self.record
                self._task.report_sweep(job, record, self.num_jobs, is_tracked=not is_interrupted)
                self._print_hint()
        if (failure := self.failure()) is not None:
            print_place("resume", self.record.resume_command)
            raise failure

    def _begin(self) -> None:
        """Leave the sweep's record, or clear what the earlier command left undone."""
        hydra, record = self.config.hydra, self.record
        with open_dict(hydra):
            folder = f"hydra.sweep.dir={quoted(str(record.folder))}"
            hydra.overrides.hydra.append(folder)
            hydra.sweep.dir = str(record.folder)
        for note in self.notes:
            console().print(note, soft_wrap=True)
        if self._is_resumed:
            record.clear_unfinished()
        else:
            record.write()
        self._done_before = self._done = sum(map(record.is_finished, record.begun()))
        self._started, self._pending = time.monotonic(), dict[int, str]()
        self._launched: list[int] = []
        if self._is_resumed:
            how_far = f"{self._done} of {record.num_jobs} runs finished"
            print_place("resume", f"{record.folder} ({how_far})")

    def run_jobs(self) -> None:
        """Run the jobs that are not finished."""
        jobs = enumerate(self.jobs)
        self.launch({number: job for number, job in jobs if not self.record.is_finished(number)})

    def launch(self, jobs: Mapping[int, Job]) -> None:
        """Run jobs by their numbers and wait for all; how each ended is in its folder."""
        self._launched += jobs
        self._pending |= {number: self._name(number, job) for number, job in jobs.items()}
        if self.is_remote:
            with self._watching(), interrupts_kept_from_children():
                self._launch_remotely(jobs)
            return
        for number, job in jobs.items():
            hydra = job.composed.hydra
            with read_write(hydra), open_dict(hydra):
                hydra.mode, hydra.sweep.dir = RunMode.MULTIRUN, str(self.record.folder)
                hydra.job.num = hydra.job.id = number
            try:
                self._run_job(job, "hydra.sweep.dir", "hydra.sweep.subdir")
            except OSError as error:  # of the files that Hydra writes
                if (reason := no_room(error)) is None:
                    raise
                record_stop(self.record.job_dir(number), reason)
            self._print_ended()

    def _launch_remotely(self, jobs: Mapping[int, Job]) -> None:
        launcher = Plugins.instance().instantiate_launcher(
            hydra_context=self.hydra_context,
            task_function=self._task_function,
            config=self.config,
        )
        settings = [[*job.settings, f"hydra.sweep.subdir={n}"] for n, job in jobs.items()]
        try:
            launcher.launch(settings, initial_job_idx=0)
        except Exception as error:
            reason = next(iter(str(error).strip().splitlines()), "")
            raise UserError(
                f"the launcher gave up ({type(error).__name__}: {reason}); jobs it queued may run "
                f"on; {self.record.resume_command} runs what is missing"
            ) from error

    @contextmanager
    def _watching(self) -> Iterator[None]:
        """Print how far the sweep is while other processes run the jobs."""
        with (
            progress_of("running", len(self._pending), "runs") as advance,
            repeated(lambda: advance(self._print_ended()), POLL_SECONDS),
        ):
            yield
        self._print_ended()

    def _print_ended(self) -> int:
        """Print a line for every job that has ended since the last call; returns how many."""
        before = self._done
        for number in sorted(self._pending):
            if not self.record.has_ended(number):
                continue
            self._done += 1
            outcome = self.record.outcome(number)
            if num_left := self.record.num_jobs - self._done:
                pace = (time.monotonic() - self._started) / (self._done - self._done_before)
                outcome += f", about {duration(pace * num_left)} left"
            place, name = f"[{self._done}/{self.record.num_jobs}]", self._pending.pop(number)
            console().print(f"{place} {name} {outcome}", soft_wrap=True)
        return self._done - before

    def _name(self, number: int, job: Job) -> str:
        varied = [one for one in job.settings if name_of(one) in self.record.swept]
        return " ".join(varied) or f"run {number}"

    def failure(self) -> UserError | None:
        """What to raise for launched jobs that did not come to an end; None if all did."""
        missing = [number for number in self._launched if not self.record.is_finished(number)]
        failures = [failure for number in missing if (failure := self.record.failure(number))]
        if not missing:
            return None
        if not failures:
            return _Failed(f"{len(missing)} runs did not end")
        is_bug = len(failures) < len(missing) or any("traceback" in failure for failure in failures)
        first = str(failures[0]["error"])
        text = first if len(missing) == 1 else f"{len(missing)} runs stopped, the first as: {first}"
        return (_Failed if is_bug else UserError)(text)

    def _print_hint(self) -> None:
        if hint := build(self.jobs[0].cfg.tracking).hint():
            print_place("W&B", hint)


def compose(args: Sequence[str], task_function: TaskFunction | None = None) -> LabSweeper:
    """The sweeper of a command line, for calls from Python, its jobs composed. Raises UserError."""
    arguments, loader = read_arguments(args), make_loader()
    with explained(arguments.settings, loader):
        check_names(arguments.settings)
        master = loader.load_configuration("config", arguments.of_hydra, RunMode.MULTIRUN)
    sweeper: LabSweeper = build(master.hydra.sweeper)
    callbacks: Any = JobStatus()  # Hydra's own list of callbacks is internal
    context = HydraContext(loader, callbacks)
    sweeper.setup(hydra_context=context, task_function=task_function or print, config=master)
    sweeper.compose(list(master.hydra.overrides.task))
    return sweeper


class _Failed(UserError):
    """Runs that failed by what no user can mend."""

    exit_code = EXIT_FAILED
