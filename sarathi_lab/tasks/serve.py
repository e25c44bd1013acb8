"""Executes plans: a run with its baselines beside it, each leaving a folder of tables."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from omegaconf import DictConfig, OmegaConf

from sarathi_lab.config import console
from sarathi_lab.config.errors import RunError
from sarathi_lab.config.paths import locked
from sarathi_lab.config.run_context import RunContext
from sarathi_lab.engine.executor import Executor
from sarathi_lab.engine.ledger import Ledger
from sarathi_lab.engine.loop import run_engine
from sarathi_lab.engine.request import Batch
from sarathi_lab.executor.simulated.executor import PipelineExecutor
from sarathi_lab.model.roofline import Peaks, request_roofline, roofline_time
from sarathi_lab.results import report
from sarathi_lab.results.decode_cost import (
    DecodeCost,
    decode_iteration,
    fullest_hybrid,
    measure_decode_cost,
)
from sarathi_lab.results.load import load_summary
from sarathi_lab.results.metrics import (
    add_costs,
    compare,
    pipeline_metrics,
    prefix_metrics,
    summarise,
)
from sarathi_lab.results.provenance import provenance
from sarathi_lab.results.result import ITERATIONS, REQUESTS, Result, Shown, Stopped
from sarathi_lab.results.saturation import Saturated, Trend, delay_trend
from sarathi_lab.results.serving_metrics import serving_summary, stall_histogram
from sarathi_lab.results.trace import write_trace
from sarathi_lab.tasks import announce
from sarathi_lab.tasks.base import conclude
from sarathi_lab.tasks.plan import Plan, Prepared, prepare

SLO_REFERENCE = "slo_decode_time"


def slo_reference(plan: Plan, executor: Executor) -> dict[str, float]:
    """The decode iteration that a relative objective refers to (seconds), of at most the run's own
    batch and length; nothing for bounds in seconds. Runs a few iterations.
    """
    slo = plan.targets.slo
    if not slo.is_relative:
        return {}
    size = (min(slo.decode_batch, plan.batch_size), min(slo.decode_context, plan.max_model_len))
    cache = {"num_blocks": plan.num_blocks, "block_size": plan.block_size}
    return {SLO_REFERENCE: decode_iteration(executor, *size, **cache)}


def serving_summary_of(
    plan: Plan, requests: pd.DataFrame, seconds: float, peaks: Peaks, reference: Mapping[str, float]
) -> dict[str, float]:
    """The metrics of `requests`, served in `seconds`, held against the plan's targets; `reference`
    may hold what `slo_reference` found.
    """
    targets = replace(plan.targets, slo=plan.targets.slo.resolved(reference.get(SLO_REFERENCE)))
    return serving_summary(requests, seconds, targets, alone_times(plan, requests, peaks))


def alone_times(plan: Plan, requests: pd.DataFrame, peaks: Peaks) -> NDArray[np.float64]:
    """Least seconds of each request [R] alone on the engine, one pipeline stage at a time."""
    return plan.backend.num_stages * request_roofline(
        plan.spec, requests, plan.backend.dtype_bytes, peaks
    )


SERVED = (  # what decides a run's work
    "policy",
    "workload",
    "executor",
    "model",
    "batch",
    "max_model_len",
    "cache",
    "queue_order",
    "preemption",
    "window",
    "stop_when_saturated",
)
READ_FROM_TIMES = ("slo", "stall", "prompt_classes")  # change no work, but what is read from it


@dataclass(frozen=True)
class Serve:
    """Serves a workload under a policy, and under its baselines on the same requests."""

    reads: ClassVar[None] = None
    has_runs: ClassVar[bool] = True

    def check(self, cfg: DictConfig) -> Prepared:
        """Plan the run and its baselines."""
        return prepare(cfg)

    def run(self, cfg: DictConfig, context: RunContext) -> Result:
        """Run it, and the baselines unless they are there already."""
        prepared: Prepared = context.prepared or prepare(cfg)
        folders: dict[str, Path] = {}
        failed: list[RunError] = []
        for name, plan in prepared.baselines.items():
            try:
                folders[name] = _ensure_baseline(cfg, plan, name, context)
            except RunError as error:
                failed.append(RunError(f"baseline {name}: {error}"))
        places = {name: os.path.relpath(path, context.run_dir) for name, path in folders.items()}
        labels = {"is_baseline": False, "baselines": places}
        result = _executed(prepared.plan, context, labels, folders)
        # Only when it is kept: the run itself may well succeed where a baseline can't.
        return replace(result, error=failed[0] if failed else None)


def _ensure_baseline(cfg: DictConfig, plan: Plan, name: str, context: RunContext) -> Path:
    """The folder of the baseline's run, executed now if no run of the sweep did so before.

    Raises RunError if it stopped, now or before.
    """
    run_dir = context.baselines_dir / f"{name}-{_fingerprint(plan)}"
    failed_dir = run_dir.with_name(f"{run_dir.name}-failed")
    # Of jobs beside each other, one runs it.
    with locked(context.baselines_dir.parent / ".locks" / run_dir.name):
        if (run_dir / "run.json").is_file():
            return run_dir
        if (failed_dir / "failed.json").is_file():  # in another job: it would fail again
            raise RunError(json.loads((failed_dir / "failed.json").read_text())["error"])
        _run_aside(cfg, plan, _baseline_name(cfg, plan, name, context.swept), context, run_dir)
    return run_dir


def _run_aside(cfg: DictConfig, plan: Plan, name: str, context: RunContext, run_dir: Path) -> None:
    """Run a baseline in a hidden folder, moved when complete: nobody reads half of one."""
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{run_dir.name}.", dir=run_dir.parent))
    own = replace(context, run_dir=aside, name=name)
    labels = {"is_baseline": True, "baselines": {}}
    try:
        conclude(lambda: _executed(plan, own, labels, {}), cfg, own, is_run=True)
        _move_unless_there(aside, run_dir)
    except RunError:
        _move_unless_there(aside, run_dir.with_name(f"{run_dir.name}-failed"))
        raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _move_unless_there(aside: Path, run_dir: Path) -> None:
    try:
        aside.rename(run_dir)
    except OSError:  # another job was first, which is as good
        if not run_dir.is_dir():
            raise


def _baseline_name(cfg: DictConfig, plan: Plan, name: str, swept: Sequence[str]) -> str:
    """The baseline and what the sweep varies of its work: not the parameters of another policy."""
    cuts_prompts = plan.policy.budget is not None
    read = [
        key
        for key in swept
        if key.partition(".")[0] != "policy" and (key != "chunk" or cuts_prompts)
    ]
    return " ".join(["baseline", name, *(f"{key}={OmegaConf.select(cfg, key)}" for key in read)])


def _fingerprint(plan: Plan) -> str:
    """Equal for plans that do the same work and read the same from it."""
    read = {name: plan.config[name] for name in (*SERVED, *READ_FROM_TIMES)}
    return hashlib.sha256(json.dumps(read, sort_keys=True).encode()).hexdigest()[:8]


def _executed(
    plan: Plan, context: RunContext, labels: Mapping[str, Any], baselines: Mapping[str, Path]
) -> Result:
    """Run one plan and compare it with its finished `baselines`. Raises Stopped."""
    labels = {**labels_of(plan, context.name), **labels}
    tags = [str(labels[key]) for key in ("policy", "model", "device", "executor")]
    tags += ["baseline"] if labels["is_baseline"] else []
    artifact = f"{plan.policy.name}-{_fingerprint(plan)}"
    result = Result(labels=labels, tags=tags, config=plan.config, artifact=artifact)
    peaks = plan.backend.peaks()
    predicted_roofline = predict_roofline(plan, peaks)
    announce.announce(plan, context, peaks, predicted_roofline)
    ledger = Ledger()
    try:
        iterations, decode_cost, peaks, profile = _measure(plan, ledger, context.run_dir)
        summary, trend = _summarise(plan, ledger, iterations, peaks, decode_cost, profile)
    except RunError as error:
        done = {ITERATIONS: ledger.iterations(), REQUESTS: ledger.requests()}
        raise Stopped(
            str(error), replace(result, tables=done, summary=_saturation(error))
        ) from error
    summary |= {"predicted_roofline": predicted_roofline, **profile}
    summaries = {name: load_summary(path) for name, path in baselines.items()}
    for name, baseline in summaries.items():
        summary |= compare(summary, baseline, name)
    if plan.writes_trace:
        stages, bubbles = ledger.stages(), ledger.bubbles()
        write_trace(context.run_dir / "trace.json", iterations, stages, bubbles)
    shown: list[Shown | str] = [report.summary_table(plan.policy.name, summary, summaries)]
    if trend is not None and trend.is_growing:
        shown.append(f"  {trend.caution()}")
    tables = {ITERATIONS: iterations, **_tables(plan, ledger, summary)}
    return replace(result, tables=tables, summary=summary, shown=shown)


def _tables(plan: Plan, ledger: Ledger, summary: Mapping[str, float]) -> dict[str, pd.DataFrame]:
    requests = ledger.requests()
    tables = {REQUESTS: requests}
    if summary.get("num_stalls"):
        tables["stalls"] = stall_histogram(requests, plan.targets.stall)
    if plan.backend.num_stages > 1:
        tables["bubbles.parquet"] = ledger.bubbles()
    return tables


def _summarise(
    plan: Plan,
    ledger: Ledger,
    iterations: pd.DataFrame,
    peaks: Peaks,
    decode_cost: DecodeCost | None,
    profile: Mapping[str, float],
) -> tuple[dict[str, float], Trend | None]:
    """The metrics of the part of the run that counts, and whether the delay grew in it. Raises
    RunError if none does.

    `iterations` is `add_costs`' table.
    """
    requests, bubbles = ledger.requests(), ledger.bubbles()
    rates: dict[str, float] = {}
    if not plan.window.is_whole:
        part = plan.window.of(iterations, requests)
        rates = part.throughput(requests)
        iterations, requests, bubbles = (
            part.spans(iterations),
            part.requests(requests),
            part.spans(bubbles),
        )
    summary = summarise(iterations, requests, peaks, decode_cost) | rates
    summary |= serving_summary_of(plan, requests, summary["duration"], peaks, profile)
    if plan.shares_prefixes:
        summary |= prefix_metrics(requests)
    if plan.backend.num_stages > 1:
        summary |= pipeline_metrics(iterations, requests, bubbles, plan.backend.num_stages)
    trend = delay_trend(requests)
    if trend is not None:
        summary |= {"is_steady": float(not trend.is_growing), "scheduling_delay_slope": trend.slope}
    return summary, trend


def _saturation(error: RunError) -> dict[str, float]:
    """What marks a run that was stopped because it could not keep up."""
    if not isinstance(error, Saturated):
        return {}
    marks = {"is_saturated": 1.0, "saturation_time": error.time, "saturation_rate": error.rate}
    return {name: value for name, value in marks.items() if value is not None}


def _measure(
    plan: Plan, ledger: Ledger, run_dir: Path
) -> tuple[pd.DataFrame, DecodeCost | None, Peaks, Mapping[str, float]]:
    """Serve the plan and record it in `ledger`, and in `run_dir` what was watched.

    Returns the iterations with their costs, what a decode costs, and the peaks as known after the
    run (a busy machine may have freed up since they were announced), and what watching cost and the
    objective refers to.
    """
    executor = plan.backend.build(plan.spec, plan.checkpoint, plan.sizes)
    if plan.fills_memory and executor.num_blocks is not None:
        plan = replace(plan, num_blocks=executor.num_blocks)
    total = sum(request.total_len - 1 for request in plan.load.requests)
    recorder = plan.saturation_limits.guard(ledger, plan.load)
    with console.progress_of("serving", total, "tokens") as advance:
        ledger.on_iteration = advance
        run_engine(plan.load.arrivals(), plan.scheduler(), executor, recorder)
    peaks = plan.backend.peaks()
    iterations = add_costs(ledger.iterations(), plan.spec, plan.backend.dtype_bytes, peaks)
    run_dir.mkdir(parents=True, exist_ok=True)
    profile = executor.write_profile(run_dir)
    return (
        iterations,
        _decode_cost(plan, executor, iterations),
        peaks,
        {**profile, **slo_reference(plan, executor)},
    )


def predict_roofline(plan: Plan, peaks: Peaks) -> float:
    """Seconds that the plan takes if every iteration meets its roofline time: the same loop on a
    virtual clock.

    On a pipeline every stage has its share of the work and of the devices, so the roofline is that
    of each stage.
    """
    dtype_bytes, num_stages = plan.backend.dtype_bytes, plan.backend.num_stages

    def roofline(batch: Batch) -> float:
        return float(roofline_time(plan.spec, batch, dtype_bytes, peaks))

    executor = PipelineExecutor(num_stages, lambda batch: [roofline(batch)] * num_stages)
    ledger = Ledger()
    run_engine(plan.load.arrivals(), plan.scheduler(), executor, ledger)
    return float(ledger.iterations().end.max())


def _decode_cost(plan: Plan, executor: Executor, iterations: pd.DataFrame) -> DecodeCost | None:
    composition = fullest_hybrid(iterations)
    if composition is None:
        return None
    return measure_decode_cost(
        executor, composition, num_blocks=plan.num_blocks, block_size=plan.block_size
    )


def labels_of(plan: Plan, name: str) -> dict[str, Any]:
    """A run's flat labels in tables and dashboards; None for what the policy does not read."""
    return {
        "name": name,
        "policy": plan.policy.name,
        **{key: plan.config[key] for key in ("batch", "seed")},
        "chunk": plan.policy.budget,
        "pd_ratio": plan.config["workload"].get("pd_ratio"),
        "seq_len": plan.config["workload"].get("seq_len"),
        "workload": plan.load.name,
        "model": plan.spec.name,
        "executor": plan.backend.name,
        "device": plan.backend.device_name,
        "threads": getattr(plan.backend, "num_threads", None),
        "dtype": plan.backend.dtype_name,
        **provenance(),
    }
