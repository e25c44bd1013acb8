"""Runs of a command line: composed and checked before the first one begins, then launched."""

from __future__ import annotations

import platform
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, cast

from hydra.core.config_loader import ConfigLoader
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.core.utils import run_job
from hydra.types import HydraContext, RunMode, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from sarathi_lab.config import run_context
from sarathi_lab.config.checks import check_jobs
from sarathi_lab.config.combinations import combine, without_unread
from sarathi_lab.config.command_line import LAUNCHER, Arguments, explained, quoted, read_arguments
from sarathi_lab.config.console import console, print_place, progress_of, repeated
from sarathi_lab.config.errors import UserError, require_bool
from sarathi_lab.config.instantiate import (
    CHOICES,
    ROUND,
    Settings,
    build,
    copied,
    make_loader,
    name_of,
    settings_without,
)
from sarathi_lab.config.job_callbacks import JobCallbacks
from sarathi_lab.config.jobs import Composer, Job, first_of_compositions
from sarathi_lab.config.paths import make_folder
from sarathi_lab.config.processes import interrupts_kept_from_children
from sarathi_lab.config.run_context import SweepRecord
from sarathi_lab.config.running_jobs import RunningJobs
from sarathi_lab.config.tracked_jobs import tracked

MULTIRUN = "hydra.mode=MULTIRUN"  # as Hydra has -m
OF_WHOLE_SWEEP = re.compile(r"repeat$|skip_invalid$|plot\.")  # settings that all jobs share
POLL_SECONDS = 0.5
MANY_JOBS = 50  # take some seconds to compose and check
# Names of settings that have no effect on a single run, and of Hydra's that have none on a sweep.
OF_SWEEPS = re.compile(r"(hydra[/.](launcher|sweeper|sweep)|repeat|plot|skip_invalid|resume)\b")
OF_OTHER_SWEEPERS = ("hydra/sweeper", "hydra.sweeper.max_batch_size", "hydra.sweep.subdir")


