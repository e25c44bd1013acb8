"""Measured operations of today's GPUs: which rows of the tables count, and in which half.

The tables are those of the package aiconfigurator-core (Apache-2.0), `FOLDER/<gpu>/<operation>/
<framework>/<version>/*.parquet`. The RTX 4090's are those of a vLLM
server in LLMServingSim's format (MIT), which also has chunks with a context. A shape is fitted or
held out by a checkerboard over its sizes, so that a held-out shape differs from every fitted one in
more than its number of tokens.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from sarathi_lab.config.csv_files import csv_file
from sarathi_lab.config.instantiate import load_option

PACKAGE = "aiconfigurator_core"
FOLDERS = {  # by option of the hardware group
    "a100": "a100_sxm",
    "h100": "h100_sxm",
    "h200": "h200_sxm",
    "b200": "b200_sxm",
    "l40s": "l40s",
    "rtx-pro-6000": "rtx_pro_6000_server",
}
ENGINES = ("vllm", "sglang", "trtllm")
MIB = 2**20
CACHE_BYTES = {  # L2 of the datasheets
    "a100": 40 * MIB,
    "h100": 50 * MIB,
    "h200": 50 * MIB,
    "b200": 126 * MIB,
    "l40s": 96 * MIB,
    "rtx-pro-6000": 128 * MIB,
}
HALF_PRECISION = ("bfloat16", "float16", "half")
BYTES = 2  # of an element in 16 bits
# Shapes of real models: a device's share has 8 heads or more.
FEATURES = (1024, 65536)  # inputs and outputs of a product
MAX_TOKENS = 16384
MIN_PROMPT = 64
MIN_HEADS = 8
# A replay alternates between weights, as many as stay in cache together were measured there.
WEIGHTS_IN_TURN = 6
# Keys and values that a replay finds in cache, and that would take longer than this from memory.
CACHED_SECONDS = 2e-6
SHRINKING = 1.25  # a row is bad if a longer one, otherwise the same, took less than 1 / 1.25 of it
RUNS = {  # vLLM's operation tables by hardware option, and one device's heads and KV heads
    "rtx-4090": ("RTX4090/Llama-3.1-8B/tp1", 32, 8),
    "rtx-pro-6000": ("RTXPRO6000/Qwen3-30B-A3B-Instruct-2507/tp1", 32, 4),
}
RUN_LAYERS = {  # of the RTX 4090's table, by the model's name of the product
    "qkv_proj": "qkv_proj",
    "out_proj": "o_proj",
    "ffn_up": "gate_up_proj",
    "ffn_down": "down_proj",
    "lm_head": "lm_head",
}
REDUCED = (2**11, 2**26)  # elements of an all-reduce: a token of a small model to 8K of a large one


def find_folder() -> Path | None:
    """The tables of the installed package, if there is one."""
    package = importlib.util.find_spec(PACKAGE)
    if package is None or not package.submodule_search_locations:
        return None
    return Path(package.submodule_search_locations[0]) / "systems" / "data"


def folder_of(folder: Path, gpu: str) -> Path:
    """The tables of a GPU, by its hardware option or by the folder's own name."""
    folder_of_gpu = folder / FOLDERS.get(gpu, gpu)
    if not folder_of_gpu.is_dir():
        others = sorted(path.name for path in folder.iterdir() if path.is_dir())
        raise SystemExit(f"{folder} has no {folder_of_gpu.name}, but {', '.join(others)}")
    return folder_of_gpu


def cache_bytes(gpu: str) -> int:
    """Return a GPU's L2 cache. Exits for one that is not listed."""
    if gpu not in CACHE_BYTES:
        raise SystemExit(
            f"{Path(__file__).name} has no L2 cache of {gpu}, by which cached rows are left out; "
            f"add its bytes to CACHE_BYTES, or take one of {', '.join(CACHE_BYTES)}"
        )
    return CACHE_BYTES[gpu]


def read(folder: Path, gpu: str, table: str, engine: str) -> tuple[pd.DataFrame, str]:
    """Rows of the newest version of an engine's table, empty if there is none, and the version."""
    paths = list(folder_of(folder, gpu).glob(f"*/{engine}/*/{table}.parquet"))
    if not paths:
        return pd.DataFrame(), "none"
    newest = max(paths, key=lambda path: [int(part) for part in _numbers(path.parent.name)])
    return pd.read_parquet(newest), newest.parent.name


