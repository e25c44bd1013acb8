"""One engine, served again and again: the same requests at any rate, under any policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from sarathi_lab.block_manager import BlockManager
from sarathi_lab.engine import run_engine
from sarathi_lab.errors import UserError
from sarathi_lab.executor import Executor
from sarathi_lab.ledger import Ledger
from sarathi_lab.policy import Policy
from sarathi_lab.request import Request
from sarathi_lab.scheduler import Scheduler


@dataclass(frozen=True)
class Engine:
    """An executor and the sizes of its schedulers: sequences of a batch, tokens of the longest, blocks of the cache."""

    executor: Executor
    batch_size: int
    max_model_len: int
    num_blocks: int
    block_size: int
    num_stages: int = 1
    on_iteration: Callable[[int], None] = lambda num_tokens: None

    def serve(self, requests: Sequence[Request], policy: Policy) -> Ledger:
        """Serve `requests` to the end with an empty cache and a clock at zero; returns the record."""
        scheduler = Scheduler(
            policy,
            BlockManager(self.num_blocks, self.block_size),
            batch_size=self.batch_size,
            max_model_len=self.max_model_len,
            num_micro_batches=self.num_stages,
        )
        ledger = Ledger()
        ledger.on_iteration = self.on_iteration
        run_engine(requests, scheduler, self.executor, ledger)
        return ledger


def mean_rate(requests: Sequence[Request]) -> float:
    """(R - 1) / (a_R - a_1), the rate at which `requests` arrive; infinite if all are there at once."""
    times = [request.arrival_time for request in requests]
    span = max(times) - min(times)
    return (len(times) - 1) / span if span > 0 else float("inf")


def at_rate(requests: Sequence[Request], rate: float) -> list[Request]:
    """The same requests with their gaps stretched so that they arrive at `rate` a second, the first one at 0.

    Raises UserError for requests that have no gaps.
    """
    own = mean_rate(requests)
    if not np.isfinite(own) or not own:
        raise UserError(
            f"the workload's {len(requests)} requests come all at once, so there is no rate to change; use a workload "
            "with arrivals, such as workload.arrivals=poisson, and at least 2 requests"
        )
    first = min(request.arrival_time for request in requests)
    return [replace(request, arrival_time=(request.arrival_time - first) * own / rate) for request in requests]


def all_at_once(requests: Sequence[Request]) -> list[Request]:
    """The same requests, all there at 0."""
    return [replace(request, arrival_time=0.0) for request in requests]
