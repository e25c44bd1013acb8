"""Objects from configuration nodes, and from the files of `conf/` by their names."""

from __future__ import annotations

import re
from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig, ListConfig, OmegaConf

from sarathi_lab.config.errors import UserError
from sarathi_lab.config.paths import CONF


def build(node: DictConfig | ListConfig) -> Any:
    """Instantiate a config node; a UserError raised by its constructor comes out as itself."""
    try:
        return instantiate(node, _convert_="all")
    except InstantiationException as error:
        if isinstance(error.__cause__, UserError):
            raise error.__cause__ from None
        # A parameter deleted with `~`, or of a kind nobody expects.
        if isinstance(error.__cause__, TypeError):
            raise UserError(_explained(node, error.__cause__)) from None
        raise


def load_option(group: str, name: str) -> Any:
    """The object that `conf/GROUP/NAME.yaml` describes, such as ("model", "13b")."""
    return build(OmegaConf.load(CONF / group / f"{name}.yaml"))


def resolved(cfg: DictConfig) -> dict[str, Any]:
    """The configuration as plain values, all interpolations filled in."""
    container = OmegaConf.to_container(cfg, resolve=True)
    assert isinstance(container, dict)
    return {str(key): value for key, value in container.items()}


def _explained(node: Any, error: TypeError) -> str:
    """One line for what a constructor says of its arguments."""
    if missing := re.search(r"(\w+)\.__init__\(\) missing \d+ required .*?: (.*)", str(error)):
        return f"{missing[1]} needs {missing[2]}; put it back (its file lacks it, or ~ removed it)"
    return f"{node.get('_target_')}: {error}; correct its settings"
