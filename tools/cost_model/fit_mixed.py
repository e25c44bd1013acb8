"""Fit latent and linear attention of today's GPUs, and state the errors held out by shape.

    python tools/cost_model/fit_mixed.py [--source FOLDER] [--gpu NAME ...]

FOLDER is `aisimulate_core/systems/data` of PyPI package aisimulate (Apache-2.0), from which
mixed_layers.csv.gz is made again; without it the file is read. Its rows are vLLM's:
`latent_prompts` and `latent_decodes` are whole modules of DeepSeek-V3's attention, products
included, with so many `heads`; `linear_prompts` and `linear_decodes` are the kernels of the gated
delta rule with its convolution (`heads` of values, `key_heads`). `length` is the prompt, or a
decode's context. Fitted is a checkerboard over the shapes' sizes. Prints the figures of the
hardware files, and errors.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import silicon
from numpy.typing import NDArray
from scipy.optimize import minimize

from sarathi_lab.config.instantiate import load_option
from sarathi_lab.config.paths import EXPERIMENTS
from sarathi_lab.executor.simulated.hardware import Hardware
from sarathi_lab.executor.simulated.mixed_layers import LatentTimes, LinearTimes, MixedOperations
from sarathi_lab.model.layers import LinearAttention

ROWS = EXPERIMENTS / "lab" / "cost_model" / "mixed_layers.csv.gz"
GPUS = ("h100", "h200", "b200")
SHAPE = ["kind", "heads", "key_heads", "batch", "length"]
HEADS = (16, 32, 128)  # of latent attention on a device; with fewer the weights stay in cache
VALUE_HEADS = (16, 32, 64)
DEEPSEEK = load_option("model", "deepseek-v3")
DELTA = load_option("model", "qwen3-next-80b-a3b").layers.linear
MIN_PROMPT = 16  # tokens: shorter ones are decodes for vLLM
NORMS = 2  # of queries and latents: kernels beside the products
# By kind: how the source's table is called, and its column with the lengths.
LATENT_TABLES = {
    "latent_prompts": ("context", "isl"),
    "latent_decodes": ("generation", "step"),
}
EDGES = [0, 16, 64, 256, 1024, 4096, 16384, 10**6]  # of the classes of sizes
Predict = Callable[[Hardware, Any], float]


def read_source(folder: Path, gpu: str) -> pd.DataFrame:
    """Rows of a GPU (`SHAPE`, time_us) that vLLM's kernels took from memory."""
    tables = [
        _latent_rows(folder, gpu, "latent_prompts"),
        _latent_rows(folder, gpu, "latent_decodes"),
        _linear_rows(folder, gpu),
    ]
    rows = pd.concat(tables).groupby(SHAPE, as_index=False).latency.mean()
    is_prompt = rows.kind.str.endswith("prompts")
    rows = rows[~is_prompt | (rows.length >= MIN_PROMPT)]
    from_memory = rows[~_is_in_cache(rows, gpu)]
    timed = from_memory.assign(gpu=gpu, time_us=1e3 * from_memory.latency)
    return timed[["gpu", *SHAPE, "time_us"]]


def _latent_rows(folder: Path, gpu: str, kind: str) -> pd.DataFrame:
    """Rows of latent attention in 16 bits (`SHAPE`, latency in ms)."""
    phase, length = LATENT_TABLES[kind]
    table = _table(folder, gpu, f"mla_{phase}_module_perf", length)
    is_half = (table.kv_cache_dtype == "bfloat16") & (table.gemm_type == "bfloat16")
    rows = table[is_half & table.num_heads.isin(HEADS)]
    return rows.rename(columns={"num_heads": "heads"}).assign(kind=kind, key_heads=0)


