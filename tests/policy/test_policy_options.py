"""Every option of conf/policy runs on both executors, with the same schedule and the same
tokens.
"""

from __future__ import annotations

import pydoc
from dataclasses import MISSING, fields, replace
from functools import cache

import pandas as pd
import pytest
import yaml
from plans import plan_of, serve_plan

from sarathi_lab.config.paths import CONF
from sarathi_lab.engine.executor import StepResult
from sarathi_lab.engine.ledger import Ledger
from sarathi_lab.engine.request import Batch
from sarathi_lab.executor.simulated.executor import SimulatedExecutor
from sarathi_lab.policy.ascend import make_profile_table
from sarathi_lab.tasks.plan import Plan

OPTIONS = sorted(path.stem for path in (CONF / "policy").glob("*.yaml"))
# With times of an iteration.
ADAPTIVE = ("slo_budget", "niyama", "lprs")
# Prompts are longer than the chunk, which is the smallest that every policy takes.
LOAD = ["model=tiny", "batch=4", "max_model_len=360", "pd_ratio=30", "chunk=256", "tracking=none"]
LOAD += ["workload=uniform", "workload.num_requests=5"]
LOAD += ["workload.min_len=40", "workload.max_len=360"]
# What a file sets differently from the class, as that is another system's or version's.
SET = {
    "lars": {"order", "patience"},
    "shortest_remaining": {"order"},
    "preflow": {"order"},
    "short_request_first": {"order"},
    "reserve_for_short": {"order", "reserve_tokens"},
    "chunk_beside_decodes": {"min_active_prefills"},
    "ascend_v0_9": {"enable_chunked_prefill"},
    "hybrid_only": {"max_prefills", "reserve"},
    "sarathi_serve_dynamic": {"low_chunk_size"},
}


@pytest.mark.parametrize("option", OPTIONS)
def test_a_policy_made_in_python_is_that_of_its_file(option):
    told = yaml.safe_load((CONF / "policy" / f"{option}.yaml").read_text())
    kind = pydoc.locate(told.pop("_target_"))
    own = {name: value for name, value in told.items() if "${" not in str(value)}
    defaults = {field.name: field.default for field in fields(kind) if field.default != MISSING}
    differs = {name for name in own.keys() & defaults if own[name] != defaults[name]}
    assert differs == SET.get(option, set())


@cache
def planned(option: str, executor: str, table: str) -> Plan:
    own = {"policy.profile_table": table} if option == "ascend_dynamic" else {}
    if option in ("lars", "highest_response_ratio", "shortest_remaining", "dynamic_chunks"):
        own = {"policy.seconds_per_token": 0.001}
    if option in ADAPTIVE:
        own = {"policy.times": [0.01, 0.0001, 0.0]}
    device = ["device=cpu", "dtype=float32"] if executor == "torch" else []
    return plan_of(option, f"executor={executor}", *LOAD, *device, changes=own)


def step_time(batch: Batch) -> float:
    """Dyadic, so that sums are exact in either order."""
    return 0.25 + batch.num_tokens / 64


class Clocked:
    """The torch executor, with step times of `step_time` on a virtual clock: what it computes is
    real.
    """

    capacity, feeds_tokens = 1, False

    def __init__(self, executor) -> None:
        self.executor = executor
        self.clock = SimulatedExecutor(step_time)

    def __getattr__(self, name):
        return getattr(self.clock, name)

    def submit(self, batch: Batch) -> None:
        self.executor.submit(batch)
        self.clock.submit(batch)

    def collect(self) -> StepResult:
        return replace(self.clock.collect(), token_ids=self.executor.collect().token_ids)


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    path = tmp_path_factory.mktemp("table") / "profile_table.csv"
    made = make_profile_table(lambda batch: batch.num_tokens / 4000, 4, 360)
    pd.DataFrame(made.rows).to_csv(path, index=False)
    return str(path)


@pytest.fixture(scope="module")
def torch_executor(table):
    """One for all, as large as the largest of their batches."""
    sizes = [planned(option, "torch", table) for option in OPTIONS]
    largest = max(sizes, key=lambda plan: plan.sizes.max_batch_tokens)
    return largest.backend.build(largest.spec, None, replace(largest.sizes, chunk=None))


@cache
def tokens_of_orca(executor, table: str) -> dict[int, list[int]]:
    return outcome(planned("orca", "torch", table), Clocked(executor))[1]


def outcome(plan: Plan, executor) -> tuple[Ledger, dict[int, list[int]]]:
    ledger = serve_plan(plan, executor)
    table = ledger.requests()
    return ledger, dict(zip(table.request_id, map(list, table.output_token_ids), strict=True))


@pytest.mark.parametrize("option", OPTIONS)
def test_an_option_runs_on_both_executors_alike(option, table, torch_executor):
    real, tokens = outcome(planned(option, "torch", table), Clocked(torch_executor))
    plan = planned(option, "simulated", table)
    simulated, _ = outcome(plan, SimulatedExecutor(step_time))
    iterations = simulated.iterations()
    assert real.iterations().equals(iterations)
    times = ["request_id", "first_scheduled_time", "finish_time", "token_times"]
    assert real.requests()[times].equals(simulated.requests()[times])
    assert tokens == tokens_of_orca(torch_executor, table)
    assert (
        iterations.num_prefill_tokens + iterations.num_decode_tokens
    ).max() <= plan.sizes.max_batch_tokens
