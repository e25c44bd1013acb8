"""Traces in four formats: every row accounted for, times as written, prompts that share what the
trace shares.
"""

from __future__ import annotations

import json
import random
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from sarathi_lab.config.errors import UserError
from sarathi_lab.config.sweeper import compose
from sarathi_lab.tasks.plan import make_plan
from sarathi_lab.workload.files import Prompts
from sarathi_lab.workload.traces import Trace

TRACES = Path(__file__).resolve().parents[3] / "shared" / "traces"
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
LENGTHS = "num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n"


def write(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


def rows_of(load) -> list[tuple[float, int, int]]:
    return [
        (request.arrival_time, request.prompt_len, request.output_len) for request in load.requests
    ]


def mooncake(*rows: tuple[int, int, int, list[int]]) -> str:
    keys = ("timestamp", "input_length", "output_length", "hash_ids")
    return "\n".join(json.dumps(dict(zip(keys, row, strict=True))) for row in rows) + "\n"


def test_burstgpt_counts_seconds_and_columns_may_be_added(tmp_path):
    path = write(
        tmp_path / "b.csv",
        BURST + "5,ChatGPT,472,18,490,API log\n45.5,GPT-4,30,7,37,Conversation log\n",
    )
    assert rows_of(Trace(path=path, seed=0).generate(None)) == [(0.0, 472, 18), (40.5, 30, 7)]
    wider = BURST.replace("Model", "Session ID,Elapsed time,Model")
    path = write(
        tmp_path / "wider.csv",
        wider + "5,,1.5,ChatGPT,472,18,490,API log\n6,a,2.5,GPT-4,9,0,9,API log\n",
    )
    load = Trace(path=path, seed=0).generate(None)
    assert rows_of(load) == [(0.0, 472, 18)]
    assert load.describe().endswith("2 rows read = 1 used + 1 dropped, 1 without prompt or output")


def test_mooncake_counts_milliseconds_and_equal_ids_are_equal_tokens(tmp_path):
    text = mooncake(
        (100, 1200, 5, [7, 8, 9]),
        (2100, 700, 6, [7, 8]),
        (3100, 1100, 7, [7, 11, 9]),
        (4100, 600, 8, [7]),
    )
    path = write(tmp_path / "m.jsonl", text)
    load = Trace(path=path, seed=0).generate(1000)
    assert rows_of(load) == [(0.0, 1200, 5), (2.0, 700, 6), (3.0, 1100, 7), (4.0, 600, 8)]
    assert [request.prefix_ids for request in load.requests] == [
        (7, 8, 9),
        (7, 8),
        (7, 11, 9),
        (7,),
    ]
    first, second, third, fourth = (
        np.asarray(request.prompt_token_ids) for request in load.requests
    )
    assert [len(prompt) for prompt in (first, second, third, fourth)] == [1200, 700, 1100, 600]
    assert np.array_equal(first[:700], second)
    assert np.array_equal(first[:512], third[:512])
    assert not np.array_equal(first[512:1024], third[512:1024])
    assert np.array_equal(first[1024:1100], third[1024:])
    assert np.array_equal(first[:512], fourth[:512])
    assert not np.array_equal(
        first[512:600], fourth[512:]
    )  # beyond the last id the tokens are the request's own
    assert max(map(max, (first, second, third, fourth))) < 1000
    other = Trace(path=path, seed=1).generate(1000).requests[0].prompt_token_ids
    assert not np.array_equal(first, other)
    assert Trace(path=path, seed=0).generate(None).requests[0].prompt_token_ids is None


def test_ids_beyond_the_prompt_are_left_out_and_rows_may_have_none(tmp_path):
    text = (
        mooncake((0, 512, 5, [1, 2, 3]))
        + '{"timestamp": 1.5, "input_length": 8, "output_length": 2}\n'
    )
    load = Trace(path=write(tmp_path / "m.jsonl", text), seed=0).generate(None)
    assert [request.prefix_ids for request in load.requests] == [(1,), ()]
    assert load.requests[1].arrival_time == 0.0015


def test_lengths_alone_are_a_closed_batch_or_take_arrivals(tmp_path):
    path = write(tmp_path / "l.csv", LENGTHS + "74,918,992,0.08\n290,905,1195,0.3\n10,5,15,2\n")
    load = Trace(path=path, seed=0).generate(None)
    assert rows_of(load) == [(0.0, 74, 918), (0.0, 290, 905), (0.0, 10, 5)]
    times = [
        time
        for time, _, _ in rows_of(
            Trace(path=path, seed=0, arrivals="poisson", rate=2.0).generate(None)
        )
    ]
    assert times[0] == 0 < times[1] < times[2]
    users = Trace(path=path, seed=0, arrivals="users", users=2, think_time=1.5).generate(None)
    assert (users.num_users, users.think_time) == (2, 1.5)
    for name, value in (("rate", 2.0), ("time_scale", 2.0)):
        with pytest.raises(UserError, match=f"{name}={value} has no effect"):
            Trace(path=path, seed=0, **{name: value}).generate(None)


def test_own_times_are_scaled_to_a_rate_or_by_a_factor(tmp_path):
    path = write(
        tmp_path / "b.csv", BURST + "".join(f"{t},m,10,5,15,x\n" for t in (10, 11, 14, 18))
    )
    arrivals = {
        name: [time for time, _, _ in rows_of(Trace(path=path, seed=0, **settings).generate(None))]
        for name, settings in {
            "own": {},
            "slow": {"time_scale": 2.0},
            "rate": {"rate": 0.75},
            "poisson": {"arrivals": "poisson", "rate": 0.75},
        }.items()
    }
    assert arrivals["own"] == [0, 1, 4, 8]
    assert arrivals["slow"] == [0, 2, 8, 16]
    assert arrivals["rate"] == [0, 0.5, 2, 4]  # three gaps in four seconds
    assert len({tuple(times) for times in arrivals.values()}) == 4


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"rate": 2.0, "time_scale": 2.0}, "rate=2.0 and workload.time_scale=2.0 both scale"),
        ({"rate": 0}, "rate=0 must be"),
        ({"users": 2}, "users=2 has no effect on the trace's own times"),
        ({"cv": 2.0}, "cv=2.0 has no effect on the trace's own times"),
        (
            {"arrivals": "poisson", "rate": 1.0, "time_scale": 2.0},
            "time_scale=2.0 has no effect on poisson",
        ),
        ({"arrivals": "weekly"}, "arrivals=weekly is unknown"),
        ({"arrivals": "closed", "rate": 2.0}, "rate=2.0 has no effect on closed"),
    ],
)
def test_settings_that_contradict_are_refused(settings, words):
    with pytest.raises(UserError, match=words):
        Trace(path="unused", seed=0, **settings)


