"""Make the tables of `tables/` from measurements that others have published.

    python experiments/lab/measured_kernels/make_tables.py --silicon FOLDER --vidur FOLDER

The first folder is `systems/data` of PyPI package aiconfigurator-core 0.12.0 (Apache-2.0). The
second has two files that were condensed from profiles of microsoft/vidur (MIT, VIDUR_FILES):

- `gemm_ms.csv`: gpu, model, tp, op, in_features, out_features, num_tokens, ms. A product's time is
  the median of its `time_stats.*.median`, over the rows of a size.
- `attention_ms_a100_tp2_64q_8kv_d128.csv`: phase, batch_size, prefill_chunk_size, kv_cache_size,
  ms, of `attn_prefill` and `attn_decode` in the same way. It has chunks of 64, 128, 256, 384, 512,
  1,024 and 2,048 tokens and nine numbers of decodes, a selection of what was profiled.

Here rows are copied, never fitted, joined or left out between others.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from sarathi_lab.config.csv_files import csv_file
from sarathi_lab.config.paths import EXPERIMENTS
from sarathi_lab.executor.tables import SHAPE, TIME, write_tables

TABLES = Path(__file__).parent / "tables"
DISTILLED = EXPERIMENTS / "lab" / "cost_model" / "tables"
TITLE = "# By experiments/lab/measured_kernels/make_tables.py.\n"
MICROSECONDS = 1e3  # in a millisecond
QWEN3_8B = {  # inputs, outputs and calls of a layer's products, gate and up apart
    "qkv_proj": (4096, 6144, 1),
    "o_proj": (4096, 4096, 1),
    "gate_up_proj": (4096, 12288, 2),
    "down_proj": (12288, 4096, 1),
}
QWEN3_8B_HEADS = (32, 8, 128)
GPUS = {"a100": "a100_sxm", "h100": "h100_sxm", "h200": "h200_sxm", "b200": "b200_sxm"}
ENGINES = {"a100": "0.14.0", "h100": "0.24.0", "h200": "0.24.0", "b200": "0.24.0"}  # vLLM's
VIDUR_FILES = {  # with the commits at which some values were compared with the tables'
    "products": "data/profiling/compute/a100/meta-llama/Llama-2-70b-hf/mlp.csv at 25e529d",
    "attention": "data/profiling/a100/attention.csv at e2d00e9",
}
ISOLATED = (
    "Replays of one kernel at a time. Gate and up are the times of two products: theirs as one was "
    "not measured. Chunks have no context."
)
VIDUR = (
    "Medians of one GPU's share of a layer of Llama-2-70B, of the shapes of Llama-3.1-70B's; "
    "an old FlashAttention, prompts and decodes in calls of their own."
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--silicon", type=Path, required=True)
    parser.add_argument("--vidur", type=Path, required=True)
    folders = parser.parse_args()
    for gpu, name in GPUS.items():
        write_qwen(gpu, folders.silicon / name)
    write_llama(folders.vidur)


def write_qwen(gpu: str, folder: Path) -> None:
    """Write one GPU's tables of Qwen3-8B, whose products were all measured but one, as two."""
    engine = ENGINES[gpu]
    rows = pd.read_parquet(folder / "gemm" / "vllm" / engine / "gemm_perf.parquet")
    rows = rows[rows.gemm_dtype == "bfloat16"]
    layers = []
    for layer, (inputs, outputs, calls) in QWEN3_8B.items():
        of_shape = rows[(rows.k == inputs) & (rows.n == outputs)]
        times = calls * MICROSECONDS * of_shape.groupby("m").latency.median()
        layers.append(times.rename(TIME).rename_axis("tokens").reset_index().assign(layer=layer))
    attention = pd.read_csv(csv_file(DISTILLED / gpu / "attention.csv"))
    attention = attention[(attention[list(SHAPE)] == list(QWEN3_8B_HEADS)).all(axis=1)]
    meta = {
        "model": "qwen3-8b",
        "source": f"aiconfigurator-core 0.12.0, systems/data/{folder.name}",
        "licence": "Apache-2.0",
        "device": str(rows.device.iloc[0]),
        "engine": f"vLLM {engine}",
        "note": ISOLATED,
    }
    write(f"{gpu}-qwen3-8b", "tp1", layers, attention, meta)


def write_llama(folder: Path) -> None:
    """Write an A100's tables of one of two shares of Llama-2-70B."""
    products = pd.read_csv(folder / "gemm_ms.csv")
    products = products.query("gpu == 'a100-80gb' and model == 'llama-2-70b' and tp == 2")
    names = {"op": "layer", "num_tokens": "tokens"}
    layers = products.rename(columns=names).assign(**{TIME: MICROSECONDS * products.ms})
    calls = pd.read_csv(folder / "attention_ms_a100_tp2_64q_8kv_d128.csv")
    is_prompt = calls.phase == "prefill"
    attention = pd.DataFrame(
        {
            "prefill_chunk": calls.prefill_chunk_size.where(is_prompt, 0),
            "kv_prefill": calls.kv_cache_size.where(is_prompt, 0),
            "n_decode": calls.batch_size.where(~is_prompt, 0),
            "kv_decode": calls.kv_cache_size.where(~is_prompt, 0),
            TIME: MICROSECONDS * calls.ms,
        }
    )
    meta = {
        "model": "llama3.1-70b",
        "source": "microsoft/vidur's profiles",
        "files": VIDUR_FILES,
        "licence": "MIT",
        "device": "NVIDIA A100 80GB",
        "engine": "an old FlashAttention",
        "note": VIDUR,
    }
    write("a100-llama3.1-70b", "tp2", [layers], attention, meta)


def write(
    name: str,
    degree: str,
    layers: list[pd.DataFrame],
    attention: pd.DataFrame,
    meta: Mapping[str, Any],
) -> None:
    dense = pd.concat(layers, ignore_index=True)[["layer", "tokens", TIME]]
    # A call of no context or no decode measures nothing that a batch has.
    attention = attention[(attention.prefill_chunk > 0) | (attention.kv_decode > 0)]
    write_tables(TABLES / name / degree, {"dense": dense, "attention": attention}, meta, TITLE)
    print(f"{name}/{degree}: {len(dense)} rows of products, {len(attention)} of attention")


if __name__ == "__main__":
    main()
