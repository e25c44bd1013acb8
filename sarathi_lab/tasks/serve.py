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

from sarathi_lab.config.console import amount, print_words
from sarathi_lab.config.errors import RunError
from sarathi_lab.config.paths import lock, read_object
from sarathi_lab.config.run_context import RunContext
from sarathi_lab.engine.ledger import Ledger
from sarathi_lab.experiment.advise import BestChunk
from sarathi_lab.model.roofline import Peaks, expert_ridge_tokens, ridge_tokens, riding_gain
from sarathi_lab.results import metrics
from sarathi_lab.results.load import AGAIN, load_summary
from sarathi_lab.results.metrics import CHUNK_RIDGES
from sarathi_lab.results.provenance import provenance
from sarathi_lab.results.report import (
    cell,
    describe_model,
    first_of_sweep,
    graph_use_lines,
    operation_display,
    print_cautions,
    print_device,
    summary_line,
    summary_table,
)
from sarathi_lab.results.result import ITERATIONS, REQUESTS, DisplayTable, Result, Stopped, show
from sarathi_lab.results.sweep_analysis import SAMPLES
from sarathi_lab.results.table import heading
from sarathi_lab.tasks.base import Task, conclude
from sarathi_lab.tasks.executed import (
    OPERATIONS,
    Summary,
    Tables,
    cautions_of,
    execute,
    summary_of,
)
from sarathi_lab.tasks.metric_trial import try_metrics
from sarathi_lab.tasks.plan import Plan, make_plan, make_plans
from sarathi_lab.tasks.run_cache import cap_caution

READ = (  # what decides a run's work, and what is read from it
    *("policy", "workload", "executor", "model", "batch", "max_model_len", "cache", "queue_order"),
    *("window", "slo", "stall", "prompt_classes", "metrics", "repetition", "cluster"),
    "speculation",
)
TAGGED = ("policy", "model", "device", "executor")  # labels
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
        plan, baselines = make_plans(cfg)
        try_metrics(plan)
        return plan, baselines

    def expected_seconds(self, cfg: DictConfig) -> float:
        plan = make_plan(cfg)
        if plan.backend.computes_tokens:
            return math.nan
        num_tokens = sum(request.output_len for request in plan.load.requests)
        return SECONDS_A_RUN + SECONDS_A_TOKEN * num_tokens

    def run(self, cfg: DictConfig, context: RunContext) -> Result:
        """Run the baselines unless they are there already, and the run itself."""
        plan, baselines = context.prepared or make_plans(cfg)
        folders = {}
        errors = []
        for name, baseline in baselines.items():
            try:
                folders[name] = _ensure_baseline(cfg, baseline, name, context)
            except RunError as stop:
                errors.append(RunError(f"baseline {name}: {stop}"))
        print_cautions(_shared_by_systems(plan, baselines, context), context)
        done = _executed(plan, context, folders, is_baseline=False)
        if errors:
            # Raised when the run is kept, which may well succeed where a baseline can't.
            return replace(done, error=errors[0])
        return done


def _shared_by_systems(plan: Plan, baselines: Mapping[str, Plan], context: RunContext) -> list[str]:
    """Say what simulated serving systems have in common, where several are compared."""
    system = plan.policy.system
    if system is None or plan.backend.computes_tokens:
        return []
    if plan.config["executor"]["host"]["name"] != "none":
        return []
    systems = {system.name}
    for baseline in baselines.values():
        if baseline.policy.system is not None:
            systems.add(baseline.policy.system.name)
    if len(systems) == 1 and "policy" not in context.varied:
        return []
    return [
        "policies differ by their schedules and their servers' defaults alone: all have the "
        "kernels of the hardware file and, by host=none, no time of their own on the CPU"
    ]


def _ensure_baseline(cfg: DictConfig, plan: Plan, name: str, context: RunContext) -> Path:
    """The folder of the baseline's run, executed at most once a sweep (`run_once`)."""
    # It is named by what the sweep varies of its work: not another policy's parameters.
    varied = {}
    for key, value in context.varied.items():
        is_of_policy = key.startswith("policy.") or key == "policy"
        is_unread_chunk = key == "chunk" and plan.policy.chunk_of_runs is None
        if not is_of_policy and not is_unread_chunk:
            varied[key] = value
    settings = [f"{key}={value}" for key, value in varied.items()]
    # Jobs with equal work find each other's baseline by this name.
    folder = f"{name}-{fingerprint(plan)}"
    context = replace(
        context,
        run_dir=context.baselines_dir / folder,
        name=" ".join(["baseline", name, *settings]),
        varied=varied,
        policy=name,
    )
    work = partial(_executed, plan, context, {}, is_baseline=True)
    return run_once(work, cfg, context)


