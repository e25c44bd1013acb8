"""What users felt of a plan's run: the metrics of serving with what only the plan and its device know."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from sarathi_lab.decode_cost import decode_iteration
from sarathi_lab.executor import Executor
from sarathi_lab.floor import Ceilings, request_floor
from sarathi_lab.plan import Plan
from sarathi_lab.serving_metrics import serving_summary

SLO_REFERENCE = "slo_decode_time"


def slo_reference(plan: Plan, executor: Executor) -> dict[str, float]:
    """The decode iteration that a relative objective refers to (seconds), of at most the run's own batch and length;
    nothing for bounds in seconds. Runs a few iterations."""
    slo = plan.targets.slo
    if not slo.is_relative:
        return {}
    size = (min(slo.decode_batch, plan.batch_size), min(slo.decode_context, plan.max_model_len))
    cache = {"num_blocks": plan.num_blocks, "block_size": plan.block_size}
    return {SLO_REFERENCE: decode_iteration(executor, *size, **cache)}


def serving_summary_of(
    plan: Plan, requests: pd.DataFrame, seconds: float, ceilings: Ceilings, reference: Mapping[str, float]
) -> dict[str, float]:
    """The metrics of `requests`, served in `seconds`, held against the plan's targets; `reference` may hold what
    `slo_reference` found."""
    targets = replace(plan.targets, slo=plan.targets.slo.resolved(reference.get(SLO_REFERENCE)))
    return serving_summary(requests, seconds, targets, alone_times(plan, requests, ceilings))


def alone_times(plan: Plan, requests: pd.DataFrame, ceilings: Ceilings) -> NDArray[np.float64]:
    """Least seconds of each request [R] alone on the idle engine; of a pipeline one stage works on it at a time."""
    return plan.backend.num_stages * request_floor(plan.spec, requests, plan.backend.dtype_bytes, ceilings)
