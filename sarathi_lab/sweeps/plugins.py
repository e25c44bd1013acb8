"""Which of Hydra's launchers and sweepers a command line chose, and whether what they need is there."""

from __future__ import annotations

import re
from collections.abc import Sequence

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from omegaconf import DictConfig

from sarathi_lab.errors import UserError
from sarathi_lab.plan import build
from sarathi_lab.sweeps.search import OptunaSearch

LAUNCHERS = {
    "joblib": "hydra-joblib-launcher",
    "submitit_local": "hydra-submitit-launcher",
    "submitit_slurm": "hydra-submitit-launcher",
}
WITHOUT_EFFECT = ("hydra.sweep.subdir", "hydra.sweeper.max_batch_size")


def explain_missing(message: str) -> UserError | None:
    """One line for what Hydra says of a launcher or sweeper that is not there; None if it says something else."""
    if (match := re.search(r"Could not find 'hydra/(launcher|sweeper)/([^']+)'", message)) is None:
        return None
    kind, name = match.groups()
    if kind == "sweeper":
        return UserError(f"hydra/sweeper={name} is unknown; use basic (all combinations) or optuna_search")
    if (package := LAUNCHERS.get(name)) is None:
        return UserError(f"hydra/launcher={name} is unknown; use one of basic, {', '.join(LAUNCHERS)}")
    return UserError(f"hydra/launcher={name} needs the package {package}, which is missing; pip install {package}")


def check_single(overrides: Sequence[str]) -> None:
    """Refuse what only a sweep reads. Raises UserError."""
    for override in overrides:
        if re.match(r"\+*hydra[/.](launcher|sweeper|sweep)\b", override):
            raise UserError(f"{override} has no effect on one run; add -m for a sweep, or drop it")


def make_search(master: DictConfig) -> OptunaSearch | None:
    """The search that the sweeper makes, None for all combinations.

    Raises UserError for another sweeper, and for settings of Hydra's that would have no effect.
    """
    for setting in master.hydra.overrides.hydra:
        if (name := setting.partition("=")[0]) in WITHOUT_EFFECT:
            raise UserError(f"{setting} has no effect: runs are numbered, and launched together; drop {name}")
    sweeper = master.hydra.sweeper
    if (target := sweeper["_target_"].rpartition(".")[2]) == BasicSweeper.__name__:
        return None
    if target != OptunaSearch.__name__:
        name = master.hydra.runtime.choices["hydra/sweeper"]
        raise UserError(f"hydra/sweeper={name} is not one of the lab's; use basic (all combinations) or optuna_search")
    return build(sweeper)
