"""Policies that are given as objects, as options of the group `policy` like those of `conf/`."""

from __future__ import annotations

import re
import sys
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from sarathi_lab.config.errors import UserError, require_text
from sarathi_lab.config.paths import CONF
from sarathi_lab.policy import Policy


class PolicyOptions:
    """A folder of options, a file for each policy that was added."""

    def __init__(self, folder: Path) -> None:
        self.names: list[str] = []
        self._folder = folder / "policy"

    def add(self, policy: Policy | type[Policy]) -> str:
        """The name of the option that makes `policy`: an object's fields as they are; of a class
        its defaults, and for the tokens of one iteration the setting `chunk`.

        Raises UserError for a class that nobody finds by its name, and for what no YAML file holds.
        """
        cls = policy if isinstance(policy, type) else type(policy)
        require_text(
            f"{cls.__name__}.name",
            getattr(cls, "name", None),
            'give the class a name: name: ClassVar[str] = "mine"',
        )
        node = {"_target_": _target_of(cls), **_parameters(policy)}
        name = self._free_name(re.sub(r"\W", "_", cls.name))
        try:
            text = OmegaConf.to_yaml(OmegaConf.create(node))
        except OmegaConfBaseException as error:
            reason = str(error).splitlines()[0]
            raise UserError(
                f"policy={policy} can't be written as settings ({reason}); use numbers and text, "
                "or an option's file"
            ) from None
        self._folder.mkdir(exist_ok=True)
        (self._folder / f"{name}.yaml").write_text(text)
        self.names.append(name)
        return name

    def _free_name(self, name: str) -> str:
        taken = {*(path.stem for path in CONF.glob("policy/*.yaml")), *self.names}
        number = 1
        while (found := name if number == 1 else f"{name}_{number}") in taken:
            number += 1
        return found


def _target_of(cls: type) -> str:
    if getattr(sys.modules.get(cls.__module__), cls.__qualname__, None) is not cls:
        raise UserError(
            f"policy={cls.__qualname__} is not what {cls.__module__} has by that name; define it "
            "at the top of a module or in a notebook's cell, and make its objects anew"
        )
    return f"{cls.__module__}.{cls.__qualname__}"


def _parameters(policy: Policy | type[Policy]) -> dict[str, Any]:
    if not is_dataclass(policy):
        return {}
    if not isinstance(policy, type):
        return {one.name: getattr(policy, one.name) for one in fields(policy) if one.init}
    own = {one.name: _default(one) for one in fields(policy) if one.init}
    own = {name: value for name, value in own.items() if value is not MISSING}
    return {**own, **({policy.budget_field: "${chunk}"} if policy.budget_field else {})}


def _default(one: Field[Any]) -> Any:
    return one.default if one.default_factory is MISSING else one.default_factory()
