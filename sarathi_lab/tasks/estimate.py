"""Estimates of the time of runs, by their loop on a virtual clock, and the list of `--dry-run`."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from sarathi_lab.config.console import console, duration, progress_of
from sarathi_lab.config.instantiate import build, resolved
from sarathi_lab.config.run_context import run_name
from sarathi_lab.config.sweep_record import FINISHED
from sarathi_lab.config.sweeper import LabSweeper
from sarathi_lab.engine.executor import Executor
from sarathi_lab.engine.ledger import Ledger
from sarathi_lab.engine.loop import run_engine
from sarathi_lab.engine.request import Batch
from sarathi_lab.engine.scheduler import Scheduler
from sarathi_lab.executor.simulated.executor import PipelineExecutor
from sarathi_lab.model.roofline import Peaks, roofline_time
from sarathi_lab.results.result import DisplayTable, show
from sarathi_lab.tasks.plan import Plan

TRIED_SECONDS = 0.3  # of a run's loop, for an estimate of the whole


def num_tokens(plan: Plan) -> int:
    """Those that are computed; the last token of a request is not."""
    return sum(request.total_len - 1 for request in plan.load.requests)


def predict_roofline(plan: Plan, peaks: Peaks) -> float:
    """Seconds that the plan takes if every iteration meets its roofline time: the same loop on a
    virtual clock. On a pipeline the roofline is that of each stage's share of work and devices.
    """
    ledger, (scheduler, executor) = Ledger(), _on_roofline(plan, peaks)
    with progress_of("predicting the roofline", num_tokens(plan), "tokens") as advance:
        ledger.on_iteration = advance
        run_engine(plan.load.arrivals(), scheduler, executor, ledger)
    return float(ledger.iterations().end.max())


def tried_loop(plan: Plan) -> tuple[float, float]:
    """Seconds that the loop takes on a virtual clock, by this machine's clock and by that one, from
    its first `TRIED_SECONDS`.
    """
    scheduler, executor = _on_roofline(plan, plan.backend.peaks())
    ledger, start = Ledger(), time.monotonic()
    done, total = 0, num_tokens(plan)

    def advance(num_tokens: int) -> None:
        nonlocal done
        done += num_tokens
        if time.monotonic() - start > TRIED_SECONDS:
            raise TimeoutError

    ledger.on_iteration = advance
    with suppress(TimeoutError):
        run_engine(plan.load.arrivals(), scheduler, executor, ledger)
    scale = total / max(1, done)
    return scale * (time.monotonic() - start), scale * float(ledger.iterations().end.max())


def _on_roofline(plan: Plan, peaks: Peaks) -> tuple[Scheduler, Executor]:
    num_stages = plan.backend.num_stages

    def times(batch: Batch) -> list[float]:
        roofline = float(roofline_time(plan.spec, batch, plan.backend.dtype_bytes, peaks))
        return [roofline] * num_stages

    num_layers = plan.spec.num_layers
    return plan.build(lambda: PipelineExecutor(num_stages, times, num_layers=num_layers))


# -- the list of --dry-run ----------------------------------------------------------------------

# What the time of a run depends on most; its policy, chunk and seed change it by less.
KIND = ("task", "workload", "executor", "model", "batch", "cache", "dtype")
MOST_SECONDS = 20.0  # of estimating; runs that come later are not estimated one by one


def print_jobs(sweeper: LabSweeper) -> None:
    """List the checked jobs, each with an estimate of its time: what the newest finished run of its
    kind below `output` took, else what its task makes of it.
    """
    finished = _finished(Path(str(sweeper.jobs[0].cfg.output)))
    swept = sweeper.record.swept if sweeper.is_sweep else None
    start, shared, rows, known = time.monotonic(), set[str](), [], []
    for number, job in enumerate(sweeper.jobs):
        estimate = finished.get(_kind(resolved(job.cfg)))
        if estimate is None and time.monotonic() - start < MOST_SECONDS:
            estimate = build(job.cfg.task).estimate(job.prepared, shared)
        job.take_prepared()
        seconds, by = estimate or (None, "unknown: nothing like it has run here")
        known += [] if seconds is None else [seconds]
        name = run_name(str(job.composed.hydra.runtime.choices["policy"]), job.settings, swept)
        about = "-" if seconds is None else duration(seconds)
        rows.append({"": str(number), "run": name, "about": about, "by": by})
    show([DisplayTable(rows, left=["run", "by"])])
    console().print(_total(sweeper, known), soft_wrap=True)


def _total(sweeper: LabSweeper, known: list[float]) -> str:
    """How many runs there are, and their time together."""
    number = sweeper.num_planned
    text = f"{number} run{'s' * (number > 1)}, checked and not started"
    if sweeper.record.is_search:
        text = f"a search of {number} trials, of which these are the ends of its space"
    if not known:
        return f"{text}; how long it takes is unknown"
    whole = duration(sum(known) / len(known) * number)
    return f"{text}; about {whole} in all, one after the other"


def _finished(output: Path) -> dict[str, tuple[float, str]]:
    """The seconds of the newest finished run of each kind, and its folder."""
    paths = sorted(output.rglob(FINISHED), key=lambda path: path.stat().st_mtime)
    newest = {}
    for path in paths:
        try:
            config: Any = OmegaConf.to_container(OmegaConf.load(path.with_name("config.yaml")))
            seconds = json.loads(path.read_text())["seconds"]
            newest[_kind(config)] = (seconds, f"run {'/'.join(path.parts[-4:-1])}")
        except (OSError, ValueError, KeyError):  # of a task that leaves none
            continue
    return newest


def _kind(config: dict[str, Any]) -> str:
    parts = {name: config.get(name) for name in KIND}
    parts["workload"] = {k: v for k, v in (parts["workload"] or {}).items() if k != "seed"}
    parts["executor"] = {k: v for k, v in (parts["executor"] or {}).items() if k != "seed"}
    return json.dumps(parts, sort_keys=True)