def _linear_rows(folder: Path, gpu: str) -> pd.DataFrame:
    """Rows of linear attention (`SHAPE`, latency in ms): the delta rule's kernel and its
    convolution, where both were timed.
    """
    table = _table(folder, gpu, "gdn_perf", "seq_len")
    table = table.rename(columns={"num_v_heads": "heads", "num_k_heads": "key_heads"})
    table = table[table.heads.isin(VALUE_HEADS)]
    table["kind"] = table.phase.map({"context": "linear_prompts", "generation": "linear_decodes"})
    is_convolution = table.kernel_source.str.startswith("causal_conv1d")
    by_kernel = table.groupby([*SHAPE, is_convolution]).latency.mean().unstack()
    both_kernels = by_kernel.dropna().sum(axis=1)
    return both_kernels.rename("latency").reset_index()


def _is_in_cache(rows: pd.DataFrame, gpu: str) -> pd.Series:
    """Whether a decode finds in the GPU's cache what would take long from memory."""
    num_bytes = np.where(
        rows.kind == "latent_decodes",
        rows.batch * rows.length * DEEPSEEK.layers.latent.cached_size * 2,
        rows.batch * rows.heads * DELTA.key_size * DELTA.value_size * 4.0,
    )
    hardware = load_option("hardware", gpu)
    fits = num_bytes <= silicon.cache_bytes(gpu)
    takes_long = num_bytes / hardware.bytes_per_second > silicon.CACHED_SECONDS
    return rows.kind.str.endswith("decodes") & fits & takes_long


def _table(folder: Path, gpu: str, name: str, length: str) -> pd.DataFrame:
    """Read the largest of vLLM's versions of a table."""
    paths = silicon.folder_of(folder, gpu).glob(f"*/vllm/*/{name}.parquet")
    table = max(map(pd.read_parquet, paths), key=len)
    return table.rename(columns={length: "length", "batch_size": "batch"})


def latent_time(hardware: Hardware, row: Any) -> float:
    """Compute the seconds of DeepSeek-V3's attention with the row's heads on a device."""
    formula, times, linears = _latent(hardware, row.heads)
    tokens = row.batch * (row.length if row.kind == "latent_prompts" else 1)
    products = sum(formula.product_time(tokens, *shape) for shape in linears)
    products += NORMS * hardware.kernel_launch
    if row.kind == "latent_prompts":
        return products + times.prefill([(0, row.length)] * row.batch)
    return products + times.decode(row.batch, row.batch * (row.length + 1))


def _latent(hardware: Hardware, heads: int) -> tuple[MixedOperations, LatentTimes, list[Any]]:
    layers = DEEPSEEK.layers
    spec = replace(DEEPSEEK, num_heads=heads, num_kv_heads=heads)
    formula = MixedOperations(spec, hardware, silicon.BYTES)
    linears = layers.latent.linears(spec.hidden_size, heads, spec.head_size, 1)
    times = LatentTimes(formula, layers.latent)
    return formula, times, [(linear.in_features, linear.out_features) for linear in linears]


def linear_time(hardware: Hardware, row: Any) -> float:
    """Compute the seconds of the gated delta rule and its convolution."""
    shape: LinearAttention = replace(
        DELTA, num_heads=row.heads, num_key_heads=row.key_heads, state_bytes=4
    )
    times = LinearTimes(shape, hardware, silicon.BYTES)
    if row.kind == "linear_decodes":
        return times.decode(row.batch)
    return times.prefill([(0, row.length)] * row.batch)


# Figures by kind of row: the start of the search, and the hardware's field that has them.
FITTED: dict[str, tuple[str, Predict, dict[str, float]]] = {
    "latent_prompts": (
        "latent",
        latent_time,
        {
            "causal_efficiency": 0.7,
            "query_ramp": 100.0,
            "attention_launch": 3e-5,
            "prompt_efficiency": 0.4,
        },
    ),
    "latent_decodes": (
        "latent",
        latent_time,
        {"kv_efficiency": 0.85, "decode_launch": 3e-5, "decode_block_time": 6e-6},
    ),
    "linear_prompts": (
        "linear",
        linear_time,
        {"launch": 12e-6, "step": 3e-6, "conv_efficiency": 0.6},
    ),
    "linear_decodes": ("linear", linear_time, {"decode_launch": 7e-6}),
}


