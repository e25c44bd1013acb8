"""Seconds a request on the real engine: real requests under a policy, in its steady state or as one
batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import pandas as pd

from sarathi_lab.engine.block_manager import BlockManager
from sarathi_lab.engine.executor import Executor
from sarathi_lab.engine.ledger import Ledger
from sarathi_lab.engine.loop import run_engine
from sarathi_lab.engine.request import Request
from sarathi_lab.engine.scheduler import Scheduler
from sarathi_lab.experiment.bench import sarathi
from sarathi_lab.policy import Orca, Policy, RequestLevel, SarathiServe
from sarathi_lab.results.metrics import device_idle_fraction, latency
from sarathi_lab.workload.base import random_prompt


@dataclass(frozen=True)
class Load:
    """Equal requests under a policy: "request_level", "orca_best", "orca_worst", or with a chunk
    "sarathi" or "sarathi_serve".

    `num_decodes` counts decode iterations: the first output token comes with the prompt.
    """

    policy: str
    prompt_len: int
    num_decodes: int
    batch_size: int
    chunk: int | None = None

    def make_policy(self) -> Policy:
        """The policy itself."""
        if self.policy == "sarathi":
            assert self.chunk is not None
            return sarathi(self.chunk, self.batch_size)
        if self.policy == "sarathi_serve":
            assert self.chunk is not None
            return SarathiServe(chunk=self.chunk)
        others: dict[str, Policy] = {
            "request_level": RequestLevel(),
            "orca_best": Orca(),
            "orca_worst": Orca(max_prefills=None),
        }
        return others[self.policy]

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


@dataclass(frozen=True)
class Served:
    """What serving a load gave. `idle_share` is the part of the steady time that the device had
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
    executor: Executor, load: Load, *, num_blocks: int, block_size: int, vocab_size: int
) -> Served | None:
    """Serve requests of `load`; None if the cache can't hold its batch."""
    requests = _requests(load, vocab_size)
    policy = load.make_policy()
    if load.batch_size * math.ceil(load.longest / block_size) > num_blocks * (1 - policy.watermark):
        return None
    scheduler = Scheduler(
        policy,
        BlockManager(num_blocks, block_size),
        batch_size=load.batch_size,
        max_model_len=load.longest,
    )
    ledger = Ledger()
    run_engine(requests, scheduler, executor, ledger)
    iterations = ledger.iterations()
    duration, latencies = float(iterations.end.max()), latency(ledger.requests())
    common = (len(iterations), duration, latencies["ttft_p50"], latencies.get("tbt_p99", math.nan))
    if not load.is_steady:
        return Served(duration / load.batch_size, device_idle_fraction(iterations), *common)
    start, end, count = steady_window(ledger.requests(), load.batch_size)
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


def _requests(load: Load, vocab_size: int) -> list[Request]:
    """For the steady state B - 1 requests with outputs of evenly spread length, then whole ones
    (`steady_state`).
    """
    spread = load.batch_size - 1
    outputs = []
    if load.is_steady:
        outputs = [1 + max(1, round(load.num_decodes * (i + 1) / spread)) for i in range(spread)]
    outputs += [load.num_decodes + 1] * load.batch_size * (2 if load.is_steady else 1)
    return [
        Request(
            i, 0.0, load.prompt_len, output_len, random_prompt(i, load.prompt_len, vocab_size, 0)
        )
        for i, output_len in enumerate(outputs)
    ]
