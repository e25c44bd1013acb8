"""sarathi_lab.config.instantiate."""

from __future__ import annotations

import re
from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from sarathi_lab.config.errors import UserError


def build(node: DictConfig) -> Any:
    """Instantiate a config node; a UserError raised by its constructor comes out as itself."""
    try:
        return instantiate(node, _convert_="all")
    except InstantiationException as error:
        if isinstance(error.__cause__, UserError):
            raise error.__cause__ from None
        if isinstance(
            error.__cause__, TypeError
        ):  # a parameter deleted with `~`, or of a kind nobody expects
            raise UserError(_explained(node, error.__cause__)) from None
        raise


def resolved(cfg: DictConfig) -> dict[str, Any]:
    """The configuration as plain values, all interpolations filled in."""
    container = OmegaConf.to_container(cfg, resolve=True)
    assert isinstance(container, dict)
    return {str(key): value for key, value in container.items()}


def _explained(node: DictConfig, error: TypeError) -> str:
    """One line for what a constructor says of its arguments."""
    if missing := re.search(r"(\w+)\.__init__\(\) missing \d+ required .*?: (.*)", str(error)):
        return f"{missing[1]} needs {missing[2]}; put it back (its file lacks it, or ~ removed it)"
    return f"{node.get('_target_')}: {error}; correct its settings"
