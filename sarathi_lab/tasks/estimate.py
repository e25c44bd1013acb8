"""Estimates of the time of runs, by their loop on a virtual clock, and the list of `--dry-run`."""

from __future__ import annotations

import math
import time

from sarathi_lab.config.console import console, duration, progress_of
from sarathi_lab.config.instantiate import build
from sarathi_lab.config.run_context import run_name
from sarathi_lab.config.sweeper import LabSweeper
from sarathi_lab.engine.ledger import Ledger
from sarathi_lab.engine.loop import run_engine
from sarathi_lab.engine.request import Batch
from sarathi_lab.executor.simulated.executor import PipelineExecutor
from sarathi_lab.model.roofline import Peaks, roofline_time
from sarathi_lab.results.result import DisplayTable, show
from sarathi_lab.tasks.plan import Plan

TRIED_SECONDS = 0.3  # of a run's loop, for an estimate of the whole
MOST_SECONDS = 20.0  # of estimating; runs that come later are not estimated


def num_tokens(plan: Plan) -> int:
    """Those that are computed; the last token of a request is not."""
    return sum(request.total_len - 1 for request in plan.load.requests)


def predict_roofline(
    plan: Plan, peaks: Peaks, most_seconds: float = math.inf
) -> tuple[float, float]:
    """Seconds that the plan takes if every iteration meets its roofline time, and seconds until the
    same loop has told so on a virtual clock, both from its first `most_seconds`. On a pipeline the
    roofline is that of each stage's share of work and devices.
    """
    num_stages, total, done = plan.backend.num_stages, num_tokens(plan), 0
    ledger, start, share = Ledger(), time.monotonic(), 1.0

    def times(batch: Batch) -> list[float]:
        roofline = float(roofline_time(plan.spec, batch, plan.backend.dtype_bytes, peaks))
        return [roofline] * num_stages

    def count(num_tokens: int) -> None:
        nonlocal done
        done += num_tokens
        advance(num_tokens)
        if time.monotonic() - start > most_seconds:
            raise TimeoutError

    num_layers = plan.spec.num_layers
    scheduler, executor = plan.build(
        lambda: PipelineExecutor(num_stages, times, num_layers=num_layers)
    )
    with progress_of("predicting the roofline", total, "tokens") as advance:
        ledger.on_iteration = count
        try:
            run_engine(plan.load.arrivals(), scheduler, executor, ledger)
        except TimeoutError:
            share = min(1.0, done / total)
    return float(ledger.iterations().end.max()) / share, (time.monotonic() - start) / share


def print_jobs(sweeper: LabSweeper) -> None:
    """List the checked jobs, each with what its task estimates its time to be."""
    swept = sweeper.record.swept if sweeper.is_sweep else None
    start, shared, rows, known = time.monotonic(), set[str](), [], []
    for number, job in enumerate(sweeper.jobs):
        seconds, by = None, "unknown"
        if time.monotonic() - start < MOST_SECONDS:
            estimate = build(job.cfg.task).estimate(job.prepared, shared)
            seconds, by = estimate or (seconds, by)
        job.take_prepared()
        known += [] if seconds is None else [seconds]
        name = run_name(str(job.composed.hydra.runtime.choices["policy"]), job.settings, swept)
        about = "-" if seconds is None else duration(seconds)
        rows.append({"": str(number), "run": name, "about": about, "by": by})
    show([DisplayTable(rows, left=["run", "by"])])
    number = sweeper.num_planned
    text = f"{number} run{'s' * (number > 1)}, checked and not started"
    if sweeper.is_search:
        text = f"a search of {number} trials, of which these are the ends of its space"
    time_of_all = "; how long it takes is unknown"
    if known:
        whole = duration(sum(known) / len(known) * number)
        time_of_all = f"; about {whole} in all, one after the other"
    console().print(f"{text}{time_of_all}", soft_wrap=True)