def test_one_time_for_all_has_no_rate(tmp_path):
    path = write(tmp_path / "b.csv", BURST + "5,m,10,5,15,x\n" * 3)
    with pytest.raises(UserError, match="its 3 usable rows share one time"):
        Trace(path=path, seed=0, rate=1.0).generate(None)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "a,b\n1,2\n",
            "has the columns a, b, which no known format has; .*Azure "
            "TIMESTAMP.*BurstGPT.*Mooncake.*lengths",
        ),
        ('{"a": 1}\n', "has the columns a, which no known format has"),
        (BURST + "soon,m,1,1,2,x\n", "line 2 is broken"),
        (BURST + "-1,m,1,1,2,x\n", "line 2 is broken .Timestamp=-1"),
        (BURST + "nan,m,1,1,2,x\n", "line 2 is broken"),
        (BURST + "1e300,m,1,1,2,x\n", "line 2 is broken"),
        (BURST + f"1,m,{10**30},1,2,x\n", "line 2 is broken"),
        (BURST + "1,m,1.5,1,2,x\n", "line 2 is broken"),
        (mooncake((0, 10, 1, [])) + "{\n", "line 2 is not JSON"),
        (
            mooncake((0, 10, 1, [])) + '{"timestamp": 1}\n',
            "line 2 is broken .input_length=nan",
        ),
        (mooncake((0, 10, 1, ["x"])), "line 1 is broken .hash_ids=..x"),
        (mooncake((0, 10, 1, [-1])), "line 1 is broken .hash_ids=.-1"),
        (mooncake((0, 10, 1, 5)), "line 1 is broken .hash_ids=5"),
        (mooncake((None, 10, 1, [])), "line 1 is broken"),
        (mooncake((True, 10, 1, [])), "line 1 is broken"),
        (mooncake((0, 1.5, 1, [])), "line 1 is broken .input_length=1.5"),
        (LENGTHS, "empty but for its header"),
        (LENGTHS + "-3,5,2,1\n", "line 2 is broken"),
    ],
)
def test_broken_files_are_named_by_line(tmp_path, text, words):
    with pytest.raises(UserError, match=words):
        Trace(path=write(tmp_path / "t", text), seed=0).generate(None)


