"""What a server's host adds to an iteration, fitted to published end-to-end points.

`python experiments/lab/real_servers/fit_hosts.py POINTS.csv`, with the points of aiconfigurator
(ai-dynamo, Apache-2.0), of which it takes the 16-bit ones of dense models on H100. It continues
where it stopped, writes what it simulated to results/hosts.csv, and prints seconds an iteration and
a sequence, fitted to prompts of 1,024 tokens, with the errors of a token's time there and on all
longer prompts.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd

from sarathi_lab import Request, load_option
from sarathi_lab.engine.arrivals import ClosedLoop
from sarathi_lab.engine.executor import Sizes
from sarathi_lab.engine.loop import serve
from sarathi_lab.executor.simulated.backend import SimulatedBackend
from sarathi_lab.executor.simulated.host import Host
from sarathi_lab.policy import Policy, SGLang, TensorRTLLM, VllmV1
from sarathi_lab.results.serving_metrics import waits

RESULTS = Path(__file__).parent / "results" / "hosts.csv"
MODELS = {
    "meta-llama/Llama-3.1-8B-Instruct": "llama3.1-8b",
    "meta-llama/Llama-3.1-70B": "llama3.1-70b",
    "Qwen/Qwen3-32B": "qwen3-32b",
}
GPUS = {"h100_sxm": "h100"}
BUDGET = 8192  # tokens of an iteration: the default of all three on these GPUs
POLICIES: dict[str, Policy] = {
    "vllm": VllmV1(max_num_batched_tokens=BUDGET),
    "trtllm": TensorRTLLM(max_num_tokens=BUDGET),
    "sglang": SGLang(chunked_prefill_size=BUDGET),
}
FREE = Host("free", iteration=0.0)
FITTED_PROMPT = 1024  # tokens
BLOCK_SIZE = 16
MEMORY_SHARE = 0.9
ROUNDS = 3  # answers of each user that count, after a first one
# Whether users' first answers end together, so that all prompts come at once again and again: as
# times to the first token tell of SGLang's points (a prompt's own time times the users), not of
# the others'.
TOGETHER = {"vllm": False, "trtllm": False, "sglang": True}
SEED = 0
EVERY = 20  # points between two writings


def read_points(path: Path) -> pd.DataFrame:
    """The 16-bit points of aggregated serving whose concurrency, model and GPU are known here."""
    points = pd.read_csv(path)
    users = points.silicon_data_source.str.extract(r"silicon_concurrency=(\d+)")[0].astype(float)
    points = points.assign(users=users)
    is_known = points.model_path.isin(list(MODELS)) & points.system.isin(list(GPUS)) & users.notna()
    is_16_bit = points.precision.isna() & points.gemm_quant_mode.isna()
    is_plain = (points["mode"] == "agg") & (points.pp_size == 1) & ~(points.attention_dp_size > 1)
    return points[is_known & is_16_bit & is_plain]


def device_time(point: pd.Series) -> float:
    """Mean seconds of a token, with a host that takes none."""
    spec = load_option("model", MODELS[point.model_path])
    hardware = load_option("hardware", GPUS[point.system])
    backend = SimulatedBackend(hardware, tensor_parallel=int(point.tp_size), host=FREE)
    room = replace(hardware, memory_bytes=MEMORY_SHARE * hardware.memory_bytes)
    num_blocks = replace(backend, hardware=room).kv_blocks(spec, BLOCK_SIZE)
    users, prompt, output = int(point.users), int(point.isl), int(point.osl)
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
    return float(np.nanmean(waits(ledger.requests().iloc[users:])["tpot"]))


def simulated(points: pd.DataFrame) -> pd.DataFrame:
    """The points with `device`, seconds of a token; those simulated before are read."""
    columns = ["id", "backend", "backend_version", "model_path", "tp_size", "users", "isl", "osl"]
    rows = pd.read_csv(RESULTS).to_dict("records") if RESULTS.is_file() else []
    known = {row["id"] for row in rows}
    missing = points[~points.id.isin(known)]
    for done, (_, point) in enumerate(missing.iterrows(), start=1):
        real = point.silicon_tpot_ms / 1e3
        rows.append({**point[columns], "real": real, "device": device_time(point)})
        if done % EVERY == 0 or done == len(missing):
            RESULTS.parent.mkdir(exist_ok=True)
            pd.DataFrame(rows).to_csv(RESULTS, index=False, float_format="%.5g")
    return pd.DataFrame(rows)


def fitted(rows: pd.DataFrame) -> dict[str, float]:
    """Seconds an iteration and a sequence by least squares of relative errors, and mean absolute
    ones before and after.
    """
    is_fitted = rows.isl == FITTED_PROMPT
    features = np.stack([np.ones(len(rows)), rows.users], axis=1)
    weights, left = 1 / rows.real.to_numpy(), (rows.real - rows.device).to_numpy()
    chosen = is_fitted.to_numpy()
    scaled = (features * weights[:, None])[chosen]
    costs, *_ = np.linalg.lstsq(scaled, (left * weights)[chosen], rcond=None)
    before = np.abs(rows.device / rows.real - 1)
    after = np.abs((rows.device + features @ costs) / rows.real - 1)
    found = {"iteration_ms": 1e3 * costs[0], "sequence_us": 1e6 * costs[1]}
    for name, part in (("fitted", is_fitted), ("held_out", ~is_fitted)):
        found |= {f"{name}_points": int(part.sum())}
        found |= {f"{name}_before": before[part].mean(), f"{name}_after": after[part].mean()}
    return found


if __name__ == "__main__":
    table = simulated(read_points(Path(sys.argv[1])))
    servers = table.groupby(["backend", "backend_version"])
    kept = {key: fitted(rows) for key, rows in servers if (rows.isl == FITTED_PROMPT).sum() > 9}
    print(pd.DataFrame(kept).T.to_string(float_format="{:.3f}".format))
