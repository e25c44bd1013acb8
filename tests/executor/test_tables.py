"""Operation tables: what the profiled cost model makes of their rows, between them and past them,
and the folders that are refused.
"""

from __future__ import annotations

import dataclasses
import runpy

import numpy as np
import pandas as pd
import pytest
from simulated import batch_of

from sarathi_lab.config.errors import UserError
from sarathi_lab.config.instantiate import load_option
from sarathi_lab.config.paths import EXPERIMENTS, REPOSITORY
from sarathi_lab.executor.simulated.analytic import AnalyticOperations
from sarathi_lab.executor.simulated.cost_model import CostModel, make_cost_model
from sarathi_lab.executor.simulated.hardware import Parallel
from sarathi_lab.executor.simulated.profiled import ProfiledOperations
from sarathi_lab.executor.tables import (
    LAYERS,
    OperationTables,
    read_tables,
    write_tables,
)
from sarathi_lab.model.spec import ModelSpec

ROW_OPERATIONS = ("qkv_proj", "out_proj", "ffn", "elementwise", "logits", "others")
TOKENS = (1, 10, 100, 200)
SECONDS = (1.0, 2.0, 8.0, 12.0)  # a token costs 0.08 at 100 and 0.06 at 200
FIXED, PER_TOKEN, PER_PAIR, PER_KV = 3.0, 0.5, 0.01, 0.2  # of prefill attention
DECODE_KV, DECODE_CONTEXT, DECODE_TOKEN, DECODE_FIXED = 0.3, 0.7, 2.0, 5.0
COLUMNS = ["operation", "num_tokens", "kv_tokens", "seconds"]


def prefill_seconds(tokens: int, kv: int) -> float:
    pairs = tokens * (kv - tokens) + tokens * (tokens + 1) / 2
    return FIXED + PER_TOKEN * tokens + PER_PAIR * pairs + PER_KV * kv


def decode_seconds(decodes: int, kv: int) -> float:
    return DECODE_KV * kv + DECODE_CONTEXT * kv / decodes + DECODE_TOKEN * decodes + DECODE_FIXED


def table() -> pd.DataFrame:
    """Rows over all layers; attention's are on no grid."""
    sizes = list(zip(TOKENS, SECONDS, strict=True))
    rows = [(name, tokens, 0, seconds) for name in ROW_OPERATIONS for tokens, seconds in sizes]
    starts = {16: (0, 100, 500), 64: (0, 200, 700), 256: (0, 50, 900)}
    sizes = [(tokens, start + tokens) for tokens in starts for start in starts[tokens]]
    rows += [("prefill_attention", tokens, kv, prefill_seconds(tokens, kv)) for tokens, kv in sizes]
    contexts = {1: (10, 100), 2: (20, 300), 4: (15, 1000), 8: (10, 100, 1000)}
    sizes = [(decodes, decodes * context) for decodes in contexts for context in contexts[decodes]]
    rows += [
        ("decode_attention", decodes, kv, decode_seconds(decodes, kv)) for decodes, kv in sizes
    ]
    return pd.DataFrame(rows, columns=COLUMNS)


def spec_of(name: str = "13b") -> ModelSpec:
    return load_option("model", name)


def formula_of(model: str) -> AnalyticOperations:
    return AnalyticOperations(spec_of(model), load_option("hardware", "a100"), 2)