class LabSweeper:
    """Runs all combinations of the settings' values, or the one run of a command line without -m.

    All jobs are checked before the first one runs; equal jobs run once, finished ones not again.
    """

    def __init__(
        self,
        arguments: Arguments,
        loader: ConfigLoader,
        config: DictConfig,
        task_function: TaskFunction,
    ) -> None:
        """Compose all jobs, and find their folder.

        Args:
            arguments: The command line.
            loader: Hydra's, of conf/.
            config: What all jobs share.
            task_function: Runs a job.

        Raises:
            UserError: For settings that nothing reads.
        """
        self.config = config
        # Hydra's annotation is a class that it does not publish, with these methods.
        callbacks = cast("Any", JobCallbacks(config))
        self.hydra_context = HydraContext(loader, callbacks)
        self.notes: list[str] = []  # for the user
        self.is_sweep = config.hydra.mode == RunMode.MULTIRUN
        self._is_dry_run = arguments.is_dry_run
        self._task_function: Callable[..., object] = task_function
        # Where options of added folders are found; it makes Hydra's node read-only.
        HydraConfig.instance().set_config(copied(config))
        self.settings = self._settings_of_jobs(arguments.settings)
        self.swept = []
        for setting in self.settings:
            if setting.is_sweep_override():
                self.swept.append(setting.key_or_group)
        self._check_settings(arguments.settings)
        resume = str(config.resume)
        if isinstance(config.resume, bool):
            resume = resume.lower()  # as it is typed
        self._is_resumed = self.is_sweep and resume != "false"
        if self._is_resumed and resume != "true":
            SweepRecord.read(Path(resume))  # before thousands of jobs are composed
        self._composer = Composer(self._compose, self.settings)
        self.jobs = self._make_jobs()
        for job in first_of_compositions(self.jobs):
            job.composition.refuse_unread(job.settings)
        self.record = self._new_record(arguments)
        if self._is_resumed:
            self.record = self.record.resumed(resume, config.output)
        elif self.is_sweep:
            self.record.check_unused()

    def _settings_of_jobs(self, settings: Settings) -> list[Override]:
        """Return the settings of an experiment's sweep and of the command line, without Hydra's."""
        typed = {*map(name_of, settings)}
        params: Mapping[str, object] = self.config.hydra.sweeper.params or {}
        of_experiment = []
        for name, value in params.items():
            # A class replaces all options that an experiment sweeps.
            if f"{name}._target_" not in typed:
                of_experiment.append(f"{name}={value}")
        parser = OverridesParser.create(self.hydra_context.config_loader)
        of_jobs = []
        for override in parser.parse_overrides([*of_experiment, *settings]):
            is_of_command = override.is_hydra_override() or override.key_or_group == "resume"
            if not is_of_command:
                of_jobs.append(override)
        return of_jobs

    def _check_settings(self, settings: Settings) -> None:
        """Refuse settings that what is run has no use for, and several values of one."""
        hydra = self.config.hydra
        require_bool("hydra.verbose", hydra.verbose, "use true to log more, else false")
        require_bool("skip_invalid", self.config.skip_invalid)
        if self.is_sweep and hydra.launcher.get("n_jobs") == 0:
            raise UserError("hydra.launcher.n_jobs=0 runs nothing; use a number such as 2, or -1")
        for setting in settings:
            name = name_of(setting)
            if name in OF_OTHER_SWEEPERS:
                raise UserError(
                    f"{setting} has no effect: a sweep is of all combinations, in folders by their "
                    "numbers; drop it"
                )
            if not self.is_sweep and OF_SWEEPS.match(name):
                raise UserError(
                    f"{setting} has no effect on one run; add -m for a sweep, or drop it"
                )
        for override in self.settings:
            if not override.is_sweep_override():
                continue
            line = str(override.input_line)
            if not self.is_sweep:
                raise UserError(
                    f"{line} has several values; add -m to sweep over them, or quote the comma"
                )
            if OF_WHOLE_SWEEP.match(override.key_or_group):
                raise UserError(f"{line} is of the whole sweep; write one value, or [a,b] for both")

    def _new_record(self, arguments: Arguments) -> SweepRecord:
        hydra = self.config.hydra
        folder = hydra.sweep.dir if self.is_sweep else hydra.run.dir
        typed = settings_without(arguments.settings, ["resume"])
        if arguments.is_sweep:
            typed.insert(0, "-m")
        return SweepRecord(
            folder=Path(str(folder)).absolute(),
            arguments=typed,
            fingerprint=run_context.fingerprint([job.config for job in self.jobs]),
            num_jobs=len(self.jobs),
            started_at=datetime.now(UTC).isoformat(),
            host=platform.node(),
            swept=self.swept,
        )

    # -- composing ---------------------------------------------------------------------------------

    def _make_jobs(self) -> list[Job]:
        """Compose the jobs, round after round, as a machine's speed drifts."""
        every_combination = combine(self.settings)
        if len(every_combination) >= MANY_JOBS and not self.config.skip_invalid:
            self._check_each_value(every_combination)
        combinations, notes = without_unread(every_combination, self.swept, self.compose_job)
        self.notes += notes
        jobs = []
        with progress_of("composing", len(combinations), "runs") as advance:
            for settings in combinations:
                jobs.append(self.compose_job(settings))
                advance(1)
        if not self.is_sweep:
            return jobs
        return self._in_rounds(jobs)

    def _in_rounds(self, jobs: Sequence[Job]) -> list[Job]:
        """Return jobs as often as they are repeated."""
        num_rounds = [job.num_rounds(self.swept) for job in jobs]
        repeat = jobs[0].cfg.repeat
        if repeat not in ("auto", 1) and min(num_rounds) == 1:
            self.notes.append("simulated runs repeat themselves: run in one round")
        if max(num_rounds) == 1:
            return list(jobs)
        self.swept.append(ROUND)
        in_rounds = []
        for number in range(max(num_rounds)):
            for job, num_of_job in zip(jobs, num_rounds, strict=True):
                if number < num_of_job:
                    in_rounds.append(job.in_round(number))
        return in_rounds

    def _check_each_value(self, combinations: Sequence[tuple[str, ...]]) -> None:
        """Refuse what a value of a setting is refused for, before thousands of jobs are composed.

        Each value is tried in the first job that has it.
        """
        check = partial(check_jobs, swept={*self.swept}, skips=False, keeps=False)
        tried: set[str] = set()
        jobs: list[Job] = []
        for settings in combinations:
            if tried.issuperset(settings):  # an earlier job had each of its values
                continue
            tried.update(settings)
            try:
                job = self.compose_job(settings)
            except UserError:
                if not any(name in CHOICES for name in self.swept):
                    raise
                continue  # it may have settings that only other jobs read, and be made without
            if not jobs:
                check([job])  # before others are composed, as most mistakes are of all jobs
            jobs.append(job)
        if len(jobs) > 1:
            check(jobs[1:])

    def compose_job(self, settings: Settings) -> Job:
        """Compose the job of these settings. Raises UserError."""
        with explained(settings):
            job = self._composer.job(settings)
            assert job.config  # a broken ${...} shows here
        return job

    def _compose(self, settings: list[str]) -> DictConfig:
        if settings == list(self.config.hydra.overrides.task):
            return copied(self.config)  # which Hydra has composed of just these
        loader = self.hydra_context.config_loader
        return loader.load_sweep_config(self.config, settings)

    # -- running -----------------------------------------------------------------------------------

    def sweep(self) -> None:
        """Run the composed jobs. Raises UserError, with nothing written, for mistakes."""
        self.check()
        if self._is_dry_run:
            build(self.jobs[0].cfg.task).print_jobs(self)
        else:
            self.run()

    def check(self) -> None:
        """Let the tasks check and prepare all jobs. Raises UserError (see `check_jobs`)."""
        # Other processes prepare theirs, and what thousands of jobs prepare would fill the memory.
        is_elsewhere = self._is_remote or self._is_dry_run
        keeps = not is_elsewhere and len(self.jobs) < MANY_JOBS
        swept = set()
        if self.is_sweep:
            # Rounds are alike: no job is refused for its number.
            swept = {*self.swept} - {ROUND}
        skips = self.config.skip_invalid
        self.jobs, notes = check_jobs(self.jobs, swept, skips=skips, keeps=keeps)
        self.notes += notes
        if self.is_sweep:
            task = build(self.jobs[0].cfg.task)
            task.check_sweep(self.jobs, self.swept)
        record = self.record
        num_jobs = len(self.jobs)
        if self._is_resumed and num_jobs != record.num_jobs:
            raise UserError(
                f"resume={record.folder} began with {record.num_jobs} runs, and {num_jobs} pass "
                "their check now; start a new sweep"
            )
        self.record = replace(record, num_jobs=num_jobs)

    @property
    def _is_remote(self) -> bool:
        """Whether other processes run the jobs, by one of Hydra's launchers."""
        return self.is_sweep and self.config.hydra.runtime.choices[LAUNCHER] != "basic"

    def run(self, *, reports: bool = True) -> None:
        """Run the checked jobs; a sweep then `reports`. Raises UserError for runs that stopped."""
        setting = "hydra.sweep.dir" if self.is_sweep else "hydra.run.dir"
        make_folder(Path(str(self.jobs[0].cfg.output)), "output")
        make_folder(self.record.folder, setting)
        with tracked(self.jobs, self.record.folder, names_hint=reports):
            if self.is_sweep:
                self._run_sweep(reports=reports)
            else:
                self._run_single()

    def _run_single(self) -> None:
        try:
            error = self._run_job(self.jobs[0])
            if isinstance(error, UserError):
                raise UserError(str(error))  # a new one, as the traceback holds memory
            if error is not None:
                raise error
        finally:
            # Also behind an error, of a baseline, that the run itself has outlived.
            if (self.record.folder / "run.json").is_file():
                print_place("results", Path(str(self.config.hydra.run.dir)))

    def _run_job(self, job: Job, number: int | None = None) -> Exception | None:
        """Run a job in this process, that of a sweep by its number; return what it raised."""
        composed = job.composed()
        hydra = composed.hydra
        mode = RunMode.RUN
        folder = "hydra.run.dir"
        subfolder = None
        if number is not None:
            mode = RunMode.MULTIRUN
            folder = "hydra.sweep.dir"
            subfolder = "hydra.sweep.subdir"
        with read_write(composed), open_dict(composed):
            OmegaConf.update(composed, folder, str(self.record.folder))
            hydra.mode = mode
            hydra.job.num = number or 0
            hydra.job.id = number or 0
        function = partial(self._task_function, prepared=job.prepared)
        job.prepared = None  # what it holds is freed when the job ends
        done = run_job(function, composed, folder, subfolder, self.hydra_context)
        return run_context.error_of(done)

    def _run_sweep(self, *, reports: bool) -> None:
        """Run the jobs that are not finished, and show all. Raises UserError for what stopped."""
        record = self.record
        is_interrupted = False
        try:
            with record.running():
                self._begin()
                running = RunningJobs(self.jobs, record)
                self._run_jobs(running)
        except KeyboardInterrupt:
            is_interrupted = True
            raise KeyboardInterrupt(f"{record.resume_command} continues") from None
        finally:
            if reports:
                task = build(self.jobs[0].cfg.task)
                task.report_sweep(self.jobs[0], record, is_tracked=not is_interrupted)
        failure = running.failure()
        if failure is not None:
            print_place("resume", record.resume_command)
            raise failure

    def _begin(self) -> None:
        """Leave the sweep's record, or clear what the earlier command left undone."""
        hydra = self.config.hydra
        record = self.record
        folder = str(record.folder)
        with open_dict(hydra):  # other processes compose their jobs by it
            hydra.overrides.hydra.append(f"hydra.sweep.dir={quoted(folder)}")
            hydra.sweep.dir = folder
        for note in self.notes:
            console().print(note, soft_wrap=True)
        if self._is_resumed:
            record.clear_unfinished()
            how_far = f"{len(record.begun())} of {record.num_jobs} runs finished"
            print_place("resume", f"{folder} ({how_far})")
        else:
            record.write()

    def _run_jobs(self, running: RunningJobs) -> None:
        """Run jobs, and wait for all; how each ended is in its folder."""
        if self._is_remote:
            with _watching(running), interrupts_kept_from_children():
                self._launch_remotely(running.jobs)
            return
        for number, job in running.jobs.items():
            self._run_job(job, number)
            running.print_ended()

    def _launch_remotely(self, jobs: Mapping[int, Job]) -> None:
        """Hand jobs, by their numbers, to a launcher of Hydra. Raises UserError if it fails."""
        launcher = Plugins.instance().instantiate_launcher(
            hydra_context=self.hydra_context, task_function=self._task_function, config=self.config
        )
        settings = []
        for number, job in jobs.items():
            # The folder by the job's number: a launcher numbers only those that it is handed.
            settings.append([*job.settings, f"hydra.sweep.subdir={number}"])
        try:
            launcher.launch(settings, initial_job_idx=0)
        except Exception as error:
            reason = str(error).strip().partition("\n")[0]
            raise UserError(
                f"the launcher gave up ({type(error).__name__}: {reason}); jobs it queued may run "
                f"on; {self.record.resume_command} runs what is missing"
            ) from error


