"""Objects from configuration nodes, and from the files of `conf/` by their names."""

from __future__ import annotations

import inspect
import pickle
import re
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from hydra import initialize_config_dir
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import InstantiationException
from hydra.types import RunMode
from hydra.utils import instantiate
from omegaconf import DictConfig, ListConfig, OmegaConf

from sarathi_lab.config.errors import UserError
from sarathi_lab.config.paths import CONF


def build(node: DictConfig | ListConfig, kind: Any = object) -> Any:
    """Instantiate a config node, which must make a `kind`; a UserError raised by its constructor
    comes out as itself.
    """
    try:
        made = instantiate(node, _convert_="all")
    except InstantiationException as error:
        if isinstance(error.__cause__, UserError):
            raise error.__cause__ from None
        # A parameter deleted with `~`, or of an unexpected kind.
        if isinstance(error.__cause__, TypeError):
            raise UserError(_explained(node, error.__cause__)) from None
        raise
    if not isinstance(made, kind):
        raise UserError(f"_target_={type(made).__name__} is no {kind.__name__}; name one")
    return made


def class_of(cfg: DictConfig, group: str) -> type:
    """The class that `GROUP._target_` names. Raises UserError if it can't be imported."""
    module, _, name = str(target := cfg[group]["_target_"]).rpartition(".")
    reason = "it is no class"
    try:
        if isinstance(found := getattr(import_module(module or name), name), type):
            return found
    except Exception as error:  # any of importing a user's module
        reason = next(iter(str(error).splitlines()), type(error).__name__)
    raise UserError(
        f"{group}._target_={target} can't be imported ({reason}); name a class as "
        "module.Class, with the module in the current folder or installed"
    )


def parameters_of(cls: type) -> list[str] | None:
    """The names that its constructor takes; None if it takes any."""
    try:
        parameters = inspect.signature(cls).parameters
    except ValueError:  # of some that are built in
        return None
    takes_any = any(found.kind is found.VAR_KEYWORD for found in parameters.values())
    return None if takes_any else list(parameters)


def option_files(group: str) -> dict[str, Path]:
    """The options of a group by name: those of conf/, and those in the folders that the running
    job's `--config-dir` or `hydra.searchpath` adds, which do not replace them.
    """
    sources = HydraConfig.get().runtime.config_sources if HydraConfig.initialized() else []
    added = [Path(source.path) for source in sources if source.schema == "file"]
    paths = [path for folder in (*reversed(added), CONF) for path in folder.glob(f"{group}/*.yaml")]
    return dict(sorted((path.stem, path) for path in paths))


def make_loader() -> ConfigLoader:
    """Hydra's loader of conf/."""
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONF), version_base="1.3", job_name="sarathi_lab"):
        return GlobalHydra.instance().config_loader()


def read_yaml(path: Path) -> DictConfig:
    """The settings in a file, which is parsed again only once it has changed."""
    state = path.stat()
    return copied(_parsed(path, state.st_mtime_ns, state.st_size))


@cache
def _parsed(path: Path, *state: int) -> Any:
    return OmegaConf.load(path)


def read_option(group: str, path: Path) -> DictConfig:
    """The settings in an option's file, those of its defaults list included."""
    node = read_yaml(path)
    if "defaults" not in node:
        return node
    settings = [f"hydra.searchpath=['file://{path.parents[1]}']", f"{group}={path.stem}"]
    return make_loader().load_configuration("config", settings, RunMode.RUN)[group]


def load_option(group: str, name: str) -> Any:
    """The object that `conf/GROUP/NAME.yaml` describes, such as ("model", "13b")."""
    return build(read_option(group, CONF / group / f"{name}.yaml"))


def resolved(cfg: DictConfig) -> dict[str, Any]:
    """The configuration as plain values, all interpolations filled in."""
    container = OmegaConf.to_container(cfg, resolve=True)
    assert isinstance(container, dict)
    return {str(key): value for key, value in container.items()}


def copied(cfg: DictConfig) -> DictConfig:
    """A copy, in a third of the time that OmegaConf's own takes."""
    copy: DictConfig = pickle.loads(pickle.dumps(cfg))
    return copy


def _explained(node: Any, error: TypeError) -> str:
    """Return one line for a constructor's error about its arguments."""
    if missing := re.search(r"(\w+)\.__init__\(\) missing \d+ required .*?: (.*)", str(error)):
        return f"{missing[1]} needs {missing[2]}; put it back (its file lacks it, or ~ removed it)"
    return f"{node.get('_target_')}: {error}; correct its settings"
