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
from sarathi_lab.config.instantiate import build
from sarathi_lab.config.paths import locked, write_json
from sarathi_lab.config.run_context import RunContext
from sarathi_lab.engine.executor import Executor
from sarathi_lab.engine.ledger import Ledger
from sarathi_lab.engine.loop import run_engine
from sarathi_lab.engine.request import Batch
from sarathi_lab.executor.simulated.pipeline import PipelineExecutor
from sarathi_lab.model.roofline import Peaks, request_roofline, roofline_time
from sarathi_lab.results import report
from sarathi_lab.results.decode_cost import (
    DecodeCost,
    decode_iteration,
    fullest_hybrid,
    measure_decode_cost,
)
from sarathi_lab.results.metrics import (
    add_costs,
    compare,
    pipeline_metrics,
    prefix_metrics,
    summarise,
)
from sarathi_lab.results.provenance import provenance
from sarathi_lab.results.saturation import Saturated, Trend, delay_trend
from sarathi_lab.results.serving_metrics import serving_summary, stall_histogram
from sarathi_lab.results.trace import write_trace
from sarathi_lab.results.tracking import Tracker
from sarathi_lab.tasks import announce
from sarathi_lab.tasks.plan import Plan, baseline_config, make_plan

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
    """Least seconds of each request [R] alone on the idle engine; of a pipeline one stage works on
    it at a time.
    """
    return plan.backend.num_stages * request_roofline(
        plan.spec, requests, plan.backend.dtype_bytes, peaks
    )


READ_FROM_TIMES = (
    "slo",
    "stall",
    "prompt_classes",
)  # settings that change no work, but what is read from it


@dataclass(frozen=True)
class Serve:
    """The task of serving a workload under a policy, and under its baselines on the same
    requests.
    """

    reads: ClassVar[None] = None
    has_runs: ClassVar[bool] = True

    def check(self, cfg: DictConfig) -> None:
        """Plan the run and its baselines."""
        make_plan(cfg)
        for name in cfg.baselines:
            make_plan(baseline_config(cfg, name))

    def run(self, cfg: DictConfig, place: RunContext) -> None:
        """Run it, and the baselines unless they are there already."""
        run_with_baselines(cfg, place)


def run_with_baselines(cfg: DictConfig, place: RunContext) -> dict[str, float]:
    """Run `cfg` and, unless they are there already, its baselines on the same requests; returns the
    summary.
    """
    plan = make_plan(cfg)
    tracker: Tracker = build(cfg.tracking)
    baselines = {
        name: _ensure_baseline(baseline_config(cfg, name), name, place, tracker)
        for name in cfg.baselines
        if build(baseline_config(cfg, name).policy)
        != build(cfg.policy)  # a run is not its own baseline
    }
    failed = [result for result in baselines.values() if isinstance(result, RunError)]
    folders = {name: result for name, result in baselines.items() if isinstance(result, Path)}
    labels = {
        "is_baseline": False,
        "baselines": {name: os.path.relpath(path, place.run_dir) for name, path in folders.items()},
    }
    summary = _execute(plan, place.run_dir, tracker, place, labels, folders)
    if failed:
        raise failed[0]  # only now: the run itself may well succeed where a baseline can't
    return summary


def read_summary(run_dir: Path) -> dict[str, float]:
    """The summary of a finished run."""
    return json.loads((run_dir / "summary.json").read_text())


def _ensure_baseline(
    cfg: DictConfig, name: str, place: RunContext, tracker: Tracker
) -> Path | RunError:
    """The folder of the baseline's run, executed now if no run of the sweep did so before; or why
    it stopped.
    """
    plan = make_plan(cfg)
    run_dir = place.baselines_dir / f"{name}-{_fingerprint(plan)}"
    with locked(
        place.baselines_dir.parent / ".locks" / run_dir.name
    ):  # of jobs beside each other, one runs it
        return _baseline(cfg, name, plan, replace(place, run_dir=run_dir), tracker)


def _baseline(
    cfg: DictConfig, name: str, plan: Plan, place: RunContext, tracker: Tracker
) -> Path | RunError:
    run_dir = place.run_dir
    failed_dir = run_dir.with_name(f"{run_dir.name}-failed")
    if (run_dir / "run.json").is_file():
        return run_dir
    if (failed_dir / "failed.json").is_file():  # by another job of the sweep: it would fail again
        return RunError(
            f"baseline {name}: {json.loads((failed_dir / 'failed.json').read_text())['error']}"
        )
    # Executed aside and moved when complete, so that nobody reads half a baseline, should this
    # process end before.
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{run_dir.name}.", dir=run_dir.parent))
    try:
        own = replace(place, name=_baseline_name(cfg, name, place.swept))
        _execute(plan, aside, tracker, own, {"is_baseline": True, "baselines": {}}, {})
        _move_unless_there(aside, run_dir)
    except RunError as error:
        _move_unless_there(aside, failed_dir)
        return RunError(f"baseline {name}: {error}")
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return run_dir


