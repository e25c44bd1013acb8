"""Executes plans: a run with its baselines beside it, each leaving a folder of tables."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
from omegaconf import DictConfig

from sarathi_lab.config.console import amount, print_words, progress_of
from sarathi_lab.config.errors import RunError
from sarathi_lab.config.paths import lock, read_object
from sarathi_lab.config.run_context import RunContext
from sarathi_lab.engine.ledger import Ledger
from sarathi_lab.engine.loop import run_engine
from sarathi_lab.engine.single_iteration import host_caution
from sarathi_lab.experiment.advise import BestChunk
from sarathi_lab.model.roofline import Peaks, request_roofline, ridge_tokens, riding_gain
from sarathi_lab.results import metrics
from sarathi_lab.results.decode_cost import fullest_hybrid, measure_decode_cost, slo_reference
from sarathi_lab.results.load import AGAIN, load_summary
from sarathi_lab.results.load_trend import load_trend
from sarathi_lab.results.own_metrics import own_quantities
from sarathi_lab.results.provenance import provenance
from sarathi_lab.results.report import (
    cell,
    first_of_sweep,
    graph_use_lines,
    operation_display,
    print_cautions,
    print_device,
    summary_line,
    summary_table,
)
from sarathi_lab.results.result import ITERATIONS, REQUESTS, DisplayTable, Result, Stopped, show
from sarathi_lab.results.serving_metrics import Slo, serving_summary
from sarathi_lab.results.steady import LEAST_DRIFT, drift, requests_for_steady_part
from sarathi_lab.results.table import heading
from sarathi_lab.results.window import Part
from sarathi_lab.tasks.base import Task, conclude
from sarathi_lab.tasks.plan import Plan, make_plans
from sarathi_lab.tasks.run_cache import cap_caution

Tables = dict[str, pd.DataFrame]
READ = (  # what decides a run's work, and what is read from it
    *("policy", "workload", "executor", "model", "batch", "max_model_len", "cache", "queue_order"),
    *("window", "slo", "stall", "prompt_classes", "metrics", "repetition", "cluster"),
    "speculation",
)
ADVICE_COLUMNS = ("throughput", "kv_reread_factor", "tbt_p50", "tbt_p99")  # shown

# Of a simulated run, and of each of its output tokens: the middle of 13 runs, 3 to 45 us a token.
SECONDS_A_RUN = 0.4
SECONDS_A_TOKEN = 1e-5


@dataclass(frozen=True)
class Serve(Task):
    """Serves a workload under a policy, and under its baselines on the same requests."""

    has_runs = True
    num_rounds = 3  # the fewest of which a median leaves out the slowest and the fastest

    def check(self, cfg: DictConfig) -> tuple[Plan, dict[str, Plan]]:
        return make_plans(cfg)

    def expected_seconds(self, cfg: DictConfig) -> dict[str, float]:
        plan, baselines = make_plans(cfg)
        if plan.backend.computes_tokens:
            return {}
        plans = {"": plan, **baselines}
        return {
            f"{name}-{fingerprint(run)}": _simulated_seconds(run) for name, run in plans.items()
        }

    def run(self, cfg: DictConfig, context: RunContext) -> Result:
        """Run the baselines unless they are there already, and the run itself."""
        plan, baselines = context.prepared or make_plans(cfg)
        folders, error = dict[str, Path](), None
        for name, baseline in baselines.items():
            try:
                folders[name] = _ensure_baseline(cfg, baseline, name, context)
            except RunError as stop:
                error = error or RunError(f"baseline {name}: {stop}")
        # Raised when the run is kept, which may well succeed where a baseline can't.
        return replace(_executed(plan, context, folders, is_baseline=False), error=error)


def _simulated_seconds(plan: Plan) -> float:
    """Return about how long a simulation takes on one core."""
    num_tokens = sum(request.output_len for request in plan.load.requests)
    return SECONDS_A_RUN + SECONDS_A_TOKEN * num_tokens


def _ensure_baseline(cfg: DictConfig, plan: Plan, name: str, context: RunContext) -> Path:
    """The folder of the baseline's run, executed at most once a sweep (`run_once`)."""
    run_dir = context.baselines_dir / f"{name}-{fingerprint(plan)}"
    # It is named by what the sweep varies of its work: not another policy's parameters.
    has_chunk = plan.policy.budget is not None
    varied = {
        key: value
        for key, value in context.varied.items()
        if key.partition(".")[0] != "policy" and (has_chunk or key != "chunk")
    }
    named = " ".join(["baseline", name, *(f"{key}={value}" for key, value in varied.items())])
    context = replace(context, run_dir=run_dir, name=named, varied=varied, policy=name)
    work = partial(_executed, plan, context, {}, is_baseline=True)
    return run_once(work, cfg, context)


