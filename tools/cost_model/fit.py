"""Fit the constants of the simulator's cost model, and state its errors on shapes that the fit did
not see.

    python tools/cost_model/fit.py
    python tools/cost_model/fit.py --gemm gemm_ms.csv --attention attention_ms.csv
    python tools/cost_model/fit.py --silicon --runs FOLDER --gpus h100,rtx-4090

The A6000 is fitted to the paper's Figs 3 and 7. The A40 and A100 of the paper's time need measured
tables (README.md names their columns). Today's GPUs need those of the package aiconfigurator-core,
the RTX 4090 the operation tables of a vLLM server.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
from simplex import Errors, Group, evenly, fit

from sarathi_lab.config.instantiate import load_option
from sarathi_lab.config.paths import EXPERIMENTS
from sarathi_lab.engine.compositions import make_batch
from sarathi_lab.executor.simulated import kernel_times
from sarathi_lab.executor.simulated.cost_model import CostModel, make_cost_model
from sarathi_lab.executor.simulated.hardware import Hardware
from sarathi_lab.executor.simulated.kernel_times import AttentionTimes, matmul_time

START = {
    "matmul_efficiency": 0.9,
    "attention_efficiency": 0.4,
    "causal_efficiency": 0.3,
    "memory_efficiency": 0.8,
    "kv_efficiency": 0.75,
    "kernel_launch": 3e-6,
    "attention_launch": 12e-6,
    "iteration_overhead": 1e-3,
}
MATMUL = ("matmul_efficiency", "memory_efficiency", "kernel_launch")
GPU_NAMES = {"a40": "a40", "a100_2023": "a100-80gb"}  # in the measured table
FITTED_TABLE = {
    ("internlm-20b", 1),
    ("llama-2-70b", 2),
}  # model, tensor-parallel degree; the others are held out
PAPER_TABLES = ("fig03", "fig07", "table2")
TABLE2_TOKENS = {"prefill-only": (1024, 0), "decode-only": (0, 4), "decode-maximal": (1021, 3)}
FITTED_CHUNKS = (64, 256, 512, 2048)
FITTED_BATCHES = (1, 4, 16, 64, 128)
FIG3_BATCHES = (1, 4, 12)
FIG3_LENGTH = 1024
FIG7_TILE = 128  # tokens between the steps of Fig 7
FIG7_LINEARS = {
    "preproj": ("qkv_proj",),
    "postproj": ("out_proj",),
    "ffn": ("ffn_up", "activation", "ffn_down"),
}
TABLE_HEADS = {
    "num_heads": 32,
    "num_kv_heads": 4,
    "head_size": 128,
}  # one GPU's share of 64 and 8 heads
SHARED = [  # the constants of kernel_times.py, one change at a time
    {},
    {"OPERAND_FLOPS": 10.0},
    {"OPERAND_FLOPS": 40.0},
    {"OVERLAP": 2.0},
    {"OVERLAP": 4.0},
    {"OVERLAP": 8.0},
    {"SPLITS": (1,)},
    {"SPLITS": (1, 2, 3, 4, 6, 8, 16)},
    {"TILES": ((128, 256), (128, 128))},
    {
        "TILES": (
            (256, 128),
            (128, 256),
            (128, 128),
            (64, 256),
            (64, 128),
            (64, 64),
            (32, 64),
            (16, 64),
        )
    },
]


def octave_weights(num_tokens: pd.Series) -> np.ndarray:
    """Weights of sum 1 that let every doubling of tokens above 16 count alike."""
    octave = np.ceil(np.log2(num_tokens.clip(lower=16))).to_numpy()
    _, inverse, counts = np.unique(octave, return_inverse=True, return_counts=True)
    return 1.0 / counts[inverse] / len(counts)


# -- the paper's A6000 -----------------------------------------------------------------------------


def paper_cost(hardware: Hardware) -> CostModel:
    return make_cost_model("analytic", load_option("model", "13b"), hardware, hardware.dtype_bytes)


def fig7_errors(hardware: Hardware, table: pd.DataFrame) -> pd.DataFrame:
    """Errors by column of Fig 7, and of `rest`: attention, norms and the cache, what its total has
    beyond products.
    """
    cost = paper_cost(hardware)
    rows = []
    for num_tokens in table.x:
        times = cost.operation_times(make_batch(prefill_tokens=int(num_tokens)))
        row = {name: sum(times[part] for part in parts) for name, parts in FIG7_LINEARS.items()}
        row["rest"] = sum(times[name] for name in ("prefill_attention", "norms", "kv_write"))
        rows.append({**row, "total": sum(row.values())})
    measured = table.assign(rest=table.total - table[list(FIG7_LINEARS)].sum(axis=1))
    predicted = pd.DataFrame(rows, index=table.index)
    return predicted * 1e3 / measured[predicted.columns] - 1


def fig3_decodes(hardware: Hardware, table: pd.DataFrame) -> pd.DataFrame:
    """Milliseconds of decode iterations by batch in Fig 3: measured attention, others and total,
    and predicted ones.
    """
    cost = paper_cost(hardware)
    measured = table[table.panel == "decode"].set_index("x")[["attn", "others", "total"]]
    rows = []
    for batch in measured.index:
        times = cost.operation_times(make_batch(num_decodes=int(batch), context=FIG3_LENGTH))
        others = sum(
            times[name] for name in ("norms", "kv_write", "lm_head", "sampling", "overhead")
        )
        rows.append(
            {"attn": times["decode_attention"], "others": others, "total": sum(times.values())}
        )
    predicted = 1e3 * pd.DataFrame(rows, index=measured.index)
    return predicted.join(measured.mul(measured.index, axis=0).add_suffix("_measured"))


def fit_a6000(hardware: Hardware, fig3: pd.DataFrame, fig7: pd.DataFrame) -> Hardware:
    """Products by Fig 7, attention by Figs 3 and 7, the fixed cost by Fig 3; of Fig 7 only every
    second tile.
    """
    fitted = fig7[odd_tile(fig7)]
    weights = octave_weights(fitted.x)

    def linear_errors(hardware: Hardware) -> list[Group]:
        errors = fig7_errors(hardware, fitted)
        return [(errors[name].to_numpy(), weights) for name in FIG7_LINEARS]

    def attention_errors(hardware: Hardware) -> list[Group]:
        decodes = fig3_decodes(hardware, fig3).loc[list(FIG3_BATCHES)]
        errors = fig7_errors(hardware, fitted)["rest"].to_numpy()
        return [(errors, weights), evenly((decodes.attn / decodes.attn_measured - 1).to_numpy())]

    hardware = fit(hardware, MATMUL, linear_errors)
    hardware = fit(
        hardware, ("causal_efficiency", "kv_efficiency", "attention_launch"), attention_errors
    )
    hardware = replace(
        hardware, attention_efficiency=hardware.causal_efficiency
    )  # no figure separates the two
    decodes = fig3_decodes(replace(hardware, iteration_overhead=0.0), fig3).loc[list(FIG3_BATCHES)]
    return replace(
        hardware,
        iteration_overhead=float((decodes.others_measured - decodes.others).median() / 1e3),
    )


def by_series(points: pd.DataFrame) -> pd.DataFrame:
    """The paper's points of a figure, a row per panel and x, a column per series."""
    points = points.assign(panel=points.panel.fillna(""))
    return points.pivot(index=["panel", "x"], columns="series", values="y").reset_index()


