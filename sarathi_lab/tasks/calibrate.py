"""The task `calibrate`: measures this machine, so that `executor=simulated` can stand in for it."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import ClassVar

from omegaconf import DictConfig, OmegaConf

from sarathi_lab.config import console
from sarathi_lab.config.errors import UserError, require_bool, require_int, require_number
from sarathi_lab.config.paths import CONF, IS_CHECKOUT, make_folder
from sarathi_lab.config.run_context import RunContext
from sarathi_lab.engine.executor import Sizes
from sarathi_lab.executor.simulated.from_profile import hardware_from_profile
from sarathi_lab.executor.simulated.hardware import Hardware
from sarathi_lab.executor.simulated.profile import Profile
from sarathi_lab.executor.torch.backend import TorchBackend
from sarathi_lab.executor.torch.profiling import (
    LEAST_OTHERS,
    Measured,
    Shape,
    blocks_needed,
    calibration_shapes,
    measure_profile,
)
from sarathi_lab.model.spec import ModelSpec
from sarathi_lab.results import report
from sarathi_lab.results.result import Result, Shown
from sarathi_lab.tasks.subjects import BLOCK_SIZE, Subject, measured_subject

PROFILE_FILE = "profile.csv"
DIGITS = 4  # of the figures in the hardware file
FLOATS = "%.6g"


@dataclass(frozen=True)
class Calibrate:
    """Measures the chosen model's operations on the chosen device for up to `seconds`.

    Leaves `<name>.yaml`, a hardware file, and `profile.csv`, the table that
    executor.cost_model=profiled interpolates. Decodes are measured up to `batch` sequences,
    contexts up to `seq_len` tokens, prompts up to 2,048 whatever it is. With `install` both files
    are put into `conf/hardware`. Raises UserError for a time that is not positive and a name that
    can't be a file's.
    """

    reads: ClassVar[tuple[str, ...]] = ("executor", "model", "device", "dtype", "batch", "seq_len")
    has_runs: ClassVar[bool] = False
    seconds: float = 75
    name: str | None = None
    install: bool = False

    def __post_init__(self) -> None:
        require_number(
            "task.seconds", self.seconds, above=0, fix="use the seconds to measure for, such as 75"
        )
        if self.name is not None and not re.fullmatch(r"[A-Za-z_][\w.-]*", str(self.name)):
            raise UserError(
                f"task.name={self.name} can't name a file; use letters, digits, dots and dashes, a "
                "letter first"
            )
        require_bool("task.install", self.install)

    def check(self, cfg: DictConfig) -> Subject:
        """Raise UserError for a device that is not real, too large a model, or a name in use."""
        backend, spec, _ = subject = measured_subject(cfg, "calibrate")
        backend.check(spec, BLOCK_SIZE * blocks_needed(_shapes(cfg), BLOCK_SIZE))
        installed = CONF / "hardware" / f"{self._hardware_name(backend)}.yaml"
        if self.install and not IS_CHECKOUT:
            raise UserError(
                "task.install=true writes to a checkout's conf/, and this is an installed package; "
                "drop it, and name the folder of the files by --config-dir"
            )
        if self.install and installed.exists():
            raise UserError(
                f"task.install=true: conf/hardware has {installed.name} already; choose another "
                "task.name, or delete it"
            )
        return subject

    def run(self, cfg: DictConfig, context: RunContext) -> Result:
        """The profile and the hardware fitted to it, with the errors on rows held out."""
        subject: Subject = context.prepared or self.check(cfg)
        backend, spec, checkpoint = subject
        console.console().print(
            f"\ncalibrating {backend.device_name} with model {spec.name} in {backend.dtype_name}",
            style="bold",
        )
        report.print_cautions(backend.cautions(spec), context)
        shapes = _shapes(cfg)
        sizes = Sizes(blocks_needed(shapes, BLOCK_SIZE), BLOCK_SIZE, batch_size=cfg.batch)
        executor = backend.build(spec, checkpoint, sizes)
        with console.progress_of("measuring", self.seconds, "s") as progress:
            measured = measure_profile(executor, shapes, self.seconds, progress)
        profile = Profile(measured.table, "of this run")
        hardware = self._fitted(backend, spec, profile, context.run_dir.absolute() / PROFILE_FILE)
        title = _title(backend, spec)
        make_folder(context.run_dir, "the run's folder")
        path = _write(hardware, context.run_dir, title)
        if self.install:
            path = _install(hardware, profile, spec, title)
        errors = {**profile.held_out_errors, **hardware.uncertainty}
        return Result(
            tables={PROFILE_FILE: profile.table},
            summary={f"error/{name}": error for name, error in errors.items()},
            shown=_errors(profile, measured, hardware),
            places=_places(path, spec, is_installed=self.install),
            labels={"device": hardware.name},
            tags=[hardware.name],
            float_format=FLOATS,
        )

    def _hardware_name(self, backend: TorchBackend) -> str:
        if self.name is not None:
            return str(self.name)
        return re.sub(r"[^a-z0-9]+", "-", backend.device_name.lower()).strip("-")

    def _fitted(
        self, backend: TorchBackend, spec: ModelSpec, profile: Profile, table: Path
    ) -> Hardware:
        peaks = backend.peaks()
        memory_bytes, num_sms = backend.size()
        return hardware_from_profile(
            profile,
            spec,
            name=self._hardware_name(backend),
            flops_per_second=peaks.flops_per_second,
            bytes_per_second=peaks.bytes_per_second,
            memory_bytes=memory_bytes,
            num_sms=num_sms,
            dtype_bytes=backend.dtype_bytes,
            profiles={spec.name: str(table)},
        )


def _shapes(cfg: DictConfig) -> list[Shape]:
    decodes = "use the largest number of decodes to measure, such as 8"
    contexts = "use the longest context to measure, such as 1024"
    return calibration_shapes(
        require_int("batch", cfg.batch, 1, decodes),
        require_int("seq_len", cfg.seq_len, 64, contexts),
    )


def _title(backend: TorchBackend, spec: ModelSpec) -> str:
    return (
        f"# {backend.device_name}, measured by task=calibrate with model {spec.name} in "
        f"{backend.dtype_name}.\n"
        "# Peaks: the best that was measured. Efficiencies and fixed costs: fitted to every "
        "second size of the table.\n"
    )


def _write(hardware: Hardware, folder: Path, title: str) -> Path:
    """Write the hardware file into `folder`; returns its path."""
    figures = {
        name: float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value
        for name, value in asdict(hardware).items()
    }
    figures["uncertainty"] = {
        kind: round(error, DIGITS) for kind, error in hardware.uncertainty.items()
    }
    target = f"_target_: {Hardware.__module__}.{Hardware.__qualname__}\n"
    path = folder / f"{hardware.name}.yaml"
    path.write_text(title + target + OmegaConf.to_yaml(OmegaConf.create(figures)))
    return path


def _install(hardware: Hardware, profile: Profile, spec: ModelSpec, title: str) -> Path:
    """Write both files into conf/hardware, the table's path relative to the repository."""
    folder = CONF / "hardware"
    table = folder / f"{hardware.name}-{PROFILE_FILE}"
    profile.table.to_csv(table, index=False, float_format=FLOATS)
    profiles = {spec.name: str(table.relative_to(CONF.parent))}
    return _write(replace(hardware, profiles=profiles), folder, title)


