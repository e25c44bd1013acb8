"""Traces in four formats: every row accounted for, times as written, prompts that share what the
trace shares.
"""

from __future__ import annotations

import copy
import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from composed import config_of

from sarathi_lab.config.errors import UserError
from sarathi_lab.engine.config import EngineConfig
from sarathi_lab.engine.loop import serve
from sarathi_lab.executor.simulated.executor import SimulatedExecutor
from sarathi_lab.policy import SarathiServe
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
        "after workload.max_requests=3, of which null takes all"
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
    assert loaded.notes == ["columns not read: Session ID"]


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
    loaded = load(mooncake((0, 512, 5, [1, 2, 3]), (1.5, 8, 2)), block_size=512)
    first, second = (one.prompt_token_ids for one in loaded.requests)
    assert (len(first), second) == (512, None)
    assert loaded.requests[1].arrival_time == 0.0015


PLAIN = "timestamp_s,input_tokens,output_tokens,priority\n0,10,5,2\n1.5,20,6,\n"


@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_priorities_are_read_whatever_separates_columns(load, separator):
    text = PLAIN.replace(",", separator)
    loaded = load(text)
    assert rows_of(loaded) == [(0.0, 10, 5), (1.5, 20, 6)]
    assert [request.priority for request in loaded.requests] == [2, 0]
    assert loaded.notes == []
    named = load(text.replace(f"{separator}2\n", f"{separator}high\n"))
    assert rows_of(named) == rows_of(loaded)
    assert named.notes == ["columns not read: priority"]
    drawn = load(text, priorities=[3, 4]).requests
    assert {request.priority for request in drawn} <= {3, 4}


@pytest.mark.filterwarnings("error")
def test_rows_with_more_cells_than_the_header_are_damaged(load):
    text = "timestamp_s,input_tokens,output_tokens\n0,10,5\n1,5,1000,20\n2,20,6,\n"
    loaded = load(text)
    assert rows_of(loaded) == [(0.0, 10, 5), (2.0, 20, 6)]
    assert "1 damaged (line 3: more cells than the 3 headings)" in loaded.describe()
    with pytest.raises(UserError, match="line 2: more cells than the 3 headings"):
        load("timestamp_s,input_tokens,output_tokens\n1,5,1000,20\n")


def test_a_table_without_a_header_is_told_so(load):
    with pytest.raises(UserError, match=r"12.5, 2000, 300, which no known.* columns in its first"):
        load("12.5,2000,300\n13.5,200,30\n")


def test_two_columns_of_one_name_are_refused(load):
    with pytest.raises(UserError, match="two columns of one name: timestamp_s, timestamp_s"):
        load("timestamp_s,timestamp_s,input_tokens,output_tokens\n1,2,3,4\n")


def test_pairs_of_lengths_need_no_time_unless_a_column_may_be_one(load):
    rows = "10,5\n20,6\n"
    assert rows_of(load("input_len,output_len\n" + rows)) == [(0.0, 10, 5), (0.0, 20, 6)]
    with pytest.raises(UserError, match="lacks created_time"):
        load("when,input_tokens,output_tokens\n1,10,5\n")


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
        ("", "is empty; name a trace"),
        (
            "a,b\n1,2\n",
            "the columns a, b, which no .*lengths.*Mooncake.*BurstGPT.*Azure TIMESTAMP",
        ),
        ('{"a": 1}\n', "has the columns a, which no known format has"),
        (
            '{"session_id": "s", "timestamp": 1, "input_length": 9, "hash_ids": []}',
            "and lacks output_length of Mooncake's; add or rename",
        ),
        (
            "created,input_tokens,output_tokens\n0.5,74,9\n",
            "and lacks created_time of Dynamo's; add or rename",
        ),
        ('{"timestamp": 0,\n "input_length": 1', "is cut off at line 2, as by a copy"),
        (AZURE + "2023-11-16 18:15:50,1\n", "line 2: GeneratedTokens is missing"),
        (AZURE + "now,1,1\n", "line 2: TIMESTAMP=now"),
        (AZURE + "3000-11-16 18:15:50,1,1\n", "line 2: "),
        (
            AZURE + '2023-11-16 18:15:50,1,1\n"2023-11-16 18:15:51,1,1\n',
            "behind line 2: unexpected end of data; correct it",
        ),
        (AZURE + "2023-11-16 18:15:50,0,1\n", "all 1 rows were dropped .1 without prompt or"),
        (BURST + "-1,m,1,1,2,x\n", "line 2: Timestamp=-1"),
        (BURST + "nan,m,1,1,2,x\n", "line 2: "),
        (BURST + "1e300,m,1,1,2,x\n", "line 2: "),
        (BURST + f"1,m,{10**30},1,2,x\n", "line 2: "),
        (BURST + "1,m,1.5,1,2,x\n", "line 2: "),
        (mooncake((0, 10, 1, ["x"])), "line 1: hash_ids=..x"),
        (mooncake((0, 10, 1, 5)), "line 1: hash_ids=5"),
        (mooncake((None, 10, 1, [])), "line 1: "),
        (mooncake((True, 10, 1, [])), "line 1: "),
        (LENGTHS, "empty but for its header"),
    ],
)
def test_broken_files_are_named_by_line(load, text, words):
    with pytest.raises(UserError, match=words):
        load(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (AZURE + "2023-11-16 18:15:50,1,1\n2023-11-16 18:15:50,x,1\n", "line 3: ContextTokens=x"),
        (mooncake((0, 10, 1, [])) + "{\n", "line 2 is not JSON"),
        (mooncake((0, 10, 1, []), (1,)), "line 2: input_length is missing"),
        (
            '[\n{"timestamp": 0, "input_length": 1, "output_length": 1},\n{"timestamp": 0, "inp',
            "is cut off at line 3",
        ),
    ],
)
def test_a_broken_row_does_not_refuse_the_others(load, text, words):
    loaded = load(text)
    assert len(loaded.requests) == 1
    described = loaded.describe()
    assert "2 rows read = 1 used + 1 dropped, 1 damaged (" in described
    assert words in described


