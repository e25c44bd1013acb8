"""The models and GPUs of `conf/` by name, for code that composes no configuration."""

from __future__ import annotations

from hydra.utils import instantiate
from omegaconf import OmegaConf

from sarathi_lab.config.paths import CONF
from sarathi_lab.executor.simulated.hardware import Hardware
from sarathi_lab.model.spec import ModelSpec


def load_spec(model: str) -> ModelSpec:
    """The model of `conf/model/`."""
    return instantiate(OmegaConf.load(CONF / "model" / f"{model}.yaml"))


def load_hardware(hardware: str) -> Hardware:
    """The GPU of `conf/hardware/`."""
    return instantiate(OmegaConf.load(CONF / "hardware" / f"{hardware}.yaml"))
