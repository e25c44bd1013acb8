"""Runs the experiments that the claims are read from, on the device at hand and simulated, with time left."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sarathi_lab.experiment.experiments import EXPERIMENTS
from sarathi_lab.report import console
from sarathi_lab.run import main as run

OVERHEAD = 4.0  # seconds of an experiment beside its measuring, about: loading, warming up, writing
SIMULATED_SECONDS = {"fig12": 100.0, "fig09": 30.0, "fig11": 20.0}  # of two cores, about; the others take less
SIMULATED_USUALLY = 6.0
Job = tuple[str, bool]  # experiment, is simulated


@dataclass(frozen=True)
class Runs:
    """Runs of `names` (measured, simulated or both) that record into `results`, in about `seconds` of measuring."""

    names: Sequence[str]
    results: Path
    seconds: float | None
    is_measured: bool
    is_simulated: bool
    settings: Sequence[str] = ()  # of the measured runs, such as model=tiny

    def run(self) -> list[str]:
        """Run all; returns what failed. A failing experiment does not stop the others."""
        jobs = [(name, False) for name in self.names if self.is_measured]
        jobs += [(name, True) for name in self.names if self.is_simulated]
        failed, start = [], time.monotonic()
        with tempfile.TemporaryDirectory(prefix="sarathi-lab-") as folder:
            for number, job in enumerate(jobs):
                left = sum(self._expected(other) for other in jobs[number:])
                name = f"{job[0]}, {'simulated' if job[1] else 'measured'}"
                gone = time.monotonic() - start
                console().print(
                    f"\n[{number + 1}/{len(jobs)}] {name}; {gone:.0f} s gone, about {left:.0f} s left", style="bold"
                )
                if not self._one(job, Path(folder) / str(number)):
                    failed.append(name)
        return failed

    def _one(self, job: Job, folder: Path) -> bool:
        name, is_simulated = job
        arguments = [f"experiment={name}", "tracking=none", f"output={folder}", f"hydra.run.dir={folder}/run"]
        arguments += [f"task.record={self.results.absolute()}"]
        if is_simulated:
            return run([*arguments, "executor=simulated"]) == 0
        return run([*arguments, *self.settings, f"task.seconds={self._seconds_of(name):g}"]) == 0

    def _seconds_of(self, name: str) -> float:
        """Its share of the time, by what each experiment needs."""
        own = EXPERIMENTS[name].seconds
        if self.seconds is None:
            return own
        return max(0.5, self.seconds * own / sum(EXPERIMENTS[other].seconds for other in self.names))

    def _expected(self, job: Job) -> float:
        name, is_simulated = job
        if is_simulated:
            return SIMULATED_SECONDS.get(name, SIMULATED_USUALLY)
        return self._seconds_of(name) + OVERHEAD
