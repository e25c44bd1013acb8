"""The task `calibrate`: measurement of this machine for `executor=simulated`."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from operator import itemgetter
from pathlib import Path
from typing import Any

import pandas as pd
from omegaconf import DictConfig, OmegaConf

from sarathi_lab.config.checked import flag, number, one_of
from sarathi_lab.config.console import print_words, progress_of
from sarathi_lab.config.errors import UserError, require_int
from sarathi_lab.config.instantiate import PAPER_BATCH
from sarathi_lab.config.paths import CONF, IS_CHECKOUT, make_folder
from sarathi_lab.config.run_context import RunContext
from sarathi_lab.engine.executor import Sizes
from sarathi_lab.engine.single_iteration import host_caution
from sarathi_lab.executor.simulated.hardware import Hardware
from sarathi_lab.executor.steal_corrected_clock import exclude_stolen_time
from sarathi_lab.executor.tables import write_tables
from sarathi_lab.executor.torch import profiling
from sarathi_lab.executor.torch.executor import TorchExecutor
from sarathi_lab.extensions.calibration.from_profile import (
    KINDS,
    hardware_from_profile,
    held_out_errors,
)
from sarathi_lab.extensions.calibration.iterations import (
    Limits,
    MeasuredIterations,
    fitted_hardware,
    measure_iterations,
)
from sarathi_lab.extensions.calibration.subjects import BLOCK_SIZE, Subject, measured_subject
from sarathi_lab.model.spec import ModelSpec
from sarathi_lab.policy.systems import setup_of
from sarathi_lab.results.provenance import slug_of
from sarathi_lab.results.report import print_cautions
from sarathi_lab.results.result import DisplayTable, Result
from sarathi_lab.tasks.base import Task

TABLES = Path("experiments", "lab", "cost_model", "tables")  # of a checkout
DIGITS = 4  # of the figures in the hardware file
MAX_ERROR = 0.3  # mean of an operation's held-out rows


@dataclass(frozen=True)
class Calibrated:
    """A fitted hardware file, tables of measured times with their meta.yaml, errors of held-out
    rows by name, what is printed, and `others`, tables that no cost model reads.
    """

    hardware: Hardware
    frames: Mapping[str, pd.DataFrame]
    meta: Mapping[str, Any]
    errors: Mapping[str, float]
    shown: Sequence[str | DisplayTable]
    others: Mapping[str, pd.DataFrame] = field(default_factory=dict)


@dataclass(frozen=True)
class Calibrate(Task):
    """Measurement of the model on the device for about `seconds`, `by` its operations, which the
    lab's model has, or by whole iterations, which every executor has. Rows that contradict each
    other are not installed.

    Leaves `<name>.yaml`, a hardware file, and tables, which executor.cost_model=profiled
    interpolates: decodes up to `batch` sequences, contexts up to `seq_len` tokens, prompts up to
    2,048 (an iteration's up to 8,192).
    """

    reads = ("executor", "model", "device", "dtype", "batch", "seq_len", "seed")
    seconds: float = number(75, above=0, fix="use the seconds to measure for, such as 75")
    by: str = one_of("auto", valid=("auto", "operations", "iterations"))
    name: str | None = None
    install: bool = flag(False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.name is not None and not re.fullmatch(r"[A-Za-z_][\w.-]*", str(self.name)):
            raise UserError(
                f"task.name={self.name} can't name a file; use letters, digits, dots and dashes, a "
                "letter first"
            )

    def check(self, cfg: DictConfig) -> Subject:
        backend, spec, _ = subject = measured_subject(cfg)
        if (weights := getattr(backend, "weights", "auto")) != "auto":
            raise UserError(
                f"executor.weights={weights}: the simulator reads no times of such products; use "
                "executor.weights=auto"
            )
        if self._has_operations(backend):
            self._check_operations(cfg, backend, spec)
        else:
            sizes = _sizes(cfg, subject)
            room = sizes.num_blocks * sizes.block_size
            backend.check(spec, max(room, _limits(cfg).longest))
            backend.expect(spec, subject[2], sizes)
        if self.install and not IS_CHECKOUT:
            raise UserError(
                "task.install=true writes to a checkout's conf/, and this is an installed package; "
                "drop it, and name the folder of the files by --config-dir"
            )
        name = f"{self._hardware_name(backend)}.yaml"
        if self.install and (CONF / "hardware" / name).exists():
            raise UserError(
                f"task.install=true: conf/hardware has {name} already; choose another "
                "task.name, or delete it"
            )
        return subject

    def _check_operations(self, cfg: DictConfig, backend: Any, spec: ModelSpec) -> None:
        if backend.name != "torch":
            raise UserError(
                f"task.by=operations: those of executor={backend.name} can't be timed; use "
                "task.by=iterations"
            )
        if spec.num_experts:
            raise UserError(
                f"model={spec.name}: a mixture's times depend on the choices of its tokens, "
                "which are not measured here; use task.by=iterations, or a dense model"
            )
        backend.check(spec, BLOCK_SIZE * profiling.blocks_needed(_shapes(cfg), BLOCK_SIZE))

    def run(self, cfg: DictConfig, context: RunContext) -> Result:
        subject: Subject = context.prepared or self.check(cfg)
        backend, spec, _ = subject
        dtype, device = backend.dtype_name, backend.device_name
        where = f"{device} with model {spec.name} in {dtype}"
        print_words(f"\ncalibrating {where}", style="bold")
        print_cautions(backend.cautions(spec), context)
        folder = make_folder(context.run_dir, "the run's folder")
        by = self._by_operations if self._has_operations(backend) else self._by_iterations
        found = by(cfg, subject, self._at_peaks(backend, folder))
        meta = {"model": spec.name, "device": device, "dtype": dtype, **found.meta}
        hardware, frames = found.hardware, found.frames
        title = (
            f"# {where}, by task=calibrate.\n# Peaks: the best that was measured. Efficiencies and "
            "fixed costs: fitted to every second size of the table.\n"
        )
        path = _write(hardware, folder, title)
        write_tables(folder, {}, meta)
        install = f"cp {path} {CONF / 'hardware'}/  # or repeat with task.install=true"
        places: dict[str, Path | str] = {"file": path, "install": install}
        named = f"hardware=auto hardware.tables={context.run_dir}"
        if self.install:
            home = TABLES / hardware.name
            write_tables(CONF.parent / home / spec.name, frames, meta)
            installed = replace(hardware, tables=str(home))
            places = {"file": _write(installed, CONF / "hardware", title)}
            named = f"hardware={hardware.name}"
        use = f"python -m sarathi_lab.run executor=simulated {named} dtype={dtype}"
        return Result(
            tables={f"{name}.csv": frame for name, frame in {**frames, **found.others}.items()},
            summary={f"error/{name}": error for name, error in found.errors.items()},
            shown=found.shown,
            places={**places, "use": f"{use} executor.cost_model=profiled model={spec.name}"},
            labels={"device": hardware.name},
            tags=[hardware.name],
            float_format="%.6g",
        )

    def _at_peaks(self, backend: Any, folder: Path) -> Hardware:
        memory_bytes, num_sms = backend.size()
        return Hardware.at_peaks(
            self._hardware_name(backend),
            backend.peaks(),
            backend.dtype_bytes,
            memory_bytes=memory_bytes,
            num_sms=num_sms,
            tables=str(folder.absolute()),
        )

    def _by_operations(self, cfg: DictConfig, subject: Subject, hardware: Hardware) -> Calibrated:
        backend, spec, checkpoint = subject
        shapes = _shapes(cfg)
        sizes = Sizes(
            profiling.blocks_needed(shapes, BLOCK_SIZE),
            BLOCK_SIZE,
            batch_size=_limits(cfg).batch_size,
        )
        measured, errors = self._measured(backend.build(spec, checkpoint, sizes), shapes)
        hardware = hardware_from_profile(measured.table, spec, hardware)
        worst = {kind: max(errors[name] for name in names) for kind, names in KINDS.items()}
        tables = measured.tables(spec, uncertainty=_rounded(worst))
        shown = _errors(errors, measured, hardware)
        every = {**errors, **hardware.held_out_errors}
        return Calibrated(hardware, tables.frames, tables.meta, every, shown)

    def _by_iterations(self, cfg: DictConfig, subject: Subject, hardware: Hardware) -> Calibrated:
        backend, spec, checkpoint = subject
        limits, executor = _limits(cfg), backend.build(spec, checkpoint, _sizes(cfg, subject))
        with (
            progress_of("measuring iterations", self.seconds, "s") as progress,
            exclude_stolen_time(executor),
        ):
            found = measure_iterations(
                executor, spec, limits, self.seconds, progress, int(cfg.seed)
            )
        self._refuse_busy(found.errors)
        hardware = fitted_hardware(found.table, spec, hardware)
        meta = {"uncertainty": _rounded(found.errors)}
        frames, others = {"iterations": found.table}, {"held_out": found.held_out}
        errors = {**found.errors, "analytic": hardware.held_out_errors["matmul"]}
        return Calibrated(hardware, frames, meta, errors, _held_out(found, hardware), others)

    def _measured(
        self, executor: TorchExecutor, shapes: Sequence[profiling.Shape]
    ) -> tuple[profiling.Measured, dict[str, float]]:
        """Measure the shapes; return the rows, and how far those of each operation are off."""
        with (
            progress_of("measuring", self.seconds, "s") as progress,
            exclude_stolen_time(executor) as clock,
        ):
            start = time.perf_counter()
            measured = profiling.measure_profile(executor, shapes, self.seconds, progress)
            lost = clock.lost / (time.perf_counter() - start)
        errors = held_out_errors(measured.table)
        self._refuse_busy(errors, lost)
        return measured, errors

    def _refuse_busy(self, errors: Mapping[str, float], lost: float = 0.0) -> None:
        """Warn of rows that contradict each other; raise UserError if they are to be installed."""
        worst, error = max(errors.items(), key=itemgetter(1))
        if error > MAX_ERROR:
            others = f" (others had a core {lost:.0%} of the time)" if lost else ""
            why = (
                f"rows of {worst} deviate by {error:.0%} from the others, more than "
                f"{MAX_ERROR:.0%}: the machine is busy{others} or slow at times; repeat when it is "
                f"quiet, or with task.seconds={2 * self.seconds:g}"
            )
            if self.install:
                raise UserError(f"task.install=true: {why}")
            print_words(f"  {why}", style="yellow")

    def _has_operations(self, backend: Any) -> bool:
        """Whether operations are measured, by the lab's model: else whole iterations."""
        return self.by == "operations" or (self.by == "auto" and backend.name == "torch")

    def _hardware_name(self, backend: Any) -> str:
        return slug_of(backend.device_name) if self.name is None else str(self.name)


def _limits(cfg: DictConfig) -> Limits:
    fix = "use the largest number of decodes to measure, such as 8"
    number = PAPER_BATCH if cfg.batch is None else cfg.batch
    batch = require_int("batch", number, 1, fix)
    fix = "use the longest context to measure, such as 1024"
    return Limits(batch, require_int("seq_len", cfg.seq_len, 64, fix))


def _shapes(cfg: DictConfig) -> list[profiling.Shape]:
    return profiling.calibration_shapes(*_limits(cfg))


def _sizes(cfg: DictConfig, subject: Subject) -> Sizes:
    """Sizes for whole iterations, with as much cache as there is, up to a full batch."""
    backend, spec, _ = subject
    sizes = _limits(cfg).sizes
    limits = _limits(cfg)
    setup = setup_of(None, limits.batch_size, limits.longest)
    room = backend.kv_blocks(spec, sizes.block_size, setup)
    if sizes.num_blocks <= room:
        return sizes
    return replace(sizes, num_blocks=room, fills_memory=True)


def _rounded(errors: Mapping[str, float]) -> dict[str, float]:
    return {kind: round(error, DIGITS) for kind, error in errors.items()}


def _write(hardware: Hardware, folder: Path, title: str) -> Path:
    figures = {
        name: float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value
        for name, value in asdict(hardware).items()
    }
    figures["uncertainty"] = _rounded(hardware.held_out_errors)
    target = f"_target_: {Hardware.__module__}.{Hardware.__qualname__}\n"
    path = folder / f"{hardware.name}.yaml"
    path.write_text(title + target + OmegaConf.to_yaml(OmegaConf.create(figures)))
    return path


def _errors(
    held_out: Mapping[str, float], measured: profiling.Measured, hardware: Hardware
) -> list[str | DisplayTable]:
    """Describe the extent of the measurement, and the errors of both cost models."""
    heading = "error of a row\nleft out (mean)"
    rows = [
        {"": name, "rows": int((measured.table.operation == name).sum()), heading: error}
        for name, error in held_out.items()
    ]
    errors = ", ".join(f"{kind} {error:.0%}" for kind, error in hardware.held_out_errors.items())
    return [
        f"  {measured.num_shapes} shapes, medians of {measured.num_rounds} rounds",
        DisplayTable(rows, left=[""], formats={heading: ".1%"}),
        f"  executor.cost_model=analytic on sizes that it was not fitted to (mean): {errors}",
    ]


def _held_out(found: MeasuredIterations, hardware: Hardware) -> list[str | DisplayTable]:
    """Describe the extent of the measurement, and the errors of held-out compositions."""
    mean, largest, bias = "error\n(mean)", "\n(largest)", "\n(signed mean)"
    rows = [
        {
            "held-out iterations": kind,
            "number": len(of_kind),
            mean: of_kind.error.abs().mean(),
            largest: of_kind.error.abs().max(),
            bias: of_kind.error.mean(),
        }
        for kind, of_kind in found.held_out.groupby("kind", sort=False)
    ]
    left_out = f", {found.num_left_out} left out as the cache is short" * bool(found.num_left_out)
    host = f", of which the host's work is at most {found.host_share:.0%}"
    error = hardware.held_out_errors["matmul"]
    formats = {mean: ".1%", largest: ".1%", bias: "+.1%"}
    return [
        f"  {len(found.table)} iterations and {len(found.held_out)} held-out ones, lower quartiles "
        f"of {found.num_rounds} rounds{left_out}{host}",
        *host_caution("some of these iterations", found.host_share),
        DisplayTable(rows, left=["held-out iterations"], formats=formats),
        f"  executor.cost_model=analytic on rows that it was not fitted to (mean): {error:.0%}",
    ]
