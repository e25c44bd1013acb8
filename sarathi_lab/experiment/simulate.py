"""Fills figures with cost models: the same batches, requests and policies on a virtual clock; and
experiments of serving with rounds of requests under all their policies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from itertools import islice
from typing import Any, NamedTuple

import pandas as pd

from sarathi_lab.config.console import progress_of
from sarathi_lab.config.crew import Crew
from sarathi_lab.config.errors import UserError
from sarathi_lab.config.instantiate import load_option
from sarathi_lab.engine.executor import Sizes
from sarathi_lab.engine.topology import SINGLE, Topology
from sarathi_lab.executor.simulated.backend import SimulatedBackend
from sarathi_lab.executor.simulated.cost_model import Level, make_cost_model
from sarathi_lab.executor.simulated.hardware import Parallel
from sarathi_lab.executor.table_files import read_tables
from sarathi_lab.experiment import pipeline
from sarathi_lab.experiment.capacity import Engine
from sarathi_lab.experiment.cases import Group, Point
from sarathi_lab.experiment.clock import Clock, CostClock, CountingClock
from sarathi_lab.experiment.figures import COLUMNS, FIGURES, LABELS
from sarathi_lab.experiment.registry import KEYS, Figure
from sarathi_lab.experiment.samples import Samples, keep, table_of
from sarathi_lab.experiment.serving import MakePolicy, ServingBench, longest
from sarathi_lab.experiment.work import BLOCK_SIZE
from sarathi_lab.model.spec import DTYPE_BYTES, ModelSpec
from sarathi_lab.policy import Policy
from sarathi_lab.results.intervals import FEWEST_PAIRS
from sarathi_lab.results.load import POINT, SIMULATED

DTYPE = "float16"  # the paper does not say; 2 bytes an element fit all its figures
COUNTED = "counted"  # the method of points that are counted instead of served
Part = Callable[[], Iterable[Point]]  # of the points of a job


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


def fill(
    what: str, unit: str, makers: Sequence[Callable[[], Sequence[Part]]], processes: int | None
) -> list[list[list[Point]]]:
    """The points of all parts that each of `makers` lists, by `processes`, each of which calls a
    maker once if it has a part of it.
    """
    crew = Crew(partial(_listed, makers), processes)
    numbers = [len(crew.own(job)) for job in range(len(makers))]
    # Few parts are large ones: at both ends, where a crew begins, lest one is waited for alone.
    largest = sorted(range(len(makers)), key=numbers.__getitem__)
    order = largest[::2] + largest[1::2][::-1]
    items = [(job, part) for job in order for part in range(numbers[job])]
    with progress_of(what, len(items), unit) as advance:
        found = iter(crew.map(_points, items, advance))
    by_job = {job: list(islice(found, numbers[job])) for job in order}
    return [by_job[job] for job in range(len(makers))]


def _listed(makers: Sequence[Callable[[], Sequence[Part]]]) -> Callable[[int], Sequence[Part]]:
    return cache(lambda job: makers[job]())


def _points(parts: Callable[[int], Sequence[Part]], place: tuple[int, int]) -> list[Point]:
    return list(parts(place[0])[place[1]]())


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
    makers = [partial(_parts_of, job, every, sizes) for job in jobs]
    tables = []
    for job, found in zip(jobs, fill("predicting", "parts", makers, processes), strict=True):
        labels = {**job._asdict(), "device": job.device, "source": "simulated"}
        tables.append(_table(found).assign(**labels)[[*COLUMNS, *LABELS]])
    return tables


def _parts_of(job: Job, every: int, sizes: Mapping[str, Any] | None) -> list[Part]:
    """Units on a clock of their own, or a pipeline whole."""
    figure, dtype_bytes = FIGURES[job.figure], DTYPE_BYTES[DTYPE]
    spec, hardware = load_option("model", job.model), load_option("hardware", job.hardware)
    if figure.kind == "pipeline":
        paper = figure.paper_points()
        return [partial(pipeline.predicted, spec, hardware, dtype_bytes, paper, every)]
    make_clock = CountingClock if job.method == COUNTED else CostClock
    cost = partial(make_cost_model, job.level, spec, hardware, dtype_bytes)
    return _on(lambda: make_clock(cost()), figure.cases(spec, figure.paper_sizes(every, sizes)))


def _on(make_clock: Callable[[], Clock], groups: Iterable[Group]) -> list[Part]:
    """List groups of cases as parts on one clock, which takes a second to make with tables."""
    clock = cache(make_clock)

    def timed(group: Group) -> Iterable[Point]:
        return group.points(clock())

    return [partial(timed, group) for group in groups]


def recorded_tables(points: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """The served points of `figure.parquet` by the device's folder, in the columns of `load`."""
    own = points[(points.source == "simulated") & (points.method != COUNTED)]
    table = _with_intervals(own).assign(**own[["hardware", "level", "model"]], dtype=DTYPE)
    return by_folder([table.assign(device_name=own.device)])


