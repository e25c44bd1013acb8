"""Fit today's GPUs to the measured tables that `silicon` reads: `fit.py --silicon` calls it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import silicon
from simplex import Errors, Group, evenly, fit

from sarathi_lab.config.instantiate import load_option
from sarathi_lab.executor.simulated.hardware import Hardware
from sarathi_lab.executor.simulated.kernel_times import AttentionTimes, all_reduce_time, matmul_time

PRODUCTS = ("matmul_efficiency", "memory_efficiency", "kernel_launch")
# Where the smallest weight takes ten times a launch, no product shows it: a norm of one token does,
# in the vLLM runs of the RTX 4090 (the L40S's generation) and the RTX PRO 6000.
KERNEL_LAUNCH = {"l40s": 1.85e-6, "rtx-4090": 1.85e-6, "rtx-pro-6000": 2.12e-6}
PROMPTS = ("causal_efficiency", "prompt_efficiency", "query_ramp", "attention_launch")
DECODES = (*("kv_efficiency", "decode_launch", "decode_block_time", "decode_fill", "regroup_time"),)
REDUCES = ("link_latency", "link_efficiency", "link_step", "two_shot_latency")
SHARED_LINKS = ("l40s", "rtx-pro-6000")  # on PCIe: what more devices take from each other's rate
START = {
    "matmul_efficiency": 0.9,
    "memory_efficiency": 0.85,
    "kernel_launch": 3e-6,
    "causal_efficiency": 0.6,
    "prompt_efficiency": 0.4,
    "query_ramp": 200.0,
    "attention_efficiency": 0.6,
    "attention_launch": 10e-6,
    "kv_efficiency": 0.8,
    "decode_launch": 10e-6,
    "decode_block_time": 3e-6,
    "regroup_time": 1e-6,
    "decode_fill": 1e-6,
}
START_REDUCES = {
    "link_latency": 5e-6,
    "link_efficiency": 0.6,
    "link_step": 0.1e-6,
    "two_shot_latency": 5e-6,
}
DECODE_SPLITS = (16, 32, 64)
UNGROUPED_SPLITS = (1, 2, 3, 4, 6, 16, 64)
# Fixed costs of decodes without grouped heads, where flash-attention 2 runs, by short contexts.
UNGROUPED = ("ungrouped_launch", "ungrouped_block_time")
FLASH_ATTENTION_2 = ("a100", "l40s", "rtx-pro-6000")
SHORT = 64  # tokens
SAMPLE = 1500  # products that a fit sees of its half: a few constants need no more
# Upper ends of the regions of errors.
REGIONS = {
    "products": ("tokens", (16, 128, 256, 512, 1024, 4096, silicon.MAX_TOKENS)),
    "prompts": ("length", (128, 512, 2048, 8192, 16384)),
    "decodes": ("length", (127, 512, 4096, 131072)),
    "reduces": ("devices", (2, 4, 8)),
}

Predict = Callable[[Hardware, pd.DataFrame], list[float]]


def product_times(hardware: Hardware, rows: pd.DataFrame) -> list[float]:
    shapes = zip(*(rows[name] for name in ("tokens", "in_features", "out_features")), strict=True)
    return [matmul_time(*map(int, shape), hardware, silicon.BYTES) for shape in shapes]


def prompt_times(hardware: Hardware, rows: pd.DataFrame) -> list[float]:
    return [
        _attention(hardware, row).prefill([(row.start, row.length)] * row.batch)
        for row in rows.itertuples()
    ]


def decode_times(hardware: Hardware, rows: pd.DataFrame) -> list[float]:
    return [
        _attention(hardware, row).decode(row.batch, row.batch * row.length)
        for row in rows.itertuples()
    ]


def _attention(hardware: Hardware, row: Any) -> AttentionTimes:
    kv_head_bytes = row.head_size * silicon.BYTES
    return AttentionTimes(hardware, row.heads, row.kv_heads, row.head_size, kv_head_bytes)


def reduce_times(hardware: Hardware, rows: pd.DataFrame) -> list[float]:
    return [all_reduce_time(row.num_bytes, int(row.devices), hardware) for row in rows.itertuples()]


TIMES: dict[str, Predict] = {
    "products": product_times,
    "prompts": prompt_times,
    "decodes": decode_times,
    "reduces": reduce_times,
}


def errors(kind: str, hardware: Hardware, rows: pd.DataFrame) -> Errors:
    """Relative errors of the predicted times of one kind of operation."""
    return np.array(TIMES[kind](hardware, rows)) / rows.seconds.to_numpy(float) - 1


def measured(folder: Path, gpu: str, engine: str, hardware: Hardware) -> dict[str, pd.DataFrame]:
    """The rows that count, by kind of operation."""
    prompts, _ = silicon.prompts(folder, gpu, engine)
    decodes, _ = silicon.decodes(folder, gpu, engine)
    return {
        "products": silicon.products(folder, gpu, engine),
        "prompts": prompts.assign(start=0),
        "decodes": from_memory(decodes, gpu, hardware),
        "reduces": silicon.reduces(folder, gpu, engine),
    }


def from_memory(decodes: pd.DataFrame, gpu: str, hardware: Hardware) -> pd.DataFrame:
    """Without what a replay read from the cache."""
    cached = silicon.in_cache(decodes, gpu, hardware.bytes_per_second)
    return decodes[~(cached | silicon.too_fast(decodes, gpu, hardware.bytes_per_second))]


def measured_in_run(runs: Path, gpu: str) -> dict[str, pd.DataFrame]:
    """The same of a GPU that only a vLLM server's operation tables tell of."""
    chunks, decodes = silicon.run_attention(runs, gpu)
    return {"products": silicon.run_products(runs), "prompts": chunks, "decodes": decodes}


