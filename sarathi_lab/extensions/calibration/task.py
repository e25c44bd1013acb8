"""The task that measures iterations of a device, and leaves what simulates it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

import pandas as pd
from omegaconf import DictConfig, OmegaConf

from sarathi_lab.config.checked import flag, number
from sarathi_lab.config.console import print_words, progress_of
from sarathi_lab.config.errors import UserError, require_int
from sarathi_lab.config.instantiate import PAPER_BATCH, build
from sarathi_lab.config.paths import CONF, IS_CHECKOUT, make_folder
from sarathi_lab.config.run_context import RunContext
from sarathi_lab.engine.executor import Backend, Executor, Sizes
from sarathi_lab.engine.single_iteration import host_caution
from sarathi_lab.executor.simulated.hardware import Hardware
from sarathi_lab.executor.steal_corrected_clock import exclude_stolen_time
from sarathi_lab.executor.tables import write_tables
from sarathi_lab.executor.torch.checks import require_one_stage
from sarathi_lab.experiment.measured_iterations import Limits, grid_of, table_of, time_iterations
from sarathi_lab.extensions.calibration import fit
from sarathi_lab.model.checkpoint import resolve_model
from sarathi_lab.model.spec import ModelSpec
from sarathi_lab.policy.systems import setup_of
from sarathi_lab.results.provenance import slug_of
from sarathi_lab.results.report import print_cautions
from sarathi_lab.results.result import DisplayTable, Result
from sarathi_lab.tasks.base import Task

TABLES = Path("experiments", "lab", "cost_model", "tables")  # of a checkout
DIGITS = 4  # of the figures in the hardware file
MAX_ERROR = 0.3  # mean of a kind of held-out compositions
NAME = re.compile(r"[A-Za-z_][\w.-]*")


class Subject(NamedTuple):
    """A device, the model, and the folder of its weights if it has one."""

    backend: Backend
    spec: ModelSpec
    checkpoint: Path | None
    limits: Limits
    sizes: Sizes


class Calibration(NamedTuple):
    """The table of iterations (`iterations.csv`), the hardware file fitted to it, and compositions
    that neither has seen: kind, composition, seconds, and by the table (`predicted`, `error`) and
    the file (`analytic`, `analytic_error`). `host_share` is the largest of a composition.
    """

    table: pd.DataFrame
    hardware: Hardware
    held_out: pd.DataFrame
    num_rounds: int
    num_left_out: int  # compositions that the cache can't hold
    host_share: float

    @property
    def errors(self) -> dict[str, float]:
        """Mean absolute errors of the table by kind."""
        return fit.mean_errors(self.held_out, "error")

    @property
    def error_of_file(self) -> float:
        """The mean absolute error of the hardware file."""
        return float(self.held_out["analytic_error"].abs().mean())


@dataclass(frozen=True)
class Calibrate(Task):
    """Measurement of iterations of the model on any executor, for about `seconds`.

    Leaves `iterations.csv`, which executor.cost_model=profiled interpolates, and `<name>.yaml`, a
    hardware file: decodes up to `batch` sequences, contexts up to `seq_len` tokens, prompts up to
    8,192 an iteration. A table that does not predict what it was not made of is not installed.
    """

    reads = ("executor", "model", "hardware", "host", "device", "dtype", "batch", "seq_len", "seed")
    seconds: float = number(75, above=0, fix="use the seconds to measure for, such as 75")
    name: str | None = None
    install: bool = flag(False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.name is not None and not NAME.fullmatch(str(self.name)):
            raise UserError(
                f"task.name={self.name} can't name a file; use letters, digits, dots and dashes, a "
                "letter first"
            )

    def check(self, cfg: DictConfig) -> Subject:
        backend: Backend = build(cfg.executor)
        require_one_stage(backend, "task=calibrate")
        if backend.request_time:
            raise UserError(
                f"host.request={backend.request_time:g} is of whole requests, and task=calibrate "
                "measures iterations; use host.request=0"
            )
        spec, checkpoint = resolve_model(cfg, backend)
        limits = _limits(cfg)
        backend.check(spec, limits.longest)
        sizes = _sizes(backend, spec, limits)
        backend.expect(spec, checkpoint, sizes)
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
        return Subject(backend, spec, checkpoint, limits, sizes)

    def run(self, cfg: DictConfig, context: RunContext) -> Result:
        subject: Subject = context.prepared or self.check(cfg)
        backend = subject.backend
        model = subject.spec.name
        dtype = backend.dtype_name
        subject_line = f"{backend.device_name} with model {model} in {dtype}"
        print_words(f"\ncalibrating {subject_line}", style="bold")
        print_cautions(backend.cautions(subject.spec), context)
        folder = make_folder(context.run_dir, "the run's folder")
        calibration = self._calibrate(subject, folder, int(cfg.seed))
        errors = calibration.errors
        self._refuse_busy(errors)
        hardware = calibration.hardware
        title = (
            f"# {subject_line}, by task=calibrate.\n# Peaks: the best that was measured. "
            "Efficiencies and fixed costs: fitted to iterations.csv.\n"
        )
        meta = {
            "model": model,
            "device": backend.device_name,
            "dtype": dtype,
            "uncertainty": _rounded(errors),
        }
        write_tables(folder, {}, meta)
        path = _write(hardware, folder, title)
        if self.install:
            home = TABLES / hardware.name
            write_tables(CONF.parent / home / model, {"iterations": calibration.table}, meta)
            # A file in conf/ names its tables from the checkout's folder.
            installed = replace(hardware, tables=str(home))
            places: dict[str, Path | str] = {"file": _write(installed, CONF / "hardware", title)}
            chosen = f"hardware={hardware.name}"
        else:
            install = f"cp {path} {CONF / 'hardware'}/  # or repeat with task.install=true"
            places = {"file": path, "install": install}
            chosen = f"hardware=auto hardware.tables={context.run_dir}"
        settings = f"dtype={dtype} executor.cost_model=profiled model={model}"
        places["use"] = f"python -m sarathi_lab.run executor=simulated {chosen} {settings}"
        summary = {f"error/{kind}": error for kind, error in errors.items()}
        summary["error/analytic"] = calibration.error_of_file
        return Result(
            tables={"iterations.csv": calibration.table, "held_out.csv": calibration.held_out},
            summary=summary,
            shown=_shown(calibration),
            places=places,
            labels={"device": hardware.name},
            tags=[hardware.name],
            float_format="%.6g",
        )

    def _calibrate(self, subject: Subject, folder: Path, seed: int) -> Calibration:
        """Time the grid and held-out compositions in the same rounds, and fit to the grid."""
        backend, spec, checkpoint, limits, sizes = subject
        grid = grid_of(limits)
        held_out = fit.held_out_of(limits, seed)
        batches = [composition.make() for composition in grid]
        # In the same rounds: a machine that drifts does so for both.
        batches += [batch for _, batch in held_out]
        executor: Executor = backend.build(spec, checkpoint, sizes)
        with (
            progress_of("measuring iterations", self.seconds, "s") as progress,
            exclude_stolen_time(executor),
        ):
            timings = time_iterations(
                executor,
                batches,
                limits,
                num_blocks=executor.num_blocks or sizes.num_blocks,
                block_size=sizes.block_size,
                vocab_size=spec.vocab_size,
                seconds=self.seconds,
                advance=progress,
                seed=seed,
            )
        rows = timings.rows
        of_grid = rows[rows.index < len(grid)]
        of_held_out = rows[rows.index >= len(grid)]
        # Compositions that the cache can't hold have no row.
        fitted = [batches[number] for number in of_grid.index]
        unseen = [held_out[number - len(grid)] for number in of_held_out.index]
        memory_bytes, num_sms = backend.size()
        at_peaks = Hardware.at_peaks(
            self._hardware_name(backend),
            backend.peaks(),
            backend.dtype_bytes,
            memory_bytes=memory_bytes,
            num_sms=num_sms,
            tables=str(folder.absolute()),
        )
        table = table_of(grid, of_grid)
        hardware = fit.fit_hardware(at_peaks, spec, fitted, of_grid["seconds"].to_numpy())
        seconds = of_held_out["seconds"].to_numpy()
        predicted = fit.predictions(unseen, seconds, table, hardware, spec)
        calibration = Calibration(
            table,
            hardware,
            predicted,
            timings.num_rounds,
            num_left_out=len(batches) - len(rows),
            host_share=float(rows["host_share"].max()),
        )
        stated = fit.with_error(hardware, calibration.error_of_file)
        return calibration._replace(hardware=stated)

    def _refuse_busy(self, errors: Mapping[str, float]) -> None:
        """Warn of a table whose `errors` contradict what it has not seen; raise UserError if it is
        to be installed.
        """
        worst = max(errors, key=errors.__getitem__)
        if errors[worst] <= MAX_ERROR:
            return
        complaint = (
            f"held-out iterations of {worst} are {errors[worst]:.0%} off, more than "
            f"{MAX_ERROR:.0%}: the machine is busy or slow at times; repeat when it is quiet, or "
            f"with task.seconds={2 * self.seconds:g}"
        )
        if self.install:
            raise UserError(f"task.install=true: {complaint}")
        print_words(f"  {complaint}", style="yellow")

    def _hardware_name(self, backend: Backend) -> str:
        return slug_of(backend.device_name) if self.name is None else str(self.name)


def _limits(cfg: DictConfig) -> Limits:
    batch = PAPER_BATCH if cfg.batch is None else cfg.batch
    size_fix = "use the largest number of decodes to measure, such as 8"
    length_fix = "use the longest context to measure, such as 1024"
    return Limits(
        require_int("batch", batch, 1, size_fix),
        require_int("seq_len", cfg.seq_len, 64, length_fix),
    )


def _sizes(backend: Backend, spec: ModelSpec, limits: Limits) -> Sizes:
    """Return sizes with as much cache as there is, up to a full batch."""
    sizes = limits.sizes
    setup = setup_of(None, limits.batch_size, limits.longest)
    num_blocks = backend.kv_blocks(spec, sizes.block_size, setup)
    if sizes.num_blocks <= num_blocks:
        return sizes
    return replace(sizes, num_blocks=num_blocks, fills_memory=True)


def _rounded(errors: Mapping[str, float]) -> dict[str, float]:
    return {kind: round(error, DIGITS) for kind, error in errors.items()}


def _write(hardware: Hardware, folder: Path, title: str) -> Path:
    figures = asdict(hardware)
    for name, value in figures.items():
        if isinstance(value, float):
            figures[name] = float(f"{value:.{DIGITS}g}")
    figures["uncertainty"] = _rounded(hardware.held_out_errors)
    target = f"_target_: {Hardware.__module__}.{Hardware.__qualname__}\n"
    path = folder / f"{hardware.name}.yaml"
    settings = OmegaConf.to_yaml(OmegaConf.create(figures))
    path.write_text(title + target + settings)
    return path


def _shown(calibration: Calibration) -> list[str | DisplayTable]:
    """Describe the extent of the measurement, and the errors of held-out compositions."""
    mean = "error\n(mean)"
    largest = "\n(largest)"
    bias = "\n(signed mean)"
    by_file = "by formula\n(mean)"
    held_out = calibration.held_out
    rows = []
    for kind, of_kind in held_out.groupby("kind", sort=False):
        errors = of_kind["error"]
        row = {
            "held-out iterations": kind,
            "number": len(of_kind),
            mean: errors.abs().mean(),
            largest: errors.abs().max(),
            bias: errors.mean(),
            by_file: of_kind["analytic_error"].abs().mean(),
        }
        rows.append(row)
    left_out = ""
    if calibration.num_left_out:
        left_out = f", {calibration.num_left_out} left out as the cache is short"
    share = calibration.host_share
    formats = {mean: ".1%", largest: ".1%", bias: "+.1%", by_file: ".1%"}
    return [
        f"  {len(calibration.table)} iterations and {len(held_out)} held-out ones, lower quartiles "
        f"of {calibration.num_rounds} rounds{left_out}, of which the host's work is at most "
        f"{share:.0%}",
        *host_caution("some of these iterations", share),
        DisplayTable(rows, left=["held-out iterations"], formats=formats),
    ]