def computed(
    figure: Figure,
    backends: Sequence[tuple[ModelSpec, SimulatedBackend]],
    sizes: Mapping[str, Any],
    processes: int | None = None,
) -> dict[str, pd.DataFrame]:
    """The tables of an experiment that is none of the paper's figures by the devices' folders, for
    models on backends; intervals are the error that the cost model states of itself.
    """
    makers = [partial(_units, figure.name, *on, sizes) for on in backends]
    title = f"computing {figure.name} with {' and '.join(spec.name for spec, _ in backends)}"
    tables = []
    for (spec, backend), found in zip(
        backends, fill(title, "parts", makers, processes), strict=True
    ):
        table = _table(found).assign(figure=figure.name)
        tables.append(labelled(_with_intervals(table), backend, spec.name))
    return by_folder(tables)


def _units(
    name: str, spec: ModelSpec, backend: SimulatedBackend, sizes: Mapping[str, Any]
) -> list[Part]:
    on = (backend.cost_model, spec, backend.hardware, backend.dtype_bytes, backend.parallel)
    return _on(lambda: CostClock(make_cost_model(*on)), FIGURES[name].cases(spec, sizes))


def _table(parts: Iterable[Sequence[Point]]) -> pd.DataFrame:
    points = (point for part in parts for point in part)
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


def served(
    figure: Figure,
    backends: Sequence[tuple[str, SimulatedBackend]],
    make_policy: MakePolicy,
    seed: int,
    sizes: Mapping[str, Any],
    processes: int | None = None,
) -> dict[str, pd.DataFrame]:
    """The tables of an experiment of serving by the devices' folders, for models on backends.

    An interval is that of the median over the rounds: it says how far the seeds are apart.
    """
    benches = [partial(_bench, *on, make_policy, seed, sizes) for on in backends]
    makers = [partial(_rounds, figure.name, make_bench) for make_bench in benches]
    what = f"computing {figure.name} with {' and '.join(model for model, _ in backends)}"
    rounds = fill(what, "rounds", makers, 1 if figure.is_chained else processes)
    tables = []
    for (model, backend), found in zip(backends, rounds, strict=True):
        samples: Samples = {}
        for points in found:
            keep(samples, points)
        table = table_of(figure.name, samples, math.inf, is_series=False)
        tables.append(labelled(table, backend, model))
    return by_folder(tables)


def _rounds(name: str, make_bench: Callable[[], ServingBench]) -> list[Part]:
    made = cache(make_bench)

    def played(number: int) -> Iterable[Point]:
        bench = made()
        return FIGURES[name].make(bench, number, **bench.sizes)

    return [partial(played, number) for number in range(FEWEST_PAIRS)]


def _bench(
    model: str,
    backend: SimulatedBackend,
    make_policy: MakePolicy,
    seed: int,
    sizes: Mapping[str, Any],
) -> ServingBench:
    spec, batch, longest_one = load_option("model", model), sizes["batch"], longest(sizes)
    blocks = (backend.kv_blocks(spec, BLOCK_SIZE), BLOCK_SIZE)
    predictor = cache(partial(backend.predictor, spec))

    @cache  # a cost model with tables takes a second to make
    def engine(cluster: Topology) -> Engine:
        build = partial(backend.build, spec, None, Sizes(*blocks, batch))
        executor = cluster.executor(build, cluster.link_between(backend, spec))
        return Engine(executor, batch, longest_one, *blocks, backend.num_stages, cluster)

    @cache
    def on_device(name: str, budget: int) -> Policy | None:
        policy = make_policy(name, budget)
        return policy and policy.on_device(predictor, batch, longest_one)

    return ServingBench(sizes, model, engine(SINGLE), on_device, None, seed, engine, backend)