@contextmanager
def _watching(running: RunningJobs) -> Iterator[None]:
    """Print how far a sweep is while other processes run the jobs."""
    with (
        progress_of("running", len(running.jobs), "runs") as advance,
        repeated(lambda: advance(running.print_ended()), POLL_SECONDS),
    ):
        yield
    running.print_ended()


def compose(args: Sequence[str], task_function: TaskFunction = print) -> LabSweeper:
    """Return the sweeper of a command line, its jobs composed. Raises UserError."""
    return sweeper_of(read_arguments(args), task_function)


def sweeper_of(arguments: Arguments, task_function: TaskFunction) -> LabSweeper:
    """Return the sweeper of arguments that were read, its jobs composed. Raises UserError."""
    loader = make_loader()
    settings = list(arguments.settings)
    if arguments.is_sweep:
        settings.append(MULTIRUN)
    with explained(arguments.settings):
        overrides = OverridesParser.create().parse_overrides(settings)
        _refuse_lists(overrides)
        config = loader.load_configuration("config", _shared(overrides), RunMode.RUN)
        return LabSweeper(arguments, loader, config, task_function)


def _refuse_lists(overrides: Sequence[Override]) -> None:
    """Raise UserError for a list in place of an option."""
    for override in overrides:
        group = override.key_or_group
        options = override.value()
        if group in CHOICES and isinstance(options, list):
            values = ",".join(map(str, options))
            remedy = f"sweep over them by {group}={values} -m"
            raise UserError(f"{override.input_line} is a list, not an option; {remedy}")


def _shared(overrides: Sequence[Override]) -> list[str]:
    """Return the settings that all jobs have: not those that are swept, and not those of an option
    where the option is swept.
    """
    swept = set()
    for override in overrides:
        if override.is_sweep_override():
            swept.add(override.key_or_group)
    shared = []
    for override in overrides:
        name = override.key_or_group
        group, _, _ = name.partition(".")
        is_swept = name in swept or group in swept
        if override.is_hydra_override() or not is_swept:
            shared.append(str(override.input_line))
    return shared
