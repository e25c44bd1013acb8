"""Fills figures with cost models: the same batches, requests and policies on a virtual clock."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import pandas as pd

from sarathi_lab.config.console import progress_of
from sarathi_lab.config.crew import Crew
from sarathi_lab.config.errors import UserError
from sarathi_lab.config.instantiate import load_option
from sarathi_lab.executor.simulated.backend import SimulatedBackend
from sarathi_lab.executor.simulated.cost_model import Level, make_cost_model
from sarathi_lab.executor.simulated.hardware import Parallel
from sarathi_lab.executor.table_files import read_tables
from sarathi_lab.experiment import pipeline
from sarathi_lab.experiment.clock import CostClock, CountingClock, Point, Unit
from sarathi_lab.experiment.figures import COLUMNS, FIGURES, LABELS
from sarathi_lab.experiment.registry import KEYS, Figure
from sarathi_lab.model.spec import DTYPE_BYTES, ModelSpec
from sarathi_lab.results.load import POINT, SIMULATED

DTYPE = "float16"  # the paper does not say; 2 bytes an element fit all its figures
COUNTED = "counted"  # the method of points that are counted instead of served


class Job(NamedTuple):
    """A paper's figure, or what `model` gives of it on `hardware` at a level of its cost model."""

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
    """The device of recorded results; the analytic level is the usual one."""
    return SIMULATED + hardware + ("" if level == "analytic" else f"-{level}")


def by_folder(tables: Sequence[pd.DataFrame]) -> dict[str, pd.DataFrame]:
    """The rows of labelled `tables` by the folder of their hardware and level."""
    rows = pd.concat(tables, ignore_index=True)
    return {
        folder_of(*map(str, labels)): own.reset_index(drop=True)
        for labels, own in rows.groupby(["hardware", "level"], sort=False)
    }


def jobs_of(figure: str, gpus: Sequence[str] | None = None) -> list[Job]:
    """The paper's GPUs, or each of `gpus`, at every level that its file has for the model."""
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
    return tables.has_own_model and tables.is_of(load_option("model", model))


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
    is_pipeline = FIGURES[job.figure].kind == "pipeline"
    systems = pipeline.SYSTEMS.values() if is_pipeline else ()
    for parallel in [system.parallel for system in systems] or [Parallel()]:
        make_cost_model(job.level, spec, hardware, dtype_bytes, parallel)
        weights = spec.weight_bytes(dtype_bytes)
        memory = parallel.num_devices * hardware.memory_bytes
        if weights > memory:
            raise UserError(
                f"task.gpus: {job.figure} needs {weights / 1e9:.1f} GB for the weights of "
                f"{job.model} alone, {parallel.num_devices} x {job.hardware} have "
                f"{memory / 1e9:.0f} GB; leave that GPU or figure out"
            )


def predict_all(
    jobs: Sequence[Job],
    every: int = 1,
    sizes: Mapping[str, Any] | None = None,
    processes: int | None = None,
) -> list[pd.DataFrame]:
    """The points of each job in the columns of `figure.parquet`, each n-th along the long axes, at
    `sizes` in place of conf/experiment's; by `processes`. Raises UserError as `make_cost_model`
    does.
    """
    make = partial(_Parts, jobs, every, sizes)
    crew = Crew(make, processes)
    items = [(job, part) for job in range(len(jobs)) for part in range(crew.own.number(job))]
    with progress_of("predicting", len(items), "parts") as advance:
        found = crew.map(_Parts.points, items, advance)
    tables = []
    for number, job in enumerate(jobs):
        own = zip(items, found, strict=True)
        points = [point for (of, _), points in own if of == number for point in points]
        labels = {**job._asdict(), "device": job.device, "source": "simulated"}
        tables.append(_table(points).assign(**labels)[[*COLUMNS, *LABELS]])
    return tables


def predict(job: Job, every: int = 1, sizes: Mapping[str, Any] | None = None) -> pd.DataFrame:
    """The points of one job, by this process."""
    return predict_all([job], every, sizes, processes=1)[0]