def run_once(work: Callable[[], Result], cfg: DictConfig, context: RunContext) -> Path:
    """Do `work` unless its folder has it; return the folder. Raises RunError if it ever stopped."""
    run_dir = context.run_dir
    # Of jobs beside each other, one runs it; run.json, which is written last, marks its end.
    with lock(run_dir.parents[1] / ".locks" / run_dir.name, waits=True) or nullcontext():
        if (run_dir / "failed.json").is_file():  # in another job: it would fail again
            raise RunError(str(read_object(run_dir / "failed.json", AGAIN).get("error")))
        if not (run_dir / "run.json").is_file():
            shutil.rmtree(run_dir, ignore_errors=True)
            conclude(work, cfg, context, is_run=True)
    return run_dir


def fingerprint(plan: Plan) -> str:
    """Equal for plans that do the same work and read the same from it."""
    read = {name: plan.config[name] for name in READ}
    # "auto" is another number for another server, whose policy need not be this one.
    read["num_blocks"] = plan.engine.num_blocks
    return hashlib.sha256(json.dumps(read, sort_keys=True).encode()).hexdigest()[:8]


def _executed(
    plan: Plan, context: RunContext, finished: Mapping[str, Path], *, is_baseline: bool
) -> Result:
    """Run one plan and compare it with the `finished` baselines. Raises Stopped."""
    places = {name: os.path.relpath(path, context.run_dir) for name, path in finished.items()}
    labels = {**labels_of(plan, context.name), "is_baseline": is_baseline, "baselines": places}
    tags = [str(labels[key]) for key in ("policy", "model", "device", "executor")]
    tags += ["baseline"] if is_baseline else []
    artifact = f"{plan.policy.name}-{fingerprint(plan)}"
    result = Result(labels=labels, tags=tags, config=plan.config, artifact=artifact)
    peaks, predicted = plan.backend.peaks(), {}
    print_plan(plan, context)
    # A simulated run takes no longer than its prediction; which drafts will be right is not known.
    if plan.backend.computes_tokens and not plan.engine.speculation.tokens:
        roofline = plan.roofline(peaks)
        if math.isfinite(roofline):
            predicted["predicted_roofline"] = roofline
            if not context.is_brief:
                print_words(f"  predicted roofline {roofline:.2f} s")
    print_cautions([_describe_peaks(plan, peaks)], context)
    if plan.advice is not None:
        longest = max(request.prompt_len for request in plan.load.requests)
        print_advice(plan.advice, longest)
    ledger = Ledger()
    try:
        tables, summary, cautions = _measured(
            plan, ledger, context.run_dir, is_brief=context.is_brief
        )
    except RunError as error:
        done = {ITERATIONS: ledger.iterations(), REQUESTS: ledger.requests()}
        raise Stopped(str(error), replace(result, tables=done)) from error
    summary |= predicted
    summaries = {name: load_summary(path) for name, path in finished.items()}
    for name, baseline in summaries.items():
        summary |= metrics.compare(summary, baseline, name, plan.metrics)
        cautions += metrics.replay_caution(summary, baseline, name)
    shown: list[DisplayTable | str] = []
    if is_baseline and not context.is_verbose and not context.is_brief:
        shown = [summary_line(summary)]
    elif not context.is_brief:
        name = context.policy or plan.policy.name
        shown = summary_table(
            name, summary, summaries, is_whole=context.is_verbose, own=plan.metrics
        )
        shown += _counted_of(plan, tables, summary)
    if "operations" in tables and not context.is_brief:
        shown.append(operation_display(tables["operations"]))
    labels["schedule"] = schedule_of(tables[ITERATIONS])
    graph_use = metrics.graph_use_by_kind(tables[ITERATIONS])
    if not context.is_brief:
        shown += graph_use_lines(graph_use)
    facts = dict(getattr(plan.backend, "facts", {}))
    if graph_use:
        facts["graph_use"] = graph_use
    if facts:
        labels["engine"] = facts
    shown += first_of_sweep(cautions, context)
    return replace(result, tables=tables, summary=summary, shown=shown)


def _describe_peaks(plan: Plan, peaks: Peaks) -> str:
    """Describe the peaks, their ridge and, where a real device serves requests that all wait from
    the start, what decodes that ride can gain there: known before the run.
    """
    text = f"peaks {peaks.describe()}"
    spec = plan.spec
    dtype_bytes = plan.backend.dtype_bytes
    if not spec.has_formulas or math.isnan(peaks.rate(spec)):
        return text
    text += f"; ridge {amount(ridge_tokens(spec, dtype_bytes, peaks))} tokens"
    if not plan.load.all_wait or not plan.backend.computes_tokens:
        return text
    lengths = [(request.prompt_len, request.output_len) for request in plan.load.requests]
    requests = pd.DataFrame(lengths, columns=["prompt_len", "output_len"])
    batch_size = min(plan.engine.num_slots, len(requests))
    gain = riding_gain(spec, requests, batch_size, dtype_bytes, peaks)
    return f"{text}; riding decodes gain up to {gain:.2f} over request_level at the roofline"


