"""Everything that a sweep has left so far in one file, for a machine that may vanish."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from sarathi_lab.config.console import console
from sarathi_lab.config.paths import replaced
from sarathi_lab.config.sweep_record import RECORD


class Archive(Callback):
    """Writes `path` (.tar.gz) anew whenever a job of a sweep has ended, however it ended: the
    sweep's folder, and what the jobs have written into `folders` since the sweep began.

    It is replaced in one step. Where it can't be written the sweep goes on, after a line.
    """

    def __init__(self, path: str, folders: Sequence[str | None] = ()) -> None:
        self._path = Path(path).absolute()
        self._folders = [Path(folder).absolute() for folder in folders if folder is not None]

    def on_job_end(self, config: DictConfig, job_return: object, **named: Any) -> None:
        """Hydra calls it in the process that launched the job."""
        del job_return, named
        sweep = Path(config.hydra.sweep.dir).absolute()
        if not (sweep / RECORD).is_file():  # a run alone
            return
        try:
            self._write(sweep)
        except OSError as error:
            why = error.strerror or error
            console().print(f"  {self._path} can't be written ({why})", soft_wrap=True)

    def _write(self, sweep: Path) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with replaced(self._path) as aside, tarfile.open(aside, "w:gz") as archive:
            for path, name in self._files(sweep):
                archive.add(path, name, recursive=False)

    def _files(self, sweep: Path) -> Iterator[tuple[Path, str]]:
        """Each file, and what it is called in the archive."""
        began = (sweep / RECORD).stat().st_mtime
        for root, since in [(sweep, 0.0), *((folder, began) for folder in self._folders)]:
            for path in sorted(root.rglob("*")):
                if path.name.startswith(f".{self._path.name}") or path == self._path:
                    continue
                if path.is_file() and path.stat().st_mtime >= since:
                    yield path, f"{root.name}/{path.relative_to(root)}"
