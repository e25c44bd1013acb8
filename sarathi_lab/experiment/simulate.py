"""Simulates experiments: the same cases on cost models, shared among processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, NamedTuple
from uuid import uuid4

import pandas as pd
from joblib import Parallel as Workers
from joblib import cpu_count, delayed
from joblib.externals.loky.process_executor import TerminatedWorkerError

from sarathi_lab.config.console import progress_of
from sarathi_lab.config.errors import RunError, UserError
from sarathi_lab.config.instantiate import load_option
from sarathi_lab.executor.simulated.backend import SimulatedBackend
from sarathi_lab.executor.simulated.cost_model import Level, make_cost_model
from sarathi_lab.executor.tables import read_tables
from sarathi_lab.experiment.cases import Point
from sarathi_lab.experiment.clock import CostClock, CountingClock
from sarathi_lab.experiment.figures import COLUMNS, LABELS
from sarathi_lab.experiment.registry import FIGURES, Figure, table_of_points, with_intervals
from sarathi_lab.model.spec import DTYPE_BYTES, ModelSpec
from sarathi_lab.results.load import SIMULATED

DTYPE = "float16"  # not stated in the paper; 2 bytes an element fit all its figures
COUNTED = "counted"  # the method of points that are counted instead of served
Case = Any  # with `points(bench)`


class Job(NamedTuple):
    """A paper's figure to be predicted for `model` on `hardware` at a level of its cost model."""

    figure: str
    model: str
    hardware: str
    level: Level
    method: str = ""

    @property
    def device(self) -> str:
        words = f"simulated {self.hardware}, {self.level}, {self.model}, {self.method}"
        return words.removesuffix(", ")


def folder_of(hardware: str, level: str) -> str:
    """Return the device of recorded results; the analytic level is the usual one."""
    return SIMULATED + hardware + ("" if level == "analytic" else f"-{level}")


def by_folder(tables: Sequence[pd.DataFrame]) -> dict[str, pd.DataFrame]:
    """Return the rows of labelled `tables` by the folder of their hardware and level."""
    rows = pd.concat(tables, ignore_index=True)
    return {
        folder_of(*map(str, labels)): own.reset_index(drop=True)
        for labels, own in rows.groupby(["hardware", "level"], sort=False)
    }


def jobs_of(figure: str, gpus: Sequence[str] | None = None) -> list[Job]:
    """List the paper's GPUs, or each of `gpus`, at every level that its file has for the model."""
    levels: tuple[Level, ...] = ("profiled", "analytic")
    jobs = [
        Job(figure, platform.model, gpu, level, method)
        for platform in FIGURES[figure].papers
        for gpu in gpus or [platform.hardware]
        for method in (("", COUNTED) if FIGURES[figure].is_counted else ("",))
        for level in levels
        if level == "analytic" or _is_profiled(gpu, platform.model)
    ]
    return list(dict.fromkeys(jobs))


def _is_profiled(gpu: str, model: str) -> bool:
    """Whether the GPU's tables were measured with this very model."""
    folder = load_option("hardware", gpu).tables
    if folder is None:
        return False
    tables = read_tables(folder, model=model)
    return tables.is_model_specific and tables.is_of(load_option("model", model))


def check_fits(job: Job) -> None:
    """Raise UserError for a device without room for the weights, or for other elements."""
    spec, hardware = load_option("model", job.model), load_option("hardware", job.hardware)
    dtype_bytes = DTYPE_BYTES[DTYPE]
    if hardware.dtype_bytes != dtype_bytes:
        raise UserError(
            f"task.gpus: hardware {job.hardware} holds the figures of "
            f"{hardware.dtype_bytes}-byte elements, the paper's are {dtype_bytes} bytes; choose "
            "another"
        )
    for parallel in FIGURES[job.figure].layouts:
        make_cost_model(job.level, spec, hardware, dtype_bytes, parallel)
        weights = spec.weight_bytes(dtype_bytes)
        memory = parallel.num_devices * hardware.memory_bytes
        if weights > memory:
            raise UserError(
                f"task.gpus: {job.figure} needs {weights / 1e9:.1f} GB for the weights of "
                f"{job.model} alone, {parallel.num_devices} x {job.hardware} have "
                f"{memory / 1e9:.0f} GB; leave that GPU or figure out"
            )


# -- cases on benches ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bench:
    """What evaluates cases in simulation, made in each process that has a case of it."""

    key: tuple[Any, ...]
    make: Callable[[], Any]

    def points(self, case: Case) -> list[Point]:
        if self.key not in _MADE:
            if any(key[0] != self.key[0] for key in _MADE):
                _MADE.clear()  # those of another call
            _MADE[self.key] = self.make()
        return list(case.points(_MADE[self.key]))


_MADE: dict[tuple[Any, ...], Any] = {}