def run_once(work: Callable[[], Result], cfg: DictConfig, context: RunContext) -> Path:
    """Do `work` unless its folder has it; return the folder. Raises RunError if it ever stopped."""
    run_dir = context.run_dir
    failed = run_dir / "failed.json"
    own_lock = run_dir.parents[1] / ".locks" / run_dir.name
    # Of jobs beside each other, one runs it; run.json, which is written last, marks its end.
    with lock(own_lock, waits=True) or nullcontext():
        if failed.is_file():  # in another job: it would fail again
            failure = read_object(failed, AGAIN)
            reason = str(failure.get("error"))
            raise RunError(reason)
        if not (run_dir / "run.json").is_file():
            shutil.rmtree(run_dir, ignore_errors=True)
            conclude(work, cfg, context, is_run=True)
    return run_dir


def fingerprint(plan: Plan) -> str:
    """Equal for plans that do the same work and read the same from it."""
    read = {name: plan.config[name] for name in READ}
    # "auto" is another number for another server, whose policy need not be this one.
    read["num_blocks"] = plan.engine.num_blocks
    text = json.dumps(read, sort_keys=True)
    return _short_digest(text.encode())


def _short_digest(content: bytes) -> str:
    digest = hashlib.sha256(content)
    # Part of folders' names: 32 bits tell the runs of a sweep apart.
    return digest.hexdigest()[:8]


def _executed(
    plan: Plan, context: RunContext, finished: Mapping[str, Path], *, is_baseline: bool
) -> Result:
    """Run one plan and compare it with the `finished` baselines. Raises Stopped."""
    result = _labelled(plan, context, finished, is_baseline=is_baseline)
    predicted = _announce(plan, context)
    ledger = Ledger()
    try:
        run = execute(plan, ledger, context.run_dir)
        summary, tables, error = summary_of(run)
    except RunError as stop:
        done = {ITERATIONS: ledger.iterations(), REQUESTS: ledger.requests()}
        raise Stopped(str(stop), replace(result, tables=done)) from stop
    summary |= predicted | _in_ridges(plan)
    cautions = cautions_of(run, is_alone=not context.is_brief)
    summaries = {name: load_summary(path) for name, path in finished.items()}
    for name, baseline in summaries.items():
        summary |= metrics.compare(summary, baseline, name, plan.metrics)
        cautions += metrics.replay_caution(summary, baseline, name)
    if error is not None and is_baseline:
        # The run is compared with its baseline in all other quantities.
        cautions.append(f"  {error}")
        error = None
    graph_use = metrics.graph_use_by_kind(tables[ITERATIONS])
    shown: list[DisplayTable | str] = []
    if not context.is_brief:
        if is_baseline and not context.is_verbose:
            shown.append(summary_line(summary))
        else:
            shown += _compared(plan, context, summary, summaries, tables)
        if OPERATIONS in tables:
            shown.append(operation_display(tables[OPERATIONS]))
        shown += graph_use_lines(graph_use)
    shown += first_of_sweep(cautions, context)
    facts = _facts_after(plan, tables, graph_use)
    return replace(
        result,
        tables=tables,
        summary=summary,
        shown=shown,
        labels={**result.labels, **facts},
        error=error,
    )


def _labelled(
    plan: Plan, context: RunContext, finished: Mapping[str, Path], *, is_baseline: bool
) -> Result:
    """Return what is known of a run's result before it begins: labels, tags and configuration."""
    labels = labels_of(plan, context.name)
    # The option's name, which sweeps over policies show, so that a run alone is called the same.
    labels["policy"] = context.policy or plan.policy.name
    labels["is_baseline"] = is_baseline
    folders = {}
    for name, path in finished.items():
        # A sweep's folder may be moved as a whole.
        folders[name] = os.path.relpath(path, context.run_dir)
    labels["baselines"] = folders
    tags = []
    for name in TAGGED:
        tags.append(str(labels[name]))
    if is_baseline:
        tags.append("baseline")
    artifact = f"{plan.policy.name}-{fingerprint(plan)}"
    return Result(labels=labels, tags=tags, config=plan.config, artifact=artifact)


def _facts_after(
    plan: Plan, tables: Tables, graph_use: metrics.GraphUseByKind
) -> dict[str, object]:
    """Return labels that only the run decides: its schedule, and what ran it."""
    labels: dict[str, object] = {"schedule": schedule_of(tables[ITERATIONS])}
    facts = dict(plan.backend.facts)
    if graph_use:
        facts["graph_use"] = graph_use
    if facts:
        labels["engine"] = facts
    return labels


