"""More sequences for a server all of whose sequences are in use while its cache has room."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pandas as pd

from sarathi_lab.config.errors import UserError
from sarathi_lab.config.instantiate import copied
from sarathi_lab.experiment.advise import Row, choose, marked
from sarathi_lab.extensions.advise.confirmation import with_longer_runs
from sarathi_lab.extensions.advise.options import Option, PolicyRuns, first_plan
from sarathi_lab.extensions.advise.server_flags import least_budget, unit_of

MOST_DOUBLINGS = 5  # of the sequences of now


@dataclass(frozen=True)
class MoreSequences:
    """A policy with more sequences, and its run that comes nearest to the objective.

    Attributes:
        present: The sequences of now, all of which are in use.
        batch_size: The sequences that were tried.
        runs: The policy with these.
        row: The run.
    """

    present: int
    batch_size: int
    runs: PolicyRuns
    row: Row


class SequenceSearch(NamedTuple):
    """What doublings of the sequences give.

    Attributes:
        nearest: The first that meets the objective, else the one that comes nearest; None if the
            sequences are not what keeps requests waiting, or none comes nearer.
        refused: The first number that there can't be, and why; "": all could be tried.
    """

    nearest: MoreSequences | None
    refused: str = ""


def more_sequences(best: PolicyRuns, row: Row) -> SequenceSearch:
    """Try doublings of the sequences that the cache has room for.

    Args:
        best: The policy that comes nearest.
        row: Its run that comes nearest.
    """
    num_fitting = best.run_of(row).fitting_sequences
    if num_fitting is None:
        return SequenceSearch(None)
    present = best.plan_of(row).engine.batch_size
    tried: dict[int, MoreSequences] = {}
    rows: list[dict[str, Any]] = [{**row, "number": 0}]
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
        tried[doublings] = larger
        rows.append({**larger.row, "number": doublings})
        if larger.row["slo_met"]:
            break
    nearest = choose(marked(pd.DataFrame(rows)))
    return SequenceSearch(tried.get(int(nearest["number"])), refused)


def _with_sequences(best: PolicyRuns, row: Row, present: int, batch_size: int) -> MoreSequences:
    """Simulate a run with other sequences: a longer one where there is."""
    cfg = copied(best.option.cfg)
    cfg.batch = batch_size
    option: Option = replace(best.option, cfg=cfg)
    policy = best.plan.policy
    unit = unit_of(policy)
    is_whole = bool(row["is_whole"])
    chunk = int(row["chunk"])
    if is_whole:
        # A budget for whole prompts must grow with the decodes that it also pays for.
        chunk += batch_size - present  # the longest prompt beside all decodes
    else:
        least = max(chunk, least_budget(policy, batch_size))
        chunk = math.ceil(least / unit) * unit
    plan = first_plan(option)
    short = option.simulate(chunk, best.slo, is_whole=is_whole)
    runs = PolicyRuns(option, plan, best.slo, marked(pd.DataFrame([short])))
    runs = with_longer_runs(runs)
    return MoreSequences(present, batch_size, runs, runs.best)
