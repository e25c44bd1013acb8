"""What a command line can ask for (config group `task`): to serve requests, to reproduce the paper,
to calibrate.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Protocol

from omegaconf import DictConfig

from sarathi_lab.config.instantiate import build
from sarathi_lab.config.run_context import RunContext
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

    def run(self, cfg: DictConfig, place: RunContext) -> None:
        """Do the work and leave the results in `place.run_dir`."""
        ...


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