def odd_tile(fig7: pd.DataFrame) -> pd.Series:
    return np.ceil(fig7.x / FIG7_TILE) % 2 == 1


def report_a6000(
    hardware: Hardware, fig3: pd.DataFrame, fig7: pd.DataFrame, table2: pd.DataFrame
) -> None:
    errors, fitted = fig7_errors(hardware, fig7), odd_tile(fig7)
    for name in errors:
        report(f"Fig 7 {name}, fitted", errors.loc[fitted, name])
        report(f"Fig 7 {name}, held out", errors.loc[~fitted, name])
    report("Fig 7 products, held out", errors.loc[~fitted, list(FIG7_LINEARS)])
    decodes = fig3_decodes(hardware, fig3)
    decode_errors = decodes.attn / decodes.attn_measured - 1
    held_out = ~decodes.index.isin(FIG3_BATCHES)
    report("Fig 3 decode attention, fitted", decode_errors[~held_out])
    report("Fig 3 decode attention, held out", decode_errors[held_out])
    report("Fig 3 decode total", decodes.total / decodes.total_measured - 1)
    report(
        "attention, held out",
        np.concatenate([errors.loc[~fitted, "rest"], decode_errors[held_out]]),
    )
    cost = paper_cost(hardware)
    batches = [
        make_batch(prefill_tokens=n, num_decodes=m, context=FIG3_LENGTH)
        for n, m in map(TABLE2_TOKENS.__getitem__, table2.panel)
    ]
    seconds = [cost.iteration_time(batch) for batch in batches]
    report("Table 2, never fitted", np.array(seconds) * 1e3 / table2.total - 1)