def fit_hardware(hardware: Hardware, tables: dict[str, pd.DataFrame]) -> Hardware:
    """`hardware` with what is fitted to the fitted halves of `tables`; its `chunk_splits` stay,
    and what the tables do not tell of."""
    halves = {kind: rows[rows.fitted] for kind, rows in tables.items() if len(rows)}
    hardware = replace(hardware, **START)
    products = halves["products"]
    halves["products"] = products.sample(min(SAMPLE, len(products)), random_state=0)
    waves = [{"partial_waves": on} for on in (False, True)]
    names = PRODUCTS
    if launch := KERNEL_LAUNCH.get(hardware.name):
        hardware, names = replace(hardware, kernel_launch=launch), PRODUCTS[:2]
    hardware = best_fit(hardware, "products", halves, names, waves)
    hardware = fit_attention(hardware, halves)
    if "reduces" not in halves:
        return hardware
    shared = hardware.name in SHARED_LINKS
    names = (*REDUCES, *(("link_sharing",) if shared else ()))
    start = {**START_REDUCES, "link_sharing": 0.2 if shared else 0.0}
    return best_fit(replace(hardware, **start), "reduces", halves, names, [{}])


def fit_attention(hardware: Hardware, halves: dict[str, pd.DataFrame]) -> Hardware:
    """`hardware` with what is fitted to prompts and decodes, from START."""
    hardware = replace(hardware, **{name: START[name] for name in (*PROMPTS, *DECODES)})
    hardware = best_fit(hardware, "prompts", halves, PROMPTS, [{}])
    splits = [{"decode_splits": number} for number in DECODE_SPLITS]
    hardware = best_fit(hardware, "decodes", halves, DECODES, splits)
    if (halves["decodes"].heads == halves["decodes"].kv_heads).any():
        ungrouped = [{"ungrouped_splits": number} for number in UNGROUPED_SPLITS]
        hardware = best_fit(hardware, "decodes", halves, (), ungrouped)
        if hardware.name in FLASH_ATTENTION_2:
            hardware = fit_ungrouped(hardware, halves["decodes"])
    return hardware


def fit_ungrouped(hardware: Hardware, decodes: pd.DataFrame) -> Hardware:
    """`hardware` with the fixed costs of decodes without grouped heads."""
    is_short = (decodes.heads == decodes.kv_heads) & (decodes.length <= SHORT)
    start = {name: START[name.replace("ungrouped", "decode")] for name in UNGROUPED}
    rows = {"decodes": decodes[is_short]}
    return best_fit(replace(hardware, **start), "decodes", rows, UNGROUPED, [{}])


def best_fit(
    hardware: Hardware,
    kind: str,
    halves: dict[str, pd.DataFrame],
    names: Sequence[str],
    changes: Sequence[dict[str, int | bool]],
) -> Hardware:
    """The fit with the change of least error on the fitted half."""

    def tied(tried: Hardware) -> Hardware:
        """Pairs of a prompt run at one efficiency: masks are by whole tiles."""
        return replace(tried, attention_efficiency=tried.causal_efficiency)

    def error(tried: Hardware) -> float:
        return float(np.abs(np.log1p(errors(kind, tried, halves[kind]))).mean())

    def groups(tried: Hardware) -> list[Group]:
        return [evenly(errors(kind, tied(tried), halves[kind]))]

    tried = [replace(hardware, **change) for change in changes]
    return min((tied(fit(one, names, groups) if names else one) for one in tried), key=error)


def before(hardware: Hardware) -> Hardware:
    """`hardware` with the constants of the A100 of 2023, which stood for all later GPUs, too."""
    old = load_option("hardware", "a100_2023")
    choices = ("partial_waves", "chunk_splits", "decode_splits", "ungrouped_splits")
    names = (*START, *REDUCES, "link_sharing", *choices)
    return replace(hardware, **{name: getattr(old, name) for name in names})