def test_a_changed_file_is_read_again(tmp_path):
    path = write(tmp_path / "l.csv", LENGTHS + "74,918,992,0.08\n")
    assert len(Trace(path=path, seed=0).generate(None).requests) == 1
    write(tmp_path / "l.csv", LENGTHS + "74,918,992,0.08\n" * 3)
    assert len(Trace(path=path, seed=0).generate(None).requests) == 3


def test_ten_thousand_rows_in_disorder_reconcile(tmp_path):
    """Zero tokens, times out of order and shared, and rows too long: each is used or dropped, and
    said so.
    """
    dice = random.Random(0)
    rows = [
        (dice.randrange(3000), dice.choice([0, 5, 50, 900]), dice.choice([0, 3, 200]))
        for _ in range(10_000)
    ]
    path = write(
        tmp_path / "b.csv", BURST + "".join(f"{t},m,{p},{d},{p + d},x\n" for t, p, d in rows)
    )
    load = Trace(path=path, seed=0, max_len=1000).generate(None)
    expected = sorted(row for row in rows if row[1] and row[2] and row[1] + row[2] <= 1000)
    first = min(rows)[0]
    assert sorted((int(t) + first, p, d) for t, p, d in rows_of(load)) == expected
    times = [request.arrival_time for request in load.requests]
    assert times == sorted(times)
    num_empty = sum(not (p and d) for _, p, d in rows)
    assert load.rows_read == 10_000 == len(load.requests) + sum(load.dropped.values())
    assert load.dropped["without prompt or output"] == num_empty
    assert load.dropped["over max_len=1000"] == 10_000 - num_empty - len(expected)
    num_early = sum(later[0] < earlier[0] for earlier, later in pairwise(rows))
    num_together = 10_000 - len({t for t, _, _ in rows})
    assert f"{num_early} rows before the row above them (sorted)" in load.describe()
    assert f"{num_together} rows at the same time as another" in load.describe()


def test_rows_above_the_models_length_are_dropped_with_the_reason(tmp_path):
    path = write(tmp_path / "l.csv", LENGTHS + "74,30,0,0\n5000,30,0,0\n600,50,0,0\n")
    args = ["executor=simulated", "model=30m", "batch=2", "workload=trace", f"workload.path={path}"]

    def described(*more: str) -> str:
        return make_plan(compose([*args, *more]).jobs[0].cfg).load.describe()

    assert "3 rows read = 2 used + 1 dropped, 1 over max_len=4096" in described()
    assert "3 rows read = 1 used + 2 dropped, 2 over max_len=600" in described("max_model_len=600")
    assert "3 rows read = 3 used + 0 dropped" in described("workload.max_len=6000")
    assert "1 used + 2 dropped, 1 over max_len=4096, 1 after max_requests" in described(
        "workload.max_requests=1"
    )


def test_prompts_may_have_priorities(tmp_path):
    rows = '{"prompt": "a", "output_len": 1, "priority": -2}\n{"prompt": "b", "output_len": 1}\n'
    load = Prompts(path=write(tmp_path / "p.jsonl", rows)).generate(None)
    assert [request.priority for request in load.requests] == [-2, 0]
    for bad in ("1.5", '"high"', "true"):
        path = write(tmp_path / "p.jsonl", rows.replace("-2", bad))
        with pytest.raises(UserError, match=r"line 1: priority=.* is not a whole number"):
            Prompts(path=path).generate(None)


@pytest.mark.skipif(not TRACES.is_dir(), reason="the public traces are not here")
def test_the_public_table_of_lengths():
    load = Trace(
        path=str(TRACES / "sharegpt_8k_lengths.csv"), seed=0, arrivals="poisson", rate=1.0
    ).generate(None)
    assert load.rows_read == len(load.requests) == 30_731
    for q, prompt, output in ((0.5, 1730, 415), (0.9, 5696, 834)):
        assert np.quantile([request.prompt_len for request in load.requests], q) == pytest.approx(
            prompt, abs=1
        )
        assert np.quantile([request.output_len for request in load.requests], q) == pytest.approx(
            output, abs=1
        )
