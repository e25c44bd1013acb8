"""Does it pay to let decodes go by themselves where one attention call makes riding dear?

    python experiments/lab/riding_limit/compare.py [--held-out]

Serves the same requests on an RTX PRO 6000, by its tables, with one attention call and with two,
under Sarathi-Serve, vLLM v1 and this lab's riding_limit at several budgets and limits; leaves
results/rtx-pro-6000.csv, a row a run, and prints the best of each rule. With --held-out it serves
six other seeds in one call with the budget and limit that were best, which leaves
results/rtx-pro-6000-held-out.csv and prints what the rule gains by seed.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd

import sarathi_lab as lab

SEEDS = (0, 1)
HELD_OUT_SEEDS = (2, 3, 4, 5, 6, 7)
BUDGETS = (512, 1024, 2048)
LIMITS = (65_536, 131_072, 262_144)  # tokens of all riding decodes' caches
RATES = {"openchat_sharegpt4": 4.0, "arxiv_summarization": 1.5}  # which one call can't keep up with
NUM_REQUESTS = {"openchat_sharegpt4": 300, "arxiv_summarization": 200}
BEST_BUDGET = 2048  # of every rule, by SEEDS
BEST_LIMIT = 262_144  # in one call, by SEEDS
LIMIT = "policy.most_riding_tokens"
QUANTITIES = ["throughput", "ttft_p50", "tbt_p99"]
RESULTS = Path(__file__).parent / "results" / "rtx-pro-6000.csv"
HELD_OUT = RESULTS.with_name("rtx-pro-6000-held-out.csv")
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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--held-out", action="store_true")
    if parser.parse_args().held_out:
        compare_held_out()
    else:
        compare()


def compare() -> None:
    runs = pd.concat(list(tables()), ignore_index=True)
    RESULTS.parent.mkdir(exist_ok=True)
    runs.to_csv(RESULTS, index=False, float_format="%.6g")
    keys = ["workload", "calls", "policy", "riding_tokens", "chunk"]
    means = runs.groupby(keys, dropna=False)[QUANTITIES].mean().reset_index()
    for (workload, calls), rows in means.groupby(["workload", "calls"]):
        print(f"{workload}, {calls} attention call(s)")
        best = rows.loc[rows.groupby("policy").throughput.idxmax()]
        print(best.drop(columns=["workload", "calls"]).to_string(index=False))


def compare_held_out() -> None:
    """Print what the chosen budget and limit gain on seeds that did not choose them."""
    tables = []
    for workload in RATES:
        common = {
            **SERVER,
            **load_of(workload),
            "seed": HELD_OUT_SEEDS,
            "chunk": BEST_BUDGET,
            "++hardware.hybrid_call": True,
        }
        served = lab.sweep(**common, policy=["sarathi_serve", "vllm_v1"]).runs
        limited = lab.sweep(**common, policy="riding_limit", **{LIMIT: BEST_LIMIT}).runs
        runs = pd.concat([served, limited], ignore_index=True)
        tables.append(runs[["policy", "seed", *QUANTITIES]].assign(workload=workload))
        by_policy = {policy: rows.set_index("seed") for policy, rows in runs.groupby("policy")}
        for policy in ("sarathi_serve", "vllm_v1"):
            ratio = by_policy["riding_limit"][QUANTITIES] / by_policy[policy][QUANTITIES]
            gains = (100 * (ratio - 1)).agg(["median", "min", "max"])
            print(f"{workload}: % over {policy}")
            print(gains.round(1).to_string())
    pd.concat(tables).to_csv(HELD_OUT, index=False, float_format="%.6g")


def load_of(workload: str) -> dict[str, Any]:
    """Return the settings of a workload at its rate."""
    return {
        "workload": workload,
        "workload.rate": RATES[workload],
        "workload.num_requests": NUM_REQUESTS[workload],
    }


def tables() -> Iterator[pd.DataFrame]:
    """Yield the runs of each workload, number of calls and rule."""
    for workload in RATES:
        asked = {**load_of(workload), "seed": SEEDS, "chunk": BUDGETS}
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
