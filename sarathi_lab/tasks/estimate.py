"""The roofline time of a run, by its loop on a virtual clock."""

from __future__ import annotations

from sarathi_lab.config.console import progress_of
from sarathi_lab.engine.ledger import Ledger
from sarathi_lab.engine.loop import run_engine
from sarathi_lab.engine.request import Batch
from sarathi_lab.executor.simulated.executor import PipelineExecutor
from sarathi_lab.model.roofline import Peaks, roofline_time
from sarathi_lab.tasks.plan import Plan


def num_tokens(plan: Plan) -> int:
    """Those that are computed; the last token of a request is not."""
    return sum(request.total_len - 1 for request in plan.load.requests)


def predict_roofline(plan: Plan, peaks: Peaks) -> float:
    """Seconds that the plan takes if every iteration meets its roofline time. On a pipeline the
    roofline is that of each stage's share of work and devices.
    """
    num_stages, num_layers = plan.backend.num_stages, plan.spec.num_layers

    def times(batch: Batch) -> list[float]:
        roofline = float(roofline_time(plan.spec, batch, plan.backend.dtype_bytes, peaks))
        return [roofline] * num_stages

    scheduler, executor = plan.build(
        lambda: PipelineExecutor(num_stages, times, num_layers=num_layers)
    )
    ledger = Ledger()
    with progress_of("predicting the roofline", num_tokens(plan), "tokens") as advance:
        ledger.on_iteration = advance
        run_engine(plan.load.arrivals(), scheduler, executor, ledger)
    return float(ledger.iterations().end.max())
