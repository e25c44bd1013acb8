"""A plan that was executed: its tables, the metrics of the part that counts, and cautions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import pandas as pd

from sarathi_lab.config.console import progress_of
from sarathi_lab.config.errors import RunError
from sarathi_lab.engine.config import EngineConfig
from sarathi_lab.engine.executor import Executor
from sarathi_lab.engine.ledger import Ledger
from sarathi_lab.engine.loop import run_engine
from sarathi_lab.engine.scheduler import Scheduler
from sarathi_lab.engine.single_iteration import host_caution
from sarathi_lab.model.roofline import Peaks, request_roofline
from sarathi_lab.results import metrics
from sarathi_lab.results.decode_cost import (
    DecodeCost,
    fullest_hybrid,
    measure_decode_cost,
    slo_reference,
)
from sarathi_lab.results.load_trend import LoadTrend, load_trend
from sarathi_lab.results.own_metrics import own_quantities
from sarathi_lab.results.result import ITERATIONS, REQUESTS
from sarathi_lab.results.serving_metrics import Slo, serving_summary
from sarathi_lab.results.steady import (
    BATCHES_OF_STEADY_RUN,
    LEAST_DRIFT,
    batch_in_flight,
    drift,
    requests_for_steady_part,
    sequences_in_cache,
)
from sarathi_lab.results.window import RunPart
from sarathi_lab.tasks.plan import Plan

Tables = dict[str, pd.DataFrame]
Summary = dict[str, float]  # a run's quantities, by name
OPERATIONS = "operations"
BUBBLES = "bubbles.parquet"


@dataclass(frozen=True)
class ExecutedRun:
    """What a plan left.

    Attributes:
        plan: The plan, with the cache that the executor has.
        peaks: Those of the device after the run.
        tables: Of all iterations and requests, and what was watched.
        part: The part that counts; None: all of the run.
        iterations: Those that count, a row each with its cost.
        requests: Those that count, a row each.
        decode_cost: Of a decode, alone and on the fullest hybrid batch; None without one.
        slo_reference: Seconds of a decode that the objective counts in; None where it has none.
        trend: Of the load over the run; None for too few requests.
    """

    plan: Plan
    scheduler: Scheduler
    ledger: Ledger
    peaks: Peaks
    tables: Tables
    part: RunPart | None
    iterations: pd.DataFrame
    requests: pd.DataFrame
    decode_cost: DecodeCost | None
    slo_reference: float | None
    trend: LoadTrend | None

    @cached_property  # asked for by the summary and by a caution
    def fitting_sequences(self) -> int | None:
        """Sequences of a batch that the cache has room for, where all that may be are in use."""
        iterations = self.tables[ITERATIONS]
        requests = self.tables[REQUESTS]
        return sequences_in_cache(iterations.num_blocks_used, requests, self.plan.engine)


def execute(plan: Plan, ledger: Ledger, run_dir: Path) -> ExecutedRun:
    """Serve the plan, recorded in `ledger`, and what was watched in `run_dir`. Raises RunError,
    also where no part of the run counts.
    """
    scheduler, executor = plan.build()
    # A cache that fills the memory is known only now.
    engine = plan.engine.with_cache_of(executor)
    plan = replace(plan, engine=engine)
    with progress_of("serving", plan.num_tokens, "tokens") as advance:
        ledger.on_iteration = advance
        run_engine(plan.load.arrivals(), scheduler, executor, ledger)
    spec = plan.spec
    dtype_bytes = plan.backend.dtype_bytes
    # Again: a busy machine may have freed up since they were printed.
    peaks = plan.backend.peaks()
    iterations = metrics.add_costs(ledger.iterations(), spec, dtype_bytes, peaks)
    requests = ledger.requests()
    tables = {ITERATIONS: iterations, REQUESTS: requests}
    run_dir.mkdir(parents=True, exist_ok=True)
    executor.write_profile(run_dir)
    watched = run_dir / f"{OPERATIONS}.parquet"
    if watched.is_file():
        times = pd.read_parquet(watched)
        tables[OPERATIONS] = metrics.operation_table(times, iterations, spec, dtype_bytes, peaks)
    part = plan.counted_part(iterations, requests)
    if part is not None:
        iterations = part.spans(iterations)
        requests = part.requests(requests)
    return ExecutedRun(
        plan,
        scheduler,
        ledger,
        peaks,
        tables,
        part,
        iterations,
        requests,
        decode_cost=_decode_cost(executor, engine, iterations),
        slo_reference=slo_reference(plan.targets.slo, engine, executor),
        trend=load_trend(requests),
    )


def _decode_cost(
    executor: Executor, engine: EngineConfig, iterations: pd.DataFrame
) -> DecodeCost | None:
    composition = fullest_hybrid(iterations)
    if composition is None:
        return None
    return measure_decode_cost(
        executor, composition, num_blocks=engine.num_blocks, block_size=engine.block_size
    )


def summary_of(run: ExecutedRun) -> tuple[Summary, Tables, RunError | None]:
    """Return the metrics of the part that counts, all tables, and the error of a user's metric."""
    plan = run.plan
    engine = plan.engine
    counted = (run.iterations, run.requests, run.peaks, run.decode_cost, plan.spec)
    summary = metrics.summarise(*counted)
    # A part counts the tokens that were emitted in it, also of requests that began before.
    if run.part is not None:
        summary |= run.part.throughput(run.tables[REQUESTS])
    slo = plan.targets.slo.resolved(run.slo_reference)
    summary |= serving_summary_of(plan, run.requests, summary["duration"], run.peaks, slo)
    num_devices = engine.cluster.num_instances * plan.backend.num_devices
    tables_of_cluster, of_cluster = engine.cluster.results(run.scheduler, summary, num_devices)
    tables = {**run.tables, **tables_of_cluster}
    summary |= of_cluster
    if engine.shares_prefixes:
        summary |= metrics.prefix_hits(run.requests)
    if run.ledger.num_stages > 1:
        tables[BUBBLES] = run.ledger.bubbles()
        summary |= _bubble_metrics(run, tables[BUBBLES])
    summary |= _load_metrics(run)
    if run.slo_reference is not None:
        summary["slo_decode_time"] = run.slo_reference
    # A user's own come last: they may not have the name of any other.
    run_tables = metrics.RunTables(*counted)
    own, error = own_quantities(plan.metrics, run_tables, summary.keys())
    return summary | own, tables, error


