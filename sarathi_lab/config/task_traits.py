"""What a command line is checked by, of the class that `task._target_` names."""

from __future__ import annotations

from collections.abc import Collection
from typing import ClassVar

from omegaconf import DictConfig

from sarathi_lab.config.instantiate import class_of


class TaskTraits:
    """What a task reads and leaves, known before it is made."""

    # Groups and settings that it reads besides `task.*`; others are refused. None: all.
    reads: ClassVar[Collection[str] | None] = None
    has_runs: ClassVar[bool] = False  # whether it leaves runs that a sweep's table can compare
    num_rounds: ClassVar[int] = 1  # of a sweep by repeat=auto, where times are measured
    # Whether it simulates by `hardware.tables` without being told so by `executor.cost_model`.
    follows_tables: ClassVar[bool] = False


def traits_of(cfg: DictConfig) -> type[TaskTraits]:
    """Return the class of the task, for one that is no task the defaults."""
    task = class_of(cfg, "task")
    if issubclass(task, TaskTraits):
        return task
    return TaskTraits
