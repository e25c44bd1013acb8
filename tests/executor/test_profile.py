"""The profiled cost model: what it makes of a table's rows, between them and past them, and the
tables it refuses.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
from simulated import batch_of

from sarathi_lab.config.errors import UserError
from sarathi_lab.config.instantiate import load_option
from sarathi_lab.config.paths import EXPERIMENTS, REPOSITORY
from sarathi_lab.executor.profile import COLUMNS, ROW_OPERATIONS
from sarathi_lab.executor.simulated.cost_model import CostModel, make_cost_model
from sarathi_lab.executor.simulated.profile import Profile, ProfiledOperations

TOKENS = (1, 10, 100, 200)
SECONDS = (1.0, 2.0, 8.0, 12.0)  # a token costs 0.08 at 100 and 0.06 at 200
FIXED, PER_TOKEN, PER_PAIR, PER_KV = 3.0, 0.5, 0.01, 0.2  # of prefill attention
DECODE_KV, DECODE_CONTEXT, DECODE_TOKEN, DECODE_FIXED = 0.3, 0.7, 2.0, 5.0


def prefill_seconds(tokens: int, kv: int) -> float:
    pairs = tokens * (kv - tokens) + tokens * (tokens + 1) / 2
    return FIXED + PER_TOKEN * tokens + PER_PAIR * pairs + PER_KV * kv


def decode_seconds(decodes: int, kv: int) -> float:
    return DECODE_KV * kv + DECODE_CONTEXT * kv / decodes + DECODE_TOKEN * decodes + DECODE_FIXED


def table(noise: float = 0.0) -> pd.DataFrame:
    sizes = list(zip(TOKENS, SECONDS, strict=True))
    rows = [(name, tokens, 0, seconds) for name in ROW_OPERATIONS for tokens, seconds in sizes]
    sizes = [(tokens, start + tokens) for tokens in (16, 64, 256) for start in (0, 100, 500)]
    rows += [("prefill_attention", tokens, kv, prefill_seconds(tokens, kv)) for tokens, kv in sizes]
    sizes = [
        (decodes, decodes * context) for decodes in (1, 2, 4, 8) for context in (10, 100, 1000)
    ]
    rows += [
        ("decode_attention", decodes, kv, decode_seconds(decodes, kv)) for decodes, kv in sizes
    ]
    made = pd.DataFrame(rows, columns=list(COLUMNS))
    made["seconds"] *= np.exp(noise * np.random.default_rng(0).standard_normal(len(made)))
    return made


def cost(made: pd.DataFrame) -> CostModel:
    spec = load_option("model", "13b")
    return CostModel(ProfiledOperations(Profile(made, "here"), spec), spec, 2)


@pytest.mark.parametrize("tokens", TOKENS)
def test_rows_are_reproduced(tokens):
    times = cost(table()).operation_times(batch_of(chunk=tokens))
    assert {times[name] for name in ROW_OPERATIONS if name != "logits"} == {
        SECONDS[TOKENS.index(tokens)]
    }


def test_logits_cost_what_the_rows_that_emit_do():
    assert cost(table()).operation_times(batch_of(chunk=100))["logits"] == 0  # an unfinished prompt
    assert (
        cost(table()).operation_times(batch_of(chunk=100, decodes=10, context=3))["logits"] == 2.0
    )


@pytest.mark.parametrize(("tokens", "seconds"), [(4, 1 + 3 / 9), (55, 5.0), (150, 10.0)])
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


def test_times_do_not_fall_past_the_table():
    profile = make_cost_model(
        "profiled", load_option("model", "13b"), load_option("hardware", "a6000"), 2
    )
    times = [profile.iteration_time(batch_of(chunk=tokens)) for tokens in range(1000, 1500, 10)]
    assert times == sorted(times)


def test_a_size_that_one_operation_lacks_is_a_hole():
    made = table()
    hole = made[~((made.operation == "ffn") & (made.num_tokens == 100))]
    with pytest.raises(
        UserError,
        match="profile here has no row of ffn for 100 tokens, which another operation has",
    ):
        Profile(hole, "here")


@pytest.mark.parametrize(("tokens", "start"), [(16, 0), (64, 500), (128, 64), (1000, 3000)])
def test_the_fit_of_prefill_attention_recovers_known_costs(tokens, start):
    times = cost(table()).operation_times(batch_of(chunk=tokens, start=start))
    assert times["prefill_attention"] == pytest.approx(prefill_seconds(tokens, start + tokens))
    assert times["decode_attention"] == 0


@pytest.mark.parametrize(("decodes", "context"), [(1, 10), (3, 50), (8, 1000), (20, 5000)])
def test_the_fit_of_decode_attention_recovers_known_costs(decodes, context):
    times = cost(table()).operation_times(batch_of(decodes=decodes, context=context))
    assert times["decode_attention"] == pytest.approx(decode_seconds(decodes, decodes * context))
    assert times["prefill_attention"] == 0


def test_several_prompts_cost_the_sum_of_their_pairs_in_one_call():
    both = batch_of(chunk=16)
    for chunk in batch_of(chunk=64, start=100).chunks:
        chunk.sequence.in_flight = False
        both.add(chunk.sequence, 64)
    once = prefill_seconds(16, 16) + prefill_seconds(64, 164) - FIXED
    assert cost(table()).operation_times(both)["prefill_attention"] == pytest.approx(once)


def test_what_the_fit_leaves_is_corrected_between_the_sizes_of_the_table():
    made = table()
    slow = (made.operation == "decode_attention") & (made.num_tokens == 8)
    made.loc[slow, "seconds"] *= 1.5  # no sum of the costs gives that
    attention = ProfiledOperations(
        Profile(made, "here"), load_option("model", "13b")
    ).decode_attention
    for row in made[slow].itertuples():
        predicted = attention.time(8, row.kv_tokens, row.kv_tokens / 8, 8, 1)
        assert predicted == pytest.approx(row.seconds, rel=0.25)
    left = [attention.time(place, 0, 0, 0, 1) for place in (4, 6, 8, 100)]
    assert left[1] == pytest.approx((left[0] + left[2]) / 2)
    assert left[3] == left[2]  # constant past the end


def test_an_iteration_is_the_sum_of_its_operations():
    batch = batch_of(chunk=55, decodes=2, context=100)
    model_of = cost(table())
    assert model_of.iteration_time(batch) == pytest.approx(
        sum(model_of.operation_times(batch).values())
    )
    assert model_of.operation_times(batch)["ffn"] == pytest.approx(
        2 + 6 * 47 / 90
    )  # 57 tokens share the products


def test_held_out_errors_are_those_of_the_table():
    exact = Profile(table(), "here").held_out_errors
    assert exact["prefill_attention"] == pytest.approx(0, abs=1e-6)
    assert exact["decode_attention"] == pytest.approx(0, abs=1e-6)
    # 10 tokens from 1 and 100: 1 + 7 * 9 / 99; 100 tokens from 10 and 200: 2 + 10 * 90 / 190.
    errors = [abs((1 + 7 * 9 / 99) / 2 - 1), abs((2 + 10 * 90 / 190) / 8 - 1)]
    assert exact["ffn"] == pytest.approx(np.median(errors))
    noisy = Profile(table(noise=0.2), "here").held_out_errors
    assert 0.05 < noisy["prefill_attention"] < 0.5
    assert 0.05 < noisy["decode_attention"] < 0.5
    stated = cost(table(noise=0.2)).uncertainty
    assert stated["attention"] == max(noisy["prefill_attention"], noisy["decode_attention"])
    assert stated["matmul"] == max(noisy[name] for name in ("qkv_proj", "out_proj", "ffn"))


def put(column: str, value: object, operation: str = "ffn") -> pd.DataFrame:
    made = table().astype({column: object})
    made.loc[made.index[made.operation == operation][1], column] = value
    return made


BROKEN = {
    "no operation": (table()[lambda t: t.operation != "ffn"], r"0 rows of ffn, 3 are needed"),
    "too few rows": (table().drop(index=[0, 1]), r"2 rows of qkv_proj, 3 are needed"),
    "missing": (put("seconds", float("nan")), r"seconds=nan of ffn in line 11"),
    "zero": (put("seconds", 0.0), r"seconds=0.0 of ffn"),
    "negative": (put("seconds", -1.0), r"seconds=-1.0 of ffn"),
    "endless": (put("seconds", float("inf")), r"seconds=inf of ffn"),
    "word": (put("seconds", "fast"), r"seconds=fast of ffn"),
    "no tokens": (put("num_tokens", 0), r"num_tokens=0 of ffn"),
    "negative context": (put("kv_tokens", -5), r"kv_tokens=-5 of ffn"),
    "context too short": (
        put("kv_tokens", 3, "prefill_attention"),
        r"kv_tokens=3 of prefill_attention .* fewer",
    ),
    "twice": (pd.concat([table(), table().iloc[[0]]]), r"two rows of qkv_proj"),
    "twice, with a context": (
        pd.concat([table(), table().iloc[[0]].assign(kv_tokens=7)], ignore_index=True),
        r"two rows of qkv_proj",
    ),
    "no column": (table().drop(columns="kv_tokens"), r"no column kv_tokens"),
    "unknown operation": (put("operation", "fn"), r"operation fn in line 11 is none of qkv_proj, "),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_table_with_holes_is_refused_in_one_line(case, tmp_path):
    broken, message = BROKEN[case]
    path = tmp_path / "profile.csv"
    broken.to_csv(path, index=False)
    with pytest.raises(UserError, match=message) as refused:
        Profile.read(path)
    assert str(path) in str(refused.value)
    assert "task=calibrate" in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "content",
    [None, b"", b"\xff\xfe\x00\x01", b'operation,"num', b"operation,num_tokens\n1,2,3,4\n1"],
)
def test_a_file_that_is_no_table_is_refused_in_one_line(content, tmp_path):
    path = tmp_path / "profile.csv"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match="profile") as refused:
        Profile.read(path)
    assert "\n" not in str(refused.value)


def test_rows_may_come_in_any_order():
    shuffled = table().sample(frac=1.0, random_state=1)
    batch = batch_of(chunk=77, start=10, decodes=3, context=40)
    assert cost(shuffled).iteration_time(batch) == pytest.approx(
        cost(table()).iteration_time(batch)
    )


def test_a_model_without_a_profile_is_named_with_those_that_have_one():
    with pytest.raises(
        UserError, match=r"a6000 has no profile of model tiny \(it has: 13b\).*task=calibrate"
    ):
        make_cost_model(
            "profiled", load_option("model", "tiny"), load_option("hardware", "a6000"), 2
        )
    gone = dataclasses.replace(load_option("hardware", "a6000"), profiles={"tiny": "nowhere.csv"})
    with pytest.raises(UserError, match=r"nowhere.csv can't be read .*task=calibrate"):
        make_cost_model("profiled", load_option("model", "tiny"), gone, 2)


def test_the_profile_of_the_a6000_is_what_its_script_prints():
    script = EXPERIMENTS / "lab" / "cost_model" / "profile_from_figures.py"
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, env=environment, check=True
    )
    assert done.stdout == (EXPERIMENTS / "lab" / "cost_model" / "profile_a6000_13b.csv").read_text()
