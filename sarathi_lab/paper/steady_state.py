"""What a request costs a policy in the steady state, by running the engine's own loop on a virtual clock."""

from __future__ import annotations

from collections import Counter

from sarathi_lab.block_manager import BlockManager
from sarathi_lab.engine import run_engine
from sarathi_lab.executor import StepResult
from sarathi_lab.policy import Policy
from sarathi_lab.request import Batch, Request, Sequence
from sarathi_lab.scheduler import Scheduler
from sarathi_lab.simulator.profile import OperationTimes
from sarathi_lab.simulator.executor import SimulatedExecutor

WARM_UP_BATCHES = 1  # full batches of requests that are admitted before the clock counts
MEASURED_BATCHES = 2


def lengths(seq_len: int, pd_ratio: float) -> tuple[int, int]:
    """Prompt and output length with P : D as near to `pd_ratio` as whole tokens allow, P + D near `seq_len`."""
    output_len = max(1, round(seq_len / (pd_ratio + 1)))
    return max(1, round(pd_ratio * output_len)), output_len


def together(cost: OperationTimes, policy: Policy, prompt_len: int, output_len: int, batch_size: int) -> Counter[str]:
    """Seconds by operation and request, if `batch_size` equal requests start and end together."""
    requests = [Request(i, 0.0, prompt_len, output_len) for i in range(batch_size)]
    spent = _serve(cost, policy, requests, batch_size)
    return _per_request(spent.iterations, batch_size)


def steady(cost: OperationTimes, policy: Policy, prompt_len: int, output_len: int, batch_size: int) -> Counter[str]:
    """Seconds by operation and request, once as many requests come as go.

    The first `batch_size` - 1 requests have outputs of evenly spread length: a closed batch of equal requests would
    decode in step for a long time, which the paper's counting (one prompt beside B - 1 decodes) has no notion of.
    """
    residual = [
        Request(i, 0.0, prompt_len, max(1, round(output_len * (i + 1) / batch_size))) for i in range(batch_size - 1)
    ]
    num_whole = (WARM_UP_BATCHES + MEASURED_BATCHES) * batch_size + 1
    whole = [Request(len(residual) + i, 0.0, prompt_len, output_len) for i in range(num_whole)]
    spent = _serve(cost, policy, residual + whole, batch_size)
    first = spent.admitted[len(residual) + WARM_UP_BATCHES * batch_size]
    last = spent.admitted[len(residual) + num_whole - 1]
    measured = [(start, times) for start, times in spent.iterations if first <= start < last]
    return _per_request(measured, MEASURED_BATCHES * batch_size)


class _Spent:
    """Recorder of the loop: the operations of every iteration, and when each request was admitted."""

    def __init__(self, cost: OperationTimes) -> None:
        self._cost = cost
        self._last: dict[str, float] = {}
        self.iterations: list[tuple[float, dict[str, float]]] = []
        self.admitted: dict[int, float] = {}

    def iteration_time(self, batch: Batch) -> float:
        self._last = self._cost(batch)
        return sum(self._last.values())

    def record(self, result: StepResult, finished: list[Sequence], scheduler: Scheduler) -> None:
        self.iterations.append((result.start, self._last))
        for sequence in finished:
            assert sequence.first_scheduled_time is not None
            self.admitted[sequence.request.request_id] = sequence.first_scheduled_time


def _serve(cost: OperationTimes, policy: Policy, requests: list[Request], batch_size: int) -> _Spent:
    longest = max(request.total_len for request in requests)
    scheduler = Scheduler(policy, BlockManager(batch_size, longest), batch_size=batch_size, max_model_len=longest)
    spent = _Spent(cost)
    run_engine(requests, scheduler, SimulatedExecutor(spent.iteration_time), spent)
    return spent


def _per_request(iterations: list[tuple[float, dict[str, float]]], num_requests: int) -> Counter[str]:
    total: Counter[str] = Counter()
    for _, times in iterations:
        total.update(times)
    return Counter({name: seconds / num_requests for name, seconds in total.items()})
