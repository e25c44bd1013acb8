"""A user's metrics tried before a run, which may take hours, on a few of its requests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pandas as pd

from sarathi_lab.config.errors import UserError
from sarathi_lab.engine.ledger import ITERATION_COLUMNS, Ledger
from sarathi_lab.engine.speculation import NO_SPECULATION
from sarathi_lab.model.roofline import Peaks
from sarathi_lab.results.decode_cost import DecodeCost
from sarathi_lab.results.metrics import RunTables, add_costs
from sarathi_lab.results.own_metrics import value_of
from sarathi_lab.tasks.plan import Plan

NUM_REQUESTS = 2
MOST_OUTPUT_TOKENS = 8  # of a request: further decodes would show a function nothing new
SECONDS = 0.01  # of an iteration, on every stage; any will do
PEAKS = Peaks(1e14, 1e12, "trial")
# Of any run: policies that never mix have none, which only the run itself tells.
DECODE_COST = DecodeCost(alone=SECONDS, marginal=SECONDS, num_decodes=1, num_chunk_tokens=1)
# A function may need more rows than a trial has: what these say of it counts after the run.
DATA_ERRORS = (ArithmeticError, IndexError, ValueError)
_passed: set[Callable[..., object]] = set()  # a sweep tries a function once, not for each job


def try_metrics(plan: Plan) -> None:
    """Raise UserError for a user's metric that fails, or returns no number, on a trial run."""
    untried = {}
    for name, function in plan.metrics.items():
        if function not in _passed:
            untried[name] = function
    if not untried:
        return
    tables = _trial_tables(plan)
    for name, function in untried.items():
        try:
            value_of(name, function, tables)
        except UserError as error:
            if not isinstance(error.__cause__, DATA_ERRORS):
                raise UserError(str(error)) from error
        _passed.add(function)


def _trial_tables(plan: Plan) -> RunTables:
    """Return the tables of the plan's first requests, simulated with a constant iteration time."""
    requests = []
    for request in plan.load.requests[:NUM_REQUESTS]:
        output_len = min(request.output_len, MOST_OUTPUT_TOKENS)
        requests.append(replace(request, output_len=output_len))
    # Drafts would be verified by tokens, which a simulation has not.
    engine = replace(plan.engine, speculation=NO_SPECULATION)
    trial = replace(plan, engine=engine)
    ledger = Ledger()
    trial.simulate(lambda batch: SECONDS, requests, ledger)
    dtype_bytes = plan.backend.dtype_bytes
    iterations = add_costs(ledger.iterations(), plan.spec, dtype_bytes, PEAKS)
    iterations = _with_all_columns(iterations)
    return RunTables(iterations, ledger.requests(), PEAKS, DECODE_COST, plan.spec)


def _with_all_columns(iterations: pd.DataFrame) -> pd.DataFrame:
    """Add the columns that only some runs have: of drafts, CUDA graphs and clusters."""
    columns: dict[str, int | str] = dict.fromkeys(ITERATION_COLUMNS, 0)
    columns["graph_use"] = "none"
    for name in columns.keys() & set(iterations):
        del columns[name]
    return iterations.assign(**columns)
