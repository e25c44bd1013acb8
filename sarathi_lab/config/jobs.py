"""One job: its configuration, its check, and its run in the folder that Hydra makes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hydra._internal.callbacks import Callbacks  # HydraContext wants one; there is no public way
from hydra.core.config_loader import ConfigLoader
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import run_job as run_in_folder
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig, open_dict, read_write

from sarathi_lab.config.apart import call_apart
from sarathi_lab.config.effects import fit_targets
from sarathi_lab.config.instantiate import build
from sarathi_lab.config.run_context import RunContext

Work = Callable[[DictConfig, RunContext], None]  # does what a configuration asks for
# What does not make a run another one.
UNNAMED = ("policy", "executor", "tracking", "baselines", "output", "trace", "limit", "hydra")


@dataclass
class Job:
    """The configuration of one run, composed once, and what its task's check has made of it."""

    settings: tuple[str, ...]
    composed: DictConfig  # with Hydra's own node
    cfg: DictConfig
    is_checked: bool = False
    prepared: Any = None

    @classmethod
    def of(cls, settings: Sequence[str], composed: DictConfig) -> Job:
        """The job of a composed configuration."""
        cfg = copy.deepcopy(composed)
        with open_dict(cfg):
            del cfg["hydra"]
        return cls(tuple(settings), composed, cfg)

    def check(self) -> None:
        """Let the task check and prepare its run. Raises UserError."""
        hydra = HydraConfig.instance()
        before = hydra.cfg
        hydra.set_config(self.composed)
        try:
            self.prepared = build(self.cfg.task).check(self.cfg)
        finally:
            hydra.cfg = before
        self.is_checked = True

    def take_prepared(self) -> Any:
        """What the check has made, for the one run of it; it is kept here no longer."""
        prepared, self.prepared, self.is_checked = self.prepared, None, False
        return prepared

    def place(self, folder: Path, number: int | None = None) -> None:
        """Let Hydra run it in `folder`, or as a sweep's job below it."""
        hydra = self.composed.hydra
        with read_write(hydra), open_dict(hydra):
            if number is None:
                hydra.mode, hydra.run.dir = RunMode.RUN, str(folder)
            else:
                hydra.sweep.dir, hydra.job.num, hydra.job.id = str(folder), number, number

    def run(self, function: Callable[[DictConfig], None], loader: ConfigLoader) -> None:
        """Call `function` in the job's folder, with its logs, callbacks and environment. Raises
        what it raises.
        """
        is_sweep = self.composed.hydra.mode == RunMode.MULTIRUN
        errors: list[Exception] = []

        def caught(cfg: DictConfig) -> None:
            try:
                function(cfg)
            except Exception as error:
                errors.append(error)
                raise

        run_in_folder(
            caught,
            self.composed,
            job_dir_key="hydra.sweep.dir" if is_sweep else "hydra.run.dir",
            job_subdir_key="hydra.sweep.subdir" if is_sweep else None,
            hydra_context=hydra_context(loader, self.composed),
        )
        if errors:
            raise errors[0]


def hydra_context(loader: ConfigLoader, cfg: DictConfig) -> HydraContext:
    """What Hydra runs and launches jobs with: its loader, and the callbacks of `cfg`."""
    return HydraContext(loader, Callbacks(cfg))


def run_here(work: Work, cfg: DictConfig, swept: Sequence[str], job: Job | None = None) -> None:
    """Do the work of `cfg` in the folder that Hydra has made. A job of another process, or one of
    a search, is checked first.
    """
    settings = HydraConfig.get()
    if job is not None and job.is_checked:
        prepared = job.take_prepared()
    else:
        fit_targets(cfg, settings.overrides.task)
        prepared = build(cfg.task).check(cfg)
    run_dir = Path(settings.runtime.output_dir)
    is_sweep = settings.mode == RunMode.MULTIRUN
    root = Path(settings.sweep.dir) if is_sweep else run_dir
    choices = settings.runtime.choices
    context = RunContext(
        run_dir=run_dir,
        baselines_dir=root / "baselines",
        name=_name(str(choices["policy"]), settings.overrides.task, swept if is_sweep else None),
        group="/".join(root.absolute().parts[-2:]),
        swept=swept,
        experiment=choices.get("experiment"),
        task=str(choices["task"]),
        prepared=prepared,
    )
    if cfg.limit is None:
        work(cfg, context)
    else:  # which makes its plan itself
        call_apart(work, cfg, replace(context, prepared=None), limit=cfg.limit)


def _name(policy: str, settings: Sequence[str], swept: Sequence[str] | None) -> str:
    """The policy and what sets the run apart: what its sweep varies, or what a single run was told
    of its work.
    """
    told = [(setting.partition("=")[0].lstrip("+"), setting) for setting in settings]
    own = [setting for key, setting in told if key == "policy._target_"]
    policy = own[-1].rpartition(".")[2] if own else policy
    if swept is None:
        parts = [setting for key, setting in told if key.partition(".")[0] not in UNNAMED]
    else:
        named = ("policy", "policy._target_")
        parts = [setting for key, setting in told if key in swept and key not in named]
    return " ".join([policy, *parts])
