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

from hydra._internal.callbacks import Callbacks
from hydra.core.config_loader import ConfigLoader
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.core.utils import run_job
from hydra.types import HydraContext, RunMode, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from sarathi_lab.config import command_line, instantiate, run_context
from sarathi_lab.config.checks import check_jobs
from sarathi_lab.config.combinations import combine, without_unread
from sarathi_lab.config.command_line import Arguments
from sarathi_lab.config.console import console, print_place, progress_of, repeated
from sarathi_lab.config.errors import UserError, require_bool
from sarathi_lab.config.instantiate import (
    CHOICES,
    ROUND,
    build,
    name_of,
    settings_without,
)
from sarathi_lab.config.jobs import Composer, Job, first_of_compositions
from sarathi_lab.config.paths import make_folder
from sarathi_lab.config.processes import interrupts_kept_from_children
from sarathi_lab.config.running_jobs import RunningJobs
from sarathi_lab.config.tracked_jobs import tracked

MULTIRUN = "hydra.mode=MULTIRUN"  # as Hydra has -m
OF_WHOLE_SWEEP = ("repeat", "skip_invalid")  # settings that all of its jobs share, and plot.*
POLL_SECONDS = 0.5
MANY_JOBS = 50  # take some seconds to compose and check
# Names of settings that have no effect on a single run.
OF_SWEEPS = re.compile(r"(hydra[/.](launcher|sweeper|sweep)|repeat|plot|skip_invalid|resume)\b")


