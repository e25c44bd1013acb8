"""The only loop: hand over arrivals, submit batches, collect results. Every executor is driven by it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Protocol

from sarathi_lab.arrivals import Arrivals, as_arrivals
from sarathi_lab.executor import Executor, StepResult
from sarathi_lab.request import Request, Sequence
from sarathi_lab.scheduler import Scheduler


class Recorder(Protocol):
    """Sees every finished iteration; see `ledger.Ledger`."""

    def record(self, result: StepResult, finished: list[Sequence]) -> None: ...


def run_engine(
    requests: Iterable[Request] | Arrivals, scheduler: Scheduler, executor: Executor, recorder: Recorder
) -> None:
    """Serve `requests` to the end. The clock starts at zero with this call."""
    arrivals = as_arrivals(requests)
    for request in arrivals.requests:
        scheduler.check_fits(request)  # before anything runs: a late refusal would lose the run
    executor.start()
    while arrivals.next_time < math.inf or scheduler.has_work or executor.num_in_flight:
        while arrivals.next_time <= executor.now:
            scheduler.add(arrivals.pop())
        _submit_all(scheduler, executor)
        if executor.num_in_flight and not _arrives_first(arrivals, executor):
            result = executor.collect()
            finished = scheduler.update(result)
            recorder.record(result, finished)
            arrivals.finished(finished)
        elif arrivals.next_time < math.inf:
            executor.wait_until(arrivals.next_time)
        else:
            raise RuntimeError(f"policy {scheduler.policy.name} stalled with {len(scheduler.waiting)} waiting requests")


def _arrives_first(arrivals: Arrivals, executor: Executor) -> bool:
    """Whether the next request comes into a pipeline with room before the oldest batch leaves it."""
    return executor.num_in_flight < executor.capacity and arrivals.next_time < executor.next_end


def _submit_all(scheduler: Scheduler, executor: Executor) -> None:
    while executor.num_in_flight < executor.capacity:
        batch = scheduler.schedule(executor.now)
        if batch is None:
            return
        executor.submit(batch)
        if executor.feeds_tokens:
            scheduler.advance(batch)
