"""Fit the attention kernels that a hardware file has besides vLLM's (`Hardware.kernels`).

    python tools/cost_model/fit_kernels.py [--source FOLDER] [--gpu NAME ...]

TensorRT-LLM's and FlashInfer's are fitted to half of the rows of aiconfigurator-core (Apache-2.0;
FOLDER: its `systems/data`), flash-attention 2 on an H100 to every second chunk size of
tables/h100-flash_attention_2 (MIT). Prints the figures, and errors held out: of the file's kernel
on these rows, and of the fitted one.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import silicon
from distil import source_of
from fit_silicon import PROMPTS, REGIONS, best_fit, errors, fit_attention, from_memory

from sarathi_lab.config.csv_files import csv_file
from sarathi_lab.config.instantiate import load_option
from sarathi_lab.config.paths import EXPERIMENTS
from sarathi_lab.executor.simulated.hardware import Hardware

KERNELS = {"tensorrt_llm": ("trtllm", ""), "flashinfer": ("sglang", "flashinfer")}
TABLES = EXPERIMENTS / "lab" / "cost_model" / "tables"
CHUNKS = csv_file(TABLES / "h100-flash_attention_2" / "attention.csv")
# It takes 128 queries a tile, splits no keys and attends in one call, as its source has it.
FLASH_ATTENTION_2 = {"block_queries": 128, "hybrid_call": True}
FITTED = ("causal_efficiency", "query_ramp", "attention_launch")
CHUNK_ENDS = (64, 256, 512, 1024)
GROUPS = (0, 1, 16, 32, 128)  # query heads of a KV head
SHOWN = (
    *(*PROMPTS, "attention_efficiency", "kv_efficiency", "decode_splits", "ungrouped_splits"),
    *("decode_launch", "decode_block_time", "decode_fill", "regroup_time"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--source", type=Path, help="the folder systems/data of the package")
    every = [*silicon.FOLDERS]
    parser.add_argument("--gpu", nargs="+", choices=every, default=every)
    given = parser.parse_args()
    if "h100" in given.gpu:
        fit_chunks(load_option("hardware", "h100"))
    for gpu in given.gpu:
        for name, (engine, kernel) in KERNELS.items():
            hardware, folder = load_option("hardware", gpu), source_of(given.source)
            table, _ = silicon.read(folder, gpu, "generation_attention_perf", engine)
            if kernel and not (table.kernel_source == kernel).any():
                continue
            prompts, _ = silicon.prompts(folder, gpu, engine, kernel=kernel)
            decodes, _ = silicon.decodes(folder, gpu, engine, kernel=kernel)
            rows = {"prompts": prompts.assign(start=0)}
            rows["decodes"] = from_memory(decodes, gpu, hardware)
            halves = {kind: part[part.fitted] for kind, part in rows.items()}
            report(f"{gpu}, {name}", hardware, fit_attention(hardware, halves), rows, SHOWN)


def fit_chunks(hardware: Hardware) -> None:
    """Fit and report flash-attention 2 on the H100."""
    rows = pd.read_csv(CHUNKS).rename(columns={"prefill_chunk": "length", "kv_prefill": "start"})
    rows = rows.rename(columns={"num_heads": "heads", "num_kv_heads": "kv_heads"})
    fitted = rows.length.rank(method="dense") % 2 == 1
    rows = rows.assign(batch=1, seconds=rows.time_us / 1e6, fitted=fitted)
    start = replace(hardware, **FLASH_ATTENTION_2, attention_efficiency=0.3, query_ramp=50.0)
    found = best_fit(start, "prompts", {"prompts": rows[fitted]}, FITTED, [{}])
    shown = ("attention_efficiency", *FITTED, *FLASH_ATTENTION_2)
    report("h100, flash_attention_2", hardware, found, {"prompts": rows}, shown, CHUNK_ENDS)


def report(
    title: str,
    before: Hardware,
    after: Hardware,
    tables: dict[str, pd.DataFrame],
    figures: Iterable[str],
    chunk_ends: tuple[int, ...] = (),
) -> None:
    """Print `figures`, and mean errors on the held-out rows, by region, before and after."""
    print(f"\n{title}: ", "  ".join(f"{name} {getattr(after, name):.3g}" for name in figures))
    for kind, rows in tables.items():
        held_out = rows[~rows.fitted]
        size, ends = REGIONS[kind]
        found = pd.DataFrame(
            {
                name: np.abs(errors(kind, hardware, held_out))
                for name, hardware in (("before", before), ("after", after))
            },
            index=held_out.index,
        )
        means = ", ".join(f"{name} {error:.1%}" for name, error in found.mean().items())
        print(f"  {kind} held out: {means} ({len(found)} rows)")
        groups = (held_out.heads // held_out.kv_heads).rename("query heads a KV head")
        for sizes, bounds in ((held_out[size], (0, *(chunk_ends or ends))), (groups, GROUPS)):
            by_region = found.groupby(pd.cut(sizes, bounds), observed=True).mean()
            print((100 * by_region).round(1).T.to_string())


if __name__ == "__main__":
    main()