class LabSweeper:
    """Runs all combinations of the settings' values, or the one run of a command line without -m.

    All jobs are checked before the first one runs; equal jobs run once, finished ones not again.
    """

    config: DictConfig  # of what all jobs share
    hydra_context: HydraContext

    def __init__(self, params: Mapping[str, str] | None = None) -> None:
        """Make the sweeper of an experiment, which sweeps the settings `params`."""
        self._params = [f"{name}={value}" for name, value in (params or {}).items()]
        self.notes: list[str] = []  # for the user

    def sweep(self) -> None:
        """Run the composed jobs. Raises UserError, with nothing written, for mistakes."""
        self.check()
        if self._is_dry_run:
            build(self.jobs[0].cfg.task).print_jobs(self)
        else:
            self.run()

    def compose(
        self,
        arguments: Arguments,
        loader: ConfigLoader,
        config: DictConfig,
        task_function: TaskFunction,
    ) -> None:
        """Compose all jobs, and find their folder. Raises UserError for what nothing reads."""
        self.config = config
        self.hydra_context = HydraContext(loader, Callbacks(config))
        self._task_function: Callable[..., object] = task_function
        self._is_dry_run = arguments.is_dry_run
        # Where options of added folders are found; it makes Hydra's node read-only.
        HydraConfig.instance().set_config(instantiate.copied(config))
        hydra = config.hydra
        self.is_sweep = hydra.mode == RunMode.MULTIRUN
        self.settings = self._parsed(arguments.settings)
        self.swept = []
        for setting in self.settings:
            if setting.is_sweep_override():
                self.swept.append(setting.key_or_group)
        self._check_settings(arguments.settings)
        resume = str(config.resume)
        self._is_resumed = self.is_sweep and resume.lower() != "false"
        if self._is_resumed and resume.lower() != "true":
            run_context.SweepRecord.read(Path(resume))  # before thousands of jobs are composed
        self._composer = Composer(self._compose, self.settings)
        self.jobs = self.make_jobs()
        for job in first_of_compositions(self.jobs):
            job.composition.refuse_unread(job.settings)
        folder = hydra.sweep.dir if self.is_sweep else hydra.run.dir
        recorded = settings_without(arguments.settings, ["resume"])
        if arguments.is_sweep:
            recorded.insert(0, "-m")
        self.record = run_context.SweepRecord(
            folder=Path(str(folder)).absolute(),
            arguments=recorded,
            fingerprint=run_context.fingerprint([job.config for job in self.jobs]),
            num_jobs=len(self.jobs),
            started_at=datetime.now(UTC).isoformat(),
            host=platform.node(),
            swept=self.swept,
        )
        if self._is_resumed:
            self.record = self.record.resumed(resume, config.output)
        elif self.is_sweep:
            self.record.check_unused()

    def _parsed(self, settings: Sequence[str]) -> list[Override]:
        """Return the settings of jobs: the sweeper's (an experiment's) and the command line's."""
        names = {*map(name_of, settings)}
        params: list[str] = []
        for setting in self._params:
            # A class replaces all options that an experiment sweeps.
            if f"{name_of(setting)}._target_" not in names:
                params.append(setting)
        parser = OverridesParser.create(self.hydra_context.config_loader)
        of_jobs = []
        for override in parser.parse_overrides([*params, *settings]):
            if not override.is_hydra_override() and override.key_or_group != "resume":
                of_jobs.append(override)
        return of_jobs

    def _check_settings(self, settings: Sequence[str]) -> None:
        """Refuse settings that what is run has no use for."""
        hydra = self.config.hydra
        require_bool("hydra.verbose", hydra.verbose, "use true to log more, else false")
        require_bool("skip_invalid", self.config.skip_invalid)
        if self.is_sweep and hydra.launcher.get("n_jobs") == 0:
            raise UserError("hydra.launcher.n_jobs=0 runs nothing; use a number such as 2, or -1")
        for typed in settings:
            if not self.is_sweep and OF_SWEEPS.match(name_of(typed)):
                raise UserError(f"{typed} has no effect on one run; add -m for a sweep, or drop it")
            if self.is_sweep and typed.startswith("hydra.sweep.subdir="):
                raise UserError(f"{typed} has no effect: runs are numbered; drop it")
        for setting in self.settings:
            if setting.is_sweep_override():
                self._check_swept(setting)

    def _check_swept(self, setting: Override) -> None:
        """Refuse several values of a setting where there is no sweep, or where it has one value."""
        line = str(setting.input_line)
        name = setting.key_or_group
        if not self.is_sweep:
            raise UserError(
                f"{line} has several values; add -m to sweep over them, or quote the comma"
            )
        if name in OF_WHOLE_SWEEP or name.startswith("plot."):
            raise UserError(f"{line} is of the whole sweep; write one value, or [a,b] for both")

    def make_jobs(self) -> list[Job]:
        """Compose the jobs, round after round, as a machine's speed drifts."""
        typed = combine(self.settings)
        if len(typed) >= MANY_JOBS and not self.config.skip_invalid:
            self._check_each_value(typed)
        combinations, notes = without_unread(typed, self.swept, self.compose_job)
        self.notes += notes
        jobs = []
        with progress_of("composing", len(combinations), "runs") as advance:
            for settings in combinations:
                jobs.append(self.compose_job(settings))
                advance(1)
        rounds = [1]
        if self.is_sweep:
            rounds = [job.num_rounds(self.swept) for job in jobs]
            if jobs[0].cfg.repeat not in ("auto", 1) and min(rounds) == 1:
                self.notes.append("simulated runs repeat themselves: run in one round")
        num_rounds = max(rounds)
        if num_rounds == 1:
            return jobs
        self.swept.append(ROUND)
        in_rounds = []
        for number in range(num_rounds):
            for job, own_rounds in zip(jobs, rounds, strict=True):
                if number < own_rounds:
                    in_rounds.append(job.in_round(number))
        return in_rounds

    def _check_each_value(self, combinations: Sequence[tuple[str, ...]]) -> None:
        """Refuse what a value of a setting is refused for, before thousands of jobs are composed.

        Each value is tried in the first job that has it.
        """
        swept = {*self.swept}
        check = partial(check_jobs, swept=swept, skips=False, keeps=False)
        tried = set[str]()
        jobs: list[Job] = []
        for settings in combinations:
            if tried.issuperset(settings):  # an earlier job had each of its values
                continue
            tried.update(settings)
            try:
                job = self.compose_job(settings)
            except UserError:
                if swept.isdisjoint(CHOICES):
                    raise
                continue  # it may have settings that only other jobs read, and be made without
            if not jobs:
                check([job])  # before others are composed, as most mistakes are of all jobs
            jobs.append(job)
        if len(jobs) > 1:
            check(jobs[1:])

    def compose_job(self, settings: Sequence[str]) -> Job:
        """Compose the job of these settings. Raises UserError."""
        with command_line.explained(settings):
            job = self._composer.job(settings)
            assert job.config  # a broken ${...} shows here
        return job

    def _compose(self, settings: list[str]) -> DictConfig:
        if settings == list(self.config.hydra.overrides.task):
            return instantiate.copied(self.config)  # which Hydra has composed of just these
        return self.hydra_context.config_loader.load_sweep_config(self.config, settings)

    def check(self) -> None:
        """Let the tasks check and prepare all jobs. Raises UserError (see `check_jobs`)."""
        # Other processes prepare theirs, and what thousands of jobs prepare would fill the memory.
        keeps = not (self._is_remote or self._is_dry_run) and len(self.jobs) < MANY_JOBS
        swept: set[str] = set()
        if self.is_sweep:
            # Rounds are alike: no job is refused for its number.
            swept = {*self.swept} - {ROUND}
        skips = self.config.skip_invalid
        self.jobs, notes = check_jobs(self.jobs, swept, skips=skips, keeps=keeps)
        self.notes += notes
        if self.is_sweep:
            build(self.jobs[0].cfg.task).check_sweep(self.jobs, self.swept)
        num_jobs = len(self.jobs)
        if self._is_resumed and num_jobs != self.record.num_jobs:
            raise UserError(
                f"resume={self.record.folder} began with {self.record.num_jobs} runs, and "
                f"{num_jobs} pass their check now; start a new sweep"
            )
        self.record = replace(self.record, num_jobs=num_jobs)

    @property
    def _is_remote(self) -> bool:
        """Whether other processes run the jobs, by one of Hydra's launchers."""
        return self.is_sweep and self.config.hydra.runtime.choices["hydra/launcher"] != "basic"

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
            hydra.overrides.hydra.append(f"hydra.sweep.dir={command_line.quoted(folder)}")
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
        make = partial(Plugins.instance().instantiate_launcher, hydra_context=self.hydra_context)
        launcher = make(task_function=self._task_function, config=self.config)
        settings: list[list[str]] = []
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
    return sweeper_of(command_line.read_arguments(args), task_function)


