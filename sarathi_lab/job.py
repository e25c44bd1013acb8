"""One job of a sweep, or the only one: its name and place, then its task."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from sarathi_lab.plan import build
from sarathi_lab.task import Place

# What does not make a run another one.
UNNAMED = ("policy", "executor", "tracking", "baselines", "output", "trace", "hydra")


def run_job(cfg: DictConfig, swept: Sequence[str]) -> None:
    """Do what `cfg` asks for in the folder that Hydra has made; `swept` are the settings that its sweep varies."""
    settings = HydraConfig.get()
    run_dir = Path(settings.runtime.output_dir)
    is_sweep = settings.mode == RunMode.MULTIRUN
    root = Path(settings.sweep.dir) if is_sweep else run_dir
    name = _name(str(settings.runtime.choices["policy"]), settings.overrides.task, swept if is_sweep else None)
    group = "/".join(root.absolute().parts[-2:])
    experiment = settings.runtime.choices.get("experiment")
    build(cfg.task).run(cfg, Place(run_dir, root / "baselines", name, group, swept, experiment))


def _name(policy: str, overrides: Sequence[str], swept: Sequence[str] | None) -> str:
    """The policy and what sets the run apart: what its sweep varies, or what a single run was told of its work."""
    told = [(override.partition("=")[0].lstrip("+"), override) for override in overrides]
    if swept is None:
        parts = [override for key, override in told if key.partition(".")[0] not in UNNAMED]
    else:
        parts = [override for key, override in told if key in swept and key != "policy"]
    return " ".join([policy, *parts])