def run_all(
    what: str, unit: str, work: Sequence[tuple[Bench, Sequence[Case]]], processes: int | None
) -> list[list[list[Point]]]:
    """Return the points of all cases by bench. Few cases are large ones, which come first."""
    order = sorted(range(len(work)), key=lambda i: len(work[i][1]))
    items = [(work[i][0], case) for i in order for case in work[i][1]]
    size = min(cpu_count() if processes is None else processes, len(items))
    with progress_of(what, len(items), unit) as advance:
        calls = (delayed(Bench.points)(*item) for item in items)
        points = []
        try:
            for one in Workers(n_jobs=size, return_as="generator")(calls):
                points.append(one)
                advance(1)
        except TerminatedWorkerError:
            raise RunError(
                "a process of the simulation was killed; the system may have been out of memory: "
                "use task.processes=1"
            ) from None
    left = iter(points)
    by_bench = {i: list(islice(left, len(work[i][1]))) for i in order}
    return [by_bench[i] for i in range(len(work))]


# -- figures of the paper --------------------------------------------------------------------------


@dataclass(frozen=True)
class Prediction:
    """All points of a figure that predicts itself, at each n-th of the paper's."""

    figure: str
    every: int

    def points(self, job: Job) -> list[Point]:
        figure = FIGURES[self.figure]
        on = load_option("model", job.model), load_option("hardware", job.hardware)
        assert figure.predict is not None
        return list(
            figure.predict(*on, DTYPE_BYTES[DTYPE], figure.paper_points(), every=self.every)
        )


def predict_all(
    jobs: Sequence[Job],
    every: int = 1,
    sizes: Mapping[str, Any] | None = None,
    processes: int | None = None,
) -> list[pd.DataFrame]:
    """Return the points of each job in the columns of `figure.parquet`, each n-th along the long
    axes, at `sizes` in place of conf/experiment's. Raises UserError as `make_cost_model` does.
    """
    work = [(_bench_of(job), _cases_of(job, every, sizes)) for job in jobs]
    tables = []
    for job, found in zip(jobs, run_all("predicting", "parts", work, processes), strict=True):
        labels = {**job._asdict(), "device": job.device, "source": "simulated"}
        table = table_of_points(job.figure, found)
        tables.append(table.assign(**labels)[[*COLUMNS, *LABELS]])
    return tables


def _bench_of(job: Job) -> Bench:
    if FIGURES[job.figure].predict is not None:
        return Bench(job, partial(_same, job))
    key = job._replace(figure="")
    return Bench(key, partial(_clock, key))  # one for all figures


def _same(job: Job) -> Job:
    return job


def _clock(job: Job) -> CostClock:
    spec, hardware = load_option("model", job.model), load_option("hardware", job.hardware)
    cost = make_cost_model(job.level, spec, hardware, DTYPE_BYTES[DTYPE])
    return CountingClock(cost) if job.method == COUNTED else CostClock(cost)


def _cases_of(job: Job, every: int, sizes: Mapping[str, Any] | None) -> Sequence[Case]:
    figure = FIGURES[job.figure]
    if figure.predict is not None:
        return [Prediction(job.figure, every)]
    return figure.cases(load_option("model", job.model), figure.paper_sizes(every, sizes))


def recorded_tables(points: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Return the served points of `figure.parquet` by the device's folder, as they are recorded."""
    own = points[(points.source == "simulated") & (points.method != COUNTED)]
    table = with_intervals(own).assign(**own[["hardware", "level", "model"]], dtype=DTYPE)
    return by_folder([table.assign(device_name=own.device)])


# -- other experiments -----------------------------------------------------------------------------


def simulate(
    figure: Figure,
    backends: Sequence[tuple[ModelSpec, SimulatedBackend]],
    sizes: Mapping[str, Any],
    processes: int | None = None,
    **settings: Any,
) -> dict[str, pd.DataFrame]:
    """Return the tables of an experiment by the devices' folders, for models on backends; the
    `settings` are those of its bench.
    """
    work, call = [], uuid4().hex
    for number, (spec, backend) in enumerate(backends):
        make = partial(figure.bench, spec, backend, sizes=sizes, **settings)
        work.append((Bench((call, number), make), figure.cases(spec, sizes)))
    title = f"computing {figure.name} with {' and '.join(spec.name for spec, _ in backends)}"
    found = run_all(title, "parts", work, 1 if figure.is_chained else processes)
    tables = []
    for (spec, backend), points in zip(backends, found, strict=True):
        labels = {"hardware": backend.hardware.name, "level": backend.cost_model}
        labels |= {"model": spec.name, "dtype": backend.dtype_name}
        tables.append(figure.table(points).assign(**labels, device_name=backend.device_name))
    return by_folder(tables)
