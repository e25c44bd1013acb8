"""Parts of the campaign that other tasks and experiments measure, at the campaign's sizes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import torch
from omegaconf import DictConfig, OmegaConf

from sarathi_lab.config.console import console
from sarathi_lab.config.errors import RunError, require_one_of
from sarathi_lab.config.paths import CONF, REPOSITORY
from sarathi_lab.config.run_context import RunContext
from sarathi_lab.executor.torch.device import device_description
from sarathi_lab.results.load import path_of
from sarathi_lab.results.provenance import device_folder
from sarathi_lab.results.result import Result
from sarathi_lab.tasks.base import conclude
from sarathi_lab.tasks.calibrate import PROFILE_FILE, Calibrate
from sarathi_lab.tasks.gpu.part import GpuTask, Part, Work, current_device
from sarathi_lab.tasks.measure import Measure
from sarathi_lab.tasks.peers.task import Peers


@dataclass(frozen=True, kw_only=True)
class GpuExperiments(GpuTask):
    """Each of `experiments` with `model`, one after the other: task=measure at the paper's sizes.

    Their tables are recorded as task=measure does it. One that fails ends no other; those that the
    time does not suffice for are left out. Raises RunError in the end if some failed.
    """

    model: str
    experiments: Sequence[str]

    def __post_init__(self) -> None:
        super().__post_init__()
        models = sorted(path.stem for path in (CONF / "model").glob("*.yaml"))
        require_one_of("task.model", self.model, models)
        for name in self.experiments:
            self._task(name, 1.0)

    def check(self, cfg: DictConfig) -> None:
        """Refuse what task=measure does, too."""
        super().check(cfg)
        for name in self.experiments:
            self._task(name, self.seconds).check(self._sized(cfg))

    def run(self, cfg: DictConfig, context: RunContext) -> Result:
        """Measure one by one, each in a folder of its own."""
        device, sized = current_device(cfg), self._sized(cfg)
        failed: list[str] = []
        start = time.monotonic()
        for number, name in enumerate(self.experiments):
            left = self.seconds - (time.monotonic() - start)
            if number and left <= 0 and not self.is_dry:
                names = ", ".join(self.experiments[number:])
                console().print(f"  the time is over: {names} left out", soft_wrap=True)
                break
            seconds = max(1.0, left / (len(self.experiments) - number))
            try:
                self._measure(name, 0.1 if self.is_dry else seconds, sized, context, device)
            except RunError as error:
                console().print(f"  {name}: {error}", soft_wrap=True)
                failed.append(name)
        missing = RunError(f"not measured: {', '.join(failed)}; see above") if failed else None
        return Result(error=missing)

    def _measure(
        self,
        name: str,
        seconds: float,
        cfg: DictConfig,
        context: RunContext,
        device: torch.device,
    ) -> None:
        task = self._task(name, seconds)
        own = replace(context, run_dir=context.run_dir / name, name=f"{context.name} {name}")
        folder = None
        if self.record is not None:
            where = device_folder(device.type, device_description(device))
            folder = path_of(name, where, Path(self.record)).parent
        with self.recording(folder, context.task, device):
            conclude(lambda: task.run(cfg, own), cfg, own, is_run=False)

    def _task(self, name: str, seconds: float) -> Measure:
        return Measure(name, setup=self.setup, seconds=seconds, record=self.record)

    def _sized(self, cfg: DictConfig) -> DictConfig:
        return changed(cfg, model="tiny" if self.is_dry else self.model)


@dataclass(frozen=True)
class GpuCalibration(Part):
    """Leaves profile.csv and hardware.yaml, which names that table where it is recorded."""

    home: ClassVar[str] = "lab/calibration"
    LOADING: ClassVar[float] = 0.4  # of the time: the model, kernels' compilation, the fit behind
    FEWEST_SECONDS: ClassVar[float] = 15.0
    DRY_SECONDS: ClassVar[float] = 2.0
    SIZES: ClassVar[dict[str, tuple[str, int, int]]] = {
        "paper": ("13b", 18, 3072),  # model, most decodes, longest context
        "dry": ("tiny", 2, 64),
    }

    def check(self, cfg: DictConfig) -> None:
        """Refuse what task=calibrate does, too."""
        super().check(cfg)
        self._task("gpu").check(self._sized(cfg))

    def measure(self, cfg: DictConfig, context: RunContext, work: Work) -> None:
        """Run task=calibrate, and record its files."""
        name = "gpu" if work.folder is None else work.folder.name
        result = self._task(name).run(self._sized(cfg), context)
        table = result.tables[PROFILE_FILE]
        work.keep(Path(PROFILE_FILE).stem, table)
        work.shown += result.shown
        made = context.run_dir / f"{name}.yaml"
        work.record("hardware.yaml", lambda path: path.write_text(_naming(made, path.parent)))

    def _task(self, name: str) -> Calibrate:
        seconds = max(self.FEWEST_SECONDS, (1 - self.LOADING) * self.seconds)
        return Calibrate(self.DRY_SECONDS if self.is_dry else seconds, name)

    def _sized(self, cfg: DictConfig) -> DictConfig:
        model, batch, seq_len = self.SIZES[self.setup]
        return changed(cfg, model=model, batch=batch, seq_len=seq_len)


def _naming(made: Path, folder: Path) -> str:
    """The text of the hardware file `made`, with the table in `folder` as its own."""
    text = made.read_text()
    profile = (folder / PROFILE_FILE).absolute()
    if profile.is_relative_to(REPOSITORY):
        profile = profile.relative_to(REPOSITORY)
    hardware = OmegaConf.create(text)
    hardware.profiles = dict.fromkeys(hardware.profiles, str(profile))
    title = "".join(line for line in text.splitlines(keepends=True) if line.startswith("#"))
    return title + OmegaConf.to_yaml(hardware)


@dataclass(frozen=True)
class GpuPeers(Part):
    """Leaves peers.csv: the lab and transformers on the same requests, random weights of one shape,
    one engine at a time.
    """

    home: ClassVar[str] = "lab/peers"
    PEERS: ClassVar[tuple[str, ...]] = ("transformers_generate", "transformers_cb", "vllm")

    def check(self, cfg: DictConfig) -> None:
        """Refuse what task=peers does, too."""
        super().check(cfg)
        self._task.check(self._sized(cfg))

    def measure(self, cfg: DictConfig, context: RunContext, work: Work) -> None:
        """Run task=peers, and record its table."""
        result = self._task.run(self._sized(cfg), context)
        work.keep("peers", result.tables["peers"])
        work.shown += result.shown
        if result.error is not None:
            raise result.error

    @property
    def _task(self) -> Peers:
        model, dtype = ("tiny", "float32") if self.is_dry else ("llama3-8b", "bfloat16")
        scenario = "dry" if self.is_dry else "gpu"
        return Peers(self.PEERS, {}, [model], [dtype], [scenario], random_weights=True)

    def _sized(self, cfg: DictConfig) -> DictConfig:
        batch, chunk = (2, 16) if self.is_dry else (32, 512)
        return changed(cfg, policy="sarathi_serve", batch=batch, chunk=chunk)


def changed(cfg: DictConfig, **settings: str | int) -> DictConfig:
    """`cfg` with other options of groups and other values."""
    changed = cfg.copy()
    for name, value in settings.items():
        is_option = OmegaConf.is_dict(cfg[name])
        changed[name] = OmegaConf.load(CONF / name / f"{value}.yaml") if is_option else value
    return changed