def frames_of(made: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Files of the rows above: `kv_tokens` of all tokens together."""
    tokens = made.num_tokens
    made = made.assign(layer=made.operation, tokens=tokens, sequences=tokens)
    made["time_us"] = made.seconds / 1e-6
    prompts = made[made.operation == "prefill_attention"]
    decodes = made[made.operation == "decode_attention"]
    calls = [
        prompts.assign(
            prefill_chunk=prompts.tokens,
            kv_prefill=prompts.kv_tokens - prompts.tokens,
            n_decode=0,
            kv_decode=0,
        ),
        decodes.assign(
            prefill_chunk=0,
            kv_prefill=0,
            n_decode=decodes.tokens,
            kv_decode=decodes.kv_tokens // decodes.tokens,
        ),
    ]
    is_attention = made.operation.str.endswith("_attention")
    is_logits = made.operation == "logits"
    return {
        "dense": made[~is_attention & ~is_logits],
        "per_sequence": made[is_logits],
        "attention": pd.concat(calls),
    }


def operations(made: pd.DataFrame) -> ProfiledOperations:
    meta = {"model": "13b", "layers": spec_of().num_layers}
    return ProfiledOperations(OperationTables("here", frames_of(made), meta), formula_of("13b"))


def cost(made: pd.DataFrame) -> CostModel:
    return CostModel(formula_of("13b"), operations(made))


@pytest.mark.parametrize(("tokens", "seconds"), [(4, 1 + 3 / 9), (150, 10.0)])
def test_between_rows_the_time_is_linear_in_tokens(tokens, seconds):
    times = cost(table()).operation_times(batch_of(chunk=tokens))
    assert times["ffn"] == pytest.approx(seconds)


def test_past_the_table_a_token_costs_what_it_does_in_the_cheapest_row_of_the_upper_half():
    made = table()
    assert cost(made).operation_times(batch_of(chunk=1000))["ffn"] == pytest.approx(0.06 * 1000)
    made.loc[(made.operation == "ffn") & (made.num_tokens == 200), "seconds"] = (
        20.0  # one row beyond a tile
    )
    assert cost(made).operation_times(batch_of(chunk=1000))["ffn"] == pytest.approx(0.08 * 1000)
    # A row of the lower half does not count, however cheap.
    made.loc[(made.operation == "ffn") & (made.num_tokens == 10), "seconds"] = 0.01
    assert cost(made).operation_times(batch_of(chunk=1000))["ffn"] == pytest.approx(0.08 * 1000)


@pytest.mark.parametrize(("tokens", "start"), [(16, 0), (1000, 3000)])
def test_the_fit_of_prefill_attention_recovers_known_costs(tokens, start):
    times = cost(table()).operation_times(batch_of(chunk=tokens, start=start))
    assert times["prefill_attention"] == pytest.approx(prefill_seconds(tokens, start + tokens))
    assert times["decode_attention"] == 0


@pytest.mark.parametrize(("decodes", "context"), [(1, 10), (20, 5000)])
def test_the_fit_of_decode_attention_recovers_known_costs(decodes, context):
    times = cost(table()).operation_times(batch_of(decodes=decodes, context=context))
    assert times["decode_attention"] == pytest.approx(decode_seconds(decodes, decodes * context))
    assert times["prefill_attention"] == 0


# -- attention on a grid ---------------------------------------------------------------------------

CHUNKS, BEFORE, DECODES, CONTEXTS = (16, 64, 256), (0, 128, 1024), (1, 4, 16), (32, 512, 2048)


def mixed_us(chunk: int, before: int, decodes: int, context: int) -> float:
    """More than two calls together, and linear in each: what a grid gives between its points."""
    return 5.0 + 0.1 * chunk + 0.001 * chunk * before + 0.02 * decodes * context


def grid(stray: bool = False) -> pd.DataFrame:
    """Prompts, decodes, and both in one call; with a `stray` row beside the grid."""
    sizes = [(chunk, before, 0, 0) for chunk in CHUNKS for before in BEFORE]
    sizes += [(0, 0, decodes, context) for decodes in DECODES for context in CONTEXTS]
    sizes += [
        (chunk, before, decodes, context)
        for chunk in CHUNKS
        for before in BEFORE
        for decodes in DECODES
        for context in CONTEXTS
    ]
    sizes += [(100, 300, 3, 700)] if stray else []
    columns = ["prefill_chunk", "kv_prefill", "n_decode", "kv_decode"]
    rows = pd.DataFrame(sizes, columns=columns)
    factor = 1.0 + 0.5 * ((rows.n_decode > 0) & (rows.prefill_chunk > 0))
    times = [mixed_us(*size) for size in sizes]
    return rows.assign(time_us=factor * np.array(times))


def attention(rows: pd.DataFrame) -> ProfiledOperations:
    tables = OperationTables("here", {"attention": rows}, {"model": "llama3-8b"})
    return ProfiledOperations(tables, formula_of("llama3-8b"))


def micros(of: ProfiledOperations, **sizes: int) -> list[float]:
    return [1e6 * seconds for seconds in of.attention_times(batch_of(**sizes))]


@pytest.mark.parametrize("stray", [False, True])
def test_a_grid_is_passed_through_and_linear_between(stray):
    of = attention(grid(stray))
    assert micros(of, chunk=64, start=128) == pytest.approx([mixed_us(64, 128, 0, 0), 0])
    assert micros(of, chunk=100, start=300) == pytest.approx([mixed_us(100, 300, 0, 0), 0])
    assert micros(of, decodes=7, context=777) == pytest.approx([0, mixed_us(0, 0, 7, 777)])
    for sizes in ((64, 128, 4, 512), (100, 300, 3, 700)):
        chunk, start, decodes, context = sizes
        prefill, added = micros(of, chunk=chunk, start=start, decodes=decodes, context=context)
        assert prefill == pytest.approx(mixed_us(chunk, start, 0, 0))
        assert prefill + added == pytest.approx(1.5 * mixed_us(*sizes))


def test_past_the_grid_the_nearest_edge_is_scaled_by_the_formula():
    of = attention(grid())
    by_formula = formula_of("llama3-8b")
    past, edge = (
        sum(by_formula.attention_times(batch_of(chunk=chunk, start=1024))) for chunk in (1024, 256)
    )
    expected = mixed_us(256, 1024, 0, 0) * past / edge
    assert micros(of, chunk=1024, start=1024)[0] == pytest.approx(expected)
    before, edge = (
        by_formula.attention_times(batch_of(decodes=1, context=context))[1]
        for context in (1, min(CONTEXTS))
    )
    expected = mixed_us(0, 0, 1, min(CONTEXTS)) * before / edge
    assert micros(of, decodes=1, context=1)[1] == pytest.approx(expected)


def test_short_prompts_are_taken_for_one_of_as_many_pairs():
    of, batch = attention(grid()), batch_of(chunk=32)
    for chunk in batch_of(chunk=32).chunks:
        chunk.sequence.in_flight = False
        batch.add(chunk.sequence, 32)
    pairs = 2 * 32 * 33 // 2
    tokens = (np.sqrt(1 + 8 * pairs) - 1) / 2
    assert 1e6 * of.attention_times(batch)[0] == pytest.approx(mixed_us(tokens, 0, 0, 0))


# -- folders ---------------------------------------------------------------------------------------


def dense(**changes: object) -> pd.DataFrame:
    made = pd.DataFrame(
        {"layer": "ffn", "tokens": [1, 8, 64], "time_us": [10.0, 12.0, 40.0]}
    ).astype(object)
    for column, value in changes.items():
        made.loc[1, column] = value
    return made


REFUSED = {
    "a time below 0": (dense(time_us=-1.0), r"line 3: time_us=-1.0 is not a time above 0; correct"),
    "no tokens": (dense(tokens=0), r"line 3: tokens=0 is not a whole number from 1"),
    "twice": (dense(tokens=1), r"line 3 repeats layer=ffn, tokens=1; keep one"),
    "a layer of another kind": (dense(layer="fn"), r"line 3: layer=fn is unknown; use one of qkv"),
    "no column": (
        dense().drop(columns="tokens"),
        r"no column tokens of layer, tokens, time_us",
    ),
    "milliseconds as microseconds": (
        dense().assign(time_us=[0.01, 0.012, 0.04]),
        r"the median of time_us is 0.012, which is not plausible in microseconds",
    ),
    "no rows": (dense().iloc[:0], r"has no rows; measure some"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_table_that_cannot_be_interpolated_is_refused_in_one_line(case, tmp_path):
    broken, message = REFUSED[case]
    path = tmp_path / "dense.csv"
    broken.to_csv(path, index=False)
    with pytest.raises(UserError, match=message) as refused:
        read_tables(str(tmp_path))
    assert str(path) in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "content", [b"", b"\xff\xfe\x00\x01", b'layer,"num', b"layer,tokens\n1,2,3,4\n1"]
)
def test_a_file_that_is_no_table_is_refused_in_one_line(content, tmp_path):
    (tmp_path / "attention.csv").write_bytes(content)
    with pytest.raises(UserError, match=r"attention\.csv") as refused:
        read_tables(str(tmp_path))
    assert "\n" not in str(refused.value)


def test_long_tables_are_read_where_they_are_gzipped(tmp_path):
    rows = pd.DataFrame({"layer": "ffn", "tokens": range(1, 2001), "time_us": 7.0})
    write_tables(tmp_path, {"dense": rows}, {"model": "13b"})
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["dense.csv.gz", "meta.yaml"]
    assert read_tables(str(tmp_path)).frames["dense"].tokens.equals(rows.tokens)


def test_folders_of_the_model_and_of_the_degree_come_first(tmp_path):
    for number, place in enumerate(("", "13b", "13b/tp2", "tp4")):
        write_tables(tmp_path / place, {"dense": dense(tokens=2 + number)}, {"model": "13b"})
    chosen = {
        (model, tensor): read_tables(str(tmp_path), model=model, tensor=tensor)
        for model, tensor in (("", 1), ("13b", 1), ("13b", 2), ("7b", 4))
    }
    tokens = [int(tables.frames["dense"].tokens[1]) for tables in chosen.values()]
    assert tokens == [2, 3, 4, 5]
    assert [tables.tensor for tables in chosen.values()] == [1, 1, 2, 4]


def profiled(folder: object, model: str = "13b", **settings: int) -> CostModel:
    gpu = dataclasses.replace(load_option("hardware", "a100"), tables=str(folder))
    return make_cost_model("profiled", spec_of(model), gpu, 2, Parallel(**settings))


@pytest.mark.parametrize(
    ("meta", "place", "settings", "message"),
    [
        ({"model": "7b"}, "", {}, "was measured with model 7b, .*, not with model 13b"),
        ({}, "", {}, "with model that no meta.yaml names"),
        ({"model": "13b", "dtype": "float32"}, "", {}, "elements of 4 bytes, not of 2"),
        (
            {"model": "org/13B"},
            "tp2",
            {"tensor": 1},
            r"parallel=2 and .*, not .* 13b, 1 and",
        ),
    ],
)
def test_tables_without_shapes_hold_for_their_own_model(meta, place, settings, message, tmp_path):
    write_tables(tmp_path / place, {"dense": dense()}, meta)
    with pytest.raises(UserError, match=message):
        profiled(tmp_path / place, **settings)


def test_what_has_no_rows_is_by_formula(tmp_path):
    write_tables(tmp_path, {"dense": dense()}, {"model": "13b"})
    measured = profiled(tmp_path).operation_times(batch_of(chunk=8))
    by_formula = make_cost_model("analytic", spec_of(), load_option("hardware", "a100"), 2)
    expected = by_formula.operation_times(batch_of(chunk=8))
    assert measured.pop("ffn") == pytest.approx(40 * 12e-6)
    assert measured == {name: expected[name] for name in measured}
    assert set(expected) - set(measured) == set(LAYERS["ffn"].replaces)


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        (None, "names no operation tables; name a folder by hardware.tables.*task=calibrate"),
        ("nowhere", "hardware.tables=nowhere is not a folder"),
        ("conf", "hardware.tables=conf has no tables of model 13b; measure"),
    ],
)
def test_no_tables_are_one_line(tables, message):
    gpu = dataclasses.replace(load_option("hardware", "a6000"), tables=tables)
    with pytest.raises(UserError, match=message):
        make_cost_model("profiled", spec_of(), gpu, 2)


def test_the_tables_of_the_a6000_are_what_their_script_writes(tmp_path, monkeypatch):
    script = REPOSITORY / "tools" / "cost_model" / "profile_from_figures.py"
    monkeypatch.setattr("sys.argv", [str(script), str(tmp_path)])
    runpy.run_path(str(script), run_name="__main__")
    recorded = EXPERIMENTS / "lab" / "cost_model" / "tables" / "a6000" / "13b"
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        path.name: path.read_text() for path in recorded.iterdir()
    }
