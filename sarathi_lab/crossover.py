"""Where chunked prefill pays: its gain over the baselines in the steady state, over loads of equal requests."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pandas as pd

from sarathi_lab.advisor import BASELINES, IterationTime, PolicyOfChunk, Prediction
from sarathi_lab.policy import Policy, Sarathi
from sarathi_lab.request import Request
from sarathi_lab.workload.synthetic import split_length

NEUTRAL = 0.02  # gains and losses up to this share are neither
OUTCOMES = ("loses", "neutral", "gains")
WAVES = 4  # batches of requests that are served; the first fills the batch, the last drains it


def steady_throughput(
    policy: Policy, prompt_len: int, output_len: int, batch_size: int, iteration_time: IterationTime
) -> float:
    """Tokens per second while equal requests keep the batch full: from the B-th request that finishes to the 3 B-th.

    Filling and draining the batch take part in no figure; a run of many requests approaches this one.
    """
    requests = [Request(i, 0.0, prompt_len, output_len) for i in range(WAVES * batch_size)]
    ledger = Prediction(requests, batch_size, iteration_time).serve(policy)
    finished = ledger.requests().finish_time.sort_values(ignore_index=True)
    start, end = finished[batch_size - 1], finished[(WAVES - 1) * batch_size - 1]
    iterations = ledger.iterations()
    inside = iterations[(iterations.end > start) & (iterations.end <= end)]
    return float((inside.num_prefill_tokens + inside.num_decode_tokens).sum() / (end - start))


def crossover(
    pd_ratios: Sequence[float],
    seq_lens: Sequence[int],
    batches: Sequence[int],
    chunks: Sequence[int],
    iteration_time: IterationTime,
    *,
    policy: PolicyOfChunk = Sarathi,
    kv_tokens: float = math.inf,
) -> pd.DataFrame:
    """The gain of `policy` over each baseline for every load and chunk: a row per cell and baseline.

    Columns: pd_ratio, seq_len (P + D, tokens), batch, chunk (tokens), baseline, gain (ratio of steady throughputs
    less 1) and outcome ("gains" above 2 %, "loses" below -2 %, else "neutral"). Left out is what cannot run: a batch
    of sequences beyond the `kv_tokens` of the cache, and a chunk below its batch.
    """
    rows = []
    for pd_ratio, seq_len, batch in itertools.product(pd_ratios, seq_lens, batches):
        if batch * seq_len > kv_tokens:
            continue
        load = (*split_length(seq_len, pd_ratio), batch, iteration_time)
        baselines = {name: steady_throughput(baseline, *load) for name, baseline in BASELINES.items()}
        for chunk in chunks:
            if chunk < batch:
                continue
            throughput = steady_throughput(policy(chunk), *load)
            cell = {"pd_ratio": pd_ratio, "seq_len": seq_len, "batch": batch, "chunk": chunk}
            rows += [{**cell, "baseline": name, "gain": throughput / base - 1} for name, base in baselines.items()]
    table = pd.DataFrame(rows, columns=["pd_ratio", "seq_len", "batch", "chunk", "baseline", "gain"])
    return table.assign(outcome=pd.cut(table.gain, [-math.inf, -NEUTRAL, NEUTRAL, math.inf], labels=list(OUTCOMES)))
