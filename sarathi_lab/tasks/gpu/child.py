"""The process of one part: runs it and leaves a record of what it ran on and how it ended."""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from sarathi_lab.config.errors import UserError
from sarathi_lab.results.device_record import clocks_seen, device_record
from sarathi_lab.tasks.gpu.context import Context


@dataclass(frozen=True)
class Job:
    """What the command tells the process of a part, as JSON in its first argument."""

    part: str
    target: str
    device: str
    is_dry: bool
    seconds: float
    work: str
    tables: str
    slug: str

    @property
    def record(self) -> Path:
        """Where the process leaves its record."""
        return Path(self.work) / f"{self.part}.json"

    def as_json(self) -> str:
        return json.dumps(asdict(self))


def main(argument: str) -> int:
    """Run the part; returns 0, or 1 if it failed. The record is written either way."""
    job = Job(**json.loads(argument))
    signal.signal(signal.SIGTERM, _end)
    device = torch.device(job.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # events and streams belong to the current one
    context = Context(
        job.part, job.device, job.is_dry, job.seconds, Path(job.work), Path(job.tables), job.slug
    )
    record: dict[str, Any] = {
        "part": job.part,
        "seconds_given": round(job.seconds, 1),
        "is_dry": job.is_dry,
    }
    record |= {**device_record(device), "error": "it was ended before it was done"}
    _write(job.record, record)
    with clocks_seen(device) as clocks:
        error = _run(job.target, context)
    _write(
        job.record,
        {**record, "clocks": clocks, "duration": round(context.elapsed, 2), "error": error},
    )
    return int(error is not None)


class _Ended(BaseException):
    """The campaign asked this process to end; what is measured so far is written on the way out."""


def _end(number: int, frame: FrameType | None) -> None:
    raise _Ended


def _run(target: str, context: Context) -> str | None:
    """What went wrong, in one line; None if nothing did."""
    module, _, name = target.partition(":")
    try:
        getattr(importlib.import_module(module), name)(context)
    except UserError as error:
        print(f"error: {error}", flush=True)
        return str(error)
    except Exception as error:
        traceback.print_exc()
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return None


def _write(path: Path, record: dict[str, Any]) -> None:
    """Whole or not at all, as the process may be ended at any time."""
    aside = path.with_suffix(".part")
    aside.write_text(json.dumps(record, indent=2) + "\n")
    os.replace(aside, path)


if __name__ == "__main__":
    code = 1
    try:
        code = main(sys.argv[1])
    except _Ended:
        print("ended by the campaign", flush=True)
    sys.stdout.flush()
    os._exit(code)  # threads that a library left behind must not keep the campaign waiting
