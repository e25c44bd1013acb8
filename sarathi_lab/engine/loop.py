"""The only loop, for every executor: hand over arrivals, submit batches, collect results."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Protocol

from sarathi_lab.config.errors import UserError
from sarathi_lab.engine.admission import SchedulingPolicy
from sarathi_lab.engine.arrivals import Arrivals, as_arrivals
from sarathi_lab.engine.block_manager import BlockManager
from sarathi_lab.engine.books import Preemption
from sarathi_lab.engine.cluster import Cluster
from sarathi_lab.engine.executor import Executor, StepResult
from sarathi_lab.engine.ledger import Ledger
from sarathi_lab.engine.queues import QueueOrder
from sarathi_lab.engine.replicas import LockstepReplicas
from sarathi_lab.engine.request import Request, SequenceState
from sarathi_lab.engine.scheduler import Scheduler
from sarathi_lab.engine.speculation import NO_SPECULATION, Speculation
from sarathi_lab.engine.topology import SINGLE, Topology

AnyScheduler = Scheduler | LockstepReplicas | Cluster


class Recorder(Protocol):
    """Sees every finished iteration; see `ledger.Ledger`."""

    def record(self, result: StepResult, finished: list[SequenceState]) -> None: ...


def serve(
    requests: Iterable[Request] | Arrivals,
    policy: SchedulingPolicy[Scheduler],
    executor: Executor,
    *,
    batch_size: int,
    num_blocks: int,
    block_size: int,
    max_model_len: int | None = None,
    num_micro_batches: int = 1,
    num_host_blocks: int = 0,
    shares_prefixes: bool = False,
    queue_order: QueueOrder = "fcfs",
    preemption: Preemption = "recompute",
    num_replicas: int = 1,
    cluster: Topology = SINGLE,
    speculation: Speculation = NO_SPECULATION,
    recorder: Recorder | None = None,
) -> Ledger:
    """Serve `requests` with an empty cache; the rest is as in `Scheduler` and `BlockManager`.

    `max_model_len` is the longest request's if None. `num_replicas` engines of these sizes run in
    lockstep, for an executor that knows of a batch's `parts`. A `cluster` has instances of these
    sizes, for the `Instances` that it makes. `recorder` sees the iterations in place of the ledger,
    which is then returned empty unless it is that. Raises UserError for what can never be served.
    """
    arrivals = as_arrivals(requests)
    if speculation.tokens and (executor.feeds_tokens or num_replicas > 1):
        raise UserError(
            "drafts are judged before the next batch is made, by each engine for itself; use an "
            "executor without overlap, and one replica"
        )
    if max_model_len is None:
        max_model_len = max((request.total_len for request in arrivals.requests), default=1)

    def make(own: SchedulingPolicy[Scheduler]) -> Scheduler:
        return Scheduler(
            own,
            BlockManager(num_blocks, block_size, num_host_blocks, shares_prefixes=shares_prefixes),
            batch_size=batch_size,
            max_model_len=max_model_len,
            num_micro_batches=num_micro_batches,
            queue_order=queue_order,
            preemption=preemption,
            speculation=speculation,
        )

    if num_replicas > 1:
        scheduler: AnyScheduler = LockstepReplicas([make(policy) for _ in range(num_replicas)])
    else:
        scheduler = cluster.scheduler(policy, make, executor)
    ledger = recorder if isinstance(recorder, Ledger) else Ledger()
    run_engine(arrivals, scheduler, executor, recorder or ledger)
    return ledger


def run_engine(
    requests: Iterable[Request] | Arrivals,
    scheduler: AnyScheduler,
    executor: Executor,
    recorder: Recorder,
) -> None:
    """Serve `requests` to the end. The clock starts at zero with this call."""
    arrivals = as_arrivals(requests)
    if scheduler.policy.in_layers:
        if executor.num_layers is None or not isinstance(scheduler, Scheduler):
            raise no_groups(scheduler.policy.name)
        scheduler.num_layers = executor.num_layers
    for request in arrivals.requests:
        scheduler.check_fits(request)  # before anything runs: a late refusal would lose the run
    executor.start()
    while arrivals.next_time < math.inf or scheduler.has_work or executor.num_in_flight:
        while arrivals.next_time <= executor.now:
            scheduler.add(arrivals.pop())
        _submit_all(scheduler, executor)
        next_time = min(arrivals.next_time, scheduler.next_time)
        # Of a pipeline or a cluster, whether a request enters before the oldest batch leaves.
        has_room = executor.num_in_flight < executor.capacity
        if executor.num_in_flight and not (has_room and next_time < executor.next_end):
            result = executor.collect()
            finished = scheduler.update(result)
            recorder.record(result, finished)
            arrivals.finished(finished)
        elif next_time < math.inf:
            executor.wait_until(next_time)
        else:
            left = f"{len(scheduler.waiting)} waiting requests"
            raise RuntimeError(f"policy {scheduler.policy.name} stalled with {left}")


def no_groups(policy: str) -> UserError:
    """What to say of a policy that moves prompts through groups of layers where nothing can."""
    return UserError(
        f"policy {policy} moves prompts through groups of layers, which pipelines, ranks and "
        "several engines can't; use executor.pipeline_parallel=1 (on a real device "
        "tensor_parallel=1, too) and cluster=single, or policy=sarathi_serve"
    )


def _submit_all(scheduler: AnyScheduler, executor: Executor) -> None:
    while executor.num_in_flight < executor.capacity:
        batch = scheduler.schedule(executor.now)
        if batch is None:
            return
        executor.submit(batch)
        if executor.feeds_tokens:
            scheduler.advance(batch)
