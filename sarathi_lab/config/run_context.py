"""What a task is told of the run that it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class RunContext:
    """Where a run's results go and what they are called; `prepared` is from the task's `check`."""

    run_dir: Path
    baselines_dir: Path
    name: str
    group: str  # what is swept, where, and the folder: the same of all runs of a command
    swept: Sequence[str] = ()  # the settings that the sweep varies
    # Those of them that this run reads, with its values.
    varied: Mapping[str, object] = field(default_factory=dict)
    experiment: str | None = None  # the overlay of conf/experiment, if one was asked for
    task: str = "serve"  # the option of conf/task
    policy: str | None = None  # the option of conf/policy; None for a class of one's own
    prepared: Any = None
    command: str = ""  # as typed
    is_verbose: bool = False  # whether to print all of it
