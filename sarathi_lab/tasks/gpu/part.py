"""A part of `make campaign`: measures within its time and records what it found, and its end."""

from __future__ import annotations

import json
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pandas as pd
import torch
from omegaconf import DictConfig

from sarathi_lab.config.checked import number, one_of
from sarathi_lab.config.console import console
from sarathi_lab.config.errors import RunError, UserError
from sarathi_lab.config.paths import EXPERIMENTS, make_folder, write_json
from sarathi_lab.config.run_context import RunContext
from sarathi_lab.executor.torch.device import device_description, resolve_device
from sarathi_lab.results.provenance import clocks_seen, device_folder, device_record
from sarathi_lab.results.result import Result, Shown
from sarathi_lab.tasks.base import Task

RUN_FILE = "run.json"  # of a folder of results: each part's device, versions, clocks and end
FLOAT_FORMAT = "%.6g"


@dataclass
class Work:
    """A part at work on `device` for its share of the time in seconds; `folder` is where its tables
    are recorded (None: nowhere), `files` what it has recorded there.
    """

    device: torch.device
    is_dry: bool
    seconds: float
    folder: Path | None
    files: list[str]
    tables: dict[str, pd.DataFrame] = field(default_factory=dict)
    shown: list[Shown | str] = field(default_factory=list)  # printed in the end
    started: float = field(default_factory=time.monotonic)

    def cuts_short(self) -> bool:
        """Whether a grid must be left unfinished; those of a dry run are tiny and are not."""
        return not self.is_dry and time.monotonic() - self.started >= self.seconds

    def log(self, text: str) -> None:
        console().print(f"  {text}", soft_wrap=True)

    def keep(self, name: str, found: pd.DataFrame | Sequence[Mapping[str, object]]) -> None:
        """Keep a table, in place of an earlier one of that name; one without rows is not kept."""
        table = pd.DataFrame(found)
        if len(table):
            self.tables[name] = table
            options: dict[str, Any] = {"index": False, "float_format": FLOAT_FORMAT}
            self.record(f"{name}.csv", lambda path: table.to_csv(path, **options))

    def record(self, name: str, write: Callable[[Path], object]) -> None:
        """Let `write` make the file in the recorded folder, if there is one."""
        if self.folder is not None:
            write(self.folder / name)
            if name not in self.files:
                self.files.append(name)


@dataclass(frozen=True)
class GpuTask(Task):
    """A task that measures a GPU for about `seconds`; what is found is kept in `record` at once.

    `setup` is paper, or dry: tiny sizes on a CPU.
    """

    reads = ("device",)
    seconds: float = number(above=0, fix="use the seconds to measure for, such as 60")
    setup: str = one_of("paper", valid=("paper", "dry"))
    record: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.is_dry and self.record and Path(self.record).resolve() == EXPERIMENTS:
            raise UserError(
                f"task.record={self.record} is for measurements, not for task.setup=dry; use "
                "another folder, or null"
            )

    @property
    def is_dry(self) -> bool:
        return self.setup == "dry"

    def check(self, cfg: DictConfig) -> None:
        """Refuse a machine without a GPU, unless the setup is dry."""
        if resolve_device(cfg.device).type != "cuda" and not self.is_dry:
            raise UserError(
                f"no GPU found (device={cfg.device}, torch {torch.__version__}); try everything "
                "with experiment=campaign_dry"
            )
        if self.record is not None:
            make_folder(Path(self.record), "task.record")

    @contextmanager
    def recording(
        self, folder: Path | None, part: str, device: torch.device
    ) -> Iterator[list[str]]:
        """Keep in the run.json of `folder` what `part` ran on, the clocks seen and how it ended.

        Yields the list of the files that it records there; those of its last run are removed.
        """
        files: list[str] = []
        if folder is None:
            yield files
            return
        make_folder(folder, "task.record")
        for name in _parts(folder).get(part, {}).get("files", []):
            (folder / name).unlink(missing_ok=True)
        gpu = _gpu_id(device)
        record: dict[str, Any] = {
            "seconds_given": self.seconds,
            "is_dry": self.is_dry,
            **device_record(device_description(device), gpu, torch.version.cuda),
            "error": "it was ended before it was done",
        }
        write_json(folder / RUN_FILE, {"parts": _parts(folder) | {part: record}})
        start = time.monotonic()
        clocks: dict[str, Any] = {}
        try:
            with clocks_seen(gpu) as clocks:
                yield files
            record["error"] = None
        except Exception as error:
            kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
            record["error"] = f"{kind}{error}".splitlines()[0]
            raise
        finally:
            took = round(time.monotonic() - start, 2)
            record |= {"clocks": clocks, "duration": took, "files": files}
            write_json(folder / RUN_FILE, {"parts": _parts(folder) | {part: record}})


class Part(GpuTask):
    """One measurement; tables and run.json are kept in `<record>/<home>/results/<device>/`."""

    home: ClassVar[str]  # the experiment whose results these are

    def run(self, cfg: DictConfig, context: RunContext) -> Result:
        """Measure. What was recorded before an error, or the end of the time, stays."""
        device, name = current_device(cfg)
        folder = Path(self.record) / self.home / "results" / name if self.record else None
        failure = None
        try:
            with self.recording(folder, context.task, device) as files:
                work = Work(device, self.is_dry, self.seconds, folder, files)
                self.measure(cfg, context, work)
        except RunError as error:
            failure = error
        return Result(
            work.tables,
            shown=work.shown,
            places={"results": context.run_dir if folder is None else folder},
            float_format=FLOAT_FORMAT,
            error=failure,
        )

    @abstractmethod
    def measure(self, cfg: DictConfig, context: RunContext, work: Work) -> None:
        """Hand every table to `work` as soon as there is one, and mind the time."""


def current_device(cfg: DictConfig) -> tuple[torch.device, str]:
    """The chosen device, made torch's current one, and the name of its folders of results."""
    device = resolve_device(cfg.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device, device_folder(device.type, device_description(device))


def _gpu_id(device: torch.device) -> str | None:
    """What nvidia-smi calls the device by, whose numbers need not be torch's."""
    if device.type != "cuda":
        return None
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    return f"GPU-{uuid}" if uuid is not None else str(device.index or 0)


def _parts(folder: Path) -> dict[str, Any]:
    path = folder / RUN_FILE
    return json.loads(path.read_text())["parts"] if path.is_file() else {}