# -- measured tables -------------------------------------------------------------------------------


def gemm_errors(hardware: Hardware, table: pd.DataFrame) -> Errors:
    shapes = zip(table.num_tokens, table.in_features, table.out_features, strict=True)
    seconds = [
        matmul_time(*(int(size) for size in shape), hardware, hardware.dtype_bytes)
        for shape in shapes
    ]
    return np.array(seconds) * 1e3 / table.ms.to_numpy() - 1


def split_gemm(table: pd.DataFrame, name: str) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Rows of one GPU: fitted and held out, by model and tensor-parallel degree."""
    table = table[table.gpu == GPU_NAMES[name]]
    fitted = np.array([pair in FITTED_TABLE for pair in zip(table.model, table.tp, strict=True)])
    return table[fitted], table[~fitted]


def fit_gemm(hardware: Hardware, table: pd.DataFrame) -> Hardware:
    fitted, _ = split_gemm(table, hardware.name)
    thinned = fitted[
        (fitted.x <= 128) | (np.arange(len(fitted)) % 6 == 0)
    ]  # neighbours cost nearly the same
    weights = octave_weights(thinned.num_tokens)
    return fit(hardware, MATMUL, lambda hardware: [(gemm_errors(hardware, thinned), weights)])


def attention_errors(hardware: Hardware, table: pd.DataFrame) -> Errors:
    """Errors on rows of the A100 attention table, whose milliseconds are those of one layer."""
    seconds = []
    kv_head_bytes = TABLE_HEADS["head_size"] * hardware.dtype_bytes
    times = AttentionTimes(hardware, **TABLE_HEADS, kv_head_bytes=kv_head_bytes)
    for row in table.itertuples():
        chunk, context, batch = (
            int(row.prefill_chunk_size),
            int(row.kv_cache_size),
            int(row.batch_size),
        )
        if row.phase == "prefill":
            seconds.append(times.prefill([(context, chunk)]))
        else:
            seconds.append(times.decode(batch, batch * context))
    return np.array(seconds) * 1e3 / table.ms.to_numpy() - 1


def split_attention(table: pd.DataFrame) -> dict[str, tuple[pd.DataFrame, pd.DataFrame]]:
    """By phase: rows fitted and held out, by chunk size and batch size."""
    prefill, decode = (table[table.phase == phase] for phase in ("prefill", "decode"))
    chunks, batches = (
        prefill.prefill_chunk_size.isin(FITTED_CHUNKS),
        decode.batch_size.isin(FITTED_BATCHES),
    )
    return {
        "prefill": (prefill[chunks], prefill[~chunks]),
        "decode": (decode[batches], decode[~batches]),
    }


def fit_attention(hardware: Hardware, table: pd.DataFrame) -> Hardware:
    groups = [fitted for fitted, _ in split_attention(table).values()]
    names = ("attention_efficiency", "causal_efficiency", "kv_efficiency", "attention_launch")
    return fit(
        hardware,
        names,
        lambda hardware: [evenly(attention_errors(hardware, rows)) for rows in groups],
    )


def report_gemm(hardware: Hardware, table: pd.DataFrame) -> None:
    fitted, held_out = split_gemm(table, hardware.name)
    report("products, fitted", gemm_errors(hardware, fitted))
    errors = gemm_errors(hardware, held_out)
    report("products, held out", errors)
    bins = pd.cut(held_out.num_tokens, [0, 16, 128, 512, 2048, math.inf])
    for interval, group in pd.Series(errors).groupby(bins.to_numpy(), observed=True):
        report(f"  of these, tokens in {interval}", group)


def report_attention(hardware: Hardware, table: pd.DataFrame) -> None:
    groups = split_attention(table)
    for phase, (fitted, held_out) in groups.items():
        report(f"{phase} attention, fitted", attention_errors(hardware, fitted))
        report(f"{phase} attention, held out", attention_errors(hardware, held_out))
    report(
        "attention, held out",
        np.concatenate([attention_errors(hardware, rows) for _, rows in groups.values()]),
    )


# -- the command -----------------------------------------------------------------------------------


def unfitted(name: str) -> Hardware:
    """The datasheet's figures of a hardware file, with START in place of what is fitted."""
    return replace(load_option("hardware", name), **START)


