"""What the tasks that advise people who tune servers have in common: a cost model, a policy of any
chunk, a record.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from omegaconf import DictConfig, OmegaConf

from sarathi_lab.config import console
from sarathi_lab.config.errors import UserError
from sarathi_lab.config.instantiate import build
from sarathi_lab.config.run_context import RunContext
from sarathi_lab.engine.executor import Predictor
from sarathi_lab.executor.simulated.backend import SimulatedBackend
from sarathi_lab.experiment.advisor import PolicyOfChunk
from sarathi_lab.model.spec import ModelSpec
from sarathi_lab.policy import Policy, with_budget
from sarathi_lab.results.tracking import Tracker
from sarathi_lab.tasks.plan import resolve_model


def cost_of(cfg: DictConfig) -> tuple[SimulatedBackend, ModelSpec, Predictor]:
    """The device, the model, and the device's cost model of it. Raises UserError for a device
    without one.
    """
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
    """The policy with a chunk of choice. Raises UserError for one that cuts no prompts, or whose
    chunk was named.
    """
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


def record(
    config: Mapping[str, Any],
    tracker: Tracker,
    place: RunContext,
    tables: Mapping[str, pd.DataFrame],
    figures: Mapping[str, Figure],
    summary: Mapping[str, float],
) -> None:
    """Write tables (CSV), figures (PNG) and the `config` into the run's folder, and hand them to
    the tracker.
    """
    place.run_dir.mkdir(parents=True, exist_ok=True)
    OmegaConf.save(OmegaConf.create(dict(config)), place.run_dir / "config.yaml")
    for name, table in tables.items():
        table.to_csv(place.run_dir / f"{name}.csv", index=False)
    for name, figure in figures.items():
        figure.savefig(place.run_dir / f"{name}.png", dpi=150)
    task, hardware = next(iter(tables)), str(config["executor"]["hardware"]["name"])
    labels = {"task": task, "device": hardware, "settings": dict(config)}
    job_type = place.experiment or task
    tags = [task, hardware]
    with tracker.run(
        name=place.name, group=place.group, job_type=job_type, tags=tags, config=labels
    ) as tracked:
        tracked.log_summary(summary)
        tracked.log_tables(place.run_dir)
    console.print_place("results", place.run_dir)
