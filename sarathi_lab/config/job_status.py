"""The status files of a sweep's jobs, which any process may write."""

from __future__ import annotations

import sys
import time
import traceback
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import joblib
from hydra.core.utils import JobReturn
from hydra.experimental.callback import Callback
from hydra.types import RunMode, TaskFunction
from omegaconf import DictConfig

from sarathi_lab.config.console import console
from sarathi_lab.config.cores import pin_process
from sarathi_lab.config.errors import UserError, no_room
from sarathi_lab.config.paths import write_json
from sarathi_lab.config.sweep_record import FINISHED, OUTPUT, job_running, record_failure


class JobStatus(Callback):
    """Leaves finished.json or failed.json in the folder of each job of a sweep, and in output.txt
    what jobs in other processes print, as their texts would mix.
    """

    def on_job_start(
        self, config: DictConfig, *, task_function: TaskFunction, **kwargs: Any
    ) -> None:
        hydra = config.hydra
        self._start, self._stack = time.monotonic(), ExitStack()
        if hydra.mode == RunMode.MULTIRUN and hydra.runtime.choices["hydra/launcher"] != "basic":
            folder = Path(hydra.runtime.output_dir)
            self._stack.enter_context(job_running(Path(hydra.sweep.dir)))
            output = self._stack.enter_context((folder / OUTPUT).open("w", buffering=1))
            self._stack.enter_context(redirect_stdout(output))
            self._stack.enter_context(redirect_stderr(output))
            if (num_jobs := hydra.launcher.get("n_jobs")) is not None:
                cores = ", ".join(map(str, pin_process(joblib.effective_n_jobs(num_jobs))))
                print(f"cores {cores}" if cores else "no cores of its own: too few are free")

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        with self._stack:
            if config.hydra.mode == RunMode.MULTIRUN:
                self._record(Path(config.hydra.runtime.output_dir), error_of(job_return))

    def _record(self, folder: Path, error: Exception | None) -> None:
        if error is None:
            write_json(folder / FINISHED, {"seconds": time.monotonic() - self._start})
        elif (reason := error if isinstance(error, UserError) else no_room(error)) is not None:
            record_stop(folder, reason)
        else:
            lines = "".join(traceback.format_exception(error))
            print(lines, file=sys.stderr)
            short = f"{type(error).__name__}: {error}".splitlines()[0]
            record_failure(folder, error=short, traceback=lines)


def error_of(job: JobReturn) -> Exception | None:
    """What a job has raised."""
    try:
        with redirect_stderr(StringIO()):  # where Hydra names the settings before it raises
            job.return_value  # noqa: B018
    except Exception as error:
        return error
    return None


def record_stop(folder: Path, reason: UserError) -> None:
    """Print and record why the job in `folder` came to no end."""
    console().print(f"  stopped: {reason}", soft_wrap=True)
    record_failure(folder, error=str(reason))
