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

from sarathi_lab.config.errors import UserError
from sarathi_lab.engine.block_manager import BlockManager
from sarathi_lab.engine.executor import Executor, Sizes
from sarathi_lab.engine.loop import run_engine
from sarathi_lab.engine.scheduler import Scheduler
from sarathi_lab.executor.simulated.backend import SimulatedBackend
from sarathi_lab.extensions.cluster import Disaggregated
from sarathi_lab.extensions.cluster.cluster import Handover, Instances
from sarathi_lab.extensions.cluster.routers import least_loaded

WEIGHTS = {"fp8": "fp8", "fp8_block": "fp8"}
CLUSTER = Disaggregated(link="network")
SHOWN_SIZES = ("workers", "prefill_tp_size", "decode_tp_size")


def why_not(row: dict[str, str]) -> str:
    """The first reason why a disaggregated row can't be simulated; empty if there is none."""
    if any(name in row["model_path"] for name in MIXTURES):
        return "mixture of experts"
    if row["system"] not in GPUS:
        return "GPU whose kernels were not measured"
    if row["gemm_quant_mode"] not in WEIGHTS or row["model_path"] not in MODELS:
        return "4-bit weights"
    point = point_of(row)
    try:
        CLUSTER.check(point.policy, point.device, point.spec, shares_prefixes=False)
    except UserError as error:
        return str(error)
    return ""


def numbers_of(row: dict[str, str]) -> dict[str, int]:
    """What a row has of its prefill and decode instances."""
    numbers = {}
    for name, text in row.items():
        if name.startswith(("prefill_", "decode_")):
            numbers[name] = int(float(text or 0))
    return numbers


def point_of(row: dict[str, str]) -> Point:
    """The point of a row, with as many users as the decode instances' batches hold."""
    numbers = numbers_of(row)
    return Point(
        row["id"],
        GPUS[row["system"]],
        MODELS[row["model_path"]],
        row["backend"],
        row["backend_version"],
        weights="fp8",
        tp=1,
        isl=int(float(row["isl"])),
        osl=int(float(row["osl"])),
        concurrency=numbers["decode_batch_size"] * numbers["decode_num_workers"],
        real_ttft=float(row["silicon_ttft_ms"]),
        real_tpot=float(row["silicon_tpot_ms"]),
    )


def simulate(row: dict[str, str]) -> dict[str, object]:
    """Measured and simulated times of a row (ms), and its users."""
    numbers = numbers_of(row)
    point = point_of(row)
    num_users = point.concurrency
    executors = []
    schedulers = []
    num_gpus = 0
    for kind in ("prefill", "decode"):
        num_workers = numbers[f"{kind}_num_workers"]
        tensor_parallel = numbers[f"{kind}_tp_size"]
        num_gpus += num_workers * tensor_parallel
        device = replace(point.device, tensor_parallel=tensor_parallel)
        for _ in range(num_workers):
            executor, scheduler = instance_of(point, device, numbers[f"{kind}_batch_size"])
            executors.append(executor)
            schedulers.append(scheduler)
    link = CLUSTER.link_between(point.device, point.spec)
    instances = Instances(executors, link)
    cluster = Handover(schedulers, instances, least_loaded, numbers["prefill_num_workers"])
    waits = Waits(COUNTED * num_users)
    seconds_of_answer = 1e-3 * (point.real_ttft + point.osl * point.real_tpot)
    users = SpreadUsers(point.requests, num_users, seconds_of_answer)
    with suppress(Enough):
        run_engine(users, cluster, instances, waits)
    table = pd.DataFrame(waits.rows, columns=["arrival", "ttft", "tpot"])
    # Of the requests that finished later, among others.
    milliseconds = 1e3 * table.iloc[num_users:].mean()
    sizes = {name: size for name, size in numbers.items() if name.endswith(SHOWN_SIZES)}
    return {
        "id": point.id,
        "backend": point.backend,
        "gpus": num_gpus,
        "users": num_users,
        **sizes,
        "real_ttft": point.real_ttft,
        "real_tpot": point.real_tpot,
        "sim_ttft": milliseconds.ttft,
        "sim_tpot": milliseconds.tpot,
    }


def instance_of(
    point: Point, device: SimulatedBackend, batch_size: int
) -> tuple[Executor, Scheduler]:
    """An engine of a point's server on a device, with at most so many sequences."""
    setup = replace(point.setup, num_sequences=batch_size)
    num_blocks = device.kv_blocks(point.spec, BLOCK_SIZE, setup)
    executor = device.build(point.spec, None, Sizes(num_blocks, BLOCK_SIZE, batch_size))
    scheduler = Scheduler(
        point.policy,
        BlockManager(num_blocks, BLOCK_SIZE),
        batch_size=batch_size,
        max_model_len=point.isl + point.osl,
    )
    return executor, scheduler


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
