"""What a run would take, by its own loop on a virtual clock."""

from __future__ import annotations

import time
from contextlib import suppress

from sarathi_lab.config.console import progress_of
from sarathi_lab.engine.config import AnyScheduler
from sarathi_lab.engine.executor import Executor
from sarathi_lab.engine.ledger import Ledger
from sarathi_lab.engine.loop import run_engine
from sarathi_lab.engine.request import Batch
from sarathi_lab.executor.simulated.executor import PipelineExecutor
from sarathi_lab.model.roofline import Peaks, roofline_time
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


def _on_roofline(plan: Plan, peaks: Peaks) -> tuple[AnyScheduler, Executor]:
    num_stages = plan.backend.num_stages

    def times(batch: Batch) -> list[float]:
        roofline = float(roofline_time(plan.spec, batch, plan.backend.dtype_bytes, peaks))
        return [roofline] * num_stages

    num_layers = plan.spec.num_layers
    return plan.build(lambda: PipelineExecutor(num_stages, times, num_layers=num_layers))
