"""Makes the small operation tables of `tables/` from measurements that others have published.

    python tools/cost_model/distil.py [--source FOLDER] [--gpu NAME ...] [--tables FOLDER]

NAME is a hardware option or any folder of the source, such as gb200. The source is PyPI package
aiconfigurator-core (extra `silicon`; Apache-2.0), or the FOLDER with its data, `systems/data`. A
table holds vLLM's kernels: the library's products, the attention that the engine chooses on that
GPU, and a layer's experts. The RTX 4090's are a server's in experiments/lab/real_servers.

Products are kept for a grid of shapes; of each shape the numbers of tokens that a straight line
between its neighbours misses by more than `TOLERANCE`. Attention is kept whole for `HEADS`. What is
left out checks what is kept: check_tables.py states the errors.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import silicon
from numpy.typing import NDArray

from sarathi_lab.config.csv_files import csv_file
from sarathi_lab.config.instantiate import load_option
from sarathi_lab.config.paths import EXPERIMENTS
from sarathi_lab.executor.tables import EXPERT_SHAPE, LAYERS, SHAPE, TIME, read_tables, write_tables

Floats = NDArray[np.float64]
TABLES = EXPERIMENTS / "lab" / "cost_model" / "tables"
PACKAGE, VERSION, LICENCE = "aiconfigurator-core", "0.12.0", "Apache-2.0"
TITLE = "# By tools/cost_model/distil.py, which says what was kept.\n"
BALANCED = "each expert of moe.csv is chosen as often as another"
NOTE = (
    "Replays of captured graphs of one kernel at a time, so no launch from the host; weights that "
    "are smaller than the L2 cache may have stayed in it."
)
MICROSECONDS = 1e3  # in a millisecond
TOLERANCE = 0.03
IN_FEATURES = (512, 1024, 2048, 3072, 4096, 5120, 8192, 12288, 16384)
OUT_FEATURES = (*IN_FEATURES[:4], 4096, 5120, 6144, 8192, 12288, 16384, 65536)
FP8_FEATURES = (1024, 2048, 4096, 8192, 16384)
HEAD_SIZE = 128
# Query and KV heads: a call works off sequences times KV heads, so that one shape stands for others
# of as many query heads a KV head; but the shortest calls differ, so some are kept of each kind.
HEADS = (
    *((1, 1), (8, 8), (32, 32), (40, 40)),
    *((2, 1), (16, 8), (4, 1), (8, 2), (32, 8)),
    *((40, 8), (48, 8), (8, 1), (32, 4), (64, 8)),
)
# Hidden size, width of an expert, experts and those of a token: Qwen3-30B-A3B and Mixtral 8x7B.
EXPERTS = ((2048, 768, 128, 8), (4096, 14336, 8, 2))
MAX_TENSOR = 8  # devices that split an expert
# A longer call that takes less than this share of a shorter one's time shows that the shorter one
# was disturbed: it is left out.
DISTURBED = 0.8
RUN_META = {
    "source": "LLMServingSim 5daddb2, RTX4090/meta-llama/Llama-3.1-8B/bf16/tp1",
    "licence": "MIT",
    "device": "NVIDIA GeForce RTX 4090",
    "engine": "vLLM 0.19.0",
    "units": f"{TIME}: microseconds",
    "note": "Kernels of one layer in a running engine, eager; attention writes the cache.",
    "included": ["kv_write"],
    "uncertainty": {"attention": 0.046},  # of the 5,843 calls that are left out
}


# Sizes that are kept of a server's mixed batches: chunk, context before it, decodes, and context.
MIXED = {
    "prefill_chunk": (0, 16, 64, 256, 512, 1024, 2048),
    "kv_prefill": (0, 128, 512, 1024, 2048, 4096, 8192, 16384),
    "n_decode": (0, 1, 4, 8, 16, 32, 64, 128, 256),
    "kv_decode": (0, 16, 128, 512, 1024, 2048, 4096, 8192, 16384),
}
RUN = "rtx-4090"
SERVER = EXPERIMENTS / "lab" / "real_servers" / "rtx-4090-llama-3.1-8b"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", type=Path, help="the folder systems/data of the package")
    parser.add_argument("--gpu", nargs="+", default=[*silicon.FOLDERS, RUN])
    parser.add_argument("--tables", type=Path, default=TABLES, help="where to write folders")
    options = parser.parse_args()
    for name in options.gpu:
        if name == RUN:
            frames = frames_of_run()
            meta = RUN_META
        else:
            source = source_of(options.source)
            frames = frames_of_gpu(source, name)
            meta = _meta(source, name)
            if "moe" in frames:
                meta["experts"] = BALANCED
        folder = options.tables / name
        write_tables(folder, frames, meta, TITLE)
        written = {}
        for file, frame in frames.items():
            path = csv_file(folder / f"{file}.csv")
            written[file] = f"{len(frame)} rows, {path.stat().st_size / 1e3:.0f} kB"
        print(name, written)


def frames_of_gpu(source: Path, gpu: str) -> dict[str, pd.DataFrame]:
    products = read_products(source, gpu)
    experts = read_experts(source, gpu)
    frames = {
        "products": pd.concat(list(_kept_products(products)), ignore_index=True),
        "attention": _kept_attention(read_attention(source, gpu), gpu),
        "communication": read_communication(source, gpu),
        "moe": experts[is_kept(experts)].drop(columns="inter_size"),
    }
    return {name: frame for name, frame in frames.items() if len(frame)}


def frames_of_run() -> dict[str, pd.DataFrame]:
    """Products and attention of one server's model with their shapes, so that they hold for others:
    the attention of `MIXED` sizes.
    """
    tables = read_tables(str(SERVER))
    spec = load_option("model", "llama3-8b")
    layer_of_operation = {LAYERS[name].operation: name for name in tables.layers}
    products = []
    for linear in (*spec.layer_linears, spec.lm_head):
        measured = tables.layers[layer_of_operation[linear.name]][1]
        times = measured.seconds.to_numpy(float) * 1e6
        columns = {
            "dtype": "bfloat16",
            "tokens": measured["size"],
            "in_features": linear.in_features,
            "out_features": linear.out_features,
            TIME: times,
        }
        rows = pd.DataFrame(columns)
        products.append(rows[_knots(rows.tokens.to_numpy(float), times)])
    calls = tables.frames["attention"]
    for name, sizes in MIXED.items():
        calls = calls[calls[name].isin(sizes)]
    heads = dict(zip(SHAPE, (spec.num_heads, spec.num_kv_heads, spec.head_size), strict=True))
    return {
        "products": pd.concat(products, ignore_index=True),
        "attention": calls.assign(**heads)[[*SHAPE, *MIXED, TIME]],
    }


def source_of(given: Path | None) -> Path:
    """The folder that was given, or the installed package's."""
    folder = given or silicon.find_folder()
    if folder is None:
        raise SystemExit(f"{PACKAGE} is not installed; pip install -e '.[silicon]', or --source")
    return folder


