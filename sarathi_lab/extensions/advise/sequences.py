"""More sequences for a server all of whose sequences are in use while its cache has room."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pandas as pd

from sarathi_lab.config.errors import UserError
from sarathi_lab.config.instantiate import copied
from sarathi_lab.experiment.advise import Row, choose, marked
from sarathi_lab.extensions.advise.confirmation import with_longer_runs
from sarathi_lab.extensions.advise.options import Budget, Option, PolicyRuns, first_plan
from sarathi_lab.extensions.advise.server_flags import least_budget, unit_of

MOST_DOUBLINGS = 5  # of the sequences of now


def more_sequences(best: PolicyRuns, row: Row) -> tuple[PolicyRuns | None, str]:
    """Try doublings of the sequences that the cache has room for.

    Args:
        best: The policy that comes nearest.
        row: Its run that comes nearest.

    Returns:
        The policy with the first number that meets the objective, else the one that comes nearest
        (None if the sequences are not what keeps requests waiting, or none comes nearer); and the
        first number that there can't be with its reason ("": all could be tried).
    """
    num_fitting = best.run_of(row).fitting_sequences
    if num_fitting is None:
        return None, ""
    present = best.plan_of(row).engine.batch_size
    tried: dict[int, PolicyRuns] = {}
    rows: list[dict[str, Any]] = [{**row, "batch": present}]
    refused = ""
    for doublings in range(1, MOST_DOUBLINGS + 1):
        batch_size = present * 2**doublings
        if batch_size > num_fitting:
            break
        try:
            larger = _with_sequences(best, row, present, batch_size)
        except UserError as error:  # such as no memory for an iteration of as many
            refused = f"batch={batch_size} ({error})"
            break
        tried[batch_size] = larger
        rows.append({**larger.best, "batch": batch_size})
        if larger.best["slo_met"]:
            break
    nearest = choose(marked(pd.DataFrame(rows)))
    return tried.get(int(nearest["batch"])), refused


def _with_sequences(best: PolicyRuns, row: Row, present: int, batch_size: int) -> PolicyRuns:
    """Simulate a run with another number of sequences, and longer ones where they decide."""
    cfg = copied(best.option.cfg)
    cfg.batch = batch_size
    option: Option = replace(best.option, cfg=cfg)
    policy = best.plan.policy
    chunk, is_whole = Budget.of(row)
    if is_whole:
        # A budget for whole prompts must grow with the decodes that it also pays for.
        chunk += batch_size - present  # the longest prompt beside all decodes
    else:
        unit = unit_of(policy)
        least = max(chunk, least_budget(policy, batch_size))
        num_units = math.ceil(least / unit)
        chunk = num_units * unit
    plan = first_plan(option)
    budget = Budget(chunk, is_whole)
    short = option.simulate(budget, best.slo)
    table = marked(pd.DataFrame([short]))
    runs = PolicyRuns(option, plan, best.slo, table)
    return with_longer_runs(runs)
