"""Fit the share of the peak that products in 8 bits reach, and state the errors held out.

    python tools/cost_model/fit_fp8.py [FOLDER]

FOLDER is the `systems/data` of aiconfigurator-core, by default the installed package's. Everything
else (launches, bandwidth, waves) is as fitted to products in 16 bits. The measured times include
the conversion of the activations, and so does the prediction.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import silicon

from sarathi_lab import load_option
from sarathi_lab.executor.simulated.hardware import Hardware
from sarathi_lab.executor.simulated.kernel_times import matmul_time

GPUS = ("h100", "h200", "b200", "l40s", "rtx-pro-6000")
ENGINE = "vllm"  # whose products in 16 bits the rest was fitted to
EFFICIENCIES = np.arange(0.40, 1.0, 0.02)
SAMPLE = 400  # products of each half: one constant needs no more
REGIONS = (0, 16, 128, 512, 2048, silicon.MAX_TOKENS)  # tokens


def products(folder: Path, gpu: str, engine: str) -> pd.DataFrame:
    """tokens, in_features, out_features, seconds, fitted; weights that stay in cache left out."""
    table, _ = silicon.read(folder, gpu, "gemm_perf", engine)
    if table.empty:
        return table
    table = table[table.gemm_dtype == "fp8"].drop_duplicates(["m", "n", "k"])
    rows = pd.DataFrame({"tokens": table.m, "in_features": table.k, "out_features": table.n})
    rows = rows.assign(seconds=table.latency / 1e3)
    sized = rows.in_features.between(*silicon.FEATURES) & rows.out_features.between(
        *silicon.FEATURES
    )
    weights = rows.in_features * rows.out_features
    beyond = weights >= silicon.cache_bytes(gpu) / silicon.WEIGHTS_IN_TURN
    rows = rows[sized & beyond & (rows.tokens <= silicon.MAX_TOKENS)]
    return rows.assign(fitted=silicon.checkerboard(rows, ["in_features", "out_features"]))


def predicted(hardware: Hardware, rows: pd.DataFrame, efficiency: float) -> np.ndarray:
    """Seconds of products in 8 bits, and of the conversion before each."""
    in_fp8 = replace(
        hardware, flops_per_second=hardware.fp8_peak, matmul_efficiency=float(efficiency)
    )
    shapes = rows[["tokens", "in_features", "out_features"]].itertuples(index=False)
    times = [matmul_time(*map(int, shape), in_fp8, 1) for shape in shapes]
    converted = rows.tokens * rows.in_features * (hardware.dtype_bytes + 1)
    return np.array(times) + hardware.kernel_launch + converted / hardware.memory_rate


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else silicon.find_folder()
    if folder is None:
        sys.exit("aiconfigurator-core is not installed; name its folder systems/data")
    for gpu in GPUS:
        hardware = load_option("hardware", gpu)
        rows = products(folder, gpu, ENGINE)
        if rows.empty or hardware.fp8_flops_per_second is None:
            print(f"{gpu}: no products or no peak in 8 bits")
            continue
        fitted = rows[rows.fitted].sample(SAMPLE, random_state=0)
        errors = [
            np.abs(predicted(hardware, fitted, share) / fitted.seconds - 1).mean()
            for share in EFFICIENCIES
        ]
        best = EFFICIENCIES[int(np.argmin(errors))]
        print(f"\n{gpu}: fp8_efficiency {best:.2f}, mean error where fitted {min(errors):.1%}")
        for engine in silicon.ENGINES:
            report(hardware, products(folder, gpu, engine), best, engine)


def report(hardware: Hardware, rows: pd.DataFrame, efficiency: float, engine: str) -> None:
    """Mean absolute and median error of the shapes held out, whole and by tokens."""
    if rows.empty:
        return
    out = rows[~rows.fitted].sample(SAMPLE, random_state=0)
    error = predicted(hardware, out, efficiency) / out.seconds - 1
    by = error.abs().groupby(pd.cut(out.tokens, REGIONS), observed=True).mean()
    parts = ", ".join(f"{interval.right:.0f}: {value:.0%}" for interval, value in by.items())
    print(f"  {engine}: mean {error.abs().mean():.1%}, median bias {error.median():+.1%} ({parts})")


if __name__ == "__main__":
    main()
