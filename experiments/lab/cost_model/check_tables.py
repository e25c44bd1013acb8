"""How far off are the tables of distil.py on the rows of their source that they leave out?

    python experiments/lab/cost_model/check_tables.py [--source FOLDER] [--gpu NAME ...]

Prints mean absolute relative errors and states them in each meta.yaml: of 16-bit products on shapes
of which no row is kept, and of attention on query and KV heads that are not kept, where an error is
as large as the formula's is given, too.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
from distil import GPUS, TABLES, TITLE, installed, read_attention, read_products, undisturbed

from sarathi_lab.config.instantiate import load_option
from sarathi_lab.executor.simulated.analytic import AnalyticOperations
from sarathi_lab.executor.simulated.attention_shapes import Heads
from sarathi_lab.executor.simulated.attention_tables import sums_of
from sarathi_lab.executor.simulated.hardware import Hardware
from sarathi_lab.executor.simulated.profiled import ProfiledOperations
from sarathi_lab.executor.table_files import read_tables
from sarathi_lab.executor.tables import SHAPE, TIME, OperationTables, write_tables
from sarathi_lab.model.spec import ModelSpec

MODEL = "llama3-8b"  # whose heads are replaced
SMALLEST = 512  # features of a product: no model has narrower ones on a device
DTYPE_BYTES = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", type=Path, help="the folder systems/data of the package")
    parser.add_argument("--gpu", nargs="+", choices=list(GPUS), default=list(GPUS))
    given = parser.parse_args()
    source = given.source or installed()
    for name in given.gpu:
        tables, hardware = read_tables(str(TABLES / name)), load_option("hardware", name)
        products = product_errors(tables, read_products(source, GPUS[name]), hardware)
        attention = attention_errors(
            tables, undisturbed(read_attention(source, GPUS[name])), hardware
        )
        by_call = attention.groupby("call")[["error", "formula"]].mean()
        print(f"{name}: products {products.mean():.1%} of {len(products)}")
        print((100 * by_call).round(1).assign(rows=attention.call.value_counts()).to_string())
        stated = {"matmul": float(products.mean()), "attention": float(by_call.error.max())}
        rounded = {kind: round(error, 3) for kind, error in stated.items()}
        write_tables(TABLES / name, {}, {**tables.meta, "uncertainty": rounded}, TITLE)


def product_errors(
    tables: OperationTables, rows: pd.DataFrame, hardware: Hardware
) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Errors on 16-bit products of shapes that the tables do not have."""
    table = ProfiledOperations(tables, load_option("model", MODEL), DTYPE_BYTES, hardware).products
    assert table is not None
    errors = []
    for (ins, outs), own in rows[rows.dtype == "bfloat16"].groupby(["in_features", "out_features"]):
        if min(ins, outs) >= SMALLEST and not table.has(ins, outs):
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
    measured = ProfiledOperations(tables, spec, DTYPE_BYTES, hardware)
    formula = AnalyticOperations(spec, hardware, DTYPE_BYTES)
    for row in rows.itertuples():
        batch = sums_of(row.prefill_chunk, 0, row.n_decode, row.kv_decode, row.num_prefills)
        times = [1e6 * sum(way.attention_times(batch)) for way in (measured, formula)]
        one, other = (abs(time / row.time_us - 1) for time in times)
        yield "prompts" if row.prefill_chunk else "decodes", one, other


def _with(heads: Heads) -> ModelSpec:
    return replace(load_option("model", MODEL), **heads._asdict())


if __name__ == "__main__":
    main()
