"""Errors of Hydra, which fill several lines, as one: the value, the reason and the fix."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.errors import HydraException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from sarathi_lab.config.arguments import name_of
from sarathi_lab.config.errors import UserError, suggestion, unknown_option
from sarathi_lab.config.instantiate import class_of, make_loader, parameters_of

HYDRA_ERRORS = (HydraException, OmegaConfBaseException, ValueError)
GROUPS = (
    *("task", "policy", "workload", "executor", "model", "hardware", "host", "cluster", "slo"),
    *("speculation", "tracking"),
)


@contextmanager
def explained(
    settings: Sequence[str],
    loader: ConfigLoader | None = None,
    kinds: tuple[type[Exception], ...] = HYDRA_ERRORS,
) -> Iterator[None]:
    """Raise UserError for errors of Hydra and OmegaConf about `settings` in the block."""
    try:
        yield
    except kinds as error:
        raise _explain(error, settings, loader or make_loader()) from None


def _explain(error: Exception, settings: Sequence[str], loader: ConfigLoader) -> UserError:
    """One line for what Hydra or OmegaConf says of `settings`."""
    message, cause = str(error), str(error.__cause__ or "")
    if isinstance(error, OverrideParseException):
        return UserError(
            f"{error.override!r} can't be read; settings are written name=value, without spaces "
            "around ="
        )
    if found := re.search(r"Sweep parameters? '(.+?)' requires --multirun", message):
        return UserError(f"{found[1]} is a sweep over several values; add -m to run them all")
    if found := re.search(r"Ambiguous value for argument '(.+?)'", message):
        return UserError(
            f"{found[1]} has several values; add -m to sweep over them, or quote the comma"
        )
    if found := re.search(r"Could not find 'hydra/(launcher|sweeper)/([^']+)'", message):
        return UserError(_missing_plugin(*found.groups()))
    if found := re.search(rf"Could not find '({'|'.join(GROUPS)})/(.+?)'", message):
        return unknown_option(found[1], found[2], options(found[1], settings, loader))
    if found := re.search(r"Could not override '([\w.@/]+)'", message + cause):
        return _unknown_key(found[1], settings, loader)
    lines = [line.strip() for line in f"{message}\n{cause}".splitlines() if line.strip()]
    first = lines[0] if lines else type(error).__name__
    return UserError(f"{' '.join(settings)}: {first}; --help shows the settings")


def _missing_plugin(kind: str, name: str) -> str:
    if kind == "sweeper":
        return f"hydra/sweeper={name} is unknown; use lab (all combinations) or optuna_search"
    package = f"hydra-{name.partition('_')[0]}-launcher"
    return (
        f"hydra/launcher={name} is unknown or its package is missing; use one of basic, joblib, "
        f"ray, submitit_local and submitit_slurm, after pip install {package}"
    )


def options(group: str, settings: Sequence[str], loader: ConfigLoader) -> list[str]:
    """The options of a group, those of the folders that `settings` add included."""
    folders = [setting for setting in settings if name_of(setting) == "hydra.searchpath"]
    return loader.get_group_options(group, config_name="config", overrides=folders)


def unknown_name(key: str, valid: Sequence[str], what: str) -> UserError:
    """For a key that is not `what`."""
    fix = f"use one of {', '.join(sorted(valid))}" if valid else "it has none; drop it"
    return UserError(f"{key} is not {what}{suggestion(key, valid)}; {fix}")


def _unknown_key(key: str, settings: Sequence[str], loader: ConfigLoader) -> UserError:
    chosen = rf"({'|'.join(GROUPS)})=[\w.-]+|hydra\.searchpath=.*"
    choices = [setting for setting in settings if re.fullmatch(chosen, setting)]
    cfg = loader.load_configuration("config", choices, RunMode.RUN)
    group, _, parameter = key.partition(".")
    if not parameter or group not in cfg or not isinstance(cfg[group], DictConfig):
        names = [str(name) for name in cfg if name != "hydra"]
        return unknown_name(key, [*names, "experiment"], "a setting")
    names = parameter_names(cfg, group)
    is_typo = bool(difflib.get_close_matches(key, names, cutoff=0.9))
    # Importing the class takes a second: only where a typo is not the likelier mistake.
    listed = parameters_of(class_of(cfg, group)) if not is_typo and group in GROUPS else None
    if parameter.partition(".")[0] in (listed or ()):
        return UserError(
            f"{key} is at its default, which the option's file does not list; write +{key}=VALUE"
        )
    owner = str(cfg[group].get("_target_", group)).rpartition(".")[2]
    return unknown_name(key, names, f"a parameter of {owner}")


def parameter_names(cfg: DictConfig, group: str) -> list[str]:
    """A group's parameters as a user types them: the short name where it is an interpolation."""
    raw: Any = OmegaConf.to_container(cfg[group], resolve=False)
    return [
        short[1] if (short := re.fullmatch(r"\$\{(\w+)\}", str(value))) else f"{group}.{key}"
        for key, value in raw.items()
        if key != "_target_"
    ]