def _announce(plan: Plan, context: RunContext) -> Summary:
    """Print what will run; return the quantity that the roofline predicts, if it predicts one."""
    peaks = plan.backend.peaks()
    print_plan(plan, context)
    predicted = {}
    # A simulated run takes no longer than its prediction; which drafts will be right is not known.
    if plan.backend.computes_tokens and not plan.engine.speculation.tokens:
        seconds = plan.roofline(peaks)
        if math.isfinite(seconds):
            predicted["predicted_roofline"] = seconds
            if not context.is_brief:
                print_words(f"  predicted roofline {seconds:.2f} s")
    print_cautions([_describe_peaks(plan, peaks)], context)
    if plan.advice is not None:
        longest = max(request.prompt_len for request in plan.load.requests)
        print_advice(plan.advice, longest)
    return predicted


def _compared(
    plan: Plan,
    context: RunContext,
    summary: Summary,
    summaries: Mapping[str, Summary],
    tables: Tables,
) -> list[DisplayTable | str]:
    """Return the table of a run beside its baselines, and which part of the run it counts."""
    name = context.policy or plan.policy.name
    table = summary_table(name, summary, summaries, is_whole=context.is_verbose, own=plan.metrics)
    return [*table, *_counted_of(plan, tables, summary)]


def _describe_peaks(plan: Plan, peaks: Peaks) -> str:
    """Describe the peaks, their ridge and what decodes that ride can gain there: known before the
    run.
    """
    spec = plan.spec
    text = f"peaks {peaks.describe(spec)}"
    if not spec.has_formulas or math.isnan(peaks.rate(spec)):
        return text
    dtype_bytes = plan.backend.dtype_bytes
    ridge = ridge_tokens(spec, dtype_bytes, peaks)
    text += f"; ridge {amount(ridge)} tokens"
    if spec.num_experts:
        of_expert = expert_ridge_tokens(spec, dtype_bytes, peaks)
        # A batch's tokens are spread over all experts, each token over several.
        of_batch = of_expert * spec.num_experts / spec.experts_per_token
        text += f", of an expert {amount(of_expert)} ({amount(of_batch)} of a batch)"
    # A real device's, where requests all wait from the start.
    if plan.load.all_wait and plan.backend.computes_tokens:
        gain = _riding_gain(plan, peaks)
        text += f"; riding decodes gain up to {gain:.2f} over request_level at the roofline"
    return text


def _riding_gain(plan: Plan, peaks: Peaks) -> float:
    """Return what decodes that ride can gain at the roofline."""
    rows = []
    for request in plan.load.requests:
        row = {
            "prompt_len": request.prompt_len,
            "output_len": request.output_len,
        }
        rows.append(row)
    batch_size = min(plan.engine.num_slots, len(rows))
    requests = pd.DataFrame(rows)
    return riding_gain(plan.spec, requests, batch_size, plan.backend.dtype_bytes, peaks)


def _in_ridges(plan: Plan) -> Summary:
    """Return the chunk of a measured run over the ridge, by which devices can be compared."""
    chunk = plan.policy.budget
    backend = plan.backend
    if chunk is None or not backend.computes_tokens:
        return {}
    if not plan.spec.has_formulas:
        return {}
    peaks = backend.peaks()
    ridge = ridge_tokens(plan.spec, backend.dtype_bytes, peaks)
    if not math.isfinite(ridge):
        return {}
    return {CHUNK_RIDGES: chunk / ridge}


def schedule_of(iterations: pd.DataFrame) -> str:
    """Equal for runs whose iterations have the same tokens in the same order: equal work."""
    tokens = iterations[["num_prefill_tokens", "num_decode_tokens"]]
    # One type on all machines: the digest is that of the bytes.
    numbers = tokens.to_numpy("int64")
    return _short_digest(numbers.tobytes())


def _counted_of(plan: Plan, tables: Tables, summary: Summary) -> list[str]:
    """State which part of a run, whose requests all waited from the start, its metrics count."""
    has_steady_part = plan.load.all_wait and plan.window.is_whole
    if not has_steady_part or "window_start" not in summary:
        return []
    start = amount(summary["window_start"])
    end = amount(summary["window_end"])
    duration = amount(tables[ITERATIONS].end.max())
    num_counted = summary["num_requests"]
    num_requests = len(tables[REQUESTS])
    return [
        f"  between filling and draining: {num_counted:.0f} of {num_requests} requests, {start} to "
        f"{end} s of {duration} s"
    ]


def labels_of(plan: Plan, name: str) -> dict[str, Any]:
    """A run's flat labels in tables and dashboards; None for what the policy does not read."""
    workload = plan.config["workload"]
    return {
        "name": name,
        "policy": plan.policy.name,
        "batch": plan.config["batch"],
        "seed": plan.config["seed"],
        "chunk": plan.policy.chunk_of_runs,
        "pd_ratio": workload.get("pd_ratio"),
        "seq_len": workload.get("seq_len"),
        "workload": plan.load.name,
        "arrives_over_time": not plan.load.all_wait,
        "assumed": plan.assumed,
        "model": plan.spec.name,
        "executor": plan.backend.name,
        "device": plan.backend.device_name,
        "threads": plan.backend.num_threads,
        "dtype": plan.backend.dtype_of(plan.spec),
        **provenance(),
    }


