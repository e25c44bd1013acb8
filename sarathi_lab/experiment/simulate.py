"""Simulates experiments: a table of points for each job, computed by several processes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any
from uuid import uuid4

import pandas as pd
from joblib import Parallel as Workers
from joblib import cpu_count, delayed
from joblib.externals.loky.process_executor import TerminatedWorkerError

from sarathi_lab.config.console import progress_of
from sarathi_lab.config.errors import RunError
from sarathi_lab.executor.simulated.cost_model import MEASURED_KERNELS
from sarathi_lab.experiment.points import Part, Point
from sarathi_lab.experiment.registry import Job
from sarathi_lab.results import load


def simulate(jobs: Sequence[Job], processes: int | None = None) -> list[pd.DataFrame]:
    """Return a table of points for each job, with its labels; parts of jobs are shared among
    `processes`, None for one a core.
    """
    parts_of_jobs = [job.parts for job in jobs]
    # Those of few parts first: these are large ones.
    order = sorted(range(len(jobs)), key=lambda number: len(parts_of_jobs[number]))
    tasks = []
    for number in order:
        for part in parts_of_jobs[number]:
            tasks.append((number, part))
    size = processes or cpu_count()
    if any(job.experiment.is_chained for job in jobs):
        size = 1
    call = uuid4().hex
    calls = [delayed(_points)(call, jobs[number], part) for number, part in tasks]
    workers = Workers(n_jobs=min(size, len(tasks)), return_as="generator")
    points_of_jobs: list[list[list[Point]]] = [[] for _ in jobs]
    with progress_of(_title(jobs), len(tasks), "parts") as advance:
        try:
            for (number, _), points in zip(tasks, workers(calls), strict=True):
                points_of_jobs[number].append(points)
                advance(1)
        except TerminatedWorkerError:
            raise RunError(
                "a process of the simulation was killed; the system may have been out of memory: "
                "use task.processes=1"
            ) from None
    tables = []
    for job, points_of_parts in zip(jobs, points_of_jobs, strict=True):
        table = job.experiment.table(points_of_parts).assign(**job.labels)
        tables.append(
            table.assign(device=job.device, device_name=job.simulated_backend.device_name)
        )
    return tables


def _title(jobs: Sequence[Job]) -> str:
    names = list(dict.fromkeys(job.experiment.name for job in jobs))
    models = " and ".join(dict.fromkeys(job.spec.name for job in jobs))
    what = names[0] if len(names) == 1 else f"{len(names)} figures"
    return f"computing {what} with {models}"


_BENCHES: dict[tuple[str, str, str, int], Any] = {}  # of the last call in this process


def _points(call: str, job: Job, part: Part) -> list[Point]:
    """Evaluate a part on the job's bench, which is made once in each process."""
    name = "" if job.experiment.shares_bench else job.experiment.name
    key = (call, job.device, name, part.draw)
    if key not in _BENCHES:
        if any(earlier != call for earlier, *_ in _BENCHES):
            _BENCHES.clear()
        _BENCHES[key] = job.experiment.bench(job.drawn(part.draw))
    return part.points(_BENCHES[key], 0)


def by_folder(tables: Iterable[pd.DataFrame]) -> dict[str, pd.DataFrame]:
    """Return the rows of simulated `tables` by the folder of their hardware and level, of which the
    analytic one is the usual; of measured kernels by that of their hardware and model.
    """
    rows = pd.concat(tables, ignore_index=True).drop(columns=["method", "device"])
    level = ("-" + rows.level).mask(rows.level == "analytic", "")
    folders = load.SIMULATED + rows.hardware + level
    composed = load.COMPOSED + rows.hardware + "-" + rows.model
    folders = folders.mask(rows.level == MEASURED_KERNELS, composed)
    by_name = {}
    for name, table in rows.groupby(folders, sort=False):
        by_name[str(name)] = table.reset_index(drop=True)
    return by_name
