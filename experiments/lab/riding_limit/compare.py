"""Does it pay to let decodes go by themselves where one attention call makes riding dear?

    python experiments/lab/riding_limit/compare.py [--held-out]

Serves the same requests on an RTX PRO 6000, by its tables, with one attention call and with two,
under Sarathi-Serve, vLLM v1 and this lab's riding_limit at several budgets and limits; leaves
results/rtx-pro-6000.csv, a row a run, and prints the best of each rule. With --held-out it serves
six other seeds in one call, each rule with its own best budget and limit of that table, which
leaves results/rtx-pro-6000-held-out.csv and prints what the rule gains by seed.
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
BUDGETS = (512, 1024, 2048, 4096, 8192, 16384)
LIMITS = (65_536, 131_072, 262_144)  # tokens of all riding decodes' caches
RATES = {"openchat_sharegpt4": 4.0, "arxiv_summarization": 1.5}  # which one call can't keep up with
NUM_REQUESTS = {"openchat_sharegpt4": 300, "arxiv_summarization": 200}
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
    for (workload, calls), best in best_settings(runs).groupby(["workload", "calls"]):
        print(f"{workload}, {calls} attention call(s)")
        print(best.drop(columns=["workload", "calls"]).to_string(index=False))


def best_settings(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the budget and limit of the largest mean throughput of each rule, by load and number
    of calls.
    """
    settings = ["workload", "calls", "policy", "riding_tokens", "chunk"]
    means = runs.groupby(settings, dropna=False)[QUANTITIES].mean().reset_index()
    largest = means.groupby(["workload", "calls", "policy"]).throughput.idxmax()
    return means.loc[largest]


def compare_held_out() -> None:
    """Print what the chosen budgets and limit gain on seeds that did not choose them."""
    best = best_settings(pd.read_csv(RESULTS)).query("calls == 1")
    tables = []
    for chosen in best.itertuples():
        settings = {**SERVER, **load_of(chosen.workload), "++hardware.hybrid_call": True}
        settings |= {"seed": HELD_OUT_SEEDS, "policy": chosen.policy, "chunk": chosen.chunk}
        if chosen.policy == "riding_limit":
            settings[LIMIT] = int(chosen.riding_tokens)
        runs = lab.sweep(**settings).runs
        labelled = runs[["policy", "chunk", "seed", *QUANTITIES]].assign(workload=chosen.workload)
        tables.append(labelled)
    held_out = pd.concat(tables)
    held_out.to_csv(HELD_OUT, index=False, float_format="%.6g")
    for workload, of_load in held_out.groupby("workload"):
        by_policy = of_load.set_index("seed").groupby("policy")[QUANTITIES]
        limited = by_policy.get_group("riding_limit")
        for policy in ("sarathi_serve", "vllm_v1"):
            ratio = limited / by_policy.get_group(policy)
            gains = (100 * (ratio - 1)).agg(["median", "min", "max"])
            print(f"{workload}: % over {policy}")
            print(gains.round(1).to_string())


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
            served = lab.sweep(**common, policy=["sarathi_serve", "vllm_v1"]).runs
            settings = {"policy": "riding_limit", LIMIT: LIMITS}
            limited = lab.sweep(**common, **settings).runs
            for runs in (served, limited):
                table = runs.reindex(columns=list(dict.fromkeys([*runs, LIMIT])))
                table = table.rename(columns={LIMIT: "riding_tokens"})
                columns = ["policy", "riding_tokens", "chunk", "seed", *QUANTITIES]
                yield table[columns].assign(workload=workload, calls=calls)


if __name__ == "__main__":
    main()
