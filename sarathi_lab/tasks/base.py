"""What a command line can ask for (config group `task`): to serve requests, to reproduce the paper,
to calibrate.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Protocol

from omegaconf import DictConfig

from sarathi_lab.config.instantiate import build, resolved
from sarathi_lab.config.run_context import RunContext
from sarathi_lab.results.result import Result, Stopped, track_stopped, write, write_stopped
from sarathi_lab.results.tracking import Tracker


class Task(Protocol):
    """One kind of work. Making one is cheap and checks its own arguments (UserError)."""

    @property
    def reads(self) -> Collection[str] | None:
        """The groups and top-level settings that it reads besides its own; None: all. Others are
        refused.
        """
        ...

    @property
    def has_runs(self) -> bool:
        """Whether it leaves runs that a sweep's table can compare."""
        ...

    def check(self, cfg: DictConfig) -> None:
        """Raise UserError for whatever would stop `run`, before anything is written."""
        ...

    def run(self, cfg: DictConfig, context: RunContext) -> Result | None:
        """Do the work; `run_task` saves, tracks and prints what is returned."""
        ...


def run_task(cfg: DictConfig, context: RunContext) -> None:
    """Run the task of `cfg`, and save, track and print its result: the one place that does so.

    A `Stopped` run is kept as far as it came. Raises what the task raises.
    """
    task: Task = build(cfg.task)
    try:
        result = task.run(cfg, context)
    except Exception as error:
        if task.has_runs:
            keep_stopped(error, cfg, context)
        raise
    if result is not None:
        write(result, context, resolved(cfg), build(cfg.tracking), is_run=task.has_runs)


def keep_stopped(error: Exception, cfg: DictConfig, context: RunContext) -> None:
    """Save what a run did before `error`, if it says so, and track it as failed."""
    done = Result()
    if isinstance(error, Stopped):
        done = error.result
        write_stopped(done, context, resolved(cfg), str(error))
    track_stopped(done, context, resolved(cfg), build(cfg.tracking))


def track_sweep(cfg: DictConfig, folder: Path, swept: Sequence[str]) -> None:
    """Log `sweep.csv` and `sweep.png` in `folder` as a run of the sweep's group; `cfg` is one of
    its jobs'.
    """
    if not (folder / "sweep.csv").is_file():
        return
    tracker: Tracker = build(cfg.tracking)
    varied = ", ".join(swept)
    config = {"task": "sweep", "swept": list(swept)}
    group = "/".join(folder.absolute().parts[-2:])
    with tracker.run(
        name=f"sweep of {varied}", group=group, job_type="sweep", tags=["sweep"], config=config
    ) as tracked:
        tracked.log_tables(folder)
