"""Plans of many policies from one composition, served below the command line."""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from typing import Any

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from sarathi_lab.config.paths import CONF
from sarathi_lab.engine.executor import Executor
from sarathi_lab.engine.ledger import Ledger
from sarathi_lab.engine.loop import serve
from sarathi_lab.tasks.plan import Plan, make_plan


@cache
def _composed(overrides: tuple[str, ...]) -> DictConfig:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("config", list(overrides))


def plan_of(policy: str, *overrides: str, changes: dict[str, Any] | None = None) -> Plan:
    """The plan of the option `policy` under `overrides`, composed once for all policies; `changes`
    are settings by their dotted names.
    """
    cfg = deepcopy(_composed(overrides))
    cfg.policy = OmegaConf.load(CONF / "policy" / f"{policy}.yaml")
    for key, value in (changes or {}).items():
        OmegaConf.update(cfg, key, value)
    return make_plan(cfg)


def serve_plan(plan: Plan, executor: Executor | None = None) -> Ledger:
    """Serve it on `executor`, or the plan's own."""
    return serve(plan.load.arrivals(), plan.engine, executor or plan.build()[1])
