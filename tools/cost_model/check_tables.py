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
    options = parser.parse_args()
    source = source_of(options.source)
    for name in options.gpu:
        tables = read_tables(str(TABLES / name))
        hardware = load_option("hardware", name)
        products = product_errors(tables, read_products(source, name), hardware)
        calls = undisturbed_attention(read_attention(source, name))
        attention = attention_errors(tables, from_memory(calls, name), hardware)
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
            of_own_shapes = experts[experts.experts == OWN]
            stated["experts"] = float(of_own_shapes.groupby("choices").error.mean().max())
        rounded = {kind: round(error, 3) for kind, error in stated.items()}
        write_tables(TABLES / name, {}, {**tables.meta, "uncertainty": rounded}, TITLE)


def mixture_of(hidden: int, width: int, number: int, chosen: int, whole_width: int) -> ModelSpec:
    """A model with measured experts: `number` of `hidden` by `width`, a device's part of the
    `whole_width`, of which each token has `chosen`.
    """
    return replace(
        load_option("model", MIXTURE),
        hidden_size=hidden,
        ffn_size=width,
        num_experts=number,
        experts_per_token=chosen,
        gated_ffn=(hidden, whole_width) not in UNGATED,
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
        for shape, group in rows.groupby(["kept", *EXPERT_SHAPE, "inter_size"]):
            is_own, hidden, width, number, chosen, whole_width = map(int, shape)
            spec = mixture_of(hidden, width, number, chosen, whole_width)
            by_table = Experts(spec, hardware, DTYPE_BYTES, rows=tables.frames["moe"])
            by_formula = Experts(spec, hardware, DTYPE_BYTES)
            name = f"{number} of {hidden} x {whole_width}, {chosen} a token"
            if is_own:
                name = OWN
            for row in group.itertuples():
                num_choices = row.tokens * chosen
                of_table = 1e6 * by_table.time(num_choices, row.activated_experts)
                of_formula = 1e6 * by_formula.time(num_choices, row.activated_experts)
                error = abs(of_table / row.time_us - 1)
                formula_error = abs(of_formula / row.time_us - 1)
                measured.append((distribution, name, error, formula_error))
    return pd.DataFrame(measured, columns=["choices", "experts", "error", "formula"])


def product_errors(
    tables: OperationTables, rows: pd.DataFrame, hardware: Hardware
) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Errors on 16-bit products of shapes that the tables do not have."""
    formula = AnalyticOperations(load_option("model", MODEL), hardware, DTYPE_BYTES)
    table = product_table(tables, DTYPE_BYTES, formula.product_time)
    assert table is not None
    in_16_bits = rows[rows.dtype == "bfloat16"]
    errors = []
    for (ins, outs), group in in_16_bits.groupby(["in_features", "out_features"]):
        if min(ins, outs) >= SMALLEST and (ins, outs) not in table.rows:
            seconds_of = table.curve(ins, outs)
            predicted = np.array([seconds_of(int(tokens)) for tokens in group.tokens])
            errors.append(np.abs(predicted / group[TIME] * 1e6 - 1))
    return np.concatenate(errors)


def attention_errors(
    tables: OperationTables, rows: pd.DataFrame, hardware: Hardware
) -> pd.DataFrame:
    """Errors of the tables and of the formula on calls over heads that the tables do not have."""
    shapes = tables.frames["attention"][list(SHAPE)]
    kept_shapes = set(shapes.itertuples(index=False, name=None))
    errors = []
    for shape, group in rows.groupby(list(SHAPE)):
        heads = Heads(*map(int, shape))
        # In a model each KV head has as many query heads.
        is_of_a_model = heads.num_heads % heads.num_kv_heads == 0
        if is_of_a_model and tuple(heads) not in kept_shapes:
            errors.extend(_errors(tables, group, _with(heads), hardware))
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
        of_tables = 1e6 * sum(measured.attention_times(batch))
        of_formula = 1e6 * sum(formula.attention_times(batch))
        call = "prompts" if row.prefill_chunk else "decodes"
        yield call, abs(of_tables / row.time_us - 1), abs(of_formula / row.time_us - 1)


def _with(heads: Heads) -> ModelSpec:
    return replace(load_option("model", MODEL), **heads._asdict())


if __name__ == "__main__":
    main()
