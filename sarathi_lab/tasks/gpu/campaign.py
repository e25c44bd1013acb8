"""Runs the parts one after the other, each in its process, within a time, and keeps what each of
them found.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sarathi_lab.config.paths import make_folder
from sarathi_lab.tasks.gpu.child import Job
from sarathi_lab.tasks.gpu.parts import LIMIT_EXTRA, LIMIT_FACTOR, Part, share
from sarathi_lab.tasks.gpu.process import run_job
from sarathi_lab.tasks.gpu.publish import publish, slug_of
from sarathi_lab.tasks.gpu.state import State

LEAST_SHARE = 0.2  # of a part's usual time, for what comes after parts that took too long


@dataclass
class Campaign:
    """`parts` on one device within `seconds`. Results are published under `results`, unless it is
    None.

    `work` keeps the state, the logs and the tables of this device.
    """

    parts: Sequence[Part]
    device: str
    device_name: str
    commit: str | None
    is_dry: bool
    seconds: float
    work: Path
    results: Path | None
    is_fresh: bool = False
    failures: dict[str, str] = field(default_factory=dict)

    def run(self) -> int:
        """Run what is not finished yet; returns 0, or 1 if some parts failed."""
        make_folder(self.work, "--work")
        if self.results is not None:
            make_folder(self.results, "--results")
        if self.is_fresh:
            (self.work / "state.json").unlink(missing_ok=True)
        state = State(self.work / "state.json")
        todo = [
            part for part in self.parts if part.is_always_run or not self._is_finished(part, state)
        ]
        self._start = time.monotonic()
        what = "dry run" if self.is_dry else "campaign"
        print(
            f"{what}: {len(todo)} of {len(self.parts)} parts to do on {self.device_name}, "
            f"{self.seconds:.0f} s"
        )
        if len(todo) < len(self.parts):
            print("finished parts are skipped; --fresh repeats them")
        for number, part in enumerate(self.parts, 1):
            if part not in todo:
                print(
                    f"[{number}/{len(self.parts)} {part.name}] finished before at this commit: "
                    "skipped"
                )
                continue
            self._run_part(part, number, state, todo[todo.index(part) :])
        return self._close()

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._start

    @property
    def slug(self) -> str:
        """The device as folders of results are called."""
        return slug_of(self.device_name)

    def _is_finished(self, part: Part, state: State) -> bool:
        return state.is_finished(part.name, self.commit, self.device_name)

    def _run_part(self, part: Part, number: int, state: State, to_come: Sequence[Part]) -> None:
        label = f"[{number}/{len(self.parts)} {part.name}]"
        usual = part.weight(is_dry=self.is_dry)
        seconds = max(
            share(to_come, self.seconds - self.elapsed, is_dry=self.is_dry), LEAST_SHARE * usual
        )
        shutil.rmtree(self.work / "tables" / part.name, ignore_errors=True)
        tables = str(self.work / "tables")
        job = Job(
            part.name,
            part.target,
            self.device,
            self.is_dry,
            seconds,
            str(self.work),
            tables,
            self.slug,
        )
        job.record.unlink(missing_ok=True)
        log = self.work / f"{part.name}.log"
        print(f"{label} {part.what}, about {seconds:.0f} s; {self._outlook(to_come)}", flush=True)

        def beat(elapsed: float) -> None:
            print(f"{label} {elapsed:.0f} s; {self._outlook(to_come)}", flush=True)

        start = time.monotonic()
        limit = LIMIT_FACTOR * seconds + LIMIT_EXTRA
        error = run_job(job, log, limit, lambda line: print(f"    {line}", flush=True), beat)
        took = time.monotonic() - start
        error = error and self._explained(job, error)
        status = "failed" if error else "finished"
        entry = {
            "status": status,
            "error": error,
            "commit": self.commit,
            "device": self.device_name,
        }
        state.save(part.name, {**entry, "seconds": round(took, 1), "log": str(log)})
        if error:
            self.failures[part.name] = error
        print(
            f"{label} {f'FAILED: {error} (log: {log})' if error else 'finished'} after "
            f"{took:.0f} s",
            flush=True,
        )
        if self.results is not None:
            publish(self.work, self.results, self.slug)

    def _outlook(self, to_come: Sequence[Part]) -> str:
        usual = sum(part.weight(is_dry=self.is_dry) for part in to_come)
        left = min(usual, max(0.0, self.seconds - self.elapsed))
        return f"{self.elapsed:.0f} s gone, about {left:.0f} s left"

    def _explained(self, job: Job, error: str) -> str:
        """What the process itself said of its failure, if it got so far."""
        if not job.record.is_file() or "was ended" in error:
            return error
        said = json.loads(job.record.read_text())
        return said["error"] if "duration" in said else error

    def _close(self) -> int:
        if self.results is not None:
            print(f"results: {self.results}/*/results/{self.slug}")
        print(f"logs:    {self.work}")
        for name, error in self.failures.items():
            print(f"failed:  {name}: {error}")
        return int(bool(self.failures))