BAILIAN = ("chat_id", "parent_chat_id", "timestamp", "input_length", "output_length", "hash_ids")


def objects(keys, *rows):
    return "\n".join(json.dumps(dict(zip(keys, row, strict=False))) for row in rows) + "\n"


def hits(loaded, block_size=16) -> list[int]:
    """Cached tokens of each request that is served in turn, with room for all."""
    engine = EngineConfig(
        SarathiServe(chunk=4096), 8, num_blocks=2000, block_size=block_size, shares_prefixes=True
    )
    executor = SimulatedExecutor(lambda batch: 0.001)
    served = serve(loaded.arrivals(), engine, executor).requests()
    return served.sort_values("request_id").prefix_hit_tokens.tolist()


def test_blocks_have_the_size_that_their_numbers_say(load):
    small = mooncake(*[(100 * i, 1000, 5, [*range(63)]) for i in range(3)])
    loaded = load(small)
    assert "hash_ids of 16 tokens each" in loaded.describe()
    assert hits(loaded) == [0, 992, 992]
    ragged = mooncake((0, 1000, 5, [1]), (1, 1000, 5, [1, 2, 3, 4, 5, 6, 7]))
    with pytest.raises(UserError, match=r"no size of blocks .*add workload\.block_size=512"):
        load(ragged)
    assert hits(load(ragged, block_size=512)) == [0, 512]
    with pytest.raises(UserError, match="block_size=16 has no effect"):
        load(BURST + "5,m,10,5,15,x\n", block_size=16)


def test_bailians_times_are_seconds_and_its_blocks_small(load):
    text = objects(BAILIAN, (1, -1, 10.5, 40, 5, [1, 2, 3]), (2, 1, 12.5, 64, 5, [1, 2, 3, 4]))
    loaded = load(text)
    assert rows_of(loaded) == [(0.0, 40, 5), (2.0, 64, 5)]
    assert hits(loaded) == [0, 32]  # the third block of the first prompt is not full
    assert loaded.notes == []
    without_ids = load(objects(BAILIAN[:5], (1, -1, 10.5, 40, 5)))
    assert without_ids.notes == ["columns not read: parent_chat_id"]


SESSIONS = (
    {"session_id": "a", "timestamp": 0, "input_length": 1024, "output_length": 8},
    {"session_id": "b", "timestamp": 50, "input_length": 1024, "output_length": 8},
    {"session_id": "a", "delay": 500, "input_length": 1536, "output_length": 8},
)


