"""Several schedulers as the one that the loop drives, and data-parallel replicas in lockstep."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace

from sarathi_lab.engine.executor import StepResult
from sarathi_lab.engine.request import Batch, Queues, Request, SequenceState
from sarathi_lab.engine.scheduler import Scheduler

WAITING_WEIGHT = 4  # of a waiting request beside a running one, as in vLLM's front end


def load_of(scheduler: Scheduler) -> int:
    """Count the requests of an instance, those without a place in its cache four times."""
    num_waiting = len(scheduler.waiting) + len(scheduler.swapped)
    return WAITING_WEIGHT * num_waiting + len(scheduler.running)


def least_loaded(schedulers: Sequence[Scheduler], request: Request) -> int:
    """The index of the first with the least load (vLLM's data-parallel front end)."""
    loads = [load_of(one) for one in schedulers]
    return loads.index(min(loads))


class Schedulers(ABC):
    """Several schedulers with the interface of one `Scheduler`."""

    def __init__(self, schedulers: Sequence[Scheduler]) -> None:
        self.schedulers = schedulers
        self.policy = schedulers[0].policy

    @property
    def next_time(self) -> float:
        """Seconds of the next event besides arrivals and batches; infinity without one."""
        return math.inf

    @property
    def has_work(self) -> bool:
        return any(scheduler.has_work for scheduler in self.schedulers)

    @property
    def waiting(self) -> list[SequenceState]:
        return [sequence for scheduler in self.schedulers for sequence in scheduler.waiting]

    def check_fits(self, request: Request) -> None:
        """Raise UserError if model or cache of one are too small for `request`, even alone."""
        for scheduler in {type(one.policy): one for one in self.schedulers}.values():
            scheduler.check_fits(request)

    @abstractmethod
    def add(self, request: Request) -> SequenceState: ...

    @abstractmethod
    def schedule(self, now: float) -> Batch | None: ...

    @abstractmethod
    def advance(self, batch: Batch) -> None: ...

    @abstractmethod
    def update(self, result: StepResult) -> list[SequenceState]: ...


class LockstepReplicas(Schedulers):
    """Replicas of an engine with separate caches that run one batch each at a time, such as those
    that share the experts of a mixture (vLLM's data with expert parallelism): a layer's experts
    wait for the tokens of all. The batches of one iteration are the `parts` of one. A request stays
    at the replica that is least loaded when it arrives.
    """

    def add(self, request: Request) -> SequenceState:
        return self.schedulers[least_loaded(self.schedulers, request)].add(request)

    def schedule(self, now: float) -> Batch | None:
        parts = tuple(replica.schedule(now) or Batch() for replica in self.schedulers)
        return Batch.of(parts) if any(parts) else None

    def advance(self, batch: Batch) -> None:
        for replica, part in zip(self.schedulers, batch.parts, strict=True):
            replica.advance(part)
        queues = [part.queues for part in batch.parts if part.queues is not None]
        batch.queues = Queues(*map(sum, zip(*queues, strict=True)))

    def update(self, result: StepResult) -> list[SequenceState]:
        if result.batch.queues is None:
            self.advance(result.batch)
        finished, end = [], 0
        for replica, part in zip(self.schedulers, result.batch.parts, strict=True):
            start, end = end, end + part.num_emits
            of_part = replace(result, batch=part, token_ids=result.token_ids[start:end])
            finished += replica.update(of_part)
        return finished
