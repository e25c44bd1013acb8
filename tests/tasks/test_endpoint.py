"""A server of OpenAI's API under the lab's workloads: what is asked, timed and kept, and what
becomes of faults.
"""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml
from composed import checked, kept, run
from scripted_server import RETRY_AFTER, ScriptedServer, scripted

from sarathi_lab.config.errors import RunError, UserError
from sarathi_lab.config.paths import REPOSITORY
from sarathi_lab.engine.ledger import REQUEST_COLUMNS
from sarathi_lab.engine.request import Request
from sarathi_lab.results.result import Result
from sarathi_lab.run import main
from sarathi_lab.tasks.endpoint import client as client_module
from sarathi_lab.tasks.endpoint import task as task_module
from sarathi_lab.tasks.endpoint.protocol import (
    WORDS,
    AnswerError,
    Texts,
    dialects,
    one_line,
    read_event,
    words,
)

GRID = ["workload.num_requests=5", "seq_len=24", "pd_ratio=5"]  # 20 + 4 tokens


def settings_for(server: ScriptedServer | str, *args: str) -> list[str]:
    url = server if isinstance(server, str) else server.url
    return ["task=endpoint", f"task.base_url={url}", "tracking=none", *args]


def asked(server: ScriptedServer | str, output: Path, *args: str) -> int:
    """The exit code of a run against the server."""
    return main([*settings_for(server, *args), f"output={output}"])


def answered(server: ScriptedServer | str, folder: Path, *args: str) -> Result:
    """The result of the task against the server."""
    return run(folder, *settings_for(server, *args))


def run_folder(output: Path, marker: str = "run.json") -> Path:
    (path,) = output.rglob(marker)
    return path.parent


def prompts_file(folder: Path, *rows: tuple[str, int] | tuple[str, int, float]) -> str:
    """The setting of a workload with these (text, output_len, arrival_time)."""
    path = folder / "prompts.jsonl"
    names = ("prompt", "output_len", "arrival_time")
    path.write_text("\n".join(json.dumps(dict(zip(names, row, strict=False))) for row in rows))
    return f"workload.path={path}"


