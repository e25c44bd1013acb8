"""One long prompt through a pipeline: chunks alike, chunks that shrink, and one at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from sarathi_lab.engine.request import Request
from sarathi_lab.experiment.clock import Point
from sarathi_lab.experiment.long_prompts import can_run
from sarathi_lab.experiment.registry import PROFILED, Ints, Platform, figure
from sarathi_lab.experiment.serving import CHUNKING, LOADED, ServingBench, point
from sarathi_lab.policy import Policy
from sarathi_lab.workload.base import random_prompt

SHRINKING, ALIKE = "shrinking chunks", "chunks alike"
TTFT, SPEED = "TTFT", "throughput / one stage's"


@figure(
    question="Do chunks that shrink with the context speed a pipeline's prefill?",
    seconds=30,
    **{**LOADED, "papers": [Platform("llama3.1-70b", "h100", 8)]},
    simulated=(*PROFILED, "executor.pipeline_parallel=4"),
)
def dynamic_chunks(
    bench: ServingBench,
    seed: int,
    *,
    chunks: Ints,
    smooth_factors: Mapping[str, float],
    **sizes: Any,
) -> Iterator[Point]:
    """Times to the first token of the first data set's prompts, each alone (mean), and their
    throughput over that of one stage with all layers, which has no bubbles and sends nothing, by
    first chunk. `smooth_factors` by series; Sarathi-Serve has one chunk of a prompt in flight.
    """
    dataset = next(iter(bench.sizes["datasets"]))
    requests = bench.requests(dataset, bench.sizes["num_requests"], seed)
    for chunk in chunks:
        found = {
            name: _served(bench, policy, requests)
            for name, policy in _policies(bench, smooth_factors, chunk).items()
        }
        for name, (ttft, speed) in found.items():
            yield point(dataset, TTFT, "s", name, ttft, chunk)
            yield point(dataset, SPEED, "times", name, speed, chunk)
            if name != CHUNKING:
                ratio = ttft / found[CHUNKING][0]
                yield point(dataset, f"{TTFT} / {CHUNKING}", "ratio", name, ratio, chunk)
            if ALIKE in found and name not in (ALIKE, CHUNKING):
                ratio = ttft / found[ALIKE][0]
                yield point(dataset, f"{TTFT} / {ALIKE}", "ratio", name, ratio, chunk)


def _policies(
    bench: ServingBench, smooth_factors: Mapping[str, float], chunk: int
) -> dict[str, Policy]:
    found = bench.named([CHUNKING], chunk)
    if (policy := bench.policy("dynamic_chunks", chunk)) is not None:
        own: Any = policy
        found |= {name: replace(own, smooth_factor=f) for name, f in smooth_factors.items()}
    return {name: policy for name, policy in found.items() if can_run(bench, policy)}


def _served(bench: ServingBench, policy: Policy, requests: list[Request]) -> tuple[float, float]:
    """Mean seconds to the first token, and how many times as fast as one stage with all layers."""
    waits, alone = [], 0.0
    for one in requests:
        tokens = random_prompt(one.request_id, one.prompt_len, bench.vocab_size, bench.seed)
        request = Request(0, 0.0, one.prompt_len, 1, tokens)
        ledger = bench.engine.serve([request], policy)
        waits.append(float(ledger.requests().first_token_time.iloc[0]))
        stages = ledger.stages()
        alone += float((stages.end - stages.start).sum())
    return float(np.mean(waits)), alone / sum(waits)