@pytest.mark.parametrize("has_ids", [True, False])
def test_turns_wait_for_answers_and_find_their_history(load, has_ids):
    ids = ([0, 100], [1, 101], [0, 100, 200])
    rows = [
        {**row, "hash_ids": block_ids} if has_ids else row
        for row, block_ids in zip(SESSIONS, ids, strict=True)
    ]
    loaded = load("\n".join(map(json.dumps, rows)))
    assert "2 sessions, whose turns wait for their answers" in loaded.describe()
    engine = EngineConfig(
        SarathiServe(chunk=4096), 8, num_blocks=2000, block_size=16, shares_prefixes=True
    )
    served = serve(loaded.arrivals(), engine, SimulatedExecutor(lambda batch: 0.001)).requests()
    table = served.set_index(["arrival_time"])
    first, second = served[served.prompt_len == 1024].itertuples()
    assert (first.arrival_time, second.arrival_time) == (0.0, 0.05)
    (later,) = served[served.prompt_len == 1536].itertuples()
    assert later.arrival_time == pytest.approx(first.finish_time + 0.5)
    # All of the first prompt, and without ids what of its answer has keys.
    assert later.prefix_hit_tokens == 1024
    assert len(table) == 3


def test_turns_without_any_time_begin_as_the_settings_say(load):
    rows = [{"conversation_id": "a", "input_length": 100, "output_length": 4}]
    rows.append({**rows[0], "delay": 250, "input_length": 150})
    loaded = load("\n".join(map(json.dumps, rows)), rate=1.0)
    assert loaded.arrival_kind == "poisson"
    ((first, second),) = loaded.sessions
    assert (first.request.arrival_time, second.pause) == (0.0, 0.25)
    assert hits(loaded) == [0, 96]


def test_sessions_are_sent_by_users_or_at_a_rate(load):
    text = "\n".join(map(json.dumps, SESSIONS))
    engine = EngineConfig(SarathiServe(chunk=4096), 8, num_blocks=2000, block_size=16)

    def served(**settings):
        arrivals = load(text, **settings).arrivals()
        return serve(arrivals, engine, SimulatedExecutor(lambda batch: 0.001)).requests()

    by_one_user = served(arrivals="users", users=1).sort_values("arrival_time")
    assert by_one_user.prompt_len.tolist() == [1024, 1536, 1024]
    last, after = by_one_user.finish_time.iloc[1], by_one_user.arrival_time.iloc[2]
    assert after == pytest.approx(last)
    # Two conversations, 50 ms apart: one in a second.
    assert load(text, rate=1.0).requests[-1].arrival_time == pytest.approx(1.0)
    at_once = served(arrivals="closed")
    assert sorted(at_once.arrival_time)[:2] == [0.0, 0.0]


def test_weka_conversations_pause_to_think_and_number_their_own_blocks(load):
    turns = [
        {"t": 0.0, "in": 128, "out": 4, "hash_ids": [0, 1], "think_time": 0.0},
        {"t": 3.0, "in": 192, "out": 4, "hash_ids": [0, 1, 2], "think_time": 2.0},
    ]
    conversations = [
        {"id": name, "block_size": 64, "hash_id_scope": "local", "requests": turns}
        for name in ("x", "y")
    ]
    loaded = load("\n".join(map(json.dumps, conversations)))
    assert hits(loaded) == [0, 128, 0, 128]
    assert [turn.pause for session in loaded.sessions for turn in session[1:]] == [2.0, 2.0]
    # Each conversation has a clock of its own, unless one begins later.
    assert "t counts within each conversation" in " ".join(loaded.notes)
    spread = load("\n".join(map(json.dumps, conversations)), rate=0.5)
    assert spread.requests[2].arrival_time > 0
    late = {**turns[0], "t": 7.0}
    inner = {"t": 8.0, "type": "subagent", "requests": [late, late]}
    conversations.append({"id": "z", "requests": [late, inner]})
    loaded = load("\n".join(map(json.dumps, conversations)))
    assert not any("t counts" in note for note in loaded.notes)
    assert loaded.requests[-1].arrival_time == 7.0
    assert "1 damaged (conversation z: an entry without `in`" in loaded.describe()


@pytest.mark.parametrize("changes", [{"requests": None}, {"requests": 5}, {}], ids=str)
@pytest.mark.parametrize("is_first", [True, False])
def test_a_weka_conversation_without_requests_is_a_damaged_row(changes, is_first, load):
    turn = {"t": 0.0, "in": 128, "out": 4, "hash_ids": [0, 1], "think_time": 0.0}
    rows = [{"id": "x", "requests": [turn]}, {"id": "y", **changes}]
    if is_first:
        rows.reverse()
    loaded = load("\n".join(map(json.dumps, rows)))
    assert len(loaded.requests) == 1
    line = 1 if is_first else 2
    said = f"2 rows read = 1 used + 1 dropped, 1 damaged (line {line}: requests is not a list"
    assert said in loaded.describe()


