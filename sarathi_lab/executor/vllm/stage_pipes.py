"""Named pipes by which the stages of a pipeline report when they computed."""

from __future__ import annotations

import os
import select
import struct
from pathlib import Path
from tempfile import TemporaryDirectory

from sarathi_lab.config.errors import RunError
from sarathi_lab.engine.executor import Span

REPORT = struct.Struct("dd")  # start and end of a micro-batch, in seconds of `time.perf_counter`
PATIENCE = 10.0  # seconds for a report of what a stage has computed


def pipe_of(folder: str, stage: int) -> Path:
    """Return the pipe that a stage writes its reports to."""
    return Path(folder) / f"stage-{stage}"


class StagePipes:
    """The reading ends of the pipes of `num_stages` stages."""

    def __init__(self, num_stages: int) -> None:
        self._folder = TemporaryDirectory(prefix="sarathi-lab-stages-")
        self._files: list[int] = []
        for stage in range(num_stages):
            pipe = pipe_of(self.folder, stage)
            os.mkfifo(pipe)
            # Without waiting for the worker, which opens the other end later.
            self._files.append(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK))

    @property
    def folder(self) -> str:
        return self._folder.name

    def has_report(self, timeout: float) -> bool:
        """Wait for up to `timeout` seconds; return whether the last stage has computed a
        micro-batch that was not read, or its worker has died.
        """
        return _is_readable(self._files[-1], timeout)

    def read(self) -> list[Span]:
        """Return start and end of the oldest micro-batch not read, by stage, in seconds of
        `time.perf_counter`. Raises RunError for a stage that reports none.
        """
        spans: list[Span] = []
        for stage, file in enumerate(self._files):
            report = b""
            if _is_readable(file, PATIENCE):
                report = os.read(file, REPORT.size)
            if not report:
                raise RunError(
                    f"stage {stage} of vLLM's pipeline reported no time of a micro-batch, as of "
                    "whole CUDA graphs; use executor.eager=true"
                )
            start, end = REPORT.unpack(report)
            spans.append((start, end))
        return spans

    def drop(self) -> None:
        """Drop all reports not read, of a run that stopped half-way."""
        for file in self._files:
            while _is_readable(file, 0.0) and os.read(file, REPORT.size):
                pass

    def close(self) -> None:
        while self._files:
            os.close(self._files.pop())
        self._folder.cleanup()


def _is_readable(file: int, timeout: float) -> bool:
    return bool(select.select([file], [], [], timeout)[0])
