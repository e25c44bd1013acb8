"""Simulates experiments: a table of points for each job, computed by several processes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any
from uuid import uuid4

import pandas as pd
from joblib import Parallel as Workers
from joblib import cpu_count, delayed
from joblib.externals.loky.process_executor import TerminatedWorkerError

from sarathi_lab.config.console import progress_of
from sarathi_lab.config.errors import RunError
from sarathi_lab.executor.simulated.cost_model import MEASURED_KERNELS
from sarathi_lab.executor.simulated.drawn_times import CostVariant
from sarathi_lab.experiment.points import Part, Point
from sarathi_lab.experiment.registry import SimulatedJob
from sarathi_lab.results import load

MOST_NAMED = 3  # figures whose names fit a line of progress


def simulate(jobs: Sequence[SimulatedJob], processes: int | None = None) -> list[pd.DataFrame]:
    """Return a table of points for each job, with its labels; parts of jobs are shared among
    `processes`, None for one a core.
    """
    key = uuid4().hex
    calls = []
    number_of_call = []
    # Jobs of few parts first: their parts are large, and would keep one process busy at the end.
    num_parts = [len(job.parts) for job in jobs]
    few_first = sorted(range(len(jobs)), key=num_parts.__getitem__)
    for number in few_first:
        job = jobs[number]
        for part in job.parts:
            call = delayed(_points)(key, job, part)
            calls.append(call)
            number_of_call.append(number)
    is_chained = any(job.experiment.is_chained for job in jobs)
    if is_chained:
        processes = 1  # a part begins where the one before ended, on the same bench
    names = dict.fromkeys(job.experiment.name for job in jobs)
    title = f"computing {', '.join(names)}"
    if len(names) > MOST_NAMED:
        title = f"computing {len(names)} figures"
    points_of_jobs: list[list[list[Point]]] = [[] for _ in jobs]  # by job and part
    results = results_of(calls, processes, title, "parts")
    for number, points in zip(number_of_call, results, strict=True):
        points_of_jobs[number].append(points)
    tables = []
    for job, points_of_parts in zip(jobs, points_of_jobs, strict=True):
        table = job.experiment.table(points_of_parts)
        tables.append(_labelled(table, job.labels))
    return tables


def results_of(calls: Sequence[Any], processes: int | None, title: str, unit: str) -> Iterator[Any]:
    """Yield the results of joblib's delayed `calls` in their order, computed by `processes` (None:
    one a core). Raises RunError where one is killed.
    """
    num_workers = max(1, min(processes or cpu_count(), len(calls)))
    workers = Workers(n_jobs=num_workers, return_as="generator")
    with progress_of(title, len(calls), unit) as advance:
        try:
            for result in workers(calls):
                advance(1)
                yield result
        except TerminatedWorkerError:
            raise RunError(
                "a process of the simulation was killed; the system may have been out of memory: "
                "use task.processes=1"
            ) from None


def _labelled(table: pd.DataFrame, labels: Mapping[str, str]) -> pd.DataFrame:
    """Return points with a job's labels, but for the labels that a point states itself."""
    labelled = table.copy()
    for name, label in labels.items():
        if name in table:
            labelled[name] = table[name].fillna(label)
        else:
            labelled[name] = label
    return labelled


# By device, experiment and variant of the cost model.
Benches = dict[tuple[str, str, CostVariant], object]
_BENCHES: dict[str, Benches] = {}  # of the last call of `simulate` in this process


def _points(call: str, job: SimulatedJob, part: Part) -> list[Point]:
    """Return a part's points on the job's bench, which is made once in each process."""
    if call not in _BENCHES:
        _BENCHES.clear()  # of the call before
    benches = _BENCHES.setdefault(call, {})
    name = job.experiment.name
    if job.experiment.shares_bench:
        name = ""
    key = (job.device, name, part.variant)
    if key not in benches:
        varied = job.in_variant(part.variant)
        benches[key] = job.experiment.bench(varied)
    return part.points(benches[key])


def by_folder(tables: Iterable[pd.DataFrame]) -> dict[str, pd.DataFrame]:
    """Return the rows of simulated `tables` by the folder of their hardware and level, of which the
    analytic one is the usual; of measured kernels by that of their hardware and model. A row that
    several levels have alike, as its times are no cost model's, is one.
    """
    rows = pd.concat(tables, ignore_index=True)
    recorded = rows.drop(columns=["method", "device"])
    distinct = recorded.drop_duplicates()
    folders = []
    for labels in distinct[["hardware", "level", "model"]].itertuples(index=False):
        folders.append(_folder_of(*labels))
    rows_of_folders = {}
    for folder, of_folder in distinct.groupby(folders, sort=False):
        rows_of_folders[str(folder)] = of_folder.reset_index(drop=True)
    return rows_of_folders


def _folder_of(hardware: str, level: str, model: str) -> str:
    if level == MEASURED_KERNELS:
        return f"{load.COMPOSED}{hardware}-{model}"
    if level == "analytic":
        return f"{load.SIMULATED}{hardware}"
    return f"{load.SIMULATED}{hardware}-{level}"
