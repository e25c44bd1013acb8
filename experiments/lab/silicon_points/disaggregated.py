"""Hold simulated prefill and decode instances against the measured points that have them.

    python experiments/lab/silicon_points/disaggregated.py POINTS.csv

Rows do not say how many users there were: taken are as many as the decode instances' batches hold,
who come evenly over the time of an answer. Instances of several sizes make a cluster here, which no
setting of `cluster` does.
"""

from __future__ import annotations

import csv
import sys
from collections import Counter
from contextlib import suppress
from dataclasses import replace

import pandas as pd
from report import FOLDER
from simulate import BLOCK_SIZE, COUNTED, GPUS, MIXTURES, MODELS, Enough, Point, SpreadUsers, Waits

from sarathi_lab.engine.block_manager import BlockManager
from sarathi_lab.engine.executor import Sizes
from sarathi_lab.engine.loop import run_engine
from sarathi_lab.engine.scheduler import Scheduler
from sarathi_lab.extensions.cluster import Disaggregated
from sarathi_lab.extensions.cluster.cluster import Handover, Instances
from sarathi_lab.extensions.cluster.routers import least_loaded

WEIGHTS = {"fp8": "fp8", "fp8_block": "fp8"}


def why_not(row: dict[str, str]) -> str:
    """The first reason why a disaggregated row can't be simulated; empty if there is none."""
    if any(name in row["model_path"] for name in MIXTURES):
        return "mixture of experts"
    if row["system"] not in GPUS:
        return "GPU whose kernels were not measured"
    if row["gemm_quant_mode"] not in WEIGHTS or row["model_path"] not in MODELS:
        return "4-bit weights"
    return ""


def simulate(row: dict[str, str]) -> dict[str, object]:
    """Measured and simulated times of a row (ms), and its users."""
    number = {
        key: int(float(row[key])) if row[key] else 0
        for key in row
        if key.startswith(("prefill_", "decode_")) or key in ("isl", "osl")
    }
    users = number["decode_batch_size"] * number["decode_num_workers"]
    measured = (float(row["silicon_ttft_ms"]), float(row["silicon_tpot_ms"]))
    named = (GPUS[row["system"]], MODELS[row["model_path"]], row["backend"], row["backend_version"])
    lengths = (number["isl"], number["osl"])
    point = Point(row["id"], *named, "fp8", 1, *lengths, users, *measured)
    executors, schedulers, spec = [], [], point.spec
    for kind in ("prefill", "decode"):
        backend = replace(point.device, tensor_parallel=number[f"{kind}_tp_size"])
        batch = number[f"{kind}_batch_size"]
        setup = replace(point.setup, num_sequences=batch)
        blocks = backend.kv_blocks(spec, BLOCK_SIZE, setup)
        for _ in range(number[f"{kind}_num_workers"]):
            executors.append(backend.build(spec, None, Sizes(blocks, BLOCK_SIZE, batch)))
            cache, longest = BlockManager(blocks, BLOCK_SIZE), sum(lengths)
            sizes = {"batch_size": batch, "max_model_len": longest}
            schedulers.append(Scheduler(point.policy, cache, **sizes))
    link = Disaggregated(link="network").link_between(point.device, spec)
    instances = Instances(executors, link)
    cluster = Handover(schedulers, instances, least_loaded, number["prefill_num_workers"])
    waits = Waits(COUNTED * users)
    answer = 1e-3 * (measured[0] + lengths[1] * measured[1])
    with suppress(Enough):
        run_engine(SpreadUsers(point.requests, users, answer), cluster, instances, waits)
    table = pd.DataFrame(waits.rows, columns=["arrival", "ttft", "tpot"])
    told = 1e3 * table.iloc[users:].mean()  # those that finished later, among others
    gpus = sum(number[f"{k}_num_workers"] * number[f"{k}_tp_size"] for k in ("prefill", "decode"))
    kept = ("workers", "prefill_tp_size", "decode_tp_size")
    sizes = {key: value for key, value in number.items() if key.endswith(kept)}
    real = {"real_ttft": measured[0], "real_tpot": measured[1]}
    own = {"id": row["id"], "backend": row["backend"], "gpus": gpus, "users": users, **sizes}
    return {**own, **real, "sim_ttft": told.ttft, "sim_tpot": told.tpot}


def main() -> None:
    with open(sys.argv[1], newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["mode"] != "agg"]
    reasons = Counter(map(why_not, rows))
    table = pd.DataFrame([simulate(row) for row in rows if not why_not(row)])
    for name in ("ttft", "tpot"):
        table[f"{name}_error"] = table[f"sim_{name}"] / table[f"real_{name}"] - 1
    table.round(4).to_csv(FOLDER / "disaggregated.csv", index=False)
    print(table.drop(columns="id").to_string(float_format="{:.3f}".format))
    for reason, count in reasons.most_common():
        print(f"{count:5} {reason or 'simulated'}")


if __name__ == "__main__":
    main()
