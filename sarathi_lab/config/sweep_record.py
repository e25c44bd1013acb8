"""What a sweep leaves in its folder: its command, what it varies, how its jobs ended; and the
callback that records how each did.
"""

from __future__ import annotations

import hashlib
import json
import shlex
import shutil
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import (
    AbstractContextManager,
    ExitStack,
    contextmanager,
    nullcontext,
    redirect_stderr,
    redirect_stdout,
    suppress,
)
from dataclasses import asdict, dataclass
from io import StringIO
from pathlib import Path
from typing import Any, Self

from hydra.core.utils import JobReturn
from hydra.experimental.callback import Callback
from hydra.types import RunMode, TaskFunction
from omegaconf import DictConfig

from sarathi_lab.config.console import console, duration
from sarathi_lab.config.errors import UserError, no_room
from sarathi_lab.config.paths import read_object, try_lock, write_json
from sarathi_lab.config.processes import pin_process

RECORD = "sweep.json"
FINISHED = "finished.json"  # written last by every job that came to its end
FAILED = "failed.json"  # why it did not
OUTPUT = "output.txt"  # what a job in another process printed
BEST = "best.json"  # a search's end
LOCK = Path(".locks") / "sweep"
LATEST = "true"
NOT_OF_WORK = ("output", "tracking", "resume", "limit", "repeat", "plot")


@dataclass(frozen=True)
class SweepRecord:
    """A sweep's folder, the command line that started it, and the settings that it varies."""

    folder: Path
    arguments: list[str]
    fingerprint: str  # of the configuration of its jobs
    num_jobs: int
    is_search: bool  # a search chooses its jobs as it goes
    started_at: str
    host: str = ""  # that it was started on
    swept: tuple[str, ...] = ()

    @classmethod
    def find(cls, folder: Path) -> Self | None:
        """Read the record in `folder`; None if there is none, or one of another version."""
        try:
            content = json.loads((folder / RECORD).read_text())
            swept = tuple(content.pop("swept", ()))
            return cls(folder=folder, **content, swept=swept)
        except (OSError, ValueError, TypeError, AttributeError):
            return None

    def write(self) -> None:
        """Write it into the folder, which is made if it is missing."""
        self.folder.mkdir(parents=True, exist_ok=True)
        content = asdict(self)
        del content["folder"]
        write_json(self.folder / RECORD, content)

    @property
    def command(self) -> str:
        """The command that started it."""
        return as_command(self.arguments)

    @property
    def resume_command(self) -> str:
        """The command that continues it."""
        return as_command([f"resume={self.folder}"])

    def job_dir(self, number: int) -> Path:
        return self.folder / str(number)

    def is_finished(self, number: int) -> bool:
        """Whether job `number` came to its end."""
        return (self.job_dir(number) / FINISHED).is_file()

    def outcome(self, number: int) -> str:
        """How job `number` ended, for a line of the terminal."""
        if (failure := self.failure(number)) is not None:
            return f"failed: {failure['error']}"
        seconds = json.loads((self.job_dir(number) / FINISHED).read_text())["seconds"]
        return f"took {duration(seconds)}"

    def failure(self, number: int) -> dict[str, Any] | None:
        """Why job `number` failed (`error`, and `traceback` of a bug), None if it did not."""
        path = self.job_dir(number) / FAILED
        return read_object(path, "remove it") if path.exists() else None

    def has_ended(self, number: int) -> bool:
        return self.is_finished(number) or self.failure(number) is not None

    def is_complete(self) -> bool:
        if self.is_search:
            return (self.folder / BEST).is_file()
        return all(self.is_finished(number) for number in range(self.num_jobs))

    def begun(self) -> list[int]:
        """The numbers of the jobs that have a folder."""
        return sorted(int(path.name) for path in self.folder.iterdir() if path.name.isdecimal())

    def clear_unfinished(self) -> None:
        """Remove the folders of jobs and baselines without an end."""
        jobs = [self.job_dir(number) for number in self.begun() if not self.is_finished(number)]
        baselines = (self.folder / "baselines").glob("*")
        for path in (*jobs, *(one for one in baselines if not (one / "run.json").is_file())):
            shutil.rmtree(path, ignore_errors=True)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Keep others from continuing the sweep meanwhile. UserError if it or a job of it runs."""
        alone = try_lock(self.folder / LOCK)
        if alone is None:
            raise UserError(
                f"resume={self.folder} is still running; wait for it, or stop it and its jobs first"
            )
        alone.close()
        with job_running(self.folder):
            yield


def job_running(folder: Path) -> AbstractContextManager[Any]:
    """Mark the sweep in `folder` as running; a job may outlive the command that started it."""
    return try_lock(folder / LOCK, shared=True) or nullcontext()


def as_command(arguments: Sequence[str]) -> str:
    """What to type for these arguments."""
    return shlex.join(["python", "-m", "sarathi_lab.run", *arguments])


def record_failure(run_dir: Path, **why: str) -> None:
    """Write failed.json into `run_dir`, unless the run itself wrote a fuller one."""
    with suppress(OSError):  # of a full disk: the job has then not ended
        if not (run_dir / FAILED).is_file():
            write_json(run_dir / FAILED, why)


def read_record(folder: Path) -> SweepRecord:
    """Read the record that `resume=folder` names. Raises UserError without one."""
    if record := SweepRecord.find(folder.absolute()):
        return record
    raise UserError(
        f"resume={folder} is not the folder of a sweep: it has no readable {RECORD}; "
        "name one such as outputs/DATE/TIME, or use resume=true"
    )


def fingerprint(configs: Sequence[Mapping[str, Any]], search: object) -> str:
    """Equal for sweeps whose jobs do the same work, wherever they leave the results."""
    jobs = [{key: cfg[key] for key in cfg if key not in NOT_OF_WORK} for cfg in configs]
    text = json.dumps([jobs, search], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def find_sweep(resume: str, new: SweepRecord, output: Path) -> SweepRecord:
    """Find the sweep that `resume` names ("true": the latest unfinished one of the same jobs as
    `new` below `output`). Raises UserError if there is none, or it is complete or another one.
    """
    if resume.lower() != LATEST:
        return _check_same(resume, read_record(Path(resume)), new)
    paths = {path.absolute() for path in [*output.rglob(RECORD), new.folder / RECORD]}
    records = [record for path in paths if (record := SweepRecord.find(path.parent))]
    same = [record for record in records if record.fingerprint == new.fingerprint]
    same.sort(key=lambda record: record.started_at)
    if unfinished := [record for record in same if not record.is_complete()]:
        return unfinished[-1]
    found = f": {same[-1].folder} is complete" if same else ""
    raise UserError(
        f"resume=true finds no unfinished sweep of this command below {output}{found}; drop it "
        "to start one"
    )


def _check_same(resume: str, record: SweepRecord, new: SweepRecord) -> SweepRecord:
    if record.fingerprint != new.fingerprint:
        raise UserError(
            f"resume={resume} has another configuration; repeat its command, {record.command}, or "
            "start a new sweep"
        )
    if record.is_complete():
        raise UserError(
            f"resume={resume} has nothing left to run: the sweep is complete; drop it to start "
            "another"
        )
    return record


def check_unused(folder: Path) -> None:
    """Refuse a folder for a new sweep in which its results would be mixed with others'."""
    if next(folder.rglob("run.json"), None) or (folder / RECORD).exists():
        raise UserError(
            f"hydra.sweep.dir={folder} has results of other runs; name another folder, or "
            f"resume={folder} if it is their sweep that shall go on"
        )


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
                import joblib

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
