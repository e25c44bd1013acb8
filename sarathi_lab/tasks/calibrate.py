"""The task of measuring this machine, so that `executor=simulated` can stand in for it."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import ClassVar

from omegaconf import DictConfig, OmegaConf
from rich.table import Table

from sarathi_lab.config import console
from sarathi_lab.config.errors import UserError, require_bool, require_int, require_number
from sarathi_lab.config.instantiate import build, resolved
from sarathi_lab.config.paths import CONF, make_folder
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
from sarathi_lab.results.tracking import Tracker
from sarathi_lab.tasks.plan import resolve_model

BLOCK_SIZE = 16  # tokens; neighbouring blocks are read in place, so their size plays no part
PROFILE_FILE = "profile.csv"
DIGITS = 4  # of the figures in the hardware file


@dataclass(frozen=True)
class Calibrate:
    """Measure the chosen model's operations on the chosen device for up to `seconds`.

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
                f"task.name={self.name} can't name a file; use letters, digits, dots and "
                "dashes, a letter first"
            )
        require_bool("task.install", self.install)

    def check(self, cfg: DictConfig) -> None:
        """Raise UserError for a device that is not real, a model that does not fit it, or a name
        that is taken.
        """
        backend, spec, _ = measured_subject(cfg, "calibrate")
        shapes = _shapes(cfg)
        backend.check(spec, BLOCK_SIZE * blocks_needed(shapes, BLOCK_SIZE))
        installed = _installed(self._hardware_name(backend))
        if self.install and installed.exists():
            raise UserError(
                f"task.install=true: conf/hardware has {installed.name} already; choose another "
                "task.name, or delete it"
            )

    def run(self, cfg: DictConfig, place: RunContext) -> None:
        """Measure, fit and write; then say how the files are used."""
        backend, spec, checkpoint = measured_subject(cfg, "calibrate")
        shapes = _shapes(cfg)
        num_blocks = blocks_needed(shapes, BLOCK_SIZE)
        out = console.console()
        out.print(
            f"\ncalibrating {backend.device_name} with model {spec.name} in {backend.dtype_name}",
            style="bold",
        )
        report.print_cautions(backend.cautions(spec), place)
        executor = backend.build(
            spec, checkpoint, Sizes(num_blocks, BLOCK_SIZE, batch_size=cfg.batch)
        )
        with console.progress_of("measuring", self.seconds, "s") as advance:
            measured = measure_profile(executor, shapes, self.seconds, advance)
        profile = Profile(measured.table, "of this run")
        make_folder(place.run_dir, "the run's folder")
        hardware = self._fitted(backend, spec, profile, place.run_dir)
        files = _write(hardware, profile, place.run_dir, _title(backend, spec))
        _track(cfg, place, profile, hardware)
        if self.install:
            files = _install(hardware, profile, spec, _title(backend, spec))
        _print_errors(profile, measured, hardware)
        _print_use(files, spec, is_installed=self.install)

    def _hardware_name(self, backend: TorchBackend) -> str:
        return (
            str(self.name)
            if self.name is not None
            else re.sub(r"[^a-z0-9]+", "-", backend.device_name.lower()).strip("-")
        )

    def _fitted(
        self, backend: TorchBackend, spec: ModelSpec, profile: Profile, folder: Path
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
            profiles={spec.name: str(folder.absolute() / PROFILE_FILE)},
        )


def measured_subject(cfg: DictConfig, task: str) -> tuple[TorchBackend, ModelSpec, Path | None]:
    """The device that `task` measures, the model and its weights. Raises UserError for a device
    that is not real.
    """
    backend = build(cfg.executor)
    if not isinstance(backend, TorchBackend):
        raise UserError(
            f"task={task} measures a real device, executor={backend.name} is none; use "
            "executor=torch"
        )
    return backend, *resolve_model(cfg, backend)


def _shapes(cfg: DictConfig) -> list[Shape]:
    batch = require_int(
        "batch", cfg.batch, 1, "use the largest number of decodes to measure, such as 8"
    )
    longest = require_int(
        "seq_len", cfg.seq_len, 64, "use the longest context to measure, such as 1024"
    )
    return calibration_shapes(batch, longest)


def _installed(name: str) -> Path:
    return CONF / "hardware" / f"{name}.yaml"


def _title(backend: TorchBackend, spec: ModelSpec) -> str:
    return (
        f"# {backend.device_name}, measured by task=calibrate with model {spec.name} in "
        f"{backend.dtype_name}.\n"
        "# Peaks: the best that was measured. Efficiencies and fixed costs: fitted to every "
        "second size of the table.\n"
    )


def _write(hardware: Hardware, profile: Profile, folder: Path, title: str, stem: str = "") -> Path:
    """Write the table and the hardware file, which names it; returns the latter's path."""
    profile.table.to_csv(folder / f"{stem}{PROFILE_FILE}", index=False, float_format="%.6g")
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
    """Both files in the folder of the group, the table's path from the repository."""
    folder = _installed(hardware.name).parent
    stem = f"{hardware.name}-"
    relative = (folder / f"{stem}{PROFILE_FILE}").relative_to(CONF.parent)
    return _write(
        replace(hardware, profiles={spec.name: str(relative)}), profile, folder, title, stem
    )


def _track(cfg: DictConfig, place: RunContext, profile: Profile, hardware: Hardware) -> None:
    """Log the table and the errors on rows held out, by operation (profiled) and by kind
    (analytic).
    """
    tracker: Tracker = build(cfg.tracking)
    errors = {**profile.held_out_errors, **hardware.uncertainty}
    config = {"task": "calibrate", "device": hardware.name, "settings": resolved(cfg)}
    with tracker.run(
        name=place.name,
        group=place.group,
        job_type="calibrate",
        tags=[hardware.name],
        config=config,
    ) as tracked:
        tracked.log_summary({f"error/{name}": error for name, error in errors.items()})
        tracked.log_tables(place.run_dir)


def _print_errors(profile: Profile, measured: Measured, hardware: Hardware) -> None:
    out = console.console()
    dropped = (
        f", the {measured.num_dropped} longest left out for lack of time"
        if measured.num_dropped
        else ""
    )
    out.print(f"  {measured.num_shapes} shapes, medians of {measured.num_rounds} rounds{dropped}")
    if measured.num_clamped:
        out.print(
            f"  in {measured.num_clamped} sizes the parts alone took longer than the whole: "
            "others is set to "
            f"{LEAST_OTHERS:g} s there"
        )
    table = Table(box=None, padding=(0, 2), pad_edge=True)
    table.add_column("")
    for heading in ("rows", "error of a row\nleft out (mean)"):
        table.add_column(heading, justify="right")
    for operation, error in profile.held_out_errors.items():
        table.add_row(operation, str(len(profile.rows(operation))), f"{error:.1%}")
    out.print(table)
    uncertainty = ", ".join(f"{kind} {error:.0%}" for kind, error in hardware.uncertainty.items())
    out.print(
        f"  executor.cost_model=analytic on sizes that it was not fitted to (mean): {uncertainty}"
    )


def _print_use(path: Path, spec: ModelSpec, *, is_installed: bool) -> None:
    console.print_place("file", path)
    if not is_installed:
        console.print_place(
            "install", f"cp {path} {CONF / 'hardware'}/  # or repeat with task.install=true"
        )
    console.print_place(
        "use",
        f"python -m sarathi_lab.run executor=simulated hardware={path.stem} "
        "executor.cost_model=profiled "
        f"model={spec.name}",
    )