def _move_unless_there(aside: Path, run_dir: Path) -> None:
    try:
        aside.rename(run_dir)
    except OSError:  # another job was first, which is as good
        if not run_dir.is_dir():
            raise


def _baseline_name(cfg: DictConfig, name: str, swept: Sequence[str]) -> str:
    """The baseline and what the sweep varies of its work: not the parameters of another policy."""
    cuts_prompts = build(cfg.policy).budget is not None
    read = [
        key
        for key in swept
        if key.partition(".")[0] != "policy" and (key != "chunk" or cuts_prompts)
    ]
    return " ".join(["baseline", name, *(f"{key}={OmegaConf.select(cfg, key)}" for key in read)])


def _fingerprint(plan: Plan) -> str:
    """Equal for plans that do the same work and read the same from it: what the policy does not
    read does not count.
    """
    served = (
        "policy",
        "workload",
        "executor",
        "model",
        "batch",
        "max_model_len",
        "cache",
        "queue_order",
        "preemption",
    )
    names = (*served, "window", "stop_when_saturated", *READ_FROM_TIMES)
    text = json.dumps({name: plan.config[name] for name in names}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _execute(
    plan: Plan,
    run_dir: Path,
    tracker: Tracker,
    place: RunContext,
    labels: Mapping[str, Any],
    baselines: Mapping[str, Path],
) -> dict[str, float]:
    """Run one plan, compare it with its finished `baselines`, write its tables to `run_dir`, and
    track it.
    """
    summaries = {name: read_summary(path) for name, path in baselines.items()}
    labels = {**labels_of(plan, place.name), **labels}
    tags = [str(labels[key]) for key in ("policy", "model", "device", "executor")]
    tags += ["baseline"] if labels["is_baseline"] else []
    job_type = place.experiment or "serve"
    config = {**labels, "settings": plan.config}
    with tracker.run(
        name=place.name, group=place.group, job_type=job_type, tags=tags, config=config
    ) as tracked:
        peaks = plan.backend.peaks()
        predicted_roofline = predict_roofline(plan, peaks)
        announce.announce(plan, place, peaks, predicted_roofline)
        ledger = Ledger()
        try:
            iterations, decode_cost, peaks, profile = _measure(plan, ledger, run_dir)
            summary, trend = _summarise(plan, ledger, iterations, peaks, decode_cost, profile)
        except RunError as error:
            marks = _saturation(error)
            if marks:
                tracked.log_summary(marks)
            _keep_finished_part(ledger, plan, run_dir, {**labels, "error": str(error), **marks})
            raise
        summary |= {"predicted_roofline": predicted_roofline, **profile}
        for name, baseline in summaries.items():
            summary |= compare(summary, baseline, name)
        run_dir.mkdir(parents=True, exist_ok=True)
        iterations.to_parquet(run_dir / "iterations.parquet")
        ledger.requests().to_parquet(run_dir / "requests.parquet")
        if summary.get("num_stalls"):
            stall_histogram(ledger.requests(), plan.targets.stall).to_csv(
                run_dir / "stalls.csv", index=False
            )
        if plan.backend.num_stages > 1:
            ledger.bubbles().to_parquet(run_dir / "bubbles.parquet")
        if plan.writes_trace:
            write_trace(run_dir / "trace.json", iterations, ledger.stages(), ledger.bubbles())
        OmegaConf.save(OmegaConf.create(plan.config), run_dir / "config.yaml")
        write_json(run_dir / "summary.json", summary)
        tracked.log_iterations(iterations)
        tracked.log_summary(summary)
        for path in baselines.values():
            tracked.use_tables(path, path.name)
        tracked.log_tables(run_dir, f"{plan.policy.name}-{_fingerprint(plan)}")
        write_json(
            run_dir / "run.json", {**labels, "status": "finished"}
        )  # last: marks the folder as complete
    report.print_summary(plan.policy.name, summary, summaries)
    if trend is not None and trend.is_growing:
        report.print_caution(trend.caution())
    return summary


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
            part.iterations(iterations),
            part.requests(requests),
            part.bubbles(bubbles),
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
    found = {"saturation_time": error.time, "saturation_rate": error.rate}
    return {
        "is_saturated": 1.0,
        **{name: value for name, value in found.items() if value is not None},
    }


def _keep_finished_part(
    ledger: Ledger, plan: Plan, run_dir: Path, labels: Mapping[str, Any]
) -> None:
    """Write what a run that stopped has done; without `run.json`, so that nobody takes it for a
    whole one.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    ledger.iterations().to_parquet(run_dir / "iterations.parquet")
    ledger.requests().to_parquet(run_dir / "requests.parquet")
    OmegaConf.save(OmegaConf.create(plan.config), run_dir / "config.yaml")
    write_json(run_dir / "failed.json", labels)


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
    """What a run is called by in tables and dashboards: flat, and null for what the policy does not
    read.
    """
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
