"""Parts of the campaign that other tasks and experiments measure, at the campaign's sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pandas as pd
from omegaconf import DictConfig, OmegaConf

from sarathi_lab.config.errors import require_one_of
from sarathi_lab.config.paths import CONF, REPOSITORY
from sarathi_lab.config.run_context import RunContext
from sarathi_lab.experiment import gpu_figures, kv_reread
from sarathi_lab.tasks.calibrate import PROFILE_FILE, Calibrate
from sarathi_lab.tasks.gpu.context import Context
from sarathi_lab.tasks.gpu.part import Part, Work
from sarathi_lab.tasks.peers.task import Peers

MODELS = ("13b", "33b")


@dataclass(frozen=True, kw_only=True)
class GpuFigures(Part):
    """The paper's figures with `model`: 13b or 33b. Leaves <model>-points.csv in the columns of
    `figure.parquet`, every composition that was timed and load that was served, and pictures.
    """

    home: ClassVar[str] = "sarathi/paper"
    model: str

    def __post_init__(self) -> None:
        super().__post_init__()
        require_one_of("task.model", self.model, MODELS)

    def measure(self, cfg: DictConfig, context: RunContext, work: Work) -> None:
        """Measure until the time is over."""
        _in_context(work, context, lambda found: gpu_figures.measure(found, self.model))


@dataclass(frozen=True)
class GpuKvReread(Part):
    """Leaves kv_reread.csv: microseconds of a layer's attention, whole and in chunks."""

    home: ClassVar[str] = "sarathi/kv_reread"

    def measure(self, cfg: DictConfig, context: RunContext, work: Work) -> None:
        """Measure until the time is over."""
        _in_context(work, context, kv_reread.measure)


def _in_context(work: Work, context: RunContext, measure: Callable[[Context], None]) -> None:
    tables = context.run_dir / "tables"
    found = Context(context.task, work.device, work.is_dry, work.seconds, tables, tables)
    try:
        measure(found)
    finally:
        for path in sorted(tables.rglob("*.csv")):
            work.keep(path.stem, pd.read_csv(path))
        for path in sorted(tables.rglob("*.png")):
            work.record(path.name, lambda to, path=path: to.write_bytes(path.read_bytes()))


@dataclass(frozen=True)
class GpuCalibration(Part):
    """Leaves profile.csv and hardware.yaml, which names that table where it is recorded."""

    home: ClassVar[str] = "lab/calibration"
    LOADING: ClassVar[float] = 0.4  # of the time: the model, kernels' compilation, the fit behind
    FEWEST_SECONDS: ClassVar[dict[str, float]] = {"paper": 15.0, "dry": 5.0}
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
        seconds = max(self.FEWEST_SECONDS[self.setup], (1 - self.LOADING) * self.seconds)
        return Calibrate(seconds, name)

    def _sized(self, cfg: DictConfig) -> DictConfig:
        model, batch, seq_len = self.SIZES[self.setup]
        return _changed(cfg, model=model, batch=batch, seq_len=seq_len)


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
        return _changed(cfg, policy="sarathi_serve", batch=batch, chunk=chunk)


def _changed(cfg: DictConfig, **settings: str | int) -> DictConfig:
    """`cfg` with other options of groups and other values."""
    changed = cfg.copy()
    for name, value in settings.items():
        is_option = OmegaConf.is_dict(cfg[name])
        changed[name] = OmegaConf.load(CONF / name / f"{value}.yaml") if is_option else value
    return changed
