"""What a request costs a policy in the steady state, by running the engine's own loop on a virtual
clock.
"""

from __future__ import annotations

import math
from collections import Counter

from sarathi_lab.engine.block_manager import BlockManager
from sarathi_lab.engine.executor import StepResult
from sarathi_lab.engine.loop import run_engine
from sarathi_lab.engine.request import Batch, Request, SequenceState
from sarathi_lab.engine.scheduler import Scheduler
from sarathi_lab.executor.simulated.cost_model import OperationTimes
from sarathi_lab.executor.simulated.executor import SimulatedExecutor
from sarathi_lab.policy import Policy

FEWER, MORE = (
    1,
    3,
)  # batches of requests that are served; what the difference took is the steady state's


def lengths(seq_len: int, pd_ratio: float, chunk_tokens: int = 1) -> tuple[int, int]:
    """Prompt length P and decode iterations D with P : D nearest to `pd_ratio` in whole tokens, P +
    D near `seq_len`.

    The prompt is a whole number of chunks of `chunk_tokens` tokens: the paper counts P / C chunks,
    with no remainder.
    """
    num_chunks = max(1, round(seq_len * pd_ratio / (pd_ratio + 1) / chunk_tokens))
    prompt_len = num_chunks * chunk_tokens
    return prompt_len, max(1, round(prompt_len / pd_ratio))


def together(
    cost: OperationTimes, policy: Policy, prompt_len: int, num_decodes: int, batch_size: int
) -> Counter[str]:
    """Seconds by operation and request, if `batch_size` equal requests start and end together.

    Each has `num_decodes` decode iterations: the first output token comes with the prompt, and is
    not counted here.
    """
    requests = [Request(i, 0.0, prompt_len, num_decodes + 1) for i in range(batch_size)]
    return _divided(_serve(cost, policy, requests, batch_size), batch_size)


def steady(
    cost: OperationTimes, policy: Policy, prompt_len: int, num_decodes: int, batch_size: int
) -> Counter[str]:
    """Seconds by operation and request, once as many requests come as go: filling and draining the
    batch cancel.

    The first `batch_size` - 1 requests have outputs of evenly spread length. A closed batch of
    equal requests would decode in step for a long time, which the paper's counting (one prompt
    beside B - 1 decodes) has no notion of.
    """
    spread = max(1, batch_size - 1)
    residual = [
        Request(i, 0.0, prompt_len, 1 + max(1, round(num_decodes * (i + 1) / spread)))
        for i in range(batch_size - 1)
    ]

    def spent(num_batches: int) -> Counter[str]:
        whole = [
            Request(batch_size + i, 0.0, prompt_len, num_decodes + 1)
            for i in range(num_batches * batch_size)
        ]
        return _serve(cost, policy, residual + whole, batch_size)

    fewer, more = spent(FEWER), spent(MORE)
    return _divided(
        Counter({name: more[name] - fewer[name] for name in more}), (MORE - FEWER) * batch_size
    )


class _Clock:
    """Sums the operations of every iteration that the executor asks the time of."""

    def __init__(self, cost: OperationTimes) -> None:
        self._cost = cost
        self.spent: Counter[str] = Counter()

    def iteration_time(self, batch: Batch) -> float:
        times = self._cost(batch)
        for name, seconds in times.items():
            self.spent[name] += seconds  # type: ignore[assignment]  # a Counter of seconds
        return sum(times.values())

    def record(self, result: StepResult, finished: list[SequenceState]) -> None:
        """Nothing is recorded: the sums are all that is wanted."""


def _serve(
    cost: OperationTimes, policy: Policy, requests: list[Request], batch_size: int
) -> Counter[str]:
    """Seconds by operation of serving all requests, with a cache that holds a batch of the
    longest.
    """
    longest = max(request.total_len for request in requests)
    num_blocks = math.ceil(batch_size / (1 - policy.watermark))
    scheduler = Scheduler(
        policy, BlockManager(num_blocks, longest), batch_size=batch_size, max_model_len=longest
    )
    clock = _Clock(cost)
    run_engine(requests, scheduler, SimulatedExecutor(clock.iteration_time), clock)
    return clock.spent


def _divided(spent: Counter[str], num_requests: int) -> Counter[str]:
    return Counter({name: seconds / num_requests for name, seconds in spent.items()})
