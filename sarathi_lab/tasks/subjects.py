"""What tasks are about: a device's cost model, a policy of any chunk, a real device."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig

from sarathi_lab.config.errors import UserError
from sarathi_lab.config.instantiate import build
from sarathi_lab.engine.executor import Predictor
from sarathi_lab.executor.simulated.backend import SimulatedBackend
from sarathi_lab.experiment.advisor import PolicyOfChunk
from sarathi_lab.model.configured import resolve_model
from sarathi_lab.model.spec import ModelSpec
from sarathi_lab.policy import Policy, with_budget

if TYPE_CHECKING:
    from sarathi_lab.executor.torch.backend import TorchBackend

# What is measured: a real device, the model, and the folder of its weights if it has one.
Subject = tuple["TorchBackend", ModelSpec, Path | None]

BLOCK_SIZE = 16  # tokens, where the size of a block plays no part


def cost_of(cfg: DictConfig) -> tuple[SimulatedBackend, ModelSpec, Predictor]:
    """The device, the model, and the device's cost model of it. Raises UserError without one."""
    backend = build(cfg.executor)
    if not isinstance(backend, SimulatedBackend):
        raise UserError(
            f"executor={backend.name} has no cost model to predict with; use executor=simulated"
        )
    if backend.num_stages > 1:
        raise UserError(
            f"executor.pipeline_parallel={backend.num_stages} is not predicted: this is for one "
            "batch at a time; use 1"
        )
    spec, _ = resolve_model(cfg, backend)
    return backend, spec, backend.predictor(spec)


def policy_of_chunk(cfg: DictConfig) -> PolicyOfChunk:
    """The policy by its chunk. Raises UserError for one that cuts no prompts, or names a chunk."""
    policy: Policy = build(cfg.policy)
    field = policy.budget_field
    if field is None:
        raise UserError(
            f"policy={policy.name} has no chunk to choose; use policy=sarathi or "
            "policy=sarathi_serve"
        )
    if policy.budget != cfg.chunk:  # `chunk` itself is refused, as the tasks don't read it
        raise UserError(
            f"policy.{field}={policy.budget} has no effect; drop it, and name chunks by "
            "task.chunks=[256,512]"
        )
    return partial(with_budget, policy)


def measured_subject(cfg: DictConfig, task: str) -> Subject:
    """The real device, the model and its weights. Raises UserError for a device that is not."""
    from sarathi_lab.executor.torch.backend import TorchBackend

    backend = build(cfg.executor)
    if not isinstance(backend, TorchBackend):
        raise UserError(
            f"task={task} measures a real device, executor={backend.name} is none; use "
            "executor=torch"
        )
    return backend, *resolve_model(cfg, backend)


def where_of(backend: TorchBackend, spec: ModelSpec) -> str:
    """The model, its type and the device in words."""
    return f"{spec.name} in {backend.dtype_name} on {backend.device_name}"
