"""Makes the small operation tables of `tables/` from measurements that others have published.

    python experiments/lab/cost_model/distil.py [--source FOLDER] [--gpu NAME ...]


The source is PyPI package aiconfigurator-core (extra `silicon`; Apache-2.0), or the FOLDER with its
data, `systems/data`. A table holds vLLM's kernels: the library's products, and the attention that
the engine chooses on that GPU. The RTX 4090's are a server's in experiments/lab/real_servers.

Products are kept for a grid of shapes; of each shape the numbers of tokens that a straight line
between its neighbours misses by more than `TOLERANCE`. Attention is kept whole for `HEADS`. What is
left out checks what is kept: check_tables.py states the errors.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from sarathi_lab.config.instantiate import load_option
from sarathi_lab.config.paths import EXPERIMENTS
from sarathi_lab.executor.table_files import read_tables
from sarathi_lab.executor.tables import LAYERS, SHAPE, TIME, write_tables

Floats = NDArray[np.float64]
TABLES = Path(__file__).parent / "tables"
PACKAGE, VERSION, LICENCE = "aiconfigurator-core", "0.12.0", "Apache-2.0"
TITLE = "# By experiments/lab/cost_model/distil.py, which says what was kept.\n"
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


class Gpu(NamedTuple):
    """Names of a GPU: the package's, the device's, and the version of vLLM."""

    folder: str
    device: str
    engine: str = "0.24.0"


GPUS = {
    "a100": Gpu("a100_sxm", "NVIDIA A100-SXM4-80GB", "0.14.0"),
    "h100": Gpu("h100_sxm", "NVIDIA H100 80GB HBM3"),
    "h200": Gpu("h200_sxm", "NVIDIA H200"),
    "b200": Gpu("b200_sxm", "NVIDIA B200"),
    "l40s": Gpu("l40s", "NVIDIA L40S"),
    "rtx-pro-6000": Gpu("rtx_pro_6000_server", "NVIDIA RTX PRO 6000 Blackwell Server Edition"),
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
    parser.add_argument("--gpu", nargs="+", choices=[*GPUS, RUN], default=[*GPUS, RUN])
    given = parser.parse_args()
    for name in given.gpu:
        if name == RUN:
            frames, meta = frames_of_run(), RUN_META
        else:
            frames = frames_of_gpu(given.source or installed(), GPUS[name])
            meta = _meta(GPUS[name])
        write_tables(TABLES / name, frames, meta, TITLE)
        sizes = {file: (TABLES / name / f"{file}.csv").stat().st_size for file in frames}
        print(
            name, {file: f"{len(frames[file])} rows, {sizes[file] / 1e3:.0f} kB" for file in frames}
        )


def frames_of_gpu(source: Path, gpu: Gpu) -> dict[str, pd.DataFrame]:
    products = read_products(source, gpu)
    return {
        "products": pd.concat(list(_kept_products(products)), ignore_index=True),
        "attention": _kept_attention(read_attention(source, gpu)),
        "communication": read_communication(source, gpu),
    }


def frames_of_run() -> dict[str, pd.DataFrame]:
    """Products and attention of one server's model with their shapes, so that they hold for others:
    the attention of `MIXED` sizes.
    """
    tables, spec = read_tables(str(SERVER)), load_option("model", "llama3-8b")
    products = []
    for linear in (*spec.layer_linears, spec.lm_head):
        name = next(name for name in tables.layers if LAYERS[name].operation == linear.name)
        rows = tables.layers[name][1]
        shape = {"in_features": linear.in_features, "out_features": linear.out_features}
        times = rows.seconds.to_numpy(float) * 1e6
        rows = pd.DataFrame({"dtype": "bfloat16", "tokens": rows["size"], **shape, TIME: times})
        products.append(rows[_knots(rows.tokens.to_numpy(float), times)])
    calls = tables.frames["attention"]
    calls = calls[np.all([calls[name].isin(sizes) for name, sizes in MIXED.items()], axis=0)]
    heads = dict(zip(SHAPE, (spec.num_heads, spec.num_kv_heads, spec.head_size), strict=True))
    return {
        "products": pd.concat(products, ignore_index=True),
        "attention": calls.assign(**heads)[[*SHAPE, *MIXED, TIME]],
    }


def installed() -> Path:
    spec = importlib.util.find_spec("aiconfigurator_core")
    if spec is None or spec.origin is None:
        raise SystemExit(f"{PACKAGE} is not installed; pip install -e '.[silicon]', or --source")
    return Path(spec.origin).parent / "systems" / "data"


def _meta(gpu: Gpu) -> dict[str, Any]:
    return {
        "source": f"{PACKAGE} {VERSION}, systems/data/{gpu.folder}",
        "licence": LICENCE,
        "device": gpu.device,
        "engine": f"vLLM {gpu.engine}",
        "units": f"{TIME}: microseconds",
        "note": NOTE,
    }


def _parquet(source: Path, gpu: Gpu, kind: str, table: str) -> pd.DataFrame:
    return pd.read_parquet(source / gpu.folder / kind / "vllm" / gpu.engine / f"{table}.parquet")


# -- products --------------------------------------------------------------------------------------


def read_products(source: Path, gpu: Gpu) -> pd.DataFrame:
    """All products in 16 bits, and in 8-bit floats with a scale for each tensor."""
    rows = _parquet(source, gpu, "gemm", "gemm_perf")
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


def read_attention(source: Path, gpu: Gpu) -> pd.DataFrame:
    """Calls over prompts without a context, and over decodes, in 16 bits without a window."""
    prompts = _calls(_parquet(source, gpu, "attention", "context_attention_perf"))
    # One-token prompts run the kernel of decodes.
    prompts = prompts[prompts.isl > 1].rename(
        columns={"batch_size": "num_prefills", "isl": "prefill_chunk"}
    )
    decodes = _calls(_parquet(source, gpu, "attention", "generation_attention_perf"))
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


def _kept_attention(rows: pd.DataFrame) -> pd.DataFrame:
    heads = [tuple(pair) for pair in rows[["num_heads", "num_kv_heads"]].to_numpy().tolist()]
    kept = undisturbed(rows[[pair in HEADS for pair in heads]])
    return kept.reset_index(drop=True)


def undisturbed(rows: pd.DataFrame) -> pd.DataFrame:
    """Without the rows that a longer call of as many sequences is much faster than."""
    length = rows.prefill_chunk + rows.kv_decode
    calls = [*SHAPE, "num_prefills", "n_decode"]
    ordered = rows.assign(length=length).sort_values([*calls, "length"], ascending=False)
    least = ordered.groupby(calls)[TIME].cummin()
    return ordered[ordered[TIME] * DISTURBED <= least].drop(columns="length").sort_index()


# -- communication ---------------------------------------------------------------------------------


def read_communication(source: Path, gpu: Gpu) -> pd.DataFrame:
    """All-reduces of 16-bit elements, which the source counts, in a captured graph."""
    folder = source / gpu.folder / "comm" / "vllm"
    newest = max(
        (path for path in folder.iterdir() if (path / "custom_allreduce_perf.parquet").is_file()),
        key=lambda path: tuple(map(int, path.name.split("."))),
    )
    rows = pd.read_parquet(newest / "custom_allreduce_perf.parquet")
    rows = rows[rows.backend == "vllm_graph"]
    made = rows.assign(
        operation="all_reduce",
        devices=rows.num_gpus,
        bytes=2 * rows.message_size,
        **{TIME: MICROSECONDS * rows.latency},
    )
    return made[["operation", "devices", "bytes", TIME]].sort_values(["devices", "bytes"])


if __name__ == "__main__":
    main()