def _bubble_metrics(run: ExecutedRun, bubbles: pd.DataFrame) -> Summary:
    """Return the metrics of a pipeline's bubbles in the part that counts."""
    if run.part is not None:
        bubbles = run.part.spans(bubbles)
    num_stages = run.plan.backend.num_stages
    return metrics.pipeline_metrics(run.iterations, run.requests, bubbles, num_stages)


def _load_metrics(run: ExecutedRun) -> Summary:
    """Return the trend of the load, and how many sequences were and may be in flight; none for too
    few requests.
    """
    if run.trend is None:
        return {}
    num_slots = run.plan.engine.num_slots
    in_flight = batch_in_flight(run.tables[REQUESTS], num_slots)
    quantities = run.trend.metrics()
    quantities["slot_use"] = in_flight / num_slots
    if run.fitting_sequences is not None:
        quantities["fitting_sequences"] = run.fitting_sequences
    return quantities


def serving_summary_of(
    plan: Plan, requests: pd.DataFrame, seconds: float, peaks: Peaks, slo: Slo
) -> Summary:
    """The metrics of `requests`, served in `seconds`, held against `slo`, the plan's other targets,
    and their roofline times, alone on the engine.
    """
    targets = replace(plan.targets, slo=slo)
    backend = plan.backend
    # A request alone is at one stage of a pipeline at a time (docs/reference/metrics.md).
    of_stage = request_roofline(plan.spec, requests, backend.dtype_bytes, peaks)
    alone = backend.num_stages * of_stage
    return serving_summary(requests, seconds, targets, alone)


