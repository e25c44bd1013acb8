"""Equal requests under a policy, and what serving them takes, in the steady state or as a batch."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pandas as pd

from sarathi_lab.engine import loop
from sarathi_lab.engine.executor import Executor
from sarathi_lab.engine.request import Request
from sarathi_lab.experiment.steady_state import lengths
from sarathi_lab.policy import Orca, Policy, RequestLevel, Sarathi, SarathiServe
from sarathi_lab.results.metrics import device_idle_fraction, latency
from sarathi_lab.workload.base import random_prompt


@dataclass(frozen=True)
class Scenario:
    """Equal requests under "request_level", "orca_best", "orca_worst", or with a chunk "sarathi" or
    "sarathi_serve".

    `num_decodes` counts decode iterations: the first output token comes with the prompt.
    """

    policy: str
    prompt_len: int
    num_decodes: int
    batch_size: int
    chunk: int | None = None

    @classmethod
    def of(
        cls, policy: str, seq_len: int, pd_ratio: float, batch: int, chunk: int | None = None
    ) -> Scenario:
        """Requests of about `seq_len` tokens at P:D = `pd_ratio`; SARATHI's prompts are whole
        chunks.
        """
        tokens = 1 if chunk is None else chunk - (batch - 1)
        return cls(policy, *lengths(seq_len, pd_ratio, tokens), batch, chunk)

    @property
    def baseline(self) -> Scenario:
        """The same requests under request-level batching."""
        return replace(self, policy="request_level", chunk=None)

    def make_policy(self) -> Policy:
        """The policy itself. SARATHI's decodes ride in full batches of B - 1 only."""
        match self.policy:
            case "request_level":
                return RequestLevel()
            case "orca_best":
                return Orca()
            case "orca_worst":
                return Orca(max_prefills=None)
        assert self.chunk is not None
        if self.policy == "sarathi":
            return Sarathi(chunk=self.chunk, min_decodes=self.batch_size - 1)
        return SarathiServe(chunk=self.chunk)

    @property
    def is_steady(self) -> bool:
        """Whether requests come as others go; else a full batch starts and ends together (see
        `steady_state`).
        """
        return self.policy in ("sarathi", "orca_best")

    @property
    def longest(self) -> int:
        """Tokens of a request at its end."""
        return self.prompt_len + self.num_decodes + 1

    def blocks(self, block_size: int) -> int:
        """Blocks of cache that hold the batch at its longest, with the policy's watermark."""
        blocks = self.batch_size * math.ceil(self.longest / block_size)
        return math.ceil(blocks / (1 - self.make_policy().watermark))


@dataclass(frozen=True)
class Served:
    """What serving a scenario gave. `idle_share` is the part of the steady time that the device had
    nothing to do.

    `ttft_p50` and `tbt_p99` are seconds to the first token and between tokens, over all requests
    (METRICS.md).
    """

    seconds_per_request: float
    idle_share: float
    num_iterations: int
    duration: float
    ttft_p50: float
    tbt_p99: float


def serve(
    executor: Executor, scenario: Scenario, *, num_blocks: int, block_size: int, vocab_size: int
) -> Served | None:
    """Serve requests of `scenario`; None if the cache can't hold its batch."""
    if scenario.blocks(block_size) > num_blocks:
        return None
    ledger = loop.serve(
        _requests(scenario, vocab_size),
        scenario.make_policy(),
        executor,
        batch_size=scenario.batch_size,
        num_blocks=num_blocks,
        block_size=block_size,
        max_model_len=scenario.longest,
    )
    iterations, requests = ledger.iterations(), ledger.requests()
    duration, latencies = float(iterations.end.max()), latency(requests)
    common = (len(iterations), duration, latencies["ttft_p50"], latencies.get("tbt_p99", math.nan))
    if not scenario.is_steady:
        return Served(duration / scenario.batch_size, device_idle_fraction(iterations), *common)
    start, end, count = steady_window(requests, scenario.batch_size)
    within = iterations[(iterations.start >= start) & (iterations.start < end)]
    return Served((end - start) / count, device_idle_fraction(within), *common)


def steady_window(requests: pd.DataFrame, batch_size: int) -> tuple[float, float, int]:
    """Start, end and requests of the steady state: from the admission that the last shorter request
    makes room for until a whole batch was admitted since. What happens in between repeats with
    every batch.
    """
    admitted = requests.sort_values("request_id").first_scheduled_time.to_numpy()
    first = 2 * batch_size - 2  # B - 1 shorter requests and the first whole one start at once
    return float(admitted[first]), float(admitted[-1]), len(admitted) - 1 - first


def _requests(scenario: Scenario, vocab_size: int) -> list[Request]:
    """For the steady state B - 1 requests with outputs of evenly spread length, then whole ones
    (`steady_state`).
    """
    decodes, batch, outputs = scenario.num_decodes, scenario.batch_size, []
    if scenario.is_steady:
        outputs = [1 + max(1, round(decodes * (i + 1) / (batch - 1))) for i in range(batch - 1)]
    outputs += [decodes + 1] * batch * (2 if scenario.is_steady else 1)
    prompt_len = scenario.prompt_len
    return [
        Request(i, 0.0, prompt_len, output_len, random_prompt(i, prompt_len, vocab_size, 0))
        for i, output_len in enumerate(outputs)
    ]