FORMATS_OF_JSON = {
    "mooncake": [
        {**row, "hash_ids": [number, 9], "turn_index": 0} for number, row in enumerate(SESSIONS)
    ],
    "bailian": [dict(zip(BAILIAN, (1, -1, 10.5, 40, 5, [1, 2, 3]), strict=True))] * 2,
    "llmservingsim": [{"arrival_time_ns": 5, "input_toks": 7, "output_toks": 9}] * 2,
    "weka": [
        {
            "id": "x",
            "block_size": 64,
            "hash_id_scope": "local",
            "requests": [
                {"t": 0.0, "in": 128, "out": 4, "hash_ids": [0, 1], "think_time": 0.0},
            ],
        }
    ]
    * 2,
}
VALUES = (None, "x", [], {}, -1, float("inf"))


def mutations(content):
    """Yield what a part of nested JSON may be in place of itself: another value, or gone."""
    yield from VALUES
    entries = content.items() if isinstance(content, dict) else ()
    if isinstance(content, list):
        entries = enumerate(content)
    for key, value in entries:
        for other in mutations(value):
            changed = copy.copy(content)
            changed[key] = other
            yield changed
        rest = copy.copy(content)
        del rest[key]
        yield rest


@pytest.mark.parametrize("name", FORMATS_OF_JSON)
def test_no_value_of_a_trace_gives_more_than_a_line(name, load):
    first, *others = FORMATS_OF_JSON[name]
    refusals = []
    for changed in mutations(first):
        try:
            load(json.dumps([*others, changed]))
        except UserError as error:
            refusals.append(str(error))
    assert not any("\n" in refusal for refusal in refusals)


@pytest.mark.parametrize(
    "text",
    [
        "arrived_at,num_prefill_tokens,num_decode_tokens\n0.5,74,9\n2.5,290,5\n",
        "request_id,request_type,application_id,arrival_timestamp,batch_size,prompt_size,token_size"
        "\n0,2,0,0.5,1,74,9\n1,2,0,2.5,1,290,5\n",
        objects(
            ("arrival_time_ns", "input_toks", "output_toks"),
            (5 * 10**8, 74, 9),
            (25 * 10**8, 290, 5),
        ),
        objects(
            ("created_time", "input_tokens", "output_tokens", "hash_ids"),
            (500, 74, 9, [0]),
            (2500, 290, 5, [1]),
        ),
        "\ufeff" + AZURE + "2024-05-10 00:00:00.5,74,9\n2024-05-10 00:00:02.5,290,5\n",
        json.dumps(
            [
                {"timestamp": 500, "input_length": 74, "output_length": 9},
                {"timestamp": 2500, "input_length": 290, "output_length": 5},
            ]
        ),
    ],
    ids=["vidur", "splitwise-sim", "LLMServingSim", "Dynamo", "byte order mark", "list"],
)
def test_formats_that_look_alike_have_their_own_times(load, text):
    assert rows_of(load(text)) == [(0.0, 74, 9), (2.0, 290, 5)]


def test_one_weka_conversation_keeps_its_times(load):
    requests = [{"t": time, "in": 128, "out": 4, "hash_ids": [0, 1]} for time in (0.0, 5.0)]
    assert rows_of(load(json.dumps({"requests": requests}))) == [(0.0, 128, 4), (5.0, 128, 4)]


def test_a_folder_is_refused_with_how_to_join_its_files(tmp_path):
    with pytest.raises(UserError, match=r"is a folder; .* jq -c"):
        Trace(path=str(tmp_path), seed=0).generate(None)


def test_a_packed_trace_is_read(tmp_path):
    path = tmp_path / "trace.jsonl.gz"
    path.write_bytes(gzip.compress(mooncake((0, 10, 1), (500, 20, 2)).encode()))
    assert rows_of(Trace(path=str(path), seed=0).generate(None)) == [(0.0, 10, 1), (0.5, 20, 2)]


def test_vidurs_rows_may_share_blocks_as_frontiers_do(load):
    rows = "0.0,32,8,7,11|22\n1.0,48,4,7,11|22|33\n2.0,16,4,8,\n"
    header = "arrived_at,num_prefill_tokens,num_decode_tokens,session_id,block_hash_ids\n"
    loaded = load(header + rows)
    assert hits(loaded) == [0, 32, 0]
    assert "columns not read: session_id" in loaded.describe()


