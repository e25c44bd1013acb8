"""Fills figures with cost models: the same batches, requests and policies on a virtual clock."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import cache, partial
from typing import Any, NamedTuple

import pandas as pd

from sarathi_lab.config.console import progress_of
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
from sarathi_lab.experiment.clock import BLOCK_SIZE, CostClock, CountingClock, Point
from sarathi_lab.experiment.figures import COLUMNS, FIGURES, LABELS
from sarathi_lab.experiment.registry import KEYS, Figure
from sarathi_lab.experiment.samples import rounds, table_of
from sarathi_lab.experiment.serving import MakePolicy, ServingBench, longest
from sarathi_lab.model.spec import DTYPE_BYTES, ModelSpec
from sarathi_lab.policy import Policy
from sarathi_lab.results.intervals import FEWEST_PAIRS
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


def predict(job: Job, every: int = 1, sizes: Mapping[str, Any] | None = None) -> pd.DataFrame:
    """The points of a job in the columns of `figure.parquet`, each n-th along the long axes, at
    `sizes` in place of conf/experiment's. Raises UserError as `make_cost_model` does.
    """
    figure, spec = FIGURES[job.figure], load_option("model", job.model)
    hardware, dtype_bytes = load_option("hardware", job.hardware), DTYPE_BYTES[DTYPE]
    if figure.kind == "pipeline":
        points = pipeline.predicted(spec, hardware, dtype_bytes, figure.paper_points(), every)
    else:
        make_clock = CountingClock if job.method == COUNTED else CostClock
        clock = make_clock(make_cost_model(job.level, spec, hardware, dtype_bytes))
        points = _made(figure, spec, clock, figure.paper_sizes(every, sizes))
    labels = {**job._asdict(), "device": job.device, "source": "simulated"}
    return _table(points).assign(**labels)[[*COLUMNS, *LABELS]]


def predict_all(
    jobs: Sequence[Job], every: int = 1, sizes: Mapping[str, Any] | None = None
) -> list[pd.DataFrame]:
    """The points of each job, several at a time, in the order of the jobs."""
    with ProcessPoolExecutor() as pool, progress_of("predicting", len(jobs)) as advance:
        futures = [pool.submit(predict, job, every, sizes) for job in jobs]
        for future in as_completed(futures):
            future.result()
            advance(1)
    return [future.result() for future in futures]


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
) -> dict[str, pd.DataFrame]:
    """The tables of an experiment that is none of the paper's figures by the devices' folders, for
    models on backends; intervals are the error that the cost model states of itself.
    """
    tables = []
    with progress_of(f"computing {figure.name}", len(backends)) as advance:
        for spec, backend in backends:
            cost = make_cost_model(
                backend.cost_model, spec, backend.hardware, backend.dtype_bytes, backend.parallel
            )
            table = _table(_made(figure, spec, CostClock(cost), sizes)).assign(figure=figure.name)
            tables.append(_labelled(_with_intervals(table), backend, spec.name))
            advance(1)
    return _by_folder(pd.concat(tables, ignore_index=True))


def served(
    figure: Figure,
    backends: Sequence[tuple[str, SimulatedBackend]],
    make_policy: MakePolicy,
    seed: int,
    sizes: Mapping[str, Any],
) -> dict[str, pd.DataFrame]:
    """The tables of an experiment of serving by the devices' folders, for models on backends.

    An interval is that of the median over the rounds: it says how far the seeds are apart.
    """
    batch, number = sizes["batch"], FEWEST_PAIRS

    def table_for(model: str, backend: SimulatedBackend) -> pd.DataFrame:
        spec = load_option("model", model)
        blocks = (backend.kv_blocks(spec, BLOCK_SIZE), BLOCK_SIZE)
        predictor = cache(partial(backend.predictor, spec))

        @cache  # a cost model with tables takes a second to make
        def engine(cluster: Topology) -> Engine:
            build = partial(backend.build, spec, None, Sizes(*blocks, batch))
            executor = cluster.executor(build, backend.link(spec, cluster))
            return Engine(executor, batch, longest(sizes), *blocks, backend.num_stages, cluster)

        @cache
        def on_device(name: str, budget: int) -> Policy | None:
            policy = make_policy(name, budget)
            return policy and policy.on_device(predictor, batch, longest(sizes))

        bench = ServingBench(sizes, model, engine(SINGLE), on_device, None, seed, engine)
        bench.backend = backend
        with progress_of(f"computing {figure.name} with {model}", number, "rounds") as advance:
            samples = rounds(
                partial(figure.make, bench, **sizes),
                fewest=number,
                most=number,
                # In rounds, whatever time they take: the clock is computed.
                advance=lambda seconds: advance(1),
            )
        table = table_of(figure.name, samples, math.inf, is_series=False)
        return _labelled(table, backend, model)

    return _by_folder(pd.concat([table_for(*own) for own in backends], ignore_index=True))


def _by_folder(table: pd.DataFrame) -> dict[str, pd.DataFrame]:
    return {
        folder_of(*map(str, labels)): rows.reset_index(drop=True)
        for labels, rows in table.groupby(["hardware", "level"], sort=False)
    }


def _made(
    figure: Figure, spec: ModelSpec, clock: CostClock, sizes: Mapping[str, Any]
) -> Iterator[Point]:
    for unit in figure.units(spec, sizes):
        yield from unit(clock)


def _table(points: Iterable[Point]) -> pd.DataFrame:
    rows = [(p.panel, p.series, float(p.x), p.y.value, p.unit, p.y.error) for p in points]
    return pd.DataFrame(rows, columns=[*KEYS, "y", "unit", "uncertainty"])


def _with_intervals(table: pd.DataFrame) -> pd.DataFrame:
    off = table.y.abs() * table.uncertainty
    table = table.assign(low=table.y - off, high=table.y + off, num_pairs=0, reason=None)
    return table[POINT]


def _labelled(table: pd.DataFrame, backend: SimulatedBackend, model: str) -> pd.DataFrame:
    return table.assign(
        hardware=backend.hardware.name,
        level=backend.cost_model,
        model=model,
        dtype=backend.dtype_name,
        device_name=backend.device_name,
    )
