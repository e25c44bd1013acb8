"""`model=auto`: a checkpoint where `model.path` names one, else the device's default shape. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hydra.utils import instantiate
from omegaconf import OmegaConf

from sarathi_lab.model.checkpoint import check_checkpoint, find_checkpoint
from sarathi_lab.model.huggingface import read_spec
from sarathi_lab.model.spec import ModelSpec
from sarathi_lab.paths import CONF


@dataclass(frozen=True)
class AutoModel:
    """`path` is a Hugging Face folder or hub id, or None for random weights in the shape that fits the device."""

    path: str | None = None

    def resolve(self, default_name: str) -> tuple[ModelSpec, Path | None]:
        """The spec, and the folder of the weights if there is one; nothing is loaded, all is checked.

        Without a path the spec is that of `conf/model/<default_name>.yaml`. Raises UserError for a path that is
        missing, holds no complete safetensors checkpoint, or an architecture that is not supported.
        """
        if self.path is None:
            return instantiate(OmegaConf.load(CONF / "model" / f"{default_name}.yaml")), None
        directory = find_checkpoint(str(self.path))
        spec = read_spec(directory)
        check_checkpoint(directory, spec)
        return spec, directory