# -- a run -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A finished run of five requests, two at a time: (its folder, the server's requests, most in
    flight).
    """
    output = tmp_path_factory.mktemp("endpoint")
    with scripted(first=0.05, gap=0.02) as server:
        args = [*GRID, "batch=2", "task.vocab_size=50", "task.body={top_k: 7}"]
        assert asked(server, output, *args) == 0
        return run_folder(output), list(server.seen), server.most_in_flight, server.url


def test_a_run_leaves_the_tables_of_the_labs_own(whole):
    folder, *_ = whole
    requests, failures = (
        pd.read_parquet(folder / f"{name}.parquet") for name in ("requests", "failures")
    )
    assert list(requests)[: len(REQUEST_COLUMNS)] == list(REQUEST_COLUMNS)
    assert len(requests) == 5
    assert failures.empty
    assert (requests.prompt_len == 20).all()
    assert (requests.output_len == 4).all()
    assert requests.output_text.eq("0123").all()
    assert [len(times) for times in requests.token_times] == [4] * 5
    assert (
        requests[["first_scheduled_time", "num_preemptions", "bubble_time"]].isna().all(axis=None)
    )
    labels = json.loads((folder / "run.json").read_text())
    assert labels["status"] == "finished"
    assert (labels["policy"], labels["executor"], labels["model"], labels["batch"]) == (
        "vllm",
        "endpoint",
        "scripted",
        2,
    )
    assert labels["device"].startswith("127.0.0.1:")
    assert labels["name"].startswith("vllm workload.num_requests=5")
    assert labels["cautions"] == []
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert config["workload"]["num_requests"] == 5
    assert "policy" not in config, "what the server does is not for the lab's settings to say"


def test_the_summary_is_that_of_the_tables(whole):
    folder, *_ = whole
    requests = pd.read_parquet(folder / "requests.parquet")
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["duration"] == requests.finish_time.max()
    assert summary["throughput"] == pytest.approx(5 * 24 / summary["duration"])
    assert summary["ttft_p50"] == pytest.approx(
        (requests.first_token_time - requests.arrival_time).median()
    )
    assert summary["tbt_p50"] >= 0.019
    assert summary["num_failed"] == summary["num_retries"] == 0
    assert "scheduling_delay_p50" not in summary, "only the server knows it"
    # Three rounds of at most two requests, each 0.05 s and three gaps of 0.02 s long.
    assert summary["duration"] >= 3 * (0.05 + 3 * 0.02) - 0.01


def test_every_name_is_defined_in_the_metrics_page(whole):
    folder, *_ = whole
    page = (REPOSITORY / "sarathi_lab" / "METRICS.md").read_text()
    names = {
        re.sub(r"_(p\d+|mean)$", "", name)
        for name in json.loads((folder / "summary.json").read_text())
    }
    for table in ("requests", "failures", "iterations"):
        names |= set(pd.read_parquet(folder / f"{table}.parquet"))
    assert [name for name in sorted({*names, "send_delay_p99"}) if f"`{name}`" not in page] == []


def test_the_curves_account_for_every_token_and_request(whole):
    folder, *_ = whole
    requests = pd.read_parquet(folder / "requests.parquet")
    intervals = pd.read_parquet(folder / "iterations.parquet")
    assert intervals.num_prefill_tokens.sum() == requests.prompt_len.sum()
    assert intervals.num_prefills.sum() == 5
    assert intervals.num_decode_tokens.sum() == 5 * 3
    assert intervals.num_waiting.iloc[-1] == intervals.num_running.iloc[-1] == 0
    assert intervals.num_running.max() == 2
    assert intervals.num_waiting.max() >= 3
    assert intervals.end.iloc[-1] >= requests.finish_time.max()


def test_what_is_asked_is_the_workload(whole):
    _, seen, most_in_flight, _ = whole
    probe, *requests = seen
    assert probe.body["max_tokens"] < 4
    assert len(requests) == 5
    for body in (each.body for each in requests):
        assert len(body["prompt"]) == 20
        assert max(body["prompt"]) < 50
        assert body["max_tokens"] == body["min_tokens"] == 4
        assert body["ignore_eos"] is True
        assert body["temperature"] == 0
        assert body["top_k"] == 7
        assert body["model"] == "org/scripted"
        assert body["stream_options"] == {"include_usage": True}
    assert {each.path for each in seen} == {"/v1/completions"}
    assert most_in_flight == 2


# -- dialects --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("server", "args", "words_of", "path"),
    [
        ({}, [], "prompts as token ids, lengths by ignore_eos", "completions"),
        ({"takes_token_ids": False}, [], "prompts as text, lengths by ignore_eos", "completions"),
        (
            {"refused_fields": ("ignore_eos", "min_tokens")},
            [],
            "prompts as token ids, lengths by max_tokens alone",
            "",
        ),
        (
            {"refused_fields": ("ignore_eos", "stream_options"), "takes_token_ids": False},
            [],
            "prompts as text",
            "",
        ),
        ({}, ["task.prompts=text"], "prompts as text", "completions"),
        ({}, ["task.api=chat"], "chat API, prompts as text", "chat/completions"),
    ],
)
def test_a_server_is_asked_as_it_can_be(server, args, words_of, path, tmp_path):
    with scripted(**server) as running:
        result = answered(running, tmp_path, *GRID, *args)
        last = running.seen[-1]
    assert words_of in result.labels["asked"]
    assert last.path.endswith(path)
    requests = result.tables["requests.parquet"]
    assert requests.output_text.eq("0123").all()
    assert (requests.prompt_len == 20).all(), "a word a token"
    has_usage = "stream_options" not in running.refused_fields
    found = str(result.labels["cautions"])
    assert ("no usage from the server" in found) == (not has_usage)


def test_the_most_exact_way_comes_first():
    first, *_, last = dialects("completions", "auto")
    assert (first.sends_token_ids, first.fixes_length, first.asks_usage) == (True, True, True)
    assert (last.sends_token_ids, last.fixes_length, last.asks_usage) == (False, False, False)
    assert not any(dialect.sends_token_ids for dialect in dialects("chat", "auto"))
    assert all(dialect.sends_token_ids for dialect in dialects("completions", "token_ids"))


def test_texts_go_out_as_they_are_and_token_ids_as_as_many_words():
    texts = Texts()
    text = "Grüße, 世界"
    written = Request(0, 0.0, 1, 1, np.asarray(texts.encode(text), dtype=np.int32))
    drawn = Request(1, 0.0, 3, 1, np.asarray([5, 75, 6], dtype=np.int32))
    for as_token_ids in (True, False):
        assert texts.prompt(written, as_token_ids=as_token_ids) == text
    assert texts.prompt(drawn, as_token_ids=True) == [5, 75, 6]
    assert (
        texts.prompt(drawn, as_token_ids=False) == f"{WORDS[5]} {WORDS[75 % len(WORDS)]} {WORDS[6]}"
    )
    assert len(words(range(500)).split()) == 500
    assert len(set(WORDS)) == len(WORDS)


@pytest.mark.parametrize(
    ("chunk", "text", "is_piece", "is_last"),
    [
        ({"choices": [{"text": "a", "finish_reason": None}]}, "a", True, False),
        (
            {"choices": [{"text": "", "finish_reason": None}]},
            "",
            True,
            False,
        ),  # part of a character
        ({"choices": [{"text": "", "finish_reason": "stop"}]}, "", False, True),
        ({"choices": [{"text": "z", "finish_reason": "length"}]}, "z", True, True),
        ({"choices": [{"delta": {"role": "assistant", "content": ""}}]}, "", False, False),
        ({"choices": [{"delta": {"content": "a"}}]}, "a", True, False),
        ({"choices": [{"delta": {"reasoning_content": "hm", "content": None}}]}, "hm", True, False),
        ({"choices": [{"delta": {}, "finish_reason": "stop"}]}, "", False, True),
        ({"choices": [], "usage": {"completion_tokens": 3}}, "", False, False),
    ],
)
def test_an_event_is_a_token_an_end_or_neither(chunk, text, is_piece, is_last):
    event = read_event(json.dumps(chunk))
    assert (event.text, event.is_piece, event.is_last) == (text, is_piece, is_last)


def test_usage_is_read_wherever_it_stands():
    counts = {"prompt_tokens": 5, "completion_tokens": 3}
    for choices in ([], [{"text": "a", "finish_reason": "stop"}]):
        event = read_event(json.dumps({"choices": choices, "usage": counts}))
        assert (event.prompt_tokens, event.completion_tokens) == (5, 3)
    assert read_event("[DONE]").is_last


@pytest.mark.parametrize(
    "data",
    [
        *("{", "[]", '"x"', '{"choices": [1]}', '{"choices": 3}', '{"choices": {"a": 1}}'),
        *('{"usage": {"prompt_tokens": "x"}}', '{"choices": [{"text": 0}]}', "[" * 100_000),
        *('{"usage": {"prompt_tokens": true}}', '{"choices": [{"delta": 5}]}'),
    ],
)
def test_an_event_that_is_none_is_refused(data):
    with pytest.raises(AnswerError, match="malformed event"):
        read_event(data)


def test_no_event_raises_anything_else():
    """Whatever JSON stands where: an event that can be kept and printed, or a reason that can."""
    values = [None, True, 0, -1, 1.5, 1e999, 10**30, "", "a", "\ud800", [], [None], {}, {"a": 1}]
    shapes = (
        *("{}", '{{"choices": {}}}', '{{"choices": [{}]}}', '{{"choices": [{{"text": {}}}]}}'),
        *('{{"choices": [{{"delta": {}}}]}}', '{{"choices": [{{"delta": {{"content": {}}}}}]}}'),
        *('{{"choices": [{{"text": "a", "finish_reason": {}}}]}}', '{{"usage": {}}}'),
        *('{{"usage": {{"completion_tokens": {}}}}}', '{{"error": {}}}'),
        '{{"error": {{"message": {}}}}}',
    )
    for shape, value in itertools.product(shapes, values):
        try:
            event = read_event(shape.format(json.dumps(value)))
        except AnswerError as error:
            one_line(str(error)).encode()
        else:
            event.text.encode()
            counts = (event.prompt_tokens, event.completion_tokens)
            assert all(count is None or count >= 0 for count in counts)


# -- time ------------------------------------------------------------------------------------------


def test_slow_answers_delay_no_arrival_and_latency_counts_from_the_wish(tmp_path):
    arrivals = [0.1 * i for i in range(8)]
    rows = prompts_file(tmp_path, *(("fine", 2, arrival) for arrival in arrivals))
    with scripted(first=1.0) as server:
        result = answered(server, tmp_path, "workload=prompts", rows, "batch=1")
        received = np.array([seen.time for seen in server.of("fine")])
        assert server.most_in_flight >= 6, "batch is for requests that arrive at once"
    assert received - received[0] == pytest.approx(arrivals, abs=0.5)
    requests = result.tables["requests.parquet"]
    assert requests.arrival_time.tolist() == pytest.approx(arrivals)
    assert ((requests.first_token_time - requests.arrival_time) >= 1.0).all()
    assert 0 <= result.summary["send_delay_p99"] < 0.5
    assert result.labels["batch"] is None


# -- faults ----------------------------------------------------------------------------------------

FAULTS = {
    "breaks off": "incomplete chunked read",
    "slow": "no end within 3 s",
    "always busy": "status 503: no time",
    "fails": "status 500: out of memory",
    "refuses": "status 400: too long",
    "malformed": "malformed event",
    "error": "error in the stream: the engine died",
    "stops": "the stream ended before the answer did",
    "infinite": "completion_tokens=inf is no number of tokens",
    "negative": "completion_tokens=-1 is no number of tokens",
    "huge": f"completion_tokens={10**20} is no number of tokens",
    "none": "an answer without a token",
    "half": r"malformed event: '\ud83d' has half of a surrogate pair",
    "number": "malformed event: '0' is no text",
    "goes on": "a token after the answer's end",
}
WELL = ("fine", "busy", "no usage", "pairs", "ends early", "marked", "blank reason")


@pytest.fixture(scope="module")
def faulty(tmp_path_factory):
    """A run in which most requests fail, each in a way of its own: (its result, the server)."""
    output = tmp_path_factory.mktemp("faulty")
    rows = prompts_file(output, *((manner, 4) for manner in (*FAULTS, *WELL)))
    limits = ["task.timeout=3", "task.retries=2", "batch=20"]
    with scripted() as server:
        return answered(server, output, "workload=prompts", rows, *limits), server


def test_nothing_is_lost_and_every_failure_has_its_reason(faulty):
    result, _ = faulty
    requests, failures = (result.tables[f"{name}.parquet"] for name in ("requests", "failures"))
    everyone = list(range(len(FAULTS) + len(WELL)))
    assert sorted([*requests.request_id, *failures.request_id]) == everyone
    assert failures.request_id.tolist() == list(range(len(FAULTS)))
    for reason, words_of in zip(failures.reason, FAULTS.values(), strict=True):
        assert words_of in reason
        assert "\n" not in reason
    by_manner = failures.set_index(pd.Index(FAULTS))
    broken = ["breaks off", "malformed", "error", "stops"]
    assert by_manner.num_pieces[broken].tolist() == [2, 2, 2, 4]
    assert by_manner.status[["always busy", "fails", "refuses"]].tolist() == [503, 500, 400]
    assert result.summary["num_failed"] == len(FAULTS)
    assert result.summary["num_requests"] == len(WELL)


def test_a_busy_server_is_asked_again_when_it_says(faulty):
    result, server = faulty
    requests = result.tables["requests.parquet"].set_index(pd.Index(WELL))
    failures = result.tables["failures.parquet"].set_index(pd.Index(FAULTS))
    assert requests.num_retries["busy"] == failures.num_retries["always busy"] == 2
    assert len(server.of("always busy")) == 3, "no more than task.retries"
    times = np.array([seen.time for seen in server.of("busy")])
    assert (np.diff(times) >= RETRY_AFTER - 0.01).all()
    assert len(times) == 3
    assert requests.first_token_time["busy"] >= 2 * RETRY_AFTER, "waiting counts as latency"


def test_tokens_are_counted_by_usage_else_by_pieces_and_it_says_so(faulty):
    result, _ = faulty
    requests = result.tables["requests.parquet"].set_index(pd.Index(WELL))
    counts = dict.fromkeys(WELL, 4) | {"ends early": 2}
    assert requests.output_len.to_dict() == counts
    assert len(requests.token_times["pairs"]) == 2
    assert requests.wanted_output_len["ends early"] == 4
    cautions = "\n".join(result.labels["cautions"])
    assert "no usage from the server for 1 of 7 requests" in cautions
    assert "22 tokens came in 20 pieces" in cautions
    assert "1 of 7 answers ended before the workload's length" in cautions
    assert all(
        any(caution in str(line) for line in result.shown) for caution in cautions.split("\n")
    )


def test_a_run_whose_requests_all_fail_keeps_why(tmp_path, capsys):
    rows = prompts_file(tmp_path, ("fails", 4), ("fails", 4), ("refuses", 4))
    with scripted() as server, pytest.raises(RunError) as raised:
        kept(tmp_path / "run", *settings_for(server, "workload=prompts", rows))
    assert str(raised.value).startswith("all 3 requests failed, most of them with: status 500")
    assert "\n" not in str(raised.value)
    assert "2 of 3 requests failed: status 500: out of memory" in capsys.readouterr().out
    folder = run_folder(tmp_path, "failed.json")
    assert len(pd.read_parquet(folder / "failures.parquet")) == 3
    assert not (folder / "run.json").exists()


def test_an_interrupted_run_keeps_what_came(tmp_path, monkeypatch):
    whole = client_module.drive

    async def cut_off(client, path, requests, *rest):
        await whole(client, path, requests[:2], *rest)
        raise KeyboardInterrupt

    monkeypatch.setattr(client_module, "drive", cut_off)
    with scripted() as server, pytest.raises(KeyboardInterrupt):
        kept(tmp_path / "run", *settings_for(server, *GRID))
    folder = run_folder(tmp_path, "failed.json")
    assert json.loads((folder / "failed.json").read_text())["error"] == "interrupted"
    assert len(pd.read_parquet(folder / "requests.parquet")) == 2
    assert not (folder / "run.json").exists()


# -- what is refused in one line -------------------------------------------------------------------


def line_of(capsys) -> str:
    text = capsys.readouterr().err
    assert text.startswith("error: ")
    assert text.count("\n") == 1
    return text


def test_a_server_that_is_not_there(tmp_path, capsys):
    with scripted() as server:
        url = server.url
    assert asked(url, tmp_path, *GRID) == 2
    line = line_of(capsys)
    assert f"{url} can't be reached (" in line
    assert "start the server, or correct task.base_url" in line


def test_a_server_that_does_not_answer_in_time(tmp_path):
    words_of = r"answers no request of model org/scripted \(no end within 0.5 s\)"
    with scripted(first=5.0) as server, pytest.raises(UserError, match=words_of):
        answered(server, tmp_path, *GRID, "task.timeout=0.5")


def test_a_key_is_sent_and_wanted(tmp_path, monkeypatch):
    monkeypatch.delenv("SARATHI_LAB_API_KEY", raising=False)
    with scripted(key="secret") as server:
        with pytest.raises(
            UserError, match=r"wants an API key \(status 401\); put it into the var"
        ):
            answered(server, tmp_path, *GRID)
        monkeypatch.setenv("OTHER_KEY", "wrong")
        with pytest.raises(UserError, match="refuses the API key"):
            answered(server, tmp_path, *GRID, "task.api_key_variable=OTHER_KEY")
        monkeypatch.setenv("SARATHI_LAB_API_KEY", "secret\n")
        kept(tmp_path, *settings_for(server, *GRID))
        assert {seen.key for seen in server.seen} == {"Bearer secret"}
    files = [*tmp_path.rglob("*.json"), *tmp_path.rglob("*.yaml")]
    assert files
    assert not any("secret" in path.read_text() for path in files)


def test_no_message_has_the_key(tmp_path, monkeypatch):
    for key in ("sec\nret", "sécret"):
        monkeypatch.setenv("SARATHI_LAB_API_KEY", key)
        with pytest.raises(UserError, match="the key in SARATHI_LAB_API_KEY has char") as raised:
            checked(*settings_for("http://127.0.0.1:9/v1"))
        assert key not in str(raised.value)
    monkeypatch.setenv("SARATHI_LAB_API_KEY", "Basic c2VjcmV0")
    rows = prompts_file(tmp_path, ("fine", 2), ("repeats", 2))
    with scripted(key="Basic c2VjcmV0") as server:
        result = answered(server, tmp_path, "workload=prompts", rows)
    assert {seen.key for seen in server.seen} == {"Basic c2VjcmV0"}, "another scheme than Bearer"
    reasons = result.tables["failures.parquet"].reason
    assert reasons.tolist() == ["status 400: no such key: ***"]


@pytest.mark.parametrize(
    "url", ["http://user:hidden@127.0.0.1:9/v1", "http://user:hidden@h/v1?x={", "http://a@[h"]
)
def test_a_password_is_neither_printed_nor_written(url, tmp_path, capsys):
    """The address is refused before anything is written, however else it is wrong."""
    for more in ([], ["chnk=4"], ["-m", "seed=0,1"]):
        assert asked(url, tmp_path / "new", *more) == 2
        assert "hidden" not in line_of(capsys)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("server", "args", "words_of"),
    [
        ({"models": []}, [], "lists no model (status 200)"),
        (
            {"models": [{"id": "m", "max_model_len": 16}]},
            [],
            "the longest request has 24 tokens, but m at",
        ),
        (
            {"takes_token_ids": False},
            ["task.prompts=token_ids"],
            "prompt must be a string.); see the server's log",
        ),
        (
            {"refused_fields": ("max_tokens",)},
            [],
            "answers no request of model org/scripted (status 422",
        ),
    ],
)
def test_a_server_that_can_not_take_the_workload(server, args, words_of, tmp_path):
    with scripted(**server) as running, pytest.raises(UserError) as raised:
        answered(running, tmp_path, *GRID, *args)
    assert words_of in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_model_that_is_named_need_not_be_listed(tmp_path):
    own = ["task.model=mine", "task.server=own", "task.timeout=20"]
    with scripted(models=[]) as server:
        labels = answered(server, tmp_path, *GRID, *own).labels
        assert {seen.body["model"] for seen in server.seen} == {"mine"}
    assert (labels["policy"], labels["model"]) == ("own", "mine")
    assert labels["name"].startswith("own tracking=none workload")


@pytest.mark.parametrize(
    ("args", "words_of"),
    [
        (["task.base_url=null"], "task.base_url=None is no address"),
        (["task.base_url=localhost:8000"], "task.base_url=localhost:8000 is no address"),
        (["task.base_url=http://h:99999/v1"], "task.base_url=http://h:99999/v1 is no address"),
        (["task.base_url='http://[::1'"], "task.base_url=http://[::1 is no address"),
        (["task.base_url='http://h/v1?a=b'"], "task.base_url=http://h/v1?a=b is no address"),
        (["workload.rate=2"], "workload.rate=2 has no effect on closed arrivals"),
        (
            ["workload.arrivals=users", "workload.users=3"],
            "use workload.arrivals=closed with task.concurrency=3",
        ),
    ],
)
def test_workloads_and_addresses_that_are_refused(args, words_of):
    with pytest.raises(UserError, match=re.escape(words_of)):
        checked(*settings_for("http://127.0.0.1:9/v1", *args))


@pytest.mark.parametrize(
    ("args", "words_of"),
    [
        (["task.speed=2"], "task.speed is not a parameter of Endpoint"),
        (["policy=orca"], "policy=orca has no effect: task=endpoint does not read policy"),
        (["chunk=64"], "chunk=64 has no effect: task=endpoint does not read chunk"),
    ],
)
def test_settings_that_are_refused(args, words_of, tmp_path, capsys):
    assert asked("http://127.0.0.1:9/v1", tmp_path / "new", *args) == 2
    assert words_of in line_of(capsys)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("settings", "words_of"),
    [
        ({"api": "embeddings"}, "task.api=embeddings is unknown; use one of completions, chat"),
        (
            {"api": "chat", "prompts": "token_ids"},
            "task.prompts=token_ids is not for task.api=chat",
        ),
        ({"prompts": "words"}, "task.prompts=words is unknown"),
        ({"concurrency": 0}, "task.concurrency=0 is below 1"),
        ({"vocab_size": 2}, "task.vocab_size=2 is below 16"),
        ({"timeout": 0}, "task.timeout=0 must be"),
        ({"retries": -1}, "task.retries=-1 is below 0"),
        ({"model": 5}, "task.model=5 is no text"),
        ({"body": 5}, "task.body=5 holds no fields"),
        ({"api_key_variable": None}, "task.api_key_variable is no variable's name"),
        ({"api_key_variable": "sk-1234"}, "task.api_key_variable is no variable's name; use"),
    ],
)
def test_values_that_are_refused(settings, words_of):
    with pytest.raises(UserError, match=re.escape(words_of)):
        task_module.Endpoint(**{"base_url": "http://localhost/v1", "concurrency": 4, **settings})


def test_a_missing_package_is_one_line(monkeypatch):
    monkeypatch.setattr(task_module, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"package httpx2 is missing; run pip install 'sarathi-lab"):
        checked(*settings_for("http://127.0.0.1:9/v1"))
