"""Tables of products and attention by shape: through their rows, between them, past them, and how
far off those are that the lab keeps. One attention call over prefills and decodes.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pandas as pd
import pytest
from simulated import batch_of

from sarathi_lab.config.errors import UserError
from sarathi_lab.config.instantiate import load_option
from sarathi_lab.config.paths import EXPERIMENTS
from sarathi_lab.engine.compositions import make_batch
from sarathi_lab.executor.simulated.analytic import AnalyticOperations
from sarathi_lab.executor.simulated.attention_tables import equivalent_prompts
from sarathi_lab.executor.simulated.backend import SimulatedBackend
from sarathi_lab.executor.simulated.cost_model import make_cost_model
from sarathi_lab.executor.simulated.hardware import Parallel
from sarathi_lab.executor.simulated.profiled import (
    ProductTable,
    ProfiledOperations,
    product_table,
)
from sarathi_lab.executor.tables import SHAPE, OperationTables, read_tables

KEPT = EXPERIMENTS / "lab" / "cost_model" / "tables"
GPUS = ("a100", "h100")
TOKENS, INS, OUTS = (1, 64, 1024), (512, 2048), (1024, 4096)


def seconds(tokens: int, ins: int, outs: int) -> float:
    """Linear in tokens, and a power of each size."""
    return (1.0 + tokens) * ins**0.5 * outs


def products() -> ProductTable:
    rows = [(t, i, o, seconds(t, i, o)) for t in TOKENS for i in INS for o in OUTS]
    columns = ["tokens", "in_features", "out_features", "seconds"]
    return ProductTable(pd.DataFrame(rows, columns=columns), lambda t, i, o: float(t * i * o))


@pytest.mark.parametrize("tokens", [*TOKENS, 7, 500])
@pytest.mark.parametrize("shape", [(512, 1024), (2048, 4096), (1000, 3000), (512, 2000)])
def test_products_pass_through_their_rows_and_are_smooth_between(tokens, shape):
    assert products().curve(*shape)(tokens) == pytest.approx(seconds(tokens, *shape))


@pytest.mark.parametrize(
    "chunks", [[(64, 0)] * 3, [(64, 0), (9, 0)], [(64, 192)], [(1, 8), (64, 7)]]
)
def test_uneven_prompts_are_taken_for_equal_ones_of_as_many_tokens_and_pairs(chunks):
    """Of as many pairs alone, where a context leaves no prompts that have both."""
    tokens = sum(length for length, _ in chunks)
    pairs = sum(length * start + length * (length + 1) // 2 for length, start in chunks)
    number, length = equivalent_prompts(tokens, pairs)
    assert number * length * (length + 1) / 2 == pytest.approx(pairs)
    if 2 * pairs <= tokens * (tokens + 1):
        assert number * length == pytest.approx(tokens)
    else:
        assert number == 1


def kept(
    gpu: str, model: str = "llama3-8b", tensor: int = 1, tables: OperationTables | None = None
) -> ProfiledOperations:
    tables, hardware = tables or read_tables(str(KEPT / gpu)), load_option("hardware", gpu)
    spec = load_option("model", model)
    return ProfiledOperations(tables, AnalyticOperations(spec, hardware, 2, Parallel(tensor)))


def seconds_of(of: ProfiledOperations, row: Any) -> float:
    batch = make_batch(
        prefill_tokens=row.prefill_chunk,
        num_prefills=row.num_prefills,
        num_decodes=row.n_decode,
        context=row.kv_decode,
    )
    return sum(of.attention_times(batch))


def test_kept_attention_is_what_was_measured_where_the_shape_is_kept():
    of = kept("h100")
    rows = of.tables.frames["attention"]
    own = rows[(rows[list(SHAPE)] == [32, 8, 128]).all(axis=1)]
    for row in own.iloc[::25].itertuples():
        assert 1e6 * seconds_of(of, row) == pytest.approx(row.time_us, rel=1e-6)


@pytest.mark.parametrize("gpu", GPUS)
def test_kept_tables_tell_shapes_that_are_taken_out_of_them(gpu):
    """Half of the spacing, so farther off than the tables themselves."""
    of = kept(gpu)
    rows = of.tables.frames["products"]
    held = (rows.in_features == 2048) | (rows.out_features == 6144)
    held &= rows.dtype == "bfloat16"
    thinner = {**of.tables.frames, "products": rows[~held]}
    attention = of.tables.frames["attention"]
    is_own = (attention[list(SHAPE)] == [32, 8, 128]).all(axis=1)
    thinner["attention"] = attention[~is_own]
    without = kept(gpu, tables=OperationTables("", thinner))
    formula = AnalyticOperations(load_option("model", "llama3-8b"), load_option("hardware", gpu), 2)
    products = product_table(without.tables, 2, formula.product_time)
    errors = [
        products.curve(row.in_features, row.out_features)(row.tokens) * 1e6 / row.time_us
        for row in rows[held].iloc[::7].itertuples()
    ]
    assert np.abs(np.array(errors) - 1).mean() < 0.15
    for is_prompt in (True, False):
        own = attention[is_own & ((attention.prefill_chunk > 0) == is_prompt)]
        errors = [
            seconds_of(without, row) * 1e6 / row.time_us for row in own.iloc[::3].itertuples()
        ]
        assert np.abs(np.array(errors) - 1).mean() < 0.15


def test_a_run_says_which_tables_it_stands_on():
    spec, gpu = load_option("model", "yi-34b"), load_option("hardware", "h100")
    (said,) = (
        line
        for line in SimulatedBackend(gpu, cost_model="profiled").cautions(spec)
        if "operation times" in line
    )
    assert said.startswith("operation times are of experiments/lab/cost_model/tables/h100; ")
    assert "attention by that of 64/8 query/KV heads" in said  # for 56/8
    assert "by formula, as no table has them: norms, activation, kv_write, sampling" in said


# -- one call over prefills and decodes ------------------------------------------------------------


def hybrid(value: bool | None) -> AnalyticOperations:
    gpu = dataclasses.replace(load_option("hardware", "rtx-4090"), hybrid_call=value)
    return AnalyticOperations(load_option("model", "llama3-8b"), gpu, 2)


def test_in_one_call_a_decode_takes_a_tile_of_queries():
    batch = batch_of(chunk=512, decodes=64, context=2048)
    apart, together = hybrid(None).attention_times(batch), hybrid(True).attention_times(batch)
    assert hybrid(False).attention_times(batch) == apart
    assert together[0] == apart[0]  # what decodes add to the call is theirs
    assert sum(together) == pytest.approx(hybrid(True).hybrid_attention(batch))
    assert sum(together) > 1.2 * sum(apart)
    assert hybrid(True).attention_times(batch_of(chunk=512)) == (apart[0], 0.0)
    alone = batch_of(decodes=64, context=2048)
    assert hybrid(True).attention_times(alone) == hybrid(None).attention_times(alone)


def test_tables_of_separate_calls_are_scaled_to_one_call():
    batch = batch_of(chunk=512, decodes=64, context=2048)
    gpu, spec = load_option("hardware", "l40s"), load_option("model", "llama3-8b")
    ways = {
        value: make_cost_model("profiled", spec, dataclasses.replace(gpu, hybrid_call=value), 2)
        for value in (False, True)
    }
    apart, together = (sum(way.operations.attention_times(batch)) for way in ways.values())
    formula = AnalyticOperations(spec, gpu, 2)
    longer = formula.hybrid_attention(batch) / sum(formula.separate_attention(batch))
    assert together == pytest.approx(longer * apart)
    with pytest.raises(UserError, match=r"hybrid_call=maybe is neither true nor false"):
        dataclasses.replace(gpu, hybrid_call="maybe")
