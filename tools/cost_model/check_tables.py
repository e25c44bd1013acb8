"""How far off are the tables of distil.py on the rows of their source that they leave out?

    python tools/cost_model/check_tables.py [--source FOLDER] [--gpu NAME ...]

Prints mean absolute relative errors: of 16-bit products on shapes of which no row is kept, of
attention on query and KV heads that are not kept, of experts by shape, with the formula's on the
same rows (choices that are not balanced are predicted as random ones). States those of products,
attention and experts in each meta.yaml.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
from distil import (
    TABLES,
    TITLE,
    from_memory,
    is_kept,
    read_attention,
    read_experts,
    read_products,
    source_of,
    undisturbed_attention,
)
from silicon import FOLDERS

from sarathi_lab.config.instantiate import load_option
from sarathi_lab.engine.compositions import make_batch
from sarathi_lab.executor.simulated.analytic import AnalyticOperations
from sarathi_lab.executor.simulated.experts import Experts
from sarathi_lab.executor.simulated.hardware import Hardware
from sarathi_lab.executor.simulated.kernel_times import Heads
from sarathi_lab.executor.simulated.profiled import ProfiledOperations, product_table
from sarathi_lab.executor.tables import (
    EXPERT_SHAPE,
    SHAPE,
    TIME,
    OperationTables,
    read_tables,
    write_tables,
)
from sarathi_lab.model.spec import ModelSpec

MODEL = "llama3-8b"  # whose heads are replaced
MIXTURE = "qwen3-30b-a3b"  # whose experts are
# Hidden size and width of experts with two weights each, as the bytes of their times tell.
UNGATED = ((2688, 1856), (2048, 5120))
OWN = "of the tables"
DISTRIBUTIONS = ("balanced", "power_law_1.01", "power_law_1.2")
SMALLEST = 512  # features of a product: no model has narrower ones on a device
DTYPE_BYTES = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", type=Path, help="the folder systems/data of the package")
    parser.add_argument("--gpu", nargs="+", choices=list(FOLDERS), default=list(FOLDERS))
    given = parser.parse_args()
    source = source_of(given.source)
    for name in given.gpu:
        tables, hardware = read_tables(str(TABLES / name)), load_option("hardware", name)
        products = product_errors(tables, read_products(source, name), hardware)
        attention = attention_errors(
            tables,
            from_memory(undisturbed_attention(read_attention(source, name)), name),
            hardware,
        )
        by_call = attention.groupby("call")[["error", "formula"]].mean()
        print(f"{name}: products {products.mean():.1%} of {len(products)}")
        print((100 * by_call).round(1).assign(rows=attention.call.value_counts()).to_string())
        if "moe" in tables.frames:
            experts = expert_errors(tables, source, name, hardware)
            by_shape = experts.groupby(["choices", "experts"])[["error", "formula"]]
            print((100 * by_shape.mean()).round(1).to_string())
            print((100 * experts.groupby("choices")[["error", "formula"]].mean()).round(1))
        stated = {"matmul": float(products.mean()), "attention": float(by_call.error.max())}
        if "moe" in tables.frames:  # the tables' own shapes by other choices than theirs
            own = experts[experts.experts == OWN].groupby("choices").error.mean()
            stated["experts"] = float(own.max())
        rounded = {kind: round(error, 3) for kind, error in stated.items()}
        write_tables(TABLES / name, {}, {**tables.meta, "uncertainty": rounded}, TITLE)


def mixture_of(hidden: int, width: int, number: int, chosen: int, whole: int) -> ModelSpec:
    """A model with measured experts: `number` of `hidden` by `width` (of the `whole` one), of which
    each token has `chosen`.
    """
    return replace(
        load_option("model", MIXTURE),
        hidden_size=hidden,
        ffn_size=width,
        num_experts=number,
        experts_per_token=chosen,
        gated_ffn=(hidden, whole) not in UNGATED,
    )


def expert_errors(
    tables: OperationTables, source: Path, gpu: str, hardware: Hardware
) -> pd.DataFrame:
    """Errors of the tables and of the formula on experts, by distribution of the choices: on
    balanced ones of models that the tables do not have, on others of all.
    """
    measured: list[tuple[str, str, float, float]] = []
    for distribution in DISTRIBUTIONS:
        rows = read_experts(source, gpu, distribution)
        rows = rows.assign(kept=is_kept(rows))
        if distribution == "balanced":
            rows = rows[~rows.kept]
        for shape, own in rows.groupby(["kept", *EXPERT_SHAPE, "inter_size"]):
            kept, hidden, width, number, chosen, whole = map(int, shape)
            spec = mixture_of(hidden, width, number, chosen, whole)
            ways = [
                Experts(spec, hardware, DTYPE_BYTES, rows=table)
                for table in (tables.frames["moe"], None)
            ]
            name = OWN if kept else f"{number} of {hidden} x {whole}, {chosen} a token"
            for row in own.itertuples():
                calls = row.tokens * chosen, row.activated_experts
                one, other = (abs(1e6 * way.time(*calls) / row.time_us - 1) for way in ways)
                measured.append((distribution, name, one, other))
    return pd.DataFrame(measured, columns=["choices", "experts", "error", "formula"])


def product_errors(
    tables: OperationTables, rows: pd.DataFrame, hardware: Hardware
) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Errors on 16-bit products of shapes that the tables do not have."""
    formula = AnalyticOperations(load_option("model", MODEL), hardware, DTYPE_BYTES)
    table = product_table(tables, DTYPE_BYTES, formula.product_time)
    assert table is not None
    errors = []
    for (ins, outs), own in rows[rows.dtype == "bfloat16"].groupby(["in_features", "out_features"]):
        if min(ins, outs) >= SMALLEST and (ins, outs) not in table.rows:
            time = table.curve(ins, outs)
            predicted = np.array([time(int(tokens)) for tokens in own.tokens])
            errors.append(np.abs(predicted / own[TIME] * 1e6 - 1))
    return np.concatenate(errors)


def attention_errors(
    tables: OperationTables, rows: pd.DataFrame, hardware: Hardware
) -> pd.DataFrame:
    """Errors of the tables and of the formula on calls over heads that the tables do not have."""
    kept = set(tables.frames["attention"][list(SHAPE)].itertuples(index=False, name=None))
    errors = []
    for shape, own in rows.groupby(list(SHAPE)):
        heads = Heads(*map(int, shape))
        if tuple(heads) not in kept and heads.num_heads % heads.num_kv_heads == 0:
            errors += list(_errors(tables, own, _with(heads), hardware))
    return pd.DataFrame(errors, columns=["call", "error", "formula"])


def _errors(
    tables: OperationTables, rows: pd.DataFrame, spec: ModelSpec, hardware: Hardware
) -> Iterator[tuple[str, float, float]]:
    formula = AnalyticOperations(spec, hardware, DTYPE_BYTES)
    measured = ProfiledOperations(tables, formula)
    for row in rows.itertuples():
        batch = make_batch(
            prefill_tokens=row.prefill_chunk,
            num_prefills=row.num_prefills,
            num_decodes=row.n_decode,
            context=row.kv_decode,
        )
        times = [1e6 * sum(way.attention_times(batch)) for way in (measured, formula)]
        one, other = (abs(time / row.time_us - 1) for time in times)
        yield "prompts" if row.prefill_chunk else "decodes", one, other


def _with(heads: Heads) -> ModelSpec:
    return replace(load_option("model", MODEL), **heads._asdict())


if __name__ == "__main__":
    main()
