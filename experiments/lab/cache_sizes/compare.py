"""Hold the caches that simulated servers have against those that real ones logged.

python experiments/lab/cache_sizes/compare.py      # writes results.csv beside this file
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from sarathi_lab.config.instantiate import load_option
from sarathi_lab.engine.served_system import ServerSetup
from sarathi_lab.executor.simulated.backend import SimulatedBackend
from sarathi_lab.policy.systems import vllm_memory

HERE = Path(__file__).parent
POINTS, RESULTS = HERE / "points.csv", HERE / "results.csv"
BLOCK_SIZE = 16
# Before, a device had its datasheet's GB: runs took all beside the weights, replays the server's
# share of it.
DATASHEET = {"h100": 80e9, "a100": 80e9, "rtx-4090": 24e9, "rtx-pro-6000": 96e9}
OLDER = ("0.11",)  # versions that profiled more than those which the rule was fitted to


def simulated_tokens(point: Any) -> int:
    """Compute the tokens of cache of the point's server by the rule of its version."""
    backend = SimulatedBackend(
        load_option("hardware", point.hardware),
        tensor_parallel=point.tensor,
        pipeline_parallel=point.pipeline,
        weights=point.weights,
    )
    spec = replace(load_option("model", point.model), kv_dtype=point.kv_dtype)
    rule = vllm_memory(point.version)
    setup = ServerSetup(rule, point.max_num_batched_tokens, point.max_num_seqs, point.share)
    return backend.kv_blocks(spec, BLOCK_SIZE, setup) * BLOCK_SIZE


def tokens_before(point: Any, share: float) -> int:
    """Compute the tokens beside the weights in `share` of the datasheet's memory."""
    spec = replace(load_option("model", point.model), weight_dtype=point.weights)
    memory = share * DATASHEET[point.hardware] * point.tensor * point.pipeline
    return int((memory - spec.weight_bytes(2)) // spec.kv_bytes_per_token(2))


def compare(points: pd.DataFrame) -> pd.DataFrame:
    """Return the points with the tokens simulated, before and now, and their relative errors."""
    rows = list(points.itertuples())
    table = points.assign(
        simulated=[simulated_tokens(row) for row in rows],
        all_before=[tokens_before(row, 1.0) for row in rows],
        share_before=[tokens_before(row, row.share) for row in rows],
    )
    for name in ("simulated", "all_before", "share_before"):
        table[f"error_{name}"] = (table[name] / table.tokens - 1).round(3)
    return table


def main() -> None:
    table = compare(pd.read_csv(POINTS))
    table.drop(columns=["note"]).to_csv(RESULTS, index=False)
    errors = [name for name in table if name.startswith("error_")]
    shown = table[["version", "model", "hardware", "tensor", "pipeline", "tokens", *errors]]
    print(shown.to_string(index=False))
    is_older = table.version.str.startswith(OLDER)
    print(table[~is_older][errors].abs().agg(["mean", "median"]).round(3).to_string())


if __name__ == "__main__":
    main()