def not_steady(run: ExecutedRun) -> list[str]:
    """State what keeps a run, whose requests all waited from the start, from a steady state."""
    plan = run.plan
    if not (plan.load.all_wait and plan.window.is_whole):
        return []
    requests = run.tables[REQUESTS]
    num_slots = plan.engine.num_slots
    setting = _setting_of_requests(plan.config["workload"])
    if run.part is None:
        needed = requests_for_steady_part(requests, num_slots)
        in_flight = needed // BATCHES_OF_STEADY_RUN
        return [
            f"  not steady: filling and draining count, too, as {len(requests)} requests are less "
            f"than {BATCHES_OF_STEADY_RUN} times the {in_flight} in flight; {setting}={needed} "
            "shows the steady state"
        ]
    change = drift(requests, run.part, num_slots)
    if abs(change) <= LEAST_DRIFT or _is_random(plan):
        return []
    return [
        f"  not steady: later batches of requests took {change:+.1%} of the earlier ones' time; "
        f"{setting}={4 * len(requests)} comes nearer to the steady state"
    ]


def _setting_of_requests(workload: Mapping[str, object]) -> str:
    if "max_requests" in workload:
        return "workload.max_requests"
    return "workload.num_requests"


def _is_random(plan: Plan) -> bool:
    """Whether noise, drafts that are right at random or drawn prefixes would look like a drift."""
    engine = plan.engine
    has_drafts = bool(engine.speculation.tokens)
    return plan.backend.computes_tokens or has_drafts or engine.shares_prefixes


def host_is_busy(run: ExecutedRun) -> list[str]:
    """State that the times of decodes are in part the host's work."""
    if run.decode_cost is None:
        return []
    return host_caution("the times of decodes", run.decode_cost.host_share or 0.0)


def over_budget(run: ExecutedRun) -> list[str]:
    """State that the policy broke its own budget, as `check_policy` finds by random queues."""
    engine = run.plan.engine
    policy = engine.policy
    # The roles of a cluster have budgets of their own, and drafts come on top of one.
    if policy.budget is None or engine.cluster.num_instances > 1 or engine.speculation.tokens:
        return []
    iterations = run.tables[ITERATIONS]
    num_decodes = iterations.num_decode_tokens
    num_tokens = iterations.num_prefill_tokens
    what = "prompt tokens"
    if not policy.decodes_on_top:
        num_tokens = num_tokens + num_decodes
        what = "tokens"
    # Decodes are never cut: more of them than the budget are a batch of their own.
    has_prompts = iterations.num_prefill_tokens > 0
    is_over = has_prompts & (num_tokens > policy.budget)
    if not policy.is_capped:
        if engine.shares_prefixes:
            # A sequence that comes back to its cached tokens looks like a decode.
            return []
        is_over &= num_decodes > 0  # batches without decodes may take whole prompts
    if not is_over.any():
        return []
    field = policy.budget_field
    return [
        f"  policy {policy.name} breaks its own budget: {is_over.sum():,} of {len(iterations):,} "
        f"iterations have more {what} than {field}={policy.budget}, up to "
        f"{num_tokens[is_over].max():,}; give the moves in `fill` token_budget=self.{field} "
        "(check_policy shows a queue that does it)"
    ]


def load_grows(run: ExecutedRun) -> list[str]:
    """State that waits depend on how long the run was."""
    if run.trend is None:
        return []
    caution = run.trend.caution()
    if caution is None:
        return []
    if run.trend.is_overloaded:
        caution += _more_sequences(run)
    return [f"  {caution}"]


def _more_sequences(run: ExecutedRun) -> str:
    """Return the remedy of a run whose cache has room for more sequences than it may hold."""
    if run.fitting_sequences is None:
        return ""
    return (
        f"; all {run.plan.engine.num_slots} sequences are in use, and the KV cache has room for "
        f"about batch={run.fitting_sequences} (--max-num-seqs)"
    )


def cautions_of(run: ExecutedRun, *, is_alone: bool) -> list[str]:
    """Return what to know of a run; of a sweep's, the table marks whether it is overloaded."""
    cautions = [*not_steady(run), *host_is_busy(run), *over_budget(run)]
    if is_alone:
        cautions += load_grows(run)
    return cautions