def _meta(source: Path, gpu: str) -> dict[str, Any]:
    rows, version = silicon.read(source, gpu, "gemm_perf", "vllm")
    return {
        "source": f"{PACKAGE} {VERSION}, systems/data/{silicon.folder_of(source, gpu).name}",
        "licence": LICENCE,
        "device": str(rows.device.iloc[0]),
        "engine": f"vLLM {version}",
        "units": f"{TIME}: microseconds",
        "note": NOTE,
    }


def _rows(source: Path, gpu: str, table: str) -> pd.DataFrame:
    return silicon.read(source, gpu, table, "vllm")[0]


# -- products --------------------------------------------------------------------------------------


def read_products(source: Path, gpu: str) -> pd.DataFrame:
    """All products in 16 bits, and in 8-bit floats with a scale for each tensor."""
    rows = _rows(source, gpu, "gemm_perf")
    if rows.empty:
        raise SystemExit(f"{silicon.folder_of(source, gpu)} has no products of vLLM; take another")
    rows = rows.rename(
        columns={"gemm_dtype": "dtype", "m": "tokens", "k": "in_features", "n": "out_features"}
    )
    keys = ["dtype", "tokens", "in_features", "out_features"]
    rows = rows[rows.dtype.isin(["bfloat16", "fp8"])].groupby(keys).latency.median()
    return (MICROSECONDS * rows).rename(TIME).reset_index()


def _kept_products(rows: pd.DataFrame) -> Iterator[pd.DataFrame]:
    for dtype, ins, outs in (
        ("bfloat16", IN_FEATURES, OUT_FEATURES),
        ("fp8", FP8_FEATURES, (*FP8_FEATURES, 65536)),
    ):
        kept = rows[
            (rows.dtype == dtype) & rows.in_features.isin(ins) & rows.out_features.isin(outs)
        ]
        for _, shape in kept.groupby(["in_features", "out_features"]):
            shape = shape.sort_values("tokens")
            yield shape[_knots(shape.tokens.to_numpy(float), shape[TIME].to_numpy(float))]


def _knots(sizes: Floats, times: Floats) -> NDArray[np.bool_]:
    """The ends, and one after the other the row that a line between those kept misses most."""
    kept = np.zeros(len(sizes), bool)
    kept[[0, -1]] = True
    while True:
        errors = np.abs(np.interp(sizes, sizes[kept], times[kept]) / times - 1)
        if errors.max() <= TOLERANCE:
            return kept
        kept[errors.argmax()] = True


# -- attention -------------------------------------------------------------------------------------


def read_attention(source: Path, gpu: str) -> pd.DataFrame:
    """Calls over prompts without a context, and over decodes, in 16 bits without a window."""
    prompts = _calls(_rows(source, gpu, "context_attention_perf"))
    # One-token prompts run the kernel of decodes.
    prompts = prompts[prompts.isl > 1].rename(
        columns={"batch_size": "num_prefills", "isl": "prefill_chunk"}
    )
    decodes = _calls(_rows(source, gpu, "generation_attention_perf"))
    decodes = decodes.assign(kv_decode=decodes.step + 1).rename(columns={"batch_size": "n_decode"})
    rows = pd.concat([prompts, decodes], ignore_index=True)
    rows = rows.rename(columns={"num_key_value_heads": "num_kv_heads", "head_dim": "head_size"})
    sizes = ["num_prefills", "prefill_chunk", "kv_prefill", "n_decode", "kv_decode"]
    rows = rows.assign(kv_prefill=0, **{TIME: MICROSECONDS * rows.latency})
    rows[sizes] = rows[sizes].fillna(0).astype(int)
    keys = [*SHAPE, *sizes]
    return rows.groupby(keys)[TIME].median().reset_index()