def print_plan(plan: Plan, context: RunContext) -> None:
    """Print what a run serves, where and how; of a sweep's run only what no run before had."""
    spec = plan.spec
    backend = plan.backend
    if context.is_brief:
        model = describe_model(spec, backend)
        facts = [f"{model} on {backend.device_name}"]
        facts += backend.cautions(spec)
        print_cautions(facts, context)
    else:
        name = context.policy or plan.policy.name
        described = plan.policy.describe()
        print_device(context, spec, backend, f"{name}{described}")
    for same, line in _lines_of(plan, context).items():
        if not context.is_brief or first_of_sweep([same], context):
            print_words(f"  {line}")


def _lines_of(plan: Plan, context: RunContext) -> dict[str, str]:
    """Return lines on a plan by texts that are equal where runs of a sweep need no line again."""
    room = _room_of(plan)
    if plan.assumed is not None:  # defaults of the system that the policy is of
        room = f"{context.policy or plan.policy.name}: {room}"
    lines = {
        _workload_without_seed(plan): plan.load.describe(),
        _room_without_seed(plan): room,
    }
    for fact in _further_facts(plan):
        lines[fact] = fact
    if plan.assumed is not None:
        lines[plan.assumed] = f"assumed unless stated{_first_for(context)}: {plan.assumed}"
    return lines


def _room_without_seed(plan: Plan) -> str:
    """Return a text that is equal for batches and caches that differ by the seed only."""
    if plan.cfg.cache.num_blocks is not None:
        return _room_of(plan)
    # The cache holds the longest requests, whose lengths the seed draws.
    return f"batch {plan.engine.batch_size} and its cache, {_workload_without_seed(plan)}"


def _workload_without_seed(plan: Plan) -> str:
    """Return a text that is equal for workloads that differ in their seed only."""
    workload = dict(plan.config["workload"])
    workload.pop("seed", None)
    return json.dumps(workload, sort_keys=True, default=str)


def _room_of(plan: Plan) -> str:
    """Describe the batch and its cache."""
    engine = plan.engine
    cache = f"cache {engine.num_blocks} x {engine.block_size} tokens"
    if plan.load.repeats_prefixes and not engine.shares_prefixes:
        cache += ", equal prefixes computed again (cache.prefix=true shares them)"
    return f"batch {engine.batch_size}, {cache}"


def _further_facts(plan: Plan) -> list[str]:
    """Return lines on a cluster, on drafts, on a server that lacks the policy, on requests that are
    longer than the model's context, and on a cut cache, where there are such.
    """
    engine = plan.engine
    lines = cap_caution(engine)
    cluster = engine.cluster.describe()
    if cluster:
        lines.append(f"{cluster}; batch and cache are those of each")
    speculation = engine.speculation.describe()
    if speculation:
        lines.append(speculation)
    if plan.unserved is not None:
        lines.append(f"{plan.unserved}: only its rule is simulated")
    longest = max(request.total_len for request in plan.load.requests)
    if longest > plan.spec.max_position:
        lines.append(
            f"the longest request has {longest} tokens: {plan.spec.name} was made for "
            f"{plan.spec.max_position}, and a server refuses more unless it scales positions"
        )
    return lines


def _first_for(context: RunContext) -> str:
    """Name the run of a sweep that is the first to have something, by all but its seed."""
    settings = []
    for name, value in context.varied.items():
        if name not in SAMPLES:
            settings.append(f"{name}={value}")
    if not settings:
        return ""
    return f", first for {' '.join(settings)}"


def print_advice(advice: BestChunk, longest_prompt: int) -> None:
    """Print whether to chunk, the chunk that chunk=auto stands for, and what it was chosen by."""
    rows = []
    for prediction in advice.table.to_dict("records"):
        chunk = prediction["chunk"]
        mark = "*" if prediction["is_as_good"] else " "
        row = {"chunk": f"{chunk} {mark}"}
        for name in ADVICE_COLUMNS:
            row[heading(name)] = cell(name, prediction[name])
        if "slo_met" in prediction:
            row["SLO"] = "met" if prediction["slo_met"] else "missed"
        rows.append(row)
    if advice.chunk >= longest_prompt:
        longest = f"the longest has {longest_prompt}"
        show([f"  do not chunk here: it leaves all prompts whole, {longest}"])
    title = f"  chunk=auto is {advice.chunk} tokens, predicted to give {advice.objective}"
    show([f"{title} (* within 1 % of the best)", DisplayTable(rows)])