def report(what: str, errors: Errors | pd.Series | pd.DataFrame) -> None:
    error = np.abs(np.asarray(errors, dtype=float).ravel())
    figures = (
        f"median {np.median(error):6.1%}  mean {error.mean():6.1%}  largest {error.max():6.1%}"
    )
    print(f"  {what:36} {figures}  ({len(error)} points)", flush=True)


def show(hardware: Hardware, names: Sequence[str], heading: str) -> None:
    print(f"\n{hardware.name}: {heading}")
    print("  " + "  ".join(f"{name} {getattr(hardware, name):.3g}" for name in names))


def compare_shared(fig7: pd.DataFrame, gemm: pd.DataFrame | None, fig3: pd.DataFrame) -> None:
    """Errors on the *fitted* shapes with other constants of kernel_times.py, by which they were
    chosen.
    """
    kept = {name: getattr(kernel_times, name) for change in SHARED for name in change}
    for change in SHARED:
        for name, value in {**kept, **change}.items():
            setattr(kernel_times, name, value)
        matmul_time.cache_clear()
        a6000 = fit_a6000(unfitted("a6000"), fig3, fig7)
        columns = fig7_errors(a6000, fig7[odd_tile(fig7)])[list(FIG7_LINEARS)]
        print(f"\n{change or 'as it is'}")
        report("a6000 products, fitted", columns)
        for name in GPU_NAMES if gemm is not None else ():
            report(
                f"{name} products, fitted",
                gemm_errors(fit_gemm(unfitted(name), gemm), split_gemm(gemm, name)[0]),
            )


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--paper",
        type=Path,
        default=EXPERIMENTS / "sarathi" / "paper",
        help="folder of fig03, fig07 and table2.csv",
    )
    parser.add_argument("--gemm", type=Path, help="measured matrix products, for the A40 and A100")
    parser.add_argument("--attention", type=Path, help="measured attention, for the A100")
    parser.add_argument(
        "--silicon",
        type=Path,
        nargs="?",
        const=Path(),
        help="fit today's GPUs instead, to this folder or that of the installed package (minutes)",
    )
    parser.add_argument("--runs", type=Path, help="vLLM servers' operation tables, for --silicon")
    parser.add_argument("--gpus", help="only these of --silicon, such as h100,rtx-4090")
    parser.add_argument(
        "--shared",
        action="store_true",
        help="compare other constants of kernel_times.py instead (minutes)",
    )
    args = parser.parse_args()
    files = [args.paper / f"{name}.csv" for name in PAPER_TABLES] + [args.gemm, args.attention]
    for path in files:
        if path is not None and not path.is_file():
            parser.error(
                f"{path} is not there; name the file of a table (README.md has its columns)"
            )
    return args


def fit_today(args: argparse.Namespace) -> None:
    import fit_silicon  # beside this file, and in need of pyarrow

    gpus = None if args.gpus is None else args.gpus.split(",")
    fit_silicon.main(None if args.silicon == Path() else args.silicon, args.runs, gpus)


def main() -> None:
    args = parse_args()
    if args.silicon is not None or args.runs is not None:
        fit_today(args)
        return
    fig3, fig7, table2 = (
        by_series(pd.read_csv(args.paper / f"{name}.csv")) for name in PAPER_TABLES
    )
    gemm = None if args.gemm is None else pd.read_csv(args.gemm)
    if args.shared:
        compare_shared(fig7, gemm, fig3)
        return
    a6000 = fit_a6000(unfitted("a6000"), fig3, fig7)
    show(a6000, tuple(START), "fitted to Figs 3 and 7")
    report_a6000(a6000, fig3, fig7, table2)
    for name in GPU_NAMES if gemm is not None else ():
        hardware = fit_gemm(unfitted(name), gemm)
        show(hardware, MATMUL, "products fitted to the measured table")
        report_gemm(hardware, gemm)
        carried = replace(hardware, **{field: getattr(a6000, field) for field in MATMUL})
        report("carried over from the A6000", gemm_errors(carried, split_gemm(gemm, name)[1]))
    if args.attention is not None:
        attention = pd.read_csv(args.attention)
        hardware = fit_attention(unfitted("a100_2023"), attention)
        names = ("attention_efficiency", "causal_efficiency", "kv_efficiency", "attention_launch")
        show(hardware, names, "attention fitted to the measured table")
        report_attention(hardware, attention)
        carried = replace(hardware, **{field: getattr(a6000, field) for field in names})
        report("carried over from the A6000", attention_errors(carried, attention))


if __name__ == "__main__":
    main()
