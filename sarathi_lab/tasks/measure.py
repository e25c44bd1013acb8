"""The task of one experiment: measured on the device with executor=torch, computed with
executor=simulated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pandas as pd
import torch
from omegaconf import DictConfig
from rich.table import Table

from sarathi_lab.config.console import console, print_place, progress_of
from sarathi_lab.config.errors import UserError, require_int, require_number, require_one_of
from sarathi_lab.config.instantiate import build, load_option, resolved
from sarathi_lab.config.run_context import RunContext
from sarathi_lab.executor.simulated.backend import SimulatedBackend
from sarathi_lab.executor.simulated.cost_model import make_cost_model
from sarathi_lab.executor.torch.backend import TorchBackend
from sarathi_lab.executor.torch.device import resolve_device
from sarathi_lab.experiment.bench import Bench
from sarathi_lab.experiment.experiments import EXPERIMENTS, Experiment
from sarathi_lab.experiment.figures import paper
from sarathi_lab.experiment.loading import load
from sarathi_lab.experiment.measure import QuietContext, measure_rounds, table_of
from sarathi_lab.experiment.serving_points import (
    least_room,
    measured,
    simulated,
    simulated_backends,
)
from sarathi_lab.experiment.simulate import SimulatedDevice, by_device, simulated_points
from sarathi_lab.experiment.sizes import SETUPS, Setup
from sarathi_lab.experiment.stages import LOADS, NUM_STAGES, fig12_samples, kv_tokens
from sarathi_lab.model.spec import ModelSpec
from sarathi_lab.results import load as recorded
from sarathi_lab.results.device_record import slug_of
from sarathi_lab.results.load import POINTS
from sarathi_lab.results.plots import serving
from sarathi_lab.results.plots.figures import draw
from sarathi_lab.results.tracking import Tracker
from sarathi_lab.tasks.figures import Figures
from sarathi_lab.tasks.plan import resolve_model

AUTO = "auto"
# of the hardware group: its default, which stands for the GPU that the paper used for each figure
PAPERS_GPU = "a6000"
STAGES = f"{recorded.SIMULATED}pipeline-"  # before the device whose iterations are the stages


@dataclass(frozen=True)
class Measure:
    """Make the points of `experiment` at the sizes of `setup`, for about `seconds` (null: those it
    needs on a CPU).

    Intervals wider than `max_spread` of the median (null: what the experiment states) leave a
    reason instead of a number. `record` names a folder such as experiments, where the table is kept
    as `<experiment>/results/<device>/<experiment>.csv`, too. `every` takes each n-th point of the
    paper's long curves in simulation.
    """

    reads: ClassVar[tuple[str, ...]] = ("executor", "model", "hardware", "device", "dtype", "seed")
    has_runs: ClassVar[bool] = False
    experiment: str
    setup: str = AUTO
    seconds: float | None = None
    max_spread: float | None = None
    record: str | None = None
    every: int = 1

    def __post_init__(self) -> None:
        require_one_of("task.experiment", self.experiment, EXPERIMENTS)
        require_one_of("task.setup", self.setup, (AUTO, *SETUPS))
        if self.seconds is not None:
            require_number(
                "task.seconds",
                self.seconds,
                above=0,
                fix="use the seconds to measure for, such as 60",
            )
        if self.max_spread is not None:
            fix = "use the share of the median, such as 0.15"
            require_number("task.max_spread", self.max_spread, above=0, fix=fix)
        require_int("task.every", self.every, 1, "use 1 for all points")

    def check(self, cfg: DictConfig) -> None:
        """Refuse a model that does not fit the device, and settings that nothing here would
        read.
        """
        backend = build(cfg.executor)
        if isinstance(backend, TorchBackend):
            self._refuse("every", "is for the recomputed figures of executor=simulated")
            spec, checkpoint = resolve_model(cfg, backend)
            if checkpoint is not None:
                raise UserError(
                    f"task=measure takes random weights; drop model.path={cfg.model.path}"
                )
            backend.check(spec, self._room(backend, spec))
            return
        self._refuse("seconds", "is for measuring, and executor=simulated computes")
        self._refuse("max_spread", "is for measuring, and executor=simulated computes")
        if self._own.is_papers:
            self._check_papers(cfg, backend)
        else:
            self._refuse("every", f"is for the paper's curves, and {self.experiment} is none")
            if self._own.is_serving:
                self._refuse(
                    "setup", "is for measuring: what is simulated has the paper's own sizes"
                )
                for model, own in simulated_backends(cfg, backend, self.experiment):
                    own.check(load_option("model", model), least_room("paper", model))
                return
            backend.check(
                resolve_model(cfg, backend)[0],
                self._setup(backend, resolve_model(cfg, backend)[0]).largest,
            )
            _refuse_parallel(backend)

    def run(self, cfg: DictConfig, place: RunContext) -> None:
        """Write figure.parquet, a CSV by device and a picture, print the lines, record and track
        them.
        """
        backend = build(cfg.executor)
        if self._own.is_serving:
            tables = self._served(cfg, backend)
        elif isinstance(backend, TorchBackend):
            tables = self._measured(cfg, backend)
        elif self._own.is_papers:
            self._figures(cfg).run(cfg, place)  # with its errors and pictures
            tables = self._recomputed(pd.read_parquet(place.run_dir / POINTS))
            self._keep(tables, place.run_dir)
            return
        else:
            tables = self._simulated(cfg, backend)
        tracker: Tracker = build(cfg.tracking)
        tags = [self.experiment, *tables]
        config = {"task": "measure", "settings": resolved(cfg)}
        with tracker.run(
            name=place.name, group=place.group, job_type=self.experiment, tags=tags, config=config
        ) as tracked:
            points = pd.concat([_as_figure(table) for table in tables.values()], ignore_index=True)
            place.run_dir.mkdir(parents=True, exist_ok=True)
            points.to_parquet(place.run_dir / POINTS, index=False)
            self._keep(tables, place.run_dir)
            picture = self._draw(points, place.run_dir)
            tracked.log_tables(place.run_dir)
        for device, table in tables.items():
            _print_lines(device, table)
        print_place("points", place.run_dir / POINTS)
        if picture is not None:
            print_place("figure", picture)

    @property
    def _own(self) -> Experiment:
        return EXPERIMENTS[self.experiment]

    def _refuse(self, name: str, why: str) -> None:
        if (value := getattr(self, name)) != getattr(type(self), name):
            raise UserError(f"task.{name}={value} has no effect: it {why}; drop it")

    def _setup(self, backend: Any, spec: ModelSpec) -> Setup:
        """The sizes that were asked for, or those that suit the device."""
        is_cpu = isinstance(backend, TorchBackend) and resolve_device(backend.device).type == "cpu"
        usual = "small" if is_cpu else "paper"
        return SETUPS[usual if self.setup == AUTO else self.setup](spec.name)

    @property
    def _spread(self) -> float:
        return self._own.max_spread if self.max_spread is None else self.max_spread

    def _room(self, backend: TorchBackend, spec: ModelSpec) -> int:
        """Tokens of cache that the sizes ask for."""
        setup = self._setup(backend, spec)
        return least_room(setup.name, spec.name) if self._own.is_serving else setup.largest

    def _served(self, cfg: DictConfig, backend: Any) -> dict[str, pd.DataFrame]:
        """Requests that arrive over time, on the device or simulated."""
        if not isinstance(backend, TorchBackend):
            return simulated(
                cfg, simulated_backends(cfg, backend, self.experiment), self.experiment
            )
        setup = self._setup(backend, resolve_model(cfg, backend)[0]).name
        return measured(
            cfg, backend, self.experiment, setup, self.seconds or self._own.seconds, self._spread
        )

    # -- measured ----------------------------------------------------------------------------------

    def _measured(self, cfg: DictConfig, backend: TorchBackend) -> dict[str, pd.DataFrame]:
        spec, _ = resolve_model(cfg, backend)
        setup, seconds = self._setup(backend, spec), self.seconds or self._own.seconds
        context = QuietContext(self.experiment, str(cfg.device), False, seconds, Path(), Path())
        is_pipeline = self.experiment == "fig12"
        room = kv_tokens(LOADS[setup.name]) if is_pipeline else 2 * setup.largest
        _, executor = load(
            context,
            spec,
            kv_tokens=room,
            batch_size=setup.most_sequences,
            longest=setup.longest,
            backend=backend,
        )
        context.seconds += context.elapsed  # loading does not count
        what = f"measuring {self.experiment} with {spec.name}"
        with progress_of(what, seconds, "s") as advance:
            if is_pipeline:
                samples = fig12_samples(executor, LOADS[setup.name], seconds, advance, cfg.seed)
            else:
                units, served = self._own.timed(setup, spec), self._own.served(setup, spec.name)
                samples = measure_rounds(executor, units, served, context, advance)
        table = table_of(samples, self._spread, cfg.seed)
        device = (
            "cpu" if executor.model.device.type == "cpu" else slug_of(torch.cuda.get_device_name())
        )
        name = backend.device_name
        if is_pipeline:
            device, name = (
                STAGES + device,
                f"simulated pipeline of {NUM_STAGES} stages, times measured on {name}",
            )
        return {device: table.assign(model=spec.name, dtype=backend.dtype_name, device_name=name)}

    # -- simulated ---------------------------------------------------------------------------------

    def _simulated(self, cfg: DictConfig, backend: SimulatedBackend) -> dict[str, pd.DataFrame]:
        spec, _ = resolve_model(cfg, backend)
        setup = self._setup(backend, spec)
        cost = make_cost_model(backend.cost_model, spec, backend.hardware, backend.dtype_bytes)
        units, gains = self._own.timed(setup, spec), self._own.served(setup, spec.name)
        with progress_of(f"computing {self.experiment}", 1) as advance:
            table = simulated_points(Bench(cost, backend.hardware), units, gains)
            advance(1)
        device = SimulatedDevice(backend.hardware.name, backend.cost_model, spec.name)
        labels = {
            "model": spec.name,
            "dtype": backend.dtype_name,
            "device_name": backend.device_name,
        }
        return {device.folder: table.assign(**labels)}

    def _figures(self, cfg: DictConfig) -> Figures:
        """The paper's GPUs, or the one that was chosen."""
        hardware = str(cfg.hardware.name)
        gpus = None if hardware == PAPERS_GPU else [hardware]
        return Figures([self.experiment], gpus, self.every)

    def _check_papers(self, cfg: DictConfig, backend: SimulatedBackend) -> None:
        self._refuse(
            "setup", "is for measuring: the paper's figures are recomputed at its own sizes"
        )
        for name in ("dtype", "cost_model", "tensor_parallel", "pipeline_parallel"):
            if (value := getattr(backend, name)) != getattr(SimulatedBackend, name):
                raise UserError(
                    f"executor.{name}={value} has no effect: {self.experiment} is recomputed as "
                    "the paper has it, at "
                    "both levels of the cost model; drop it"
                )
        if "AutoModel" not in str(cfg.model["_target_"]):
            raise UserError(
                f"model={cfg.model.name} has no effect: {self.experiment} is of the paper's "
                "models; drop it"
            )
        self._figures(cfg).check(cfg)

    def _recomputed(self, points: pd.DataFrame) -> dict[str, pd.DataFrame]:
        """By device, with what the paper's figure does not show."""
        tables: dict[str, pd.DataFrame] = {}
        for device, table in by_device(points).items():
            spec, hardware = (
                load_option("model", device.model),
                load_option("hardware", device.hardware),
            )
            bench = Bench(
                make_cost_model(device.level, spec, hardware, hardware.dtype_bytes), hardware
            )
            extra = simulated_points(bench, self._own.extra(SETUPS["paper"](spec.name), spec), [])
            labels = {name: table[name].iloc[0] for name in ("model", "device_name")}
            whole = (
                pd.concat([table, extra.assign(**labels)], ignore_index=True)
                if len(extra)
                else table
            )
            tables[device.folder] = pd.concat([tables.get(device.folder), whole], ignore_index=True)
        return {folder: table.assign(dtype="float16") for folder, table in tables.items()}

    def _draw(self, points: pd.DataFrame, folder: Path) -> Path | None:
        """A figure of the paper beside the paper's own points; None of what it does not show, or
        has no number.
        """
        path = folder / f"{self.experiment}.png"
        if self._own.is_serving:
            serving.draw(self.experiment, points).savefig(path, dpi=150)
            return path
        if not self._own.is_papers or points.y.isna().all():
            return None
        whole = pd.concat(
            [paper(self.experiment), points.assign(uncertainty=math.nan)], ignore_index=True
        )
        draw(self.experiment, whole).savefig(path, dpi=150)
        return path

    def _keep(self, tables: dict[str, pd.DataFrame], folder: Path) -> None:
        for device, table in tables.items():
            table.to_csv(folder / f"{device}.csv", index=False, float_format="%.6g")
            if self.record is not None:
                print_place(
                    "record", recorded.save(table, self.experiment, device, Path(self.record))
                )


