"""What a command line can ask for (config group `task`): to serve requests, to reproduce the paper, to calibrate."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from omegaconf import DictConfig


@dataclass(frozen=True)
class Place:
    """Where a run's results go and what they are called."""

    run_dir: Path
    baselines_dir: Path
    name: str
    group: str
    swept: Sequence[str] = ()  # the settings that the sweep varies
    experiment: str | None = None  # the overlay of conf/experiment, if one was asked for


class Task(Protocol):
    """One kind of work. Making one is cheap and checks its own arguments (UserError)."""

    @property
    def reads(self) -> Collection[str] | None:
        """The groups and top-level settings that it reads besides its own; None: all. Others are refused."""
        ...

    @property
    def has_runs(self) -> bool:
        """Whether it leaves runs that a sweep's table can compare."""
        ...

    def check(self, cfg: DictConfig) -> None:
        """Raise UserError for whatever would stop `run`, before anything is written."""
        ...

    def run(self, cfg: DictConfig, place: Place) -> None:
        """Do the work and leave the results in `place.run_dir`."""
        ...
