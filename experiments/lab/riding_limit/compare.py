"""Does it pay to let decodes go by themselves where one attention call makes riding dear?

    python experiments/lab/riding_limit/compare.py

Serves the same requests on an RTX PRO 6000, by its tables, with one attention call and with two,
under Sarathi-Serve, vLLM v1 and this lab's riding_limit at several budgets and limits; leaves
results/rtx-pro-6000.csv, a row a run, and prints the best of each rule.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd

import sarathi_lab as lab

SEEDS = (0, 1)
BUDGETS = (512, 1024, 2048)
LIMITS = (65_536, 131_072, 262_144)  # tokens of all riding decodes' caches
RATES = {"openchat_sharegpt4": 4.0, "arxiv_summarization": 1.5}  # which one call can't keep up with
NUM_REQUESTS = {"openchat_sharegpt4": 300, "arxiv_summarization": 200}
LIMIT = "policy.most_riding_tokens"
QUANTITIES = ["throughput", "ttft_p50", "tbt_p99"]
RESULTS = Path(__file__).parent / "results" / "rtx-pro-6000.csv"
SERVER: dict[str, Any] = {
    "executor": "simulated",
    "executor.cost_model": "profiled",
    "hardware": "rtx-pro-6000",
    "hardware.tables": "experiments/lab/real_servers/rtx-pro-6000-qwen3-30b-a3b/tp1",
    "model": "qwen3-30b-a3b",
    "host": "vllm_0_19",
    "batch": 256,
    "cache.num_blocks": 18_125,  # as in experiments/lab/piggyback_boundary/served.py
    "workload.arrivals": "poisson",
    "baselines": [[]],
}


def main() -> None:
    runs = pd.concat(list(tables()), ignore_index=True)
    RESULTS.parent.mkdir(exist_ok=True)
    runs.to_csv(RESULTS, index=False, float_format="%.6g")
    keys = ["workload", "calls", "policy", "riding_tokens", "chunk"]
    means = runs.groupby(keys, dropna=False)[QUANTITIES].mean().reset_index()
    for (workload, calls), rows in means.groupby(["workload", "calls"]):
        print(f"{workload}, {calls} attention call(s)")
        best = rows.loc[rows.groupby("policy").throughput.idxmax()]
        print(best.drop(columns=["workload", "calls"]).to_string(index=False))


def tables() -> Iterator[pd.DataFrame]:
    """Yield the runs of each workload, number of calls and rule."""
    for workload, rate in RATES.items():
        asked = {
            "workload": workload,
            "workload.rate": rate,
            "workload.num_requests": NUM_REQUESTS[workload],
            "seed": SEEDS,
            "chunk": BUDGETS,
        }
        for calls in (1, 2):
            common = {**SERVER, **asked, "++hardware.hybrid_call": calls == 1}
            known = lab.sweep(**common, policy=["sarathi_serve", "vllm_v1"]).runs
            limited = {"policy": "riding_limit", LIMIT: LIMITS}
            own = lab.sweep(**common, **limited).runs
            for runs in (known, own):
                table = runs.reindex(columns=list(dict.fromkeys([*runs, LIMIT])))
                table = table.rename(columns={LIMIT: "riding_tokens"})
                columns = ["policy", "riding_tokens", "chunk", "seed", *QUANTITIES]
                yield table[columns].assign(workload=workload, calls=calls)


if __name__ == "__main__":
    main()