def _numbers(version: str) -> list[str]:
    return "".join(sign if sign.isdigit() else " " for sign in version).split()


def products(folder: Path, gpu: str, engine: str = "vllm") -> pd.DataFrame:
    """tokens, in_features, out_features, seconds, fitted. Without weights that stay in cache."""
    table, _ = read(folder, gpu, "gemm_perf", engine)
    if table.empty:
        return table
    table = table[table.gemm_dtype.isin(HALF_PRECISION)].drop_duplicates(["m", "n", "k"])
    rows = pd.DataFrame(
        {"tokens": table.m, "in_features": table.k, "out_features": table.n},
    ).assign(seconds=table.latency / 1e3)
    low, high = FEATURES
    sized = rows.in_features.between(low, high) & rows.out_features.between(low, high)
    weights = rows.in_features * rows.out_features * BYTES
    rows = rows[sized & (rows.tokens <= MAX_TOKENS)]
    rows = rows[weights.reindex(rows.index) >= cache_bytes(gpu) / WEIGHTS_IN_TURN]
    return rows.assign(fitted=checkerboard(rows, ["in_features", "out_features"]))


def prompts(
    folder: Path, gpu: str, engine: str = "vllm", head_size: int = 128, kernel: str = ""
) -> tuple[pd.DataFrame, int]:
    """batch, length, heads, kv_heads, head_size, seconds, fitted: prompts without a context, of a
    `kernel` of the engine if named, and the number of bad rows left out.
    """
    table = _of_kernel(read(folder, gpu, "context_attention_perf", engine)[0], kernel)
    rows = _attention(table, head_size, "isl")
    rows = rows[rows.length >= MIN_PROMPT]
    return _without_bad(rows)


def decodes(
    folder: Path, gpu: str, engine: str = "vllm", head_size: int = 128, kernel: str = ""
) -> tuple[pd.DataFrame, int]:
    """As `prompts`, `length` being each sequence's context; and `cached`, whether a replay finds
    the keys and values in cache where a server, many layers later, does not.
    """
    table = _of_kernel(read(folder, gpu, "generation_attention_perf", engine)[0], kernel)
    if table.empty:
        return table, 0
    rows = _attention(table.assign(context=table.isl + table.step), head_size, "context")
    rows, num_bad = _without_bad(rows)
    num_bytes = 2 * rows.batch * rows.length * rows.kv_heads * rows.head_size * BYTES
    return rows.assign(kv_bytes=num_bytes), num_bad


def _of_kernel(table: pd.DataFrame, kernel: str) -> pd.DataFrame:
    return table[table.kernel_source == kernel] if kernel and len(table) else table


def too_fast(rows: pd.DataFrame, gpu: str, bytes_per_second: float) -> pd.Series:
    """Rows that would have read more than the cache holds faster than the datasheet allows."""
    beyond = rows.kv_bytes > cache_bytes(gpu)
    return beyond & (rows.kv_bytes / rows.seconds > bytes_per_second)


def in_cache(rows: pd.DataFrame, gpu: str, bytes_per_second: float) -> pd.Series:
    slow = rows.kv_bytes / bytes_per_second > CACHED_SECONDS
    return slow & (rows.kv_bytes <= cache_bytes(gpu))


def reduces(folder: Path, gpu: str, engine: str = "vllm") -> pd.DataFrame:
    """num_bytes, devices, seconds, fitted of all-reduces within captured graphs."""
    table, _ = read(folder, gpu, "custom_allreduce_perf", engine)
    if table.empty:
        return table
    graph = table.kernel_source.str.contains("eager")
    table = table[~graph & table.message_size.between(*REDUCED)]
    rows = pd.DataFrame(
        {
            "num_bytes": table.message_size * BYTES,  # the table counts elements
            "devices": table.num_gpus,
            "seconds": table.latency / 1e3,
        }
    ).drop_duplicates(["num_bytes", "devices"])
    return rows.assign(fitted=checkerboard(rows, ["num_bytes", "devices"]))


