"""What is measured: a real device, the model, and the folder of its weights if it has one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from sarathi_lab.config.errors import UserError
from sarathi_lab.config.instantiate import build
from sarathi_lab.executor.torch.checks import require_one_stage
from sarathi_lab.model.checkpoint import resolve_model
from sarathi_lab.model.spec import ModelSpec

Subject = tuple[Any, ModelSpec, Path | None]  # a Backend that computes
BLOCK_SIZE = 16  # tokens, where the size of a block plays no part


def measured_subject(cfg: DictConfig) -> Subject:
    """The real device, the model and its weights. Raises UserError for one that is not, or more."""
    backend = build(cfg.executor)
    if not backend.computes_tokens:
        raise UserError(
            f"task=calibrate measures a real device, executor={backend.name} is none; use "
            "executor=torch"
        )
    require_one_stage(backend, "task=calibrate")
    return backend, *resolve_model(cfg, backend)
