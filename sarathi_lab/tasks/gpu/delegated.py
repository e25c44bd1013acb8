"""Parts of the campaign that other tasks and experiments measure, at the campaign's sizes."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import ClassVar

from omegaconf import DictConfig, OmegaConf

from sarathi_lab.config.checked import one_of
from sarathi_lab.config.console import console
from sarathi_lab.config.errors import RunError
from sarathi_lab.config.instantiate import read_option
from sarathi_lab.config.paths import CONF, REPOSITORY
from sarathi_lab.config.run_context import RunContext
from sarathi_lab.executor.tables import META
from sarathi_lab.results.load import path_of
from sarathi_lab.results.result import Result
from sarathi_lab.tasks.base import Task, conclude
from sarathi_lab.tasks.calibrate import Calibrate
from sarathi_lab.tasks.gpu.part import GpuTask, Part, Work, current_device
from sarathi_lab.tasks.measure import Measure
from sarathi_lab.tasks.plan import changed

MODELS = sorted(path.stem for path in CONF.glob("model/*.yaml"))


@dataclass(frozen=True, kw_only=True)
class GpuExperiments(GpuTask):
    """Each of `experiments` with `model`, one after the other: task=measure at the paper's sizes.

    One that fails ends no other, RunError comes last; those without time are left out.
    """

    model: str = one_of(valid=MODELS)
    experiments: Sequence[str]

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.experiments:
            self._task(name, 1.0)

    def check(self, cfg: DictConfig) -> None:
        super().check(cfg)
        for name in self.experiments:
            self._task(name, self.seconds).check(self._sized(cfg))

    def run(self, cfg: DictConfig, context: RunContext) -> Result:
        (device, where), sized = current_device(cfg), self._sized(cfg)
        failed: list[str] = []
        start = time.monotonic()
        for number, name in enumerate(self.experiments):
            left = self.seconds - (time.monotonic() - start)
            if number and left <= 0 and not self.is_dry:
                names = ", ".join(self.experiments[number:])
                console().print(f"  the time is over: {names} left out", soft_wrap=True)
                break
            seconds = max(1.0, left / (len(self.experiments) - number))
            task = self._task(name, 0.1 if self.is_dry else seconds)
            own = replace(context, run_dir=context.run_dir / name, name=f"{context.name} {name}")
            folder = path_of(name, where, Path(self.record)).parent if self.record else None
            try:
                with self.recording(folder, context.task, device):
                    conclude(partial(task.run, sized, own), sized, own, is_run=False)
            except RunError as error:
                console().print(f"  {name}: {error}", soft_wrap=True)
                failed.append(name)
        missing = RunError(f"not measured: {', '.join(failed)}; see above") if failed else None
        return Result(error=missing)

    def _task(self, name: str, seconds: float) -> Measure:
        return Measure(name, setup=self.setup, seconds=seconds, record=self.record)

    def _sized(self, cfg: DictConfig) -> DictConfig:
        return changed(cfg, model=_option("model", "tiny" if self.is_dry else self.model))


class Delegated(Part):
    """A part whose `tables` another task makes."""

    tables: ClassVar[tuple[str, ...]]

    @abstractmethod
    def delegated(self, cfg: DictConfig) -> tuple[Task, DictConfig]:
        """That task, and its configuration."""

    def check(self, cfg: DictConfig) -> None:
        super().check(cfg)
        task, own = self.delegated(cfg)
        task.check(own)

    def measure(self, cfg: DictConfig, context: RunContext, work: Work) -> None:
        task, own = self.delegated(cfg)
        result = task.run(own, context)
        assert result is not None
        for table in self.tables:
            work.keep(Path(table).stem, result.tables[table])
        work.shown += result.shown
        if result.error is not None:
            raise result.error


@dataclass(frozen=True)
class GpuCalibration(Delegated):
    """Leaves operation tables and hardware.yaml, which names the folder that they are in."""

    home, tables = "lab/calibration", ("dense.csv", "per_sequence.csv", "attention.csv")
    LOADING: ClassVar[float] = 0.4  # of the time: the model, kernels' compilation, the fit behind

    def delegated(self, cfg: DictConfig) -> tuple[Task, DictConfig]:
        """With the most decodes and the longest context."""
        model, batch, seq_len = ("tiny", 2, 64) if self.is_dry else ("13b", 18, 3072)
        seconds = 20.0 if self.is_dry else max(15.0, (1 - self.LOADING) * self.seconds)
        sized = changed(cfg, model=_option("model", model), batch=batch, seq_len=seq_len)
        return Calibrate(seconds, current_device(cfg)[1]), sized

    def measure(self, cfg: DictConfig, context: RunContext, work: Work) -> None:
        super().measure(cfg, context, work)
        made = context.run_dir / f"{current_device(cfg)[1]}.yaml"
        meta = (context.run_dir / META).read_text()
        work.record(META, lambda path: path.write_text(meta))
        work.record("hardware.yaml", lambda path: path.write_text(_naming(made, path.parent)))


def _naming(made: Path, folder: Path) -> str:
    """The text of the hardware file `made`, with the tables in `folder` as its own."""
    text = made.read_text()
    tables = folder.absolute()
    if tables.is_relative_to(REPOSITORY):
        tables = tables.relative_to(REPOSITORY)
    hardware = OmegaConf.create(text)
    hardware.tables = str(tables)
    title = "".join(line for line in text.splitlines(keepends=True) if line.startswith("#"))
    return title + OmegaConf.to_yaml(hardware)


def _option(group: str, name: str) -> DictConfig:
    return read_option(group, CONF / group / f"{name}.yaml")
