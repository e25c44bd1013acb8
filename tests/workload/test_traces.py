"""Traces in four formats: every row accounted for, times as written, prompts that share what the
trace shares.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from composed import config_of

from sarathi_lab.config.errors import UserError
from sarathi_lab.tasks.plan import make_plan
from sarathi_lab.workload.traces import Trace

TRACES = Path(__file__).resolve().parents[3] / "shared" / "traces"
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
LENGTHS = "num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n"


def load_of(path: Path, text: str, vocab_size: int | None = None, **settings):
    path.write_text(text, encoding="utf-8")
    return Trace(**{"path": str(path), "seed": 0, **settings}).generate(vocab_size)


@pytest.fixture
def load(tmp_path):
    """Requests of a trace of this text."""
    return lambda *text, **settings: load_of(tmp_path / "trace", *text, **settings)


def rows_of(loaded) -> list[tuple[float, int, int]]:
    return [(one.arrival_time, one.prompt_len, one.output_len) for one in loaded.requests]


def mooncake(*rows: tuple) -> str:
    keys = ("timestamp", "input_length", "output_length", "hash_ids")
    return "\n".join(json.dumps(dict(zip(keys, row, strict=False))) for row in rows) + "\n"


def test_azure_rows_reconcile_and_seven_digits_count(load):
    text = (
        AZURE
        + "2023-11-16 18:15:50.0000000,100,10\n2023-11-16 18:15:50.0000001,0,10\n"
        + "2023-11-16 18:15:51.0000003,900,200\n2023-11-16 18:15:49.5000000,30,5\n"
        + "2023-11-16 18:15:52.0000000,40,1\n2023-11-16 18:15:53.0000000,50,1\n\n"
    )
    few = load(text, 64, max_requests=3, max_len=1000)
    assert rows_of(few) == [(0.0, 30, 5), (0.5, 100, 10), (2.5, 40, 1)]
    assert few.describe().endswith(
        "6 rows read = 3 used + 3 dropped, 1 without prompt or output, 1 over max_len=1000, 1 "
        "after max_requests"
    )
    assert few.requests[0].prompt_token_ids.shape == (30,)
    assert load(text).requests[2].arrival_time == 1.5000003


def test_parts_are_successive_rows_each_from_its_first_time(load):
    rows = "".join(f"2023-11-16 18:15:5{i}.0,{i + 1},{i + 2}\n" for i in range(5))
    parts = [rows_of(load(AZURE + rows, max_requests=2, part=i)) for i in range(3)]
    assert [shape for part in parts for _, *shape in part] == [[i + 1, i + 2] for i in range(5)]
    assert [[time for time, *_ in part] for part in parts] == [[0, 1], [0, 1], [0]]
    with pytest.raises(UserError, match=r"workload\.part=1 has no effect without max_requests"):
        load(AZURE + rows, part=1)
    with pytest.raises(UserError, match="5 outside part=3"):
        load(AZURE + rows, max_requests=2, part=3)


def test_burstgpt_counts_seconds_and_columns_may_be_added(load):
    rows = BURST + "5,ChatGPT,472,18,490,API log\n45.5,GPT-4,30,7,37,Conversation log\n"
    assert rows_of(load(rows)) == [(0.0, 472, 18), (40.5, 30, 7)]
    wider = BURST.replace("Model", "Session ID,Elapsed time,Model")
    loaded = load(wider + "5,,1.5,ChatGPT,472,18,490,API log\n6,a,2.5,GPT-4,9,0,9,API log\n")
    assert rows_of(loaded) == [(0.0, 472, 18)]
    assert loaded.describe().endswith(
        "2 rows read = 1 used + 1 dropped, 1 without prompt or output"
    )


def test_mooncake_counts_milliseconds_and_equal_ids_are_equal_tokens(load):
    text = mooncake(
        (100, 1200, 5, [7, 8, 9]),
        (2100, 700, 6, [7, 8]),
        (3100, 1100, 7, [7, 11, 9]),
        (4100, 600, 8, [7]),
    )
    loaded = load(text, 1000)
    assert rows_of(loaded) == [(0.0, 1200, 5), (2.0, 700, 6), (3.0, 1100, 7), (4.0, 600, 8)]
    for requests in (loaded.requests, load(text).requests):  # with a vocabulary, and simulated
        first, second, third, fourth = (one.prompt_token_ids for one in requests)
        assert [len(prompt) for prompt in (first, second, third, fourth)] == [1200, 700, 1100, 600]
        assert np.array_equal(first[:700], second)
        assert np.array_equal(first[:512], third[:512])
        assert not np.array_equal(first[512:1024], third[512:1024])
        assert np.array_equal(first[1024:1100], third[1024:])
        assert np.array_equal(first[:512], fourth[:512])
        assert not np.array_equal(first[512:600], fourth[512:])  # beyond the last id: its alone
    first = loaded.requests[0].prompt_token_ids
    assert max(first) < 1000
    assert not np.array_equal(first, load(text, 1000, seed=1).requests[0].prompt_token_ids)


def test_ids_beyond_the_prompt_are_left_out_and_rows_may_have_none(load):
    loaded = load(mooncake((0, 512, 5, [1, 2, 3]), (1.5, 8, 2)))
    first, second = (one.prompt_token_ids for one in loaded.requests)
    assert (len(first), second) == (512, None)
    assert loaded.requests[1].arrival_time == 0.0015


def test_lengths_alone_are_a_closed_batch_or_take_arrivals(load):
    text = LENGTHS + "74,918,992,0.08\n290,905,1195,0.3\n10,5,15,2\n"
    assert rows_of(load(text)) == [(0.0, 74, 918), (0.0, 290, 905), (0.0, 10, 5)]
    times = [time for time, _, _ in rows_of(load(text, arrivals="poisson", rate=2.0))]
    assert times[0] == 0 < times[1] < times[2]
    users = load(text, arrivals="users", users=2, think_time=1.5)
    assert (users.num_users, users.think_time) == (2, 1.5)
    implied = load(text, rate=2.0)
    assert [time for time, _, _ in rows_of(implied)] == times
    assert implied.arrival_kind == "poisson"
    with pytest.raises(UserError, match=r"rate=2\.0 has no effect on closed"):
        load(text, arrivals="closed", rate=2.0)


def test_a_files_times_are_scaled_to_a_rate(load):
    text = BURST + "".join(f"{t},m,10,5,15,x\n" for t in (10, 11, 14, 18))
    for rate, times in ((None, [0, 1, 4, 8]), (0.75, [0, 0.5, 2, 4])):  # three gaps in four seconds
        assert [time for time, _, _ in rows_of(load(text, rate=rate))] == times


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"arrivals": "weekly"}, "arrivals=weekly is unknown"),
        ({"arrivals": "closed", "rate": 2.0}, "rate=2.0 has no effect on closed"),
    ],
)
def test_settings_that_contradict_are_refused(settings, words):
    with pytest.raises(UserError, match=words):
        Trace(path="unused", seed=0, **settings)


def test_a_files_times_leave_no_effect_to_settings_of_other_arrivals(load):
    with pytest.raises(UserError, match="users=2 has no effect on the trace's times"):
        load(BURST + "5,m,10,5,15,x\n" * 3, users=2)


def test_one_time_for_all_has_no_rate(load):
    with pytest.raises(UserError, match="its 3 usable rows share one time"):
        load(BURST + "5,m,10,5,15,x\n" * 3, rate=1.0)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is empty; name a file"),
        ("a,b\n1,2\n", "the columns a, b, which no .*Azure TIMESTAMP.*BurstGPT.*Mooncake.*lengths"),
        ('{"a": 1}\n', "has the columns a, which no known format has"),
        (AZURE + "2023-11-16 18:15:50,1,1\n2023-11-16 18:15:50,x,1\n", "line 3 .*ContextTokens=x"),
        (AZURE + "2023-11-16 18:15:50,1\n", "line 2 is broken .GeneratedTokens=nan"),
        (AZURE + "now,1,1\n", "line 2 is broken .TIMESTAMP=now"),
        (AZURE + "3000-11-16 18:15:50,1,1\n", "line 2 is broken"),
        (AZURE + '2023-11-16 18:15:50,1,1\n"2023-11-16 18:15:51,1,1\n', "can't be read .*row 2"),
        (AZURE + "2023-11-16 18:15:50,0,1\n", "all 1 rows were dropped .1 without prompt or"),
        (BURST + "-1,m,1,1,2,x\n", "line 2 is broken .Timestamp=-1"),
        (BURST + "nan,m,1,1,2,x\n", "line 2 is broken"),
        (BURST + "1e300,m,1,1,2,x\n", "line 2 is broken"),
        (BURST + f"1,m,{10**30},1,2,x\n", "line 2 is broken"),
        (BURST + "1,m,1.5,1,2,x\n", "line 2 is broken"),
        (mooncake((0, 10, 1, [])) + "{\n", "line 2 is not JSON"),
        (mooncake((0, 10, 1, []), (1,)), "line 2 is broken .input_length=nan"),
        (mooncake((0, 10, 1, ["x"])), "line 1 is broken .hash_ids=..x"),
        (mooncake((0, 10, 1, 5)), "line 1 is broken .hash_ids=5"),
        (mooncake((None, 10, 1, [])), "line 1 is broken"),
        (mooncake((True, 10, 1, [])), "line 1 is broken"),
        (LENGTHS, "empty but for its header"),
    ],
)
def test_broken_files_are_named_by_line(load, text, words):
    with pytest.raises(UserError, match=words):
        load(text)


def test_a_changed_file_is_read_again(load):
    for number in (1, 3):
        assert len(load(LENGTHS + "74,918,992,0.08\n" * number).requests) == number


@pytest.mark.parametrize(
    ("setting", "described"),
    [
        ("batch=2", "3 rows read = 2 used + 1 dropped, 1 over max_len=4096"),
        ("max_model_len=600", "3 rows read = 1 used + 2 dropped, 2 over max_len=600"),
        ("workload.max_len=6000", "3 rows read = 3 used + 0 dropped"),
        ("workload.max_requests=1", "1 over max_len=4096, 1 after max_requests"),
    ],
)
def test_rows_above_the_models_length_are_dropped_with_the_reason(tmp_path, setting, described):
    path = tmp_path / "l.csv"
    path.write_text(LENGTHS + "74,30,0,0\n5000,30,0,0\n600,50,0,0\n")
    args = ["executor=simulated", "model=30m", "batch=2", "workload=trace", f"workload.path={path}"]
    assert described in make_plan(config_of(*args, setting)).load.describe()


@pytest.mark.skipif(not TRACES.is_dir(), reason="the public traces are not here")
@pytest.mark.parametrize(
    ("name", "rows", "lengths"),
    [
        ("AzureLLMInferenceTrace_conv", 19_366, {0.5: (1020, 129)}),
        ("AzureLLMInferenceTrace_code", 8819, {0.5: (1469, 13)}),
        ("sharegpt_8k_lengths", 30_731, {0.5: (1730, 415), 0.9: (5696, 834)}),
    ],
)
def test_public_traces_load_whole(name, rows, lengths):
    loaded = Trace(path=str(TRACES / f"{name}.csv"), seed=0).generate(None)
    assert loaded.rows_read == rows == len(loaded.requests) + sum(loaded.dropped.values())
    for quantile, expected in lengths.items():
        found = np.quantile([row[1:] for row in rows_of(loaded)], quantile, axis=0)
        assert found == pytest.approx(expected, abs=1)
    times = [request.arrival_time for request in loaded.requests]
    assert times == sorted(times)
    assert times[0] == 0.0