def schedule_of(iterations: pd.DataFrame) -> str:
    """Equal for runs whose iterations have the same tokens in the same order: equal work."""
    tokens = iterations[["num_prefill_tokens", "num_decode_tokens"]].to_numpy()
    return hashlib.sha256(tokens.astype("int64").tobytes()).hexdigest()[:8]


def _measured(
    plan: Plan, ledger: Ledger, run_dir: Path, *, is_brief: bool
) -> tuple[Tables, dict[str, float], list[str]]:
    """Serve the plan, recorded in `ledger`, and what was watched in `run_dir`; returns the tables,
    the metrics of the part that counts (RunError if none does), and cautions.
    """
    backend, spec = plan.backend, plan.spec
    scheduler, executor = plan.build()
    engine = plan.engine.with_cache_of(executor)
    plan = replace(plan, engine=engine)
    with progress_of("serving", plan.num_tokens, "tokens") as advance:
        ledger.on_iteration = advance
        run_engine(plan.load.arrivals(), scheduler, executor, ledger)
    peaks = backend.peaks()  # again: a busy machine may have freed up since they were printed
    iterations = metrics.add_costs(ledger.iterations(), spec, backend.dtype_bytes, peaks)
    num_instances = engine.cluster.num_instances
    num_devices = num_instances * backend.num_devices
    requests, bubbles = ledger.requests(), ledger.bubbles()
    tables = {ITERATIONS: iterations, REQUESTS: requests}
    run_dir.mkdir(parents=True, exist_ok=True)
    executor.write_profile(run_dir)
    profile: dict[str, float] = {}
    if (watched := run_dir / "operations.parquet").is_file():
        times = pd.read_parquet(watched)
        work = (iterations, spec, backend.dtype_bytes, peaks)
        tables["operations"] = metrics.operation_table(times, *work)
    rates: dict[str, float] = {}
    cautions: list[str] = []
    part = plan.counted_part(iterations, requests)
    if plan.load.all_wait and plan.window.is_whole:
        cautions += steady_cautions(plan, requests, part)
    if part is not None:
        rates = part.throughput(requests)
        iterations, requests = part.spans(iterations), part.requests(requests)
        bubbles = part.spans(bubbles)
    decode_cost = None
    if (composition := fullest_hybrid(iterations)) is not None:
        of_cache = {"num_blocks": engine.num_blocks, "block_size": engine.block_size}
        decode_cost = measure_decode_cost(executor, composition, **of_cache)
        cautions += host_caution("the times of decodes", decode_cost.host_share or 0.0)
    reference = slo_reference(plan.targets.slo, plan.engine, executor)
    if reference is not None:
        profile["slo_decode_time"] = reference
    summary = metrics.summarise(iterations, requests, peaks, decode_cost) | rates
    counted = metrics.RunTables(iterations, requests, peaks, decode_cost)
    summary |= own_quantities(plan.metrics, counted)
    slo = plan.targets.slo.resolved(reference)
    summary |= serving_summary_of(plan, requests, summary["duration"], peaks, slo)
    further, of_cluster = engine.cluster.results(scheduler, summary, num_devices)
    tables |= further
    summary |= of_cluster
    summary |= engine.speculation.metrics(iterations)
    if engine.shares_prefixes:
        num_shared, num_prompt = requests.prefix_hit_tokens.sum(), requests.prompt_len.sum()
        summary["prefix_hit_rate"] = float(num_shared / num_prompt)
    if ledger.num_stages > 1:
        tables["bubbles.parquet"] = ledger.bubbles()
        summary |= metrics.pipeline_metrics(iterations, requests, bubbles, backend.num_stages)
    if (trend := load_trend(requests)) is not None:
        summary |= trend.metrics()
        caution = trend.caution()
        if caution is not None and not is_brief:  # a sweep's table marks the run
            cautions.append(f"  {caution}")
    return tables, summary | profile, cautions


def _counted_of(plan: Plan, tables: Tables, summary: Mapping[str, float]) -> list[str]:
    """State which part of a run, whose requests all waited from the start, its metrics count."""
    if "window_start" not in summary or not (plan.load.all_wait and plan.window.is_whole):
        return []
    duration = tables[ITERATIONS].end.max()
    seconds = f"{amount(summary['window_start'])} to {amount(summary['window_end'])} s"
    return [
        f"  between filling and draining: {summary['num_requests']:.0f} of "
        f"{len(tables[REQUESTS])} requests, {seconds} of {amount(duration)} s"
    ]