def _refuse_parallel(backend: SimulatedBackend) -> None:
    if backend.parallel.num_devices > 1:
        raise UserError(
            f"task=measure simulates one device, not {backend.parallel.description}; leave that out"
        )


def _as_figure(table: pd.DataFrame) -> pd.DataFrame:
    """In the columns of `figure.parquet`; the error is half the interval over the value."""
    source = "simulated" if table.device_name.iloc[0].startswith("simulated") else "measured"
    error = (table.high - table.low) / 2 / table.y.abs()
    return table.assign(
        source=source, device=table.device_name + ", " + table.model, uncertainty=error
    )


def _print_lines(device: str, table: pd.DataFrame) -> None:
    """Each line's least and most with their intervals, and what is missing."""
    out = Table(box=None, padding=(0, 1))
    for heading in ("panel", "line", "points", "least", "most", "unit", "missing"):
        is_number = heading in ("points", "least", "most")
        out.add_column(
            heading, justify="right" if is_number else "left", no_wrap=heading != "missing"
        )
    for (panel, series), line in table.groupby(["panel", "series"], sort=False):
        known = line.dropna(subset="y").sort_values("y")
        ends = [_in_words(known.iloc[i]) for i in (0, -1)] if len(known) else ["", ""]
        missing = line[line.y.isna()]
        why = f"{len(missing)}: {missing.reason.iloc[0]}" if len(missing) else ""
        out.add_row(str(panel), str(series), str(len(line)), *ends, str(line.unit.iloc[0]), why)
    is_measured = bool(table.num_pairs.max())
    what = (
        "medians, in brackets the 95 % interval"
        if is_measured
        else "in brackets the cost model's own error"
    )
    console().print(f"\n{table.figure.iloc[0]} on {device}: {what}", style="bold")
    console().print(out)


def _in_words(row: pd.Series) -> str:
    return f"{row.y:.3g} ({row.low:.3g} to {row.high:.3g}) at {row.x:g}"
