"""Simulates experiments: a table of points for each job, computed by several processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from uuid import uuid4

import pandas as pd
from joblib import Parallel as Workers
from joblib import cpu_count, delayed
from joblib.externals.loky.process_executor import TerminatedWorkerError

from sarathi_lab.config.console import progress_of
from sarathi_lab.config.errors import RunError
from sarathi_lab.executor.simulated.cost_model import MEASURED_KERNELS
from sarathi_lab.experiment.points import Part, Point
from sarathi_lab.experiment.registry import SimulatedJob
from sarathi_lab.results import load

# A delayed call, as joblib has it: the function, its arguments and its keyword arguments.
Call = tuple[Callable[..., list[Point]], tuple[object, ...], dict[str, object]]


def simulate(jobs: Sequence[SimulatedJob], processes: int | None = None) -> list[pd.DataFrame]:
    """Return a table of points for each job, with its labels; parts of jobs are shared among
    `processes`, None for one a core.
    """
    numbers, calls = _calls(jobs)
    num_workers = min(processes or cpu_count(), len(calls))
    if any(job.experiment.is_chained for job in jobs):
        num_workers = 1  # a part begins where the one before ended, on the same bench
    workers = Workers(n_jobs=num_workers, return_as="generator")
    points_of_jobs: list[list[list[Point]]] = [[] for _ in jobs]
    with progress_of(_title(jobs), len(calls), "parts") as advance:
        try:
            for number, points in zip(numbers, workers(calls), strict=True):
                points_of_jobs[number].append(points)
                advance(1)
        except TerminatedWorkerError:
            raise RunError(
                "a process of the simulation was killed; the system may have been out of memory: "
                "use task.processes=1"
            ) from None
    tables = []
    for job, points_of_parts in zip(jobs, points_of_jobs, strict=True):
        table = job.experiment.table(points_of_parts)
        labels = {**job.labels, "device": job.device, "device_name": job.backend.device_name}
        tables.append(table.assign(**labels))
    return tables


def _calls(jobs: Sequence[SimulatedJob]) -> tuple[list[int], list[Call]]:
    """Return a call for each part of the jobs, and before them the numbers of their jobs."""
    parts_of_jobs = [job.parts for job in jobs]
    # Jobs of few parts first: their parts are large, and would keep one process busy at the end.
    few_first = sorted(range(len(jobs)), key=lambda number: len(parts_of_jobs[number]))
    key = uuid4().hex
    numbers = []
    calls = []
    for number in few_first:
        for part in parts_of_jobs[number]:
            numbers.append(number)
            calls.append(delayed(_points)(key, jobs[number], part))
    return numbers, calls


def _title(jobs: Sequence[SimulatedJob]) -> str:
    names: dict[str, None] = {}
    models: dict[str, None] = {}
    for job in jobs:
        names[job.experiment.name] = None
        models[job.spec.name] = None
    computed = " and ".join(names)
    if len(names) > 1:
        computed = f"{len(names)} figures"
    return f"computing {computed} with {' and '.join(models)}"


Benches = dict[tuple[str, str, int], object]  # by device, experiment and draw
_BENCHES: dict[str, Benches] = {}  # of the last call of `simulate` in this process


def _points(call: str, job: SimulatedJob, part: Part) -> list[Point]:
    """Evaluate a part on the job's bench, which is made once in each process."""
    if call not in _BENCHES:
        _BENCHES.clear()  # of the call before
    benches = _BENCHES.setdefault(call, {})
    name = "" if job.experiment.shares_bench else job.experiment.name
    key = (job.device, name, part.draw)
    if key not in benches:
        benches[key] = job.experiment.bench(job.drawn(part.draw))
    return part.points(benches[key])


def by_folder(tables: Iterable[pd.DataFrame]) -> dict[str, pd.DataFrame]:
    """Return the rows of simulated `tables` by the folder of their hardware and level, of which the
    analytic one is the usual; of measured kernels by that of their hardware and model.
    """
    rows = pd.concat(tables, ignore_index=True).drop(columns=["method", "device"])
    folders = []
    for hardware, level, model in zip(rows.hardware, rows.level, rows.model, strict=True):
        folders.append(_folder_of(hardware, level, model))
    rows_of_folders = {}
    for folder, of_folder in rows.groupby(folders, sort=False):
        rows_of_folders[str(folder)] = of_folder.reset_index(drop=True)
    return rows_of_folders


def _folder_of(hardware: str, level: str, model: str) -> str:
    if level == MEASURED_KERNELS:
        return f"{load.COMPOSED}{hardware}-{model}"
    if level == "analytic":
        return f"{load.SIMULATED}{hardware}"
    return f"{load.SIMULATED}{hardware}-{level}"