def steady_cautions(plan: Plan, requests: pd.DataFrame, part: Part | None) -> list[str]:
    """State what keeps a run, whose `requests` all waited from the start, from a steady state."""
    workload = plan.config["workload"]
    setting = "workload.max_requests" if "max_requests" in workload else "workload.num_requests"
    number, num_slots = len(requests), plan.engine.num_slots
    if part is None:
        needed = requests_for_steady_part(requests, num_slots)
        return [
            f"  not steady: filling and draining count, too, as {number} requests are less than "
            f"three times the {needed // 3} in flight; {setting}={needed} shows the steady state"
        ]
    engine = plan.engine
    change = drift(requests, part, num_slots)
    # Noise, drafts that are right at random and drawn prefixes would look the same.
    is_random = plan.backend.computes_tokens or engine.speculation.tokens or engine.shares_prefixes
    if is_random or abs(change) <= LEAST_DRIFT:
        return []
    return [
        f"  not steady: later batches of requests took {change:+.1%} of the earlier ones' time; "
        f"{setting}={4 * number} comes nearer to the steady state"
    ]


def serving_summary_of(
    plan: Plan, requests: pd.DataFrame, seconds: float, peaks: Peaks, slo: Slo
) -> dict[str, float]:
    """The metrics of `requests`, served in `seconds`, held against `slo`, the plan's other targets,
    and their roofline times, alone on the engine.
    """
    targets = replace(plan.targets, slo=slo)
    alone = request_roofline(plan.spec, requests, plan.backend.dtype_bytes, peaks)
    return serving_summary(requests, seconds, targets, plan.backend.num_stages * alone)


def labels_of(plan: Plan, name: str) -> dict[str, Any]:
    """A run's flat labels in tables and dashboards; None for what the policy does not read."""
    workload = plan.config["workload"]
    return {
        "name": name,
        "policy": plan.policy.name,
        **{key: plan.config[key] for key in ("batch", "seed")},
        "chunk": plan.policy.budget,
        **{key: workload.get(key) for key in ("pd_ratio", "seq_len")},
        "workload": plan.load.name,
        "arrives_over_time": not plan.load.all_wait,
        "assumed": plan.assumed,
        "model": plan.spec.name,
        "executor": plan.backend.name,
        "device": plan.backend.device_name,
        "threads": getattr(plan.backend, "num_threads", None),
        "dtype": plan.backend.dtype_name,
        **provenance(),
    }


def print_plan(plan: Plan, context: RunContext) -> None:
    """Print what a run serves, where and how; of a sweep's run only what no run before had."""
    lines = _facts_of(plan)
    if context.is_brief:
        spec, backend = plan.spec, plan.backend
        device = f"{spec.name} ({spec.num_params / 1e6:,.0f}M parameters, {backend.dtype_name})"
        facts = [f"{device} on {backend.device_name}", *backend.cautions(spec), *lines]
        print_cautions([*facts, *cap_caution(plan.engine)], context)
        return
    policy = f"{context.policy or plan.policy.name}{plan.policy.describe()}"
    print_device(context, plan.spec, plan.backend, policy)
    for line in lines:
        print_words(f"  {line}")
    print_cautions(cap_caution(plan.engine), context)


def _facts_of(plan: Plan) -> list[str]:
    """Return lines on the workload, the batch, the cache and what was assumed."""
    engine = plan.engine
    cache = f"cache {engine.num_blocks} x {engine.block_size} tokens"
    if plan.load.repeats_prefixes and not engine.shares_prefixes:
        cache += ", equal prefixes computed again (cache.prefix=true shares them)"
    lines = [f"{plan.load.describe()}, batch {engine.batch_size}, {cache}"]
    if cluster := engine.cluster.describe():
        lines.append(f"{cluster}; batch and cache are those of each")
    if speculation := engine.speculation.describe():
        lines.append(speculation)
    if plan.assumed is not None:
        lines.append(f"assumed unless stated: {plan.assumed}")
    return lines


def print_advice(advice: BestChunk, longest_prompt: int) -> None:
    """Print whether to chunk, the chunk that chunk=auto stands for, and what it was chosen by."""
    rows = []
    for prediction in advice.table.to_dict("records"):
        mark = "*" if prediction["is_as_good"] else " "
        row = {"chunk": f"{prediction['chunk']} {mark}"}
        row |= {heading(name): cell(name, prediction[name]) for name in ADVICE_COLUMNS}
        if "slo_met" in prediction:
            row["SLO"] = "met" if prediction["slo_met"] else "missed"
        rows.append(row)
    if advice.chunk >= longest_prompt:
        longest = f"the longest has {longest_prompt}"
        show([f"  do not chunk here: it leaves all prompts whole, {longest}"])
    title = f"  chunk=auto is {advice.chunk} tokens, predicted to give {advice.objective}"
    show([f"{title} (* within 1 % of the best)", DisplayTable(rows)])