def with_figures(hardware: Hardware, field: str, figures: dict[str, float]) -> Hardware:
    """Return the hardware with `figures` in its `field`; context runs as fast as the chunk."""
    figures = {**getattr(hardware, field), **figures}
    if "causal_efficiency" in figures:
        figures["attention_efficiency"] = figures["causal_efficiency"]
    return replace(hardware, **{field: figures})


def fit(hardware: Hardware, kind: str, rows: pd.DataFrame) -> Hardware:
    """Fit the figures of a kind to its rows by the mean logarithm of predicted over measured."""
    field, _, start = FITTED[kind]

    def hardware_of(log_factors: NDArray[np.float64]) -> Hardware:
        """Return the hardware with `start` times the factors."""
        values = np.exp(log_factors) * [*start.values()]
        figures = dict(zip(start, values, strict=True))
        for name, value in figures.items():
            if name.endswith("efficiency"):
                figures[name] = min(1.0, value)
        return with_figures(hardware, field, figures)

    def mean_error(log_factors: NDArray[np.float64]) -> float:
        relative = errors(hardware_of(log_factors), kind, rows)
        return float(np.abs(np.log1p(relative)).mean())

    simplex = np.vstack([np.zeros(len(start)), 0.3 * np.eye(len(start))])
    options = {"xatol": 0.005, "fatol": 1e-4, "initial_simplex": simplex}
    best = minimize(mean_error, simplex[0], method="Nelder-Mead", options=options)
    return hardware_of(best.x)


def errors(hardware: Hardware, kind: str, rows: pd.DataFrame) -> NDArray[np.float64]:
    """Relative errors of the predicted times."""
    predict = FITTED[kind][1]
    seconds = np.array([predict(hardware, row) for row in rows.itertuples()])
    return seconds / (rows.time_us.to_numpy() / 1e6) - 1


def fitted_half(rows: pd.DataFrame) -> pd.Series:
    return silicon.checkerboard(rows, ["heads", "batch", "length"])


def report(gpu: str, rows: pd.DataFrame) -> None:
    """Fit the GPU, and print figures and mean errors of each half and class."""
    unfitted = replace(load_option("hardware", gpu), latent={}, linear={})
    hardware = unfitted
    for kind, rows_of_kind in rows.groupby("kind"):
        is_fitted = fitted_half(rows_of_kind)
        to_fit = rows_of_kind[is_fitted]
        held_out = rows_of_kind[~is_fitted]
        hardware = fit(hardware, kind, to_fit)
        held_out_errors = pd.Series(np.abs(errors(hardware, kind, held_out)), held_out.index)
        print(
            f"{gpu} {kind} ({len(held_out)} held out): "
            f"fitted {np.abs(errors(hardware, kind, to_fit)).mean():.1%}, "
            f"held out {held_out_errors.mean():.1%}, "
            f"before {np.abs(errors(unfitted, kind, held_out)).mean():.1%}"
        )
        for size in ("length", "batch", "heads"):
            classes = pd.cut(held_out[size], EDGES)
            means = held_out_errors.groupby(classes).mean().dropna()
            shown = {f"{interval.right:g}": f"{mean:.0%}" for interval, mean in means.items()}
            print(f"  by {size} to", shown)
    for field in ("latent", "linear"):
        figures = getattr(hardware, field).items()
        print(f"{gpu} {field}:", ", ".join(f"{name}: {value:.3g}" for name, value in figures))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--source", type=Path)
    parser.add_argument("--gpu", nargs="+", choices=GPUS, default=GPUS)
    options = parser.parse_args(arguments)
    if options.source:
        rows = pd.concat([read_source(options.source, gpu) for gpu in GPUS])
        rows.to_csv(ROWS, index=False, float_format="%.5g")
    rows = pd.read_csv(ROWS)
    for gpu in options.gpu:
        report(gpu, rows[rows.gpu == gpu])


if __name__ == "__main__":
    main()