class _Parts:
    """What jobs are made of: units on a clock of their own, or a pipeline whole."""

    def __init__(self, jobs: Sequence[Job], every: int, sizes: Mapping[str, Any] | None) -> None:
        self._jobs, self._every, self._sizes = jobs, every, sizes
        self._units, self._clock = cache(self._list_units), cache(_clock)

    def number(self, job: int) -> int:
        is_pipeline = FIGURES[self._jobs[job].figure].kind == "pipeline"
        return 1 if is_pipeline else len(self._units(job))

    def points(self, place: tuple[int, int]) -> list[Point]:
        """Those of a job's part, by their numbers."""
        job = self._jobs[place[0]]
        figure = FIGURES[job.figure]
        if figure.kind == "pipeline":
            options = load_option("model", job.model), load_option("hardware", job.hardware)
            paper = figure.paper_points()
            return list(pipeline.predicted(*options, DTYPE_BYTES[DTYPE], paper, self._every))
        return list(self._units(place[0])[place[1]](self._clock(job)))

    def _list_units(self, number: int) -> list[Unit]:
        job = self._jobs[number]
        figure, spec = FIGURES[job.figure], load_option("model", job.model)
        return list(figure.units(spec, figure.paper_sizes(self._every, self._sizes)))


def _clock(job: Job) -> CostClock:
    """It takes a second where there are tables."""
    spec, hardware = load_option("model", job.model), load_option("hardware", job.hardware)
    make_clock = CountingClock if job.method == COUNTED else CostClock
    return make_clock(make_cost_model(job.level, spec, hardware, DTYPE_BYTES[DTYPE]))


def recorded_tables(points: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """The served points of `figure.parquet` by the device's folder, in the columns of `load`."""
    own = points[(points.source == "simulated") & (points.method != COUNTED)]
    return {
        folder_of(*map(str, labels)): _with_intervals(rows).assign(
            **rows[["hardware", "level", "model"]], dtype=DTYPE, device_name=rows.device
        )
        for labels, rows in own.groupby(["hardware", "level"], sort=False)
    }


def computed(
    figure: Figure,
    backends: Sequence[tuple[ModelSpec, SimulatedBackend]],
    sizes: Mapping[str, Any],
    processes: int | None = None,
) -> dict[str, pd.DataFrame]:
    """The tables of an experiment that is none of the paper's figures by the devices' folders, for
    models on backends; intervals are the error that the cost model states of itself.
    """
    tables = []
    for spec, backend in backends:
        crew = Crew(partial(_units, figure.name, spec, backend, sizes), processes)
        title = f"computing {figure.name} with {spec.name}"
        with progress_of(title, len(crew.own), "parts") as advance:
            found = crew.map(_unit_points, range(len(crew.own)), advance)
        table = _table(point for unit in found for point in unit).assign(figure=figure.name)
        tables.append(labelled(_with_intervals(table), backend, spec.name))
    return by_folder(tables)


def _units(
    name: str, spec: ModelSpec, backend: SimulatedBackend, sizes: Mapping[str, Any]
) -> list[Callable[[], Iterable[Point]]]:
    parts = (backend.hardware, backend.dtype_bytes, backend.parallel)
    clock = CostClock(make_cost_model(backend.cost_model, spec, *parts))
    return [partial(unit, clock) for unit in FIGURES[name].units(spec, sizes)]


def _unit_points(units: Sequence[Callable[[], Iterable[Point]]], number: int) -> list[Point]:
    return list(units[number]())


def _table(points: Iterable[Point]) -> pd.DataFrame:
    rows = [(p.panel, p.series, float(p.x), p.y.value, p.unit, p.y.error) for p in points]
    return pd.DataFrame(rows, columns=[*KEYS, "y", "unit", "uncertainty"])


def _with_intervals(table: pd.DataFrame) -> pd.DataFrame:
    off = table.y.abs() * table.uncertainty
    table = table.assign(low=table.y - off, high=table.y + off, num_pairs=0, reason=None)
    return table[POINT]


def labelled(table: pd.DataFrame, backend: SimulatedBackend, model: str) -> pd.DataFrame:
    return table.assign(
        hardware=backend.hardware.name,
        level=backend.cost_model,
        model=model,
        dtype=backend.dtype_name,
        device_name=backend.device_name,
    )
