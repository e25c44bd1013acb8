"""The loop of every run: schedule, run, update."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Protocol

from sarathi_lab.config.errors import UserError
from sarathi_lab.engine.arrivals import Arrivals, as_arrivals
from sarathi_lab.engine.config import EngineConfig
from sarathi_lab.engine.executor import Executor, StepResult
from sarathi_lab.engine.ledger import Ledger
from sarathi_lab.engine.policy_errors import PolicyStalled
from sarathi_lab.engine.request import Request, SequenceState
from sarathi_lab.engine.scheduler import Scheduler


class Recorder(Protocol):
    """Records every finished iteration; see `ledger.Ledger`."""

    def record(self, result: StepResult, finished: list[SequenceState]) -> None: ...


def serve(
    requests: Iterable[Request] | Arrivals,
    engine: EngineConfig,
    executor: Executor,
    recorder: Recorder | None = None,
) -> Ledger:
    """Serve requests with an empty cache.

    Args:
        requests: All of a run, or what lets them arrive (a closed loop, sessions).
        engine: Builds the scheduler.
        executor: Runs the batches; built by `engine` or by the caller.
        recorder: Records the iterations in place of the ledger.

    Returns:
        The ledger of the run; an empty one if another `recorder` records it.

    Raises:
        UserError: A request can never be served, or drafts meet an executor that overlaps batches.
    """
    arrivals = as_arrivals(requests)
    if engine.speculation.tokens and executor.feeds_tokens:
        raise UserError(
            "drafts are verified before the next batch is made; use an executor without overlap"
        )
    if engine.max_model_len is None:
        longest = max((request.total_len for request in arrivals.requests), default=1)
        engine = replace(engine, max_model_len=longest)
    ledger = recorder if isinstance(recorder, Ledger) else Ledger()
    run_engine(arrivals, engine.make_scheduler(executor), executor, recorder or ledger)
    return ledger


def run_engine(
    requests: Iterable[Request] | Arrivals,
    scheduler: Scheduler,
    executor: Executor,
    recorder: Recorder,
) -> None:
    """Serve requests to the end. The clock starts at zero with this call.

    Args:
        requests: As of `serve`.
        scheduler: Empty, made for `executor`.
        executor: Owns the time: a clock on the wall, or a virtual one.
        recorder: Records every iteration and the sequences that it finished.

    Raises:
        PolicyStalled: The policy takes nothing though requests are there and nothing is on its way.
    """
    arrivals = as_arrivals(requests)
    for request in arrivals.requests:
        scheduler.check_fits(request)  # before anything runs: a late refusal would lose the run
    for request in arrivals.cached:
        scheduler.warm(request)
    executor.start()
    # Each pass submits what can run now, then collects a batch or waits for what comes next.
    while arrivals.next_time < math.inf or scheduler.has_work or executor.num_in_flight:
        while arrivals.next_time <= executor.now:
            scheduler.add(arrivals.pop())
        _submit_all(scheduler, executor)
        next_time = min(arrivals.next_time, scheduler.next_time)
        # In a pipeline or a cluster a request may enter before the oldest batch leaves.
        has_room = executor.num_in_flight < executor.capacity
        if executor.num_in_flight and not (has_room and next_time < executor.next_end):
            result = executor.collect()
            finished = scheduler.update(result)
            recorder.record(result, finished)
            arrivals.finished(finished)
        elif next_time < math.inf:
            executor.wait_until(next_time)
        else:
            num_waiting = len(scheduler.waiting)
            raise PolicyStalled(scheduler.policy, scheduler.running, num_waiting)


def _submit_all(scheduler: Scheduler, executor: Executor) -> None:
    while executor.num_in_flight < executor.capacity:
        batch = scheduler.schedule(executor.now)
        if batch is None:
            return
        executor.submit(batch)
        if executor.feeds_tokens:
            scheduler.advance(batch)