def _calls(rows: pd.DataFrame) -> pd.DataFrame:
    in_16_bits = (rows.attn_dtype == "bfloat16") & (rows.kv_cache_dtype == "bfloat16")
    is_whole = rows.window_size == 0 if "window_size" in rows else True
    return rows[in_16_bits & is_whole & (rows.head_dim == HEAD_SIZE)]


def _kept_attention(rows: pd.DataFrame, gpu: str) -> pd.DataFrame:
    heads = [tuple(pair) for pair in rows[["num_heads", "num_kv_heads"]].to_numpy().tolist()]
    kept = undisturbed_attention(rows[[pair in HEADS for pair in heads]])
    return from_memory(kept, gpu).reset_index(drop=True)


def from_memory(rows: pd.DataFrame, gpu: str) -> pd.DataFrame:
    """Without decodes whose keys and values a replay found in the cache (of a GPU whose cache is
    known), where a server, many layers later, does not.
    """
    if gpu not in silicon.CACHE_BYTES:
        return rows
    values = rows.n_decode * rows.kv_decode * rows.num_kv_heads * rows.head_size
    sized = rows.assign(kv_bytes=2 * values * silicon.BYTES)
    return rows[~silicon.in_cache(sized, gpu, load_option("hardware", gpu).bytes_per_second)]


def undisturbed_attention(rows: pd.DataFrame) -> pd.DataFrame:
    """Without the rows that a longer call of as many sequences is much faster than."""
    length = rows.prefill_chunk + rows.kv_decode
    kept = undisturbed(rows.assign(size=length), [*SHAPE, "num_prefills", "n_decode"], "size")
    return kept.drop(columns="size")


def undisturbed(rows: pd.DataFrame, alike: Sequence[str], size: str) -> pd.DataFrame:
    """Without the rows that one of a larger `size`, and otherwise alike, is much faster than."""
    ordered = rows.sort_values([*alike, size], ascending=False)
    least = ordered.groupby(list(alike))[TIME].cummin()
    return ordered[ordered[TIME] * DISTURBED <= least].sort_index()


# -- communication ---------------------------------------------------------------------------------


def read_communication(source: Path, gpu: str) -> pd.DataFrame:
    """All-reduces of 16-bit elements, which the source counts, in a captured graph."""
    rows = _rows(source, gpu, "custom_allreduce_perf")
    if rows.empty:
        return rows
    rows = rows[rows.backend == "vllm_graph"]
    made = rows.assign(
        operation="all_reduce",
        devices=rows.num_gpus,
        bytes=2 * rows.message_size,
        **{TIME: MICROSECONDS * rows.latency},
    )
    return made[["operation", "devices", "bytes", TIME]].sort_values(["devices", "bytes"])


# -- experts ---------------------------------------------------------------------------------------


def read_experts(source: Path, gpu: str, distribution: str = "balanced") -> pd.DataFrame:
    """A layer's experts in 16 bits, all on one device or split over a few, and `inter_size`, their
    features on all of these. Balanced choices meet as many experts as they can; how many others
    meet is not said, so that the mean of random choices is put down.
    """
    rows = _rows(source, gpu, "moe_perf")
    columns = [*EXPERT_SHAPE, "tokens", "activated_experts", TIME]
    if rows.empty:
        return pd.DataFrame(columns=[*columns, "inter_size"])
    rows = rows[(rows.moe_dtype == "bfloat16") & (rows.distribution == distribution)]
    rows = rows[(rows.moe_ep_size == 1) & (rows.moe_tp_size <= MAX_TENSOR)]
    rows = rows.rename(columns={"num_tokens": "tokens", "topk": "top_k"})
    rows = rows.assign(expert_size=rows.inter_size // rows.moe_tp_size)
    keys = [*EXPERT_SHAPE, "inter_size", "tokens"]
    rows = (MICROSECONDS * rows.groupby(keys).latency.median()).rename(TIME).reset_index()
    met = np.minimum(rows.num_experts, rows.tokens * rows.top_k)
    if distribution != "balanced":
        met = rows.num_experts * (1 - (1 - rows.top_k / rows.num_experts) ** rows.tokens)
    rows = rows.assign(activated_experts=met)[[*columns, "inter_size"]]
    return undisturbed(rows, [*EXPERT_SHAPE, "inter_size"], "tokens")


def is_kept(experts: pd.DataFrame) -> NDArray[np.bool_]:
    sizes = ["hidden_size", "inter_size", "num_experts", "top_k"]
    shapes = experts[sizes].to_numpy(int).tolist()
    return np.array([tuple(shape) in EXPERTS for shape in shapes], bool)


if __name__ == "__main__":
    main()