def report(hardware: Hardware, tables: dict[str, pd.DataFrame]) -> None:
    """Mean errors on the held-out halves, before and after, and by region of shapes."""
    for kind, rows in tables.items():
        if rows.empty:
            continue
        held_out = rows[~rows.fitted]
        old = np.abs(errors(kind, before(hardware), held_out)).mean()
        found = pd.Series(np.abs(errors(kind, hardware, held_out)), index=held_out.index)
        size, ends = REGIONS[kind]
        regions = pd.cut(held_out[size], [0, *ends], labels=[str(end) for end in ends])
        by_region = found.groupby(regions, observed=True).mean()
        shown = "  ".join(f"<={end} {error:.1%}" for end, error in by_region.items())
        print(
            f"  {kind:9} held out: before {old:6.1%}  mean {found.mean():5.1%}  median "
            f"{found.median():5.1%}  largest {found.max():7.1%}  ({len(found)} rows)\n"
            f"            by {size}: {shown}",
            flush=True,
        )


def report_others(folder: Path, gpu: str, hardware: Hardware) -> None:
    """What was not fitted: other engines' tables, heads of 64, decodes from cache."""
    for engine in silicon.ENGINES[1:]:
        tables = measured(folder, gpu, engine, hardware)
        means = [
            f"{kind} {np.abs(errors(kind, hardware, rows)).mean():.1%}"
            for kind, rows in tables.items()
            if len(rows)
        ]
        print(f"  {engine} {silicon.read(folder, gpu, 'gemm_perf', engine)[1]}: {', '.join(means)}")
    prompts, _ = silicon.prompts(folder, gpu, head_size=64)
    decodes, _ = silicon.decodes(folder, gpu)
    cached = decodes[silicon.in_cache(decodes, gpu, hardware.bytes_per_second)]
    for kind, what, rows in (
        ("prompts", "heads of 64", prompts.assign(start=0)),
        ("decodes", "read from the cache by the replay", cached),
    ):
        if len(rows):
            print(f"  {kind}, {what}: {np.abs(errors(kind, hardware, rows)).mean():.1%}")


def report_chunks(runs: Path, gpu: str, hardware: Hardware) -> None:
    """Chunks after a context and decodes as a vLLM server ran them."""
    chunks, decodes = silicon.run_attention(runs, gpu)
    for kind, rows in (("prompts", chunks[chunks.start > 0]), ("decodes", decodes)):
        found = np.abs(errors(kind, hardware, rows))
        print(f"  {kind} of a server, after a context: {found.mean():.1%} ({len(found)} rows)")


def show(hardware: Hardware) -> None:
    splits = ("chunk_splits", "decode_splits", "ungrouped_splits")
    names = (*START, *REDUCES, "link_sharing", "partial_waves", *splits)
    if hardware.ungrouped_launch is not None:
        names += UNGROUPED
    values = ((name, getattr(hardware, name)) for name in names)
    print("  " + "  ".join(f"{name} {value:.3g}" for name, value in values))


def main(folder: Path | None, runs: Path | None, gpus: Sequence[str] | None = None) -> None:
    """Fit and report those of `gpus`, by default all, that the tables in `folder`, or of the
    installed package, and in `runs` tell of.
    """
    folder = folder or silicon.find_folder()
    for path in (folder, runs):
        if path is not None and not path.is_dir():
            raise SystemExit(f"{path} is not there; name the folder of the measured tables")
    known = [*(silicon.FOLDERS if folder else ()), *(("rtx-4090",) if runs else ())]
    unknown = sorted(set(gpus or known) - set(known))
    if unknown or not known:
        raise SystemExit(
            f"no tables of {', '.join(unknown) or 'any GPU'}, but of: {', '.join(known) or 'none'}"
            "; pip install aiconfigurator-core, or name folders with --silicon and --runs"
        )
    for gpu in gpus or known:
        hardware = load_option("hardware", gpu)
        if folder and gpu in silicon.FOLDERS:
            tables = measured(folder, gpu, "vllm", hardware)
            version = silicon.read(folder, gpu, "gemm_perf", "vllm")[1]
        else:
            assert runs is not None, "the RTX 4090 is known by a run alone"
            tables, version = measured_in_run(runs, gpu), "0.19.0"
        print(f"\n{gpu}: vLLM {version}", flush=True)
        hardware = fit_hardware(hardware, tables)
        show(hardware)
        report(hardware, tables)
        if folder and gpu in silicon.FOLDERS:
            report_others(folder, gpu, hardware)
        if runs and gpu in silicon.RUNS:
            report_chunks(runs, gpu, hardware)
