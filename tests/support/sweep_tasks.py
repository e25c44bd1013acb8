"""A task that takes no time, and fails, waits or kills its process where a file in the output
folder says so.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from omegaconf import DictConfig

from sarathi_lab.config.errors import RunError
from sarathi_lab.config.paths import write_json
from sarathi_lab.config.run_context import RunContext
from sarathi_lab.tasks.base import Task


@dataclass(frozen=True)
class Scripted(Task):
    """Leaves `result.json`, and a line in the output folder's `calls` for every start."""

    reads: ClassVar[None] = None

    def check(self, cfg: DictConfig) -> None:
        """All is well."""

    def run(self, cfg: DictConfig, place: RunContext) -> None:
        """Do what the file `fail-CHUNK`, `stop-CHUNK`, `wait-CHUNK`, `kill-CHUNK` or `meet` asks
        for.
        """
        output = Path(cfg.output)
        with (output / "calls").open("a") as calls:
            calls.write(f"{cfg.chunk}\n")
        print("chunk", cfg.chunk)
        if (output / f"fail-{cfg.chunk}").exists():
            raise ValueError(f"a bug with {cfg.chunk}")
        if (output / f"stop-{cfg.chunk}").exists():
            raise RunError(f"no room for {cfg.chunk}")
        if (output / f"wait-{cfg.chunk}").exists():
            time.sleep(120)
        while (output / "meet").exists() and len((output / "calls").read_text().split()) < 2:
            time.sleep(
                0.01
            )  # so that the first two run beside each other, however slowly a process starts
        if (output / f"kill-{cfg.chunk}").exists():
            time.sleep(0.5)  # the other one is done by then
            os.kill(os.getpid(), signal.SIGKILL)
        cores = sorted(os.sched_getaffinity(0))
        write_json(
            place.run_dir / "result.json",
            {"chunk": cfg.chunk, "cores": cores, "process": os.getpid()},
        )