def sweeper_of(arguments: Arguments, task_function: TaskFunction) -> LabSweeper:
    """Return the sweeper of arguments that were read, its jobs composed. Raises UserError."""
    loader = instantiate.make_loader()
    settings = list(arguments.settings)
    if arguments.is_sweep:
        settings.append(MULTIRUN)
    with command_line.explained(arguments.settings):
        overrides = OverridesParser.create().parse_overrides(settings)
        _refuse_lists(overrides)
        config = loader.load_configuration("config", _shared(overrides), RunMode.RUN)
        sweeper = build(config.hydra.sweeper, LabSweeper)
        sweeper.compose(arguments, loader, config, task_function)
    return sweeper


def _refuse_lists(overrides: Sequence[Override]) -> None:
    """Raise UserError for a list in place of an option."""
    for override in overrides:
        group = override.key_or_group
        options = override.value()
        if group in CHOICES and isinstance(options, list):
            remedy = f"sweep over them by {group}={','.join(map(str, options))} -m"
            raise UserError(f"{override.input_line} is a list, not an option; {remedy}")


def _shared(overrides: Sequence[Override]) -> list[str]:
    """Return the settings that all jobs have: not those that are swept, and not those of an option
    where the option is swept.
    """
    swept = [override.key_or_group for override in overrides if override.is_sweep_override()]
    shared = []
    for override in overrides:
        name = override.key_or_group
        group = name.partition(".")[0]
        if override.is_hydra_override() or not {name, group}.intersection(swept):
            shared.append(str(override.input_line))
    return shared
