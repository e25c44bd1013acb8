"""Data-parallel replicas of an engine in lockstep, as the one scheduler that the loop drives."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from sarathi_lab.engine.executor import StepResult
from sarathi_lab.engine.request import Batch, Queues, Request, SequenceState
from sarathi_lab.engine.routers import least_loaded
from sarathi_lab.engine.scheduler import Scheduler


class LockstepReplicas:
    """Replicas of an engine, each with a cache of its own, that run one batch each at a time.

    So do replicas that share the experts of a mixture (vLLM's data parallelism with expert
    parallelism): a layer's experts wait for the tokens of all. The batches of one iteration are the
    `parts` of one. A request goes for good to the least loaded (`routers`).
    """

    next_time = math.inf

    def __init__(self, replicas: Sequence[Scheduler]) -> None:
        self.replicas = replicas
        self.policy = replicas[0].policy

    @property
    def has_work(self) -> bool:
        return any(replica.has_work for replica in self.replicas)

    @property
    def waiting(self) -> list[SequenceState]:
        return [sequence for replica in self.replicas for sequence in replica.waiting]

    def check_fits(self, request: Request) -> None:
        """Raise UserError if model or cache are too small for `request`, even alone."""
        self.replicas[0].check_fits(request)

    def add(self, request: Request) -> SequenceState:
        """Queue a request. Raises UserError for one that could never finish."""
        return self.replicas[least_loaded(self.replicas, request)].add(request)

    def schedule(self, now: float) -> Batch | None:
        """The next batch of each at time `now` (seconds), or None if none can run."""
        parts = tuple(replica.schedule(now) or Batch() for replica in self.replicas)
        return Batch.of(parts) if any(parts) else None

    def advance(self, batch: Batch) -> None:
        """Book what is known of a batch before it ran."""
        for replica, part in zip(self.replicas, batch.parts, strict=True):
            replica.advance(part)
        queues = [part.queues for part in batch.parts if part.queues is not None]
        batch.queues = Queues(*map(sum, zip(*queues, strict=True)))

    def update(self, result: StepResult) -> list[SequenceState]:
        """Book a finished batch; returns the sequences that it finished."""
        if result.batch.queues is None:
            self.advance(result.batch)
        finished, end = [], 0
        for replica, part in zip(self.replicas, result.batch.parts, strict=True):
            start, end = end, end + part.num_emits
            own = replace(result, batch=part, token_ids=result.token_ids[start:end])
            finished += replica.update(own)
        return finished
