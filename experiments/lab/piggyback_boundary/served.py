"""What separate attention calls gain a server, by load, simulated from two cards' tables.

    python experiments/lab/piggyback_boundary/served.py

Serves the same requests with one attention call and with two, by the operation times of
experiments/lab/real_servers, and leaves results/served.csv, a row a run.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

import sarathi_lab as lab

SEEDS = (0, 1, 2)
QUANTITIES = ["throughput", "ttft_p50", "ttft_p99", "tbt_p50", "tbt_p99"]
SHOWN = {  # factor and unit
    "throughput": (1.0, "tokens/s"),
    "ttft_p50": (1.0, "s to the first token, P50"),
    "tbt_p99": (1e3, "ms between tokens, P99"),
}
RESULTS = Path(__file__).parent / "results" / "served.csv"
ONE_CALL = "++hardware.hybrid_call"


class Load(NamedTuple):
    """A server, what it is asked, and the rates in requests a second."""

    hardware: str
    model: str
    tables: str
    num_blocks: int
    workload: str
    num_requests: int
    rates: Sequence[float]


SERVERS = "experiments/lab/real_servers"
RTX_4090 = ("rtx-4090", "llama3.1-8b", f"{SERVERS}/rtx-4090-llama-3.1-8b/tp1", 2588)
# 290,000 tokens of cache, as in boundary.py.
RTX_PRO = ("rtx-pro-6000", "qwen3-30b-a3b", f"{SERVERS}/rtx-pro-6000-qwen3-30b-a3b/tp1", 18_125)
LOADS = (
    Load(*RTX_4090, "openchat_sharegpt4", 200, (0.5, 1.0, 1.5, 3.0)),
    Load(*RTX_4090, "arxiv_summarization", 100, (0.2, 0.4, 0.6, 1.2)),
    Load(*RTX_PRO, "openchat_sharegpt4", 300, (2.0, 4.0, 6.0, 10.0)),
    Load(*RTX_PRO, "arxiv_summarization", 200, (1.0, 1.5, 2.0, 3.0)),
)


def main() -> None:
    runs = pd.concat([serve(load) for load in LOADS], ignore_index=True)
    RESULTS.parent.mkdir(exist_ok=True)
    runs.to_csv(RESULTS, index=False, float_format="%.6g")
    for labels, rows in runs.groupby(["hardware", "workload", "rate"], sort=False):
        print(*labels, sep=", ")
        for quantity, (factor, unit) in SHOWN.items():
            by_seed = factor * rows.pivot(index="seed", columns="calls", values=quantity)
            ratio = by_seed[2] / by_seed[1]
            print(
                f"  {by_seed[1].median():8.4g} -> {by_seed[2].median():8.4g} {unit}: "
                f"{ratio.median() - 1:+.1%} ({ratio.min() - 1:+.1%} to {ratio.max() - 1:+.1%})"
            )


def serve(load: Load) -> pd.DataFrame:
    """Serve a load with one and with two calls, at each rate and seed."""
    settings: dict[str, Any] = {
        "executor": "simulated",
        "executor.cost_model": "profiled",
        "hardware": load.hardware,
        "hardware.tables": load.tables,
        "model": load.model,
        "host": "vllm_0_19",
        "policy": "vllm_v1",
        "chunk": 2048,
        "batch": 256,
        "cache.num_blocks": load.num_blocks,
        "workload": load.workload,
        "workload.num_requests": load.num_requests,
        "workload.arrivals": "poisson",
        "workload.rate": load.rates,
        "seed": SEEDS,
        "baselines": [[]],
    }
    tables = []
    for calls in (1, 2):
        found = lab.sweep(**settings, **{ONE_CALL: calls == 1}).runs
        named = found.rename(columns={"workload.rate": "rate"})
        table = named[["rate", "seed", *QUANTITIES]]
        tables.append(table.assign(calls=calls, hardware=load.hardware, workload=load.workload))
    return pd.concat(tables, ignore_index=True)


if __name__ == "__main__":
    main()
