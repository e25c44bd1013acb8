"""Published end-to-end points of real servers, simulated: users who each wait for their answer.

`python experiments/lab/real_servers/silicon.py POINTS.csv`, with the points of aiconfigurator
(ai-dynamo, Apache-2.0): continues where it stopped, and writes results/silicon.csv, a row a point
with its error or why it was not simulated, and results/silicon_errors.csv by GPU, model and server.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd

from sarathi_lab import Request, load_option
from sarathi_lab.config.errors import UserError
from sarathi_lab.engine.arrivals import ClosedLoop
from sarathi_lab.engine.executor import Sizes
from sarathi_lab.engine.loop import serve
from sarathi_lab.executor.simulated.backend import SimulatedBackend
from sarathi_lab.policy import Policy, SGLang, TensorRTLLM, VllmV1
from sarathi_lab.results.serving_metrics import waits

RESULTS = Path(__file__).parent / "results"
MODELS = {
    "meta-llama/Llama-3.1-8B-Instruct": "llama3.1-8b",
    "meta-llama/Llama-3.1-70B": "llama3.1-70b",
    "Qwen/Qwen3-32B": "qwen3-32b",
}
GPUS = {"a100_sxm": "a100", "h100_sxm": "h100", "h200_sxm": "h200", "b200_sxm": "b200"}
BUDGET = 8192  # tokens of an iteration: the default of all three on these GPUs
POLICIES: dict[str, Policy] = {
    "vllm": VllmV1(max_num_batched_tokens=BUDGET),
    "trtllm": TensorRTLLM(max_num_tokens=BUDGET),
    "sglang": SGLang(chunked_prefill_size=BUDGET),
}
HOSTS = {"vllm": "vllm_0_12", "trtllm": "trtllm_1_0", "sglang": "sglang_0_5"}
BLOCK_SIZE = 16
MEMORY_SHARE = 0.9
ROUNDS = 3  # answers of each user that count, after a first one
# Whether users' first answers end together, so that all prompts come at once again and again: as
# times to the first token tell of SGLang's points (a prompt's own time times the users), not of
# the others'.
TOGETHER = {"vllm": False, "trtllm": False, "sglang": True}
SEED = 0
EVERY = 20  # points between two writings


def reason_against(point: pd.Series) -> str:
    """Why a point is not simulated; nothing if it is."""
    checks = {
        "disaggregated": point["mode"] != "agg",
        "a mixture of experts, or another model": point.model_path not in MODELS,
        "8 or 4 bits": isinstance(point.precision, str) or isinstance(point.gemm_quant_mode, str),
        "no such GPU": point.system not in GPUS,
        "unknown concurrency": np.isnan(point.concurrency),
        "a pipeline": point.pp_size > 1,
        "data parallel": point.attention_dp_size > 1,
    }
    return next((reason for reason, holds in checks.items() if holds), "")


def simulated(point: pd.Series, level: str, host: str | None = None) -> dict[str, float]:
    """Mean seconds to the first token and a token."""
    spec = load_option("model", MODELS[point.model_path])
    hardware = load_option("hardware", GPUS[point.system])
    backend = SimulatedBackend(
        hardware,
        cost_model=level,
        tensor_parallel=int(point.tp_size),
        host=load_option("host", host or HOSTS[point.backend]),
    )
    room = replace(hardware, memory_bytes=MEMORY_SHARE * hardware.memory_bytes)
    num_blocks = replace(backend, hardware=room).kv_blocks(spec, BLOCK_SIZE)
    users, (prompt, output) = int(point.concurrency), (int(point.isl), int(point.osl))
    first = np.random.default_rng(SEED).integers(1, output + 1, users)
    if TOGETHER[point.backend]:
        first[:] = output
    lengths = [*first.tolist(), *[output] * (ROUNDS * users)]
    requests = [Request(i, 0.0, prompt, length) for i, length in enumerate(lengths)]
    ledger = serve(
        ClosedLoop(requests, users),
        POLICIES[point.backend],
        backend.build(spec, None, Sizes(num_blocks, BLOCK_SIZE, users)),
        batch_size=users,
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        max_model_len=prompt + output,
    )
    counted = ledger.requests().iloc[users:]
    found = waits(counted)
    return {"ttft": float(found["ttft"].mean()), "tpot": float(np.nanmean(found["tpot"]))}


def read_points(path: Path) -> pd.DataFrame:
    points = pd.read_csv(path)
    concurrency = points.silicon_data_source.str.extract(r"silicon_concurrency=(\d+)")[0]
    return points.assign(concurrency=concurrency.astype(float))


def row_of(point: pd.Series, level: str, host: str | None) -> dict[str, object]:
    kept = ["id", "system", "model_path", "backend", "backend_version", "precision", "mode"]
    sizes = ["isl", "osl", "concurrency", "tp_size"]
    row: dict[str, object] = {name: point[name] for name in (*kept, *sizes)}
    row |= {"real_ttft": point.silicon_ttft_ms / 1e3, "real_tpot": point.silicon_tpot_ms / 1e3}
    row["reason"] = reason_against(point)
    if not row["reason"]:
        try:
            row |= simulated(point, level, host)
        except UserError as error:
            row["reason"] = str(error)
    return row


def errors(rows: pd.DataFrame) -> pd.DataFrame:
    """By GPU, model and server: points, mean relative error and mean absolute one."""
    own = rows[rows.reason.isna() | (rows.reason == "")]
    own = own.assign(
        tpot_error=own.tpot / own.real_tpot - 1, ttft_error=own.ttft / own.real_ttft - 1
    )
    keys = ["system", "model_path", "backend", "backend_version"]
    return own.groupby(keys).apply(_summary, include_groups=False).reset_index()


def _summary(own: pd.DataFrame) -> pd.Series:
    found = {"points": len(own)}
    for name in ("tpot", "ttft"):
        error = own[f"{name}_error"]
        found |= {f"{name}_bias": error.median(), f"{name}_error": error.abs().mean()}
    return pd.Series(found)


def main(args: list[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("points", type=Path)
    parser.add_argument("--level", default="analytic", choices=["analytic", "profiled"])
    parser.add_argument("--host", help="of all servers, in place of their own")
    parser.add_argument("--out", type=Path, default=RESULTS)
    chosen = parser.parse_args(args)
    chosen.out.mkdir(parents=True, exist_ok=True)
    path = chosen.out / "silicon.csv"
    rows = pd.read_csv(path).to_dict("records") if path.is_file() else []
    known = {row["id"] for row in rows}
    points = read_points(chosen.points)
    points = points[~points.id.isin(known)]
    for done, (_, point) in enumerate(points.iterrows(), start=1):
        rows.append(row_of(point, chosen.level, chosen.host))
        if (not rows[-1]["reason"] and done % EVERY == 0) or done == len(points):
            pd.DataFrame(rows).to_csv(path, index=False, float_format="%.5g")
    table = pd.DataFrame(rows)
    table.to_csv(path, index=False, float_format="%.5g")
    found = errors(table)
    found.to_csv(chosen.out / "silicon_errors.csv", index=False, float_format="%.4g")
    print(found.to_string(index=False, float_format="{:.3f}".format))
    print(table.reason.fillna("").replace("", "simulated").value_counts().to_string())


if __name__ == "__main__":
    main(sys.argv[1:])
