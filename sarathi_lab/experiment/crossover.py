"""Where chunked prefill pays: its steady gain over the baselines, over loads of equal requests."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import pandas as pd

from sarathi_lab.executor.simulated.cost_model import OperationTimes
from sarathi_lab.experiment.advisor import BASELINES, PolicyOfChunk
from sarathi_lab.experiment.scenario import lengths, steady, together
from sarathi_lab.policy import Policy, RequestLevel, Sarathi

NEUTRAL = 0.02  # gains and losses up to this share are neither
OUTCOMES = ("loses", "neutral", "gains")


def steady_throughput(
    policy: Policy,
    prompt_len: int,
    num_decodes: int,
    batch_size: int,
    operation_times: OperationTimes,
) -> float:
    """Prompt tokens and decode iterations per second in the steady state of equal requests.

    Request-level batching starts and ends its batches together, other policies keep the batch full.
    """
    serve = together if isinstance(policy, RequestLevel) else steady
    seconds = sum(serve(operation_times, policy, prompt_len, num_decodes, batch_size).values())
    return (prompt_len + num_decodes) / seconds


def loads_that_fit(
    pd_ratios: Sequence[float], seq_lens: Sequence[int], batches: Sequence[int], kv_tokens: float
) -> list[tuple[float, int, int]]:
    """(P:D, P + D, batch) of which a batch of whole sequences fits `kv_tokens` tokens."""
    return [
        (pd_ratio, seq_len, batch)
        for pd_ratio, seq_len, batch in itertools.product(pd_ratios, seq_lens, batches)
        if batch * (sum(lengths(seq_len, pd_ratio)) + 1) <= kv_tokens
    ]


def crossover(
    pd_ratios: Sequence[float],
    seq_lens: Sequence[int],
    batches: Sequence[int],
    chunks: Sequence[int],
    operation_times: OperationTimes,
    *,
    policy: PolicyOfChunk = Sarathi,
    kv_tokens: float = math.inf,
    on_load: Callable[[int], None] = lambda num_loads: None,
) -> pd.DataFrame:
    """The gain of `policy` over each baseline: a row per load, chunk and baseline.

    Columns: pd_ratio, seq_len (P + D, tokens), batch, chunk (tokens), baseline, gain (ratio of
    steady throughputs less 1) and outcome ("gains" above 2 %, "loses" below -2 %, else "neutral").
    Left out is what cannot run: a batch of sequences beyond the `kv_tokens` of the cache, and a
    chunk below its batch. `on_load` is called with 1 after each of `loads_that_fit`.
    """
    rows = []
    for pd_ratio, seq_len, batch in loads_that_fit(pd_ratios, seq_lens, batches, kv_tokens):
        sizes = (*lengths(seq_len, pd_ratio), batch, operation_times)
        baselines = {name: steady_throughput(base, *sizes) for name, base in BASELINES.items()}
        for chunk in (chunk for chunk in chunks if chunk >= batch):
            throughput = steady_throughput(policy(chunk), *sizes)
            load = (pd_ratio, seq_len, batch, chunk)
            rows += [(*load, name, throughput / base - 1) for name, base in baselines.items()]
        on_load(1)
    columns = ["pd_ratio", "seq_len", "batch", "chunk", "baseline", "gain"]
    table = pd.DataFrame(rows, columns=columns)
    ends = [-math.inf, -NEUTRAL, NEUTRAL, math.inf]
    return table.assign(outcome=pd.cut(table.gain, ends, labels=list(OUTCOMES)))


def at_best_chunk(table: pd.DataFrame) -> pd.DataFrame:
    """Of `crossover`'s rows those with the best chunk, one per load and baseline."""
    return table.loc[table.groupby(["baseline", "pd_ratio", "seq_len", "batch"]).gain.idxmax()]
