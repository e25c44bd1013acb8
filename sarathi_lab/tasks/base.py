"""What a command line can ask for (config group `task`), and the one place that runs it."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import mean

from omegaconf import DictConfig

from sarathi_lab.config.checked import check_fields
from sarathi_lab.config.console import console, counted, duration, print_place, progress_of
from sarathi_lab.config.instantiate import build, resolved
from sarathi_lab.config.jobs import Job, first_of_compositions
from sarathi_lab.config.run_context import RunContext, SweepRecord, group_of, run_name
from sarathi_lab.config.sweeper import LabSweeper
from sarathi_lab.config.task_traits import TaskTraits
from sarathi_lab.results.load import merge_settings
from sarathi_lab.results.own_metrics import LABELS
from sarathi_lab.results.plots.choice import check_stated
from sarathi_lab.results.report import print_sweep
from sarathi_lab.results.result import Result, Stopped, track, write, write_stopped
from sarathi_lab.results.tracking import Tracker
from sarathi_lab.results.wandb_writer import TrackedRun

OF_DEVICES = ("device", "threads", "hostname", "workload")  # labels that no setting has by name
SAMPLED = 20  # jobs of a sweep by which its time is told


class Task(TaskTraits, ABC):
    """Kind of work. The constructor is cheap and checks the task's arguments (UserError)."""

    def __post_init__(self) -> None:
        check_fields(self, "task.")

    @abstractmethod
    def check(self, cfg: DictConfig) -> object:
        """Return `context.prepared` of `run`. Raises UserError for what would stop it."""

    def check_sweep(self, jobs: Sequence[Job], swept: Sequence[str]) -> None:
        """Check what only all jobs of a sweep decide. Raises UserError."""
        if self.has_runs:
            check_picture(jobs, swept)

    def expected_seconds(self, cfg: DictConfig) -> float:
        """Return about how long a job takes without baselines; NaN where only the device knows."""
        return math.nan

    @abstractmethod
    def run(self, cfg: DictConfig, context: RunContext) -> Result | None:
        """Do the work; `run_task` saves, tracks and prints what is returned."""

    def report_sweep(self, job: Job, record: SweepRecord, *, is_tracked: bool) -> None:
        """Print the table of a sweep; `job` is one of its runs."""
        if not self.has_runs:
            print_place("results", record.folder)
            return
        print_sweep(record.folder, record.num_jobs, resolved(job.cfg)["plot"])
        # Without a finished run there is no table.
        if is_tracked and (record.folder / "sweep.csv").is_file():
            tracker: Tracker = build(job.cfg.tracking)
            tracker.leave(_tracked_sweep(job, record))

    def print_jobs(self, sweeper: LabSweeper) -> None:
        """List the checked jobs that are not finished, as `--dry-run` does."""
        record = sweeper.record
        swept = record.swept if sweeper.is_sweep else None
        lines = list(sweeper.notes)
        jobs = []
        for number, job in enumerate(sweeper.jobs):
            if record.is_finished(number):
                continue
            jobs.append(job)
            name = run_name(str(job.choices["policy"]), job.settings, swept)
            lines.append(f"{number}  {name}")
        summary = f"{counted(len(jobs), 'run')}, checked and not started"
        num_finished = len(sweeper.jobs) - len(jobs)
        if num_finished:
            summary += f"; {num_finished} finished before"
        lines.append(summary)
        if jobs and self.has_runs:
            lines += self._expected(jobs)
        for line in lines:
            console().print(line, soft_wrap=True)

    def _expected(self, jobs: Sequence[Job]) -> list[str]:
        """State beside what jobs run, and about how long they take."""
        lines = []
        baselines = ", ".join(map(str, jobs[0].cfg.baselines))
        if baselines:
            lines.append(f"baselines of each: {baselines}; runs of equal work share them")
        num_jobs = len(jobs)
        step = math.ceil(num_jobs / SAMPLED)
        seconds_a_job = mean(self.expected_seconds(job.cfg) for job in jobs[::step])
        if not math.isnan(seconds_a_job):
            seconds = seconds_a_job * num_jobs
            lines.append(f"about {duration(seconds)} on one core, and baselines")
        return lines


def check_picture(jobs: Sequence[Job], swept: Sequence[str]) -> None:
    """Refuse names of the group `plot` that no run of a sweep has. Raises UserError."""
    config = jobs[0].config  # the same for all jobs: a sweep has one picture
    axes = config["plot"]
    if not any(axes.values()):
        return
    settings = {*LABELS, *OF_DEVICES}
    for job in first_of_compositions(jobs):
        settings.update(merge_settings({}, job.config))
    own_metrics = [str(dotted).rpartition(".")[2] for dotted in config["metrics"]]
    check_stated(axes, sorted(settings), swept, own_metrics)


def _tracked_sweep(job: Job, record: SweepRecord) -> TrackedRun:
    """Return a sweep's table and picture as a run to be tracked; `job` is one of its runs."""
    return TrackedRun(
        name=f"sweep of {', '.join(record.swept)}",
        group=group_of(record.folder, job.choices, record.swept, record.host),
        job_type="sweep",
        folder=str(record.folder),
        tags=["sweep"],
        config={
            "task": "sweep",
            "swept": list(record.swept),
            "hostname": record.host,
            "command": record.command,
        },
        has_tables=True,
    )


def run_task(cfg: DictConfig, context: RunContext) -> None:
    """Run the task of `cfg` and keep its result. Raises what the task raises."""
    task: Task = build(cfg.task)
    conclude(lambda: task.run(cfg, context), cfg, context, is_run=task.has_runs)


def conclude(
    work: Callable[[], Result | None], cfg: DictConfig, context: RunContext, *, is_run: bool
) -> None:
    """Do `work`, and save, track and print its result: the one place that does so.

    A run that ends by an error is tracked as failed; with `Stopped`, its results so far are kept.
    """
    tracker: Tracker = build(cfg.tracking)
    with progress_of("running"):
        try:
            result = work()
        except Exception as error:
            # A run that failed at once has no more than its configuration.
            done = _with_settings(Result(), cfg)
            if isinstance(error, Stopped):
                done = _with_settings(error.result, cfg)
                write_stopped(done, context, str(error))
            if is_run:
                track(done, context, tracker, is_run=True, has_failed=True)
            raise
        if result is not None:
            write(_with_settings(result, cfg), context, tracker, is_run=is_run)
    if result is not None and result.error is not None:
        raise result.error


def _with_settings(result: Result, cfg: DictConfig) -> Result:
    """Return a result with the run's configuration, unless it has one of its own."""
    if result.config is not None:
        return result
    return replace(result, config=resolved(cfg))