def checkerboard(rows: pd.DataFrame, sizes: Sequence[str]) -> pd.Series:
    """Whether the ranks of a shape's sizes, among those that occur, have an even sum."""
    ranks = [rows[size].rank(method="dense").astype(int) for size in sizes]
    return sum(ranks[1:], ranks[0]) % 2 == 0


def _attention(table: pd.DataFrame, head_size: int, length: str) -> pd.DataFrame:
    columns = ["batch", "length", "heads", "kv_heads", "head_size", "seconds", "fitted"]
    if table.empty:
        return pd.DataFrame(columns=columns)
    half = table.attn_dtype.isin(HALF_PRECISION) & table.kv_cache_dtype.isin(HALF_PRECISION)
    table = table[half & (table.head_dim == head_size) & (table.num_heads >= MIN_HEADS)]
    if "window_size" in table:
        table = table[table.window_size == 0]
    rows = pd.DataFrame(
        {
            "batch": table.batch_size,
            "length": table[length],
            "heads": table.num_heads,
            # TensorRT-LLM's tables have 0 where there are as many KV heads as heads.
            "kv_heads": table.num_key_value_heads.where(
                table.num_key_value_heads > 0, table.num_heads
            ),
            "head_size": table.head_dim,
            "seconds": table.latency / 1e3,
        }
    )
    rows = rows[rows.heads % rows.kv_heads == 0].drop_duplicates(columns[:5])
    return rows.assign(fitted=checkerboard(rows, columns[:4]))


def _without_bad(rows: pd.DataFrame) -> tuple[pd.DataFrame, int]:
    """Rows of which no longer one, otherwise the same, took clearly less time."""
    ordered = rows.sort_values("length", ascending=False)
    shape = [ordered[name] for name in ("batch", "heads", "kv_heads", "head_size")]
    shortest = ordered.groupby(shape, sort=False).seconds.cummin()  # of this and longer ones
    good = ordered[ordered.seconds <= SHRINKING * shortest].sort_index()
    return good, len(rows) - len(good)


def run_products(folder: Path) -> pd.DataFrame:
    """As `products`, of Llama-3.1-8B on the RTX 4090: two products fitted, three held out."""
    run, *_ = RUNS["rtx-4090"]
    by_tokens = pd.read_csv(csv_file(folder / run / "dense.csv"))
    by_sequences = pd.read_csv(folder / run / "per_sequence.csv")
    table = pd.concat([by_tokens, by_sequences.rename(columns={"sequences": "tokens"})])
    spec = load_option("model", "llama3-8b")
    parts = []
    for linear in (*spec.layer_linears, spec.lm_head):
        rows = table[table.layer == RUN_LAYERS[linear.name]]
        sizes = {"in_features": linear.in_features, "out_features": linear.out_features}
        parts.append(rows.assign(**sizes, fitted=linear.name in ("qkv_proj", "ffn_down")))
    rows = pd.concat(parts, ignore_index=True)
    return rows.assign(seconds=rows.time_us / 1e6)


def run_attention(folder: Path, gpu: str) -> tuple[pd.DataFrame, pd.DataFrame]:
    """As `prompts`, with `start` tokens before each chunk, and as `decodes`: calls of one kind."""
    if gpu not in RUNS:
        raise SystemExit(f"no server's tables of {gpu} are known; take one of {', '.join(RUNS)}")
    run, heads, kv_heads = RUNS[gpu]
    table = pd.read_csv(csv_file(folder / run / "attention.csv"))
    table = table.assign(seconds=table.time_us / 1e6, heads=heads, kv_heads=kv_heads)
    table = table.assign(head_size=128)
    chunks = table[(table.n_decode == 0) & (table.prefill_chunk >= MIN_PROMPT)]
    chunks = chunks.rename(columns={"prefill_chunk": "length", "kv_prefill": "start"})
    chunks = chunks.assign(batch=1, fitted=checkerboard(chunks, ["length", "start"]))
    decodes = table[(table.prefill_chunk == 0) & (table.n_decode > 0)]
    decodes = decodes.rename(columns={"n_decode": "batch", "kv_decode": "length"})
    return chunks, decodes.assign(fitted=checkerboard(decodes, ["batch", "length"]))