def _errors(profile: Profile, measured: Measured, hardware: Hardware) -> list[str | Shown]:
    """How much was measured, and the errors of both cost models."""
    num_dropped = measured.num_dropped
    dropped = f", the {num_dropped} longest left out for lack of time" if num_dropped else ""
    lines: list[str | Shown] = [
        f"  {measured.num_shapes} shapes, medians of {measured.num_rounds} rounds{dropped}"
    ]
    if measured.num_clamped:
        lines.append(
            f"  in {measured.num_clamped} sizes the parts alone took longer than the whole: others "
            f"is set to {LEAST_OTHERS:g} s there"
        )
    rows = [
        {"": name, "rows": len(profile.rows(name)), "error of a row\nleft out (mean)": error}
        for name, error in profile.held_out_errors.items()
    ]
    formats = {"error of a row\nleft out (mean)": ".1%"}
    uncertainty = ", ".join(f"{kind} {error:.0%}" for kind, error in hardware.uncertainty.items())
    return [
        *lines,
        Shown(rows, left=[""], formats=formats),
        "  executor.cost_model=analytic on sizes that it was not fitted to (mean): " + uncertainty,
    ]


def _places(path: Path, spec: ModelSpec, *, is_installed: bool) -> dict[str, Path | str]:
    """Where the hardware file is, and the commands that use it."""
    install = f"cp {path} {CONF / 'hardware'}/  # or repeat with task.install=true"
    return {
        "file": path,
        **({} if is_installed else {"install": install}),
        "use": f"python -m sarathi_lab.run executor=simulated hardware={path.stem} "
        f"executor.cost_model=profiled model={spec.name}",
    }