def test_a_trace_that_powershell_has_written_is_read(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text("num_prefill_tokens,num_decode_tokens\n74,9\n", encoding="utf-16")
    assert rows_of(Trace(path=str(path), seed=0).generate(None)) == [(0.0, 74, 9)]


def test_columns_that_may_matter_are_named(load):
    rows = "2025-03-10 00:00:00,2,10,5\n"
    loaded = load("TIMESTAMP,NumImages,ContextTokens,GeneratedTokens\n" + rows)
    assert "columns not read: NumImages" in loaded.describe()
    assert (
        "not read: arrival_ms"
        in load("num_prefill_tokens,num_decode_tokens,arrival_ms\n1,2,3\n").describe()
    )
    assert "not read" not in load(LENGTHS + "74,918,992,0.08\n").describe()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[{"id": "x", "conversations": []}]', "workload=prompts workload.path=FILE reads it"),
        ('{"messages": [], "output_length": 4}', "workload=prompts workload.path=FILE reads it"),
        ('{"timestamp": 1, "text_input": "x"}', "prompt and output_len for workload=prompts"),
        ('{"prompt": "x", "output_len": 4}', "workload=prompts workload.path=FILE reads it"),
        ('{"sub_requests": []}', "write each as an object with session_id"),
        ('{"request_throughput": 1.0}', "task=validate task.run=FILE reads it"),
        ("requests:\n  - prompt: 100\n", "is YAML; name a trace"),
    ],
)
def test_other_files_are_refused_with_what_reads_them(load, text, words):
    with pytest.raises(UserError, match=words):
        load(text)


def test_other_kinds_of_files_are_named(tmp_path):
    path = tmp_path / "trace.parquet"
    path.write_bytes(b"PAR1\x00\xff")
    with pytest.raises(UserError, match="is a Parquet file, which is not read here"):
        Trace(path=str(path), seed=0).generate(None)


def test_a_changed_file_is_read_again(load):
    for number in (1, 3):
        assert len(load(LENGTHS + "74,918,992,0.08\n" * number).requests) == number


@pytest.mark.parametrize(
    ("setting", "described"),
    [
        ("batch=2", "3 rows read = 2 used + 1 dropped, 1 over max_len=4096"),
        ("max_model_len=600", "3 rows read = 1 used + 2 dropped, 2 over max_len=600"),
        ("workload.max_len=6000", "3 rows read = 3 used + 0 dropped"),
        ("workload.max_requests=1", "1 over max_len=4096, 1 after workload.max_requests=1"),
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


@pytest.mark.parametrize(
    ("time", "values", "gap", "note"),
    [
        ("timestamp", (0.5, 2.0), 1.5, "seconds"),
        ("timestamp", (1767600000, 1767600002), 2, "seconds"),
        ("timestamp", (1767600000000, 1767600001500), 1.5, "milliseconds"),
        ("timestamp", (1767600000000000, 1767600001500000), 1.5, "microseconds"),
        ("timestamp", (7, 7), 0, "seconds"),
        ("timestamp", ("2026-01-05T08:00:00Z", "2026-01-05T08:00:01.5Z"), 1.5, "dates"),
        ("arrival_s", (1, 2.5), 1.5, ""),
        ("arrival_time", (0.5, 2.0), 1.5, ""),
        ("arrival_time_s", (1, 2.5), 1.5, ""),
        ("timestamp_ms", (100, 1600), 1.5, ""),
    ],
)
def test_plain_files_have_times_by_their_name_or_size(load, time, values, gap, note):
    first, second = values
    text = f"{time},prompt_tokens,completion_tokens\n{first},74,9\n{second},80,8\n"
    loaded = load(text)
    assert rows_of(loaded) == [(0, 74, 9), (pytest.approx(gap), 80, 8)]
    assert not note or f"timestamp read as {note}" in loaded.notes


def test_whole_times_without_a_unit_are_refused_with_the_names_that_tell(load):
    header = "timestamp,prompt_tokens,completion_tokens\n"
    with pytest.raises(UserError, match=r"up to 250000 as timestamp.*timestamp_s or timestamp_ms"):
        load(header + "0,74,9\n250000,80,8\n")


def test_a_pause_of_no_conversation_is_named(load):
    line = '{"t": %d, "in": 128, "out": 10, "hash_ids": [1, 2], "think_time": 0.5}\n'
    loaded = load(line % 0 + line % 2)
    assert rows_of(loaded) == [(0, 128, 10), (2, 128, 10)]
    assert "columns not read: think_time" in str(loaded)
