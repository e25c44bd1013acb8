"""Tasks called as functions: configurations as the command line composes them, without its run."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import yaml
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from sarathi_lab.config.errors import UserError
from sarathi_lab.config.instantiate import build
from sarathi_lab.config.paths import CONF
from sarathi_lab.config.run_context import RunContext
from sarathi_lab.config.stated import follow_stated
from sarathi_lab.results.result import Result
from sarathi_lab.tasks.base import run_task


@cache
def _composed(groups: tuple[str, ...]) -> DictConfig:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("config", overrides=list(groups))


def config_of(*settings: str) -> DictConfig:
    """The configuration of a command line with these settings, options of groups before others."""
    pairs = [setting.lstrip("+").partition("=")[::2] for setting in settings]
    groups = tuple(f"{key}={value}" for key, value in pairs if (CONF / key).is_dir())
    cfg = _composed(groups).copy()
    for key, value in pairs:
        if not (CONF / key).is_dir():
            OmegaConf.update(cfg, key, yaml.safe_load(value), force_add=True)
    follow_stated(cfg, settings)
    return cfg


def settings_of(task: str) -> dict[str, object]:
    """The task's own settings as its file has them."""
    found = OmegaConf.to_container(config_of(f"task={task}").task, resolve=True)
    assert isinstance(found, dict)
    return {str(name): value for name, value in found.items() if name != "_target_"}


def checked(*settings: str) -> None:
    """Make and check the task; raises UserError as a command line does."""
    cfg = config_of(*settings)
    build(cfg.task).check(cfg)


def refusal_of(*settings: str) -> str:
    """The one line in which the task refuses the settings."""
    with pytest.raises(UserError) as raised:
        checked(*settings)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def run(folder: Path, *settings: str) -> Result:
    """The result of the task that the settings name, run in `folder`; nothing else is written."""
    return run_of(folder, config_of(*settings), settings)


def run_of(folder: Path, cfg: DictConfig, settings: tuple[str, ...] = ("task=serve",)) -> Result:
    """The same of a configuration that was composed of the settings."""
    task = build(cfg.task)
    return task.run(cfg, replace(_context(folder, settings), prepared=task.check(cfg)))


def kept(folder: Path, *settings: str) -> Path:
    """`folder`, where the task's result is kept as a run's; nothing of a sweep."""
    run_task(config_of(*settings), _context(folder, settings))
    return folder


def _context(folder: Path, settings: tuple[str, ...]) -> RunContext:
    (task,) = [setting[5:] for setting in settings if setting.startswith("task=")]
    name = " ".join(["sarathi", *settings])
    where = (folder, folder / "baselines", name, "tests")
    return RunContext(*where, task=task, settings=settings)
