"""What a sweep leaves in its folder for the one that continues it: the command, and the outcome of
every job.
"""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from sarathi_lab.config.errors import UserError
from sarathi_lab.config.paths import json_object, try_lock, write_json

RECORD = "sweep.json"
FINISHED = "finished.json"  # written last by every job that came to its end
FAILED = "failed.json"  # why it did not
OUTPUT = "output.txt"  # what a job in another process printed
BEST = "best.json"  # a search's end
LOCK = Path(".locks") / "sweep"


@dataclass(frozen=True)
class SweepRecord:
    """A sweep's folder, the command line that it was started with, and what its jobs do."""

    folder: Path
    arguments: list[str]
    fingerprint: str  # of the configuration of its jobs
    num_jobs: int
    is_search: bool  # a search chooses its jobs as it goes
    started_at: str
    host: str = ""  # that it was started on

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Raises OSError or ValueError where there is none."""
        return cls(folder=folder, **json.loads((folder / RECORD).read_text()))

    @classmethod
    def find(cls, folder: Path) -> Self | None:
        """The same; None where there is none, or one of another program or version."""
        try:
            return cls.read(folder)
        except (OSError, ValueError, TypeError):
            return None

    def write(self) -> None:
        """Leave it in the folder, which is made if it is missing."""
        self.folder.mkdir(parents=True, exist_ok=True)
        content = {key: value for key, value in vars(self).items() if key != "folder"}
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
        """Whether job `number` came to its end, by this sweep or the one that it continues; not if
        its file is damaged, as what lies beside it may be, too.
        """
        end = _contents(self.job_dir(number) / FINISHED) or {}
        return isinstance(end.get("seconds"), float)

    def failure(self, number: int) -> dict[str, Any] | None:
        """Why job `number` failed (`error`, and `traceback` of a bug), None if it did not."""
        path = self.job_dir(number) / FAILED
        if not path.exists():
            return None
        return {"error": f"{path} is damaged"} | (_contents(path) or {})

    def has_ended(self, number: int) -> bool:
        return self.is_finished(number) or self.failure(number) is not None

    def is_complete(self) -> bool:
        """Whether nothing is left to do."""
        if self.is_search:
            return (self.folder / BEST).is_file()
        return all(self.is_finished(number) for number in range(self.num_jobs))

    def begun(self) -> list[int]:
        """The numbers of the jobs that have a folder."""
        return sorted(int(path.name) for path in self.folder.iterdir() if path.name.isdecimal())

    def clear_unfinished(self) -> None:
        """Remove what jobs and baselines without an end have left, so that they begin anew."""
        jobs = [self.job_dir(number) for number in self.begun() if not self.is_finished(number)]
        baselines = self.folder / "baselines"
        for path in (*jobs, *baselines.glob("*-failed"), *baselines.glob(".*")):
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
        with self.job_running():
            yield

    def job_running(self) -> AbstractContextManager[Any]:
        """The same for one job, which may outlive the command that started it."""
        return try_lock(self.folder / LOCK, shared=True) or nullcontext()


def _contents(path: Path) -> dict[str, Any] | None:
    """The object in a file, None if there is no such file or it holds something else."""
    try:
        return json_object(path.read_text(), str(path))
    except (OSError, UnicodeDecodeError, UserError):
        return None


def as_command(arguments: Sequence[str]) -> str:
    """What to type for these arguments."""
    return shlex.join(["python", "-m", "sarathi_lab.run", *arguments])


def record_failure(run_dir: Path, **why: str) -> None:
    """Say that the job in `run_dir` failed, unless the run itself has said more; where there is no
    room to say so, it has not ended.
    """
    with suppress(OSError):
        if not (run_dir / FAILED).is_file():
            write_json(run_dir / FAILED, why)
