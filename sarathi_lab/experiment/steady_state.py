"""The cost of a request in the steady state, by running the engine's loop on a virtual clock."""

from __future__ import annotations

import math
from collections import Counter

from sarathi_lab.engine.executor import StepResult
from sarathi_lab.engine.loop import serve
from sarathi_lab.engine.request import Batch, Request, SequenceState
from sarathi_lab.executor.simulated.cost_model import OperationTimes
from sarathi_lab.executor.simulated.executor import SimulatedExecutor
from sarathi_lab.policy import Policy

FEWER, MORE = 1, 3  # batches of requests; the difference of their costs is the steady state's


def lengths(seq_len: int, pd_ratio: float, chunk_tokens: int = 1) -> tuple[int, int]:
    """Prompt length P and decode iterations D: P : D near `pd_ratio`, P + D near `seq_len`.

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
    return _divided(_spent(cost, policy, requests, batch_size), batch_size)


def steady(
    cost: OperationTimes, policy: Policy, prompt_len: int, num_decodes: int, batch_size: int
) -> Counter[str]:
    """Seconds by operation and request, once as many requests come as go.

    Filling and draining the batch cancel. The first `batch_size` - 1 requests have outputs of
    evenly spread length: a closed batch of equal requests would decode in step for a long time,
    which the paper's counting (one prompt beside B - 1 decodes) has no notion of.
    """
    spread = max(1, batch_size - 1)
    outputs = [1 + max(1, round(num_decodes * (i + 1) / spread)) for i in range(batch_size - 1)]
    residual = [Request(i, 0.0, prompt_len, output) for i, output in enumerate(outputs)]

    def spent(num_batches: int) -> Counter[str]:
        ids = range(batch_size, batch_size * (1 + num_batches))
        whole = [Request(i, 0.0, prompt_len, num_decodes + 1) for i in ids]
        return _spent(cost, policy, residual + whole, batch_size)

    fewer, more = spent(FEWER), spent(MORE)
    return _divided(
        Counter({name: more[name] - fewer[name] for name in more}), (MORE - FEWER) * batch_size
    )


class _Unrecorded:
    """Keeps no record, which would take as long as the loop."""

    def record(self, result: StepResult, finished: list[SequenceState]) -> None: ...


def _spent(
    cost: OperationTimes, policy: Policy, requests: list[Request], batch_size: int
) -> Counter[str]:
    """Seconds by operation of serving all, with a cache that holds a batch of the longest."""
    spent: Counter[str] = Counter()

    def iteration_time(batch: Batch) -> float:
        times = cost(batch)
        spent.update(times)
        return sum(times.values())

    serve(
        requests,
        policy,
        SimulatedExecutor(iteration_time),
        batch_size=batch_size,
        num_blocks=math.ceil(batch_size / (1 - policy.watermark)),
        block_size=max(request.total_len for request in requests),
        recorder=_Unrecorded(),
    )
    return spent


def _divided(spent: Counter[str], num_requests: int) -> Counter[str]:
    return Counter({name: seconds / num_requests for name, seconds in spent.items()})
