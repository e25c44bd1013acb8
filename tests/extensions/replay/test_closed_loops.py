"""Clients whose users wait for their answers: replayed as they sent."""

from __future__ import annotations

import json
import math

import numpy as np
import pandas as pd
import pytest
from composed import config_of, refusal_of, run

from sarathi_lab.config.instantiate import build
from sarathi_lab.engine.arrivals import Arrivals, ClosedLoop
from sarathi_lab.engine.loop import serve
from sarathi_lab.engine.request import Request
from sarathi_lab.extensions.replay.bench_files import read_benchmarks
from sarathi_lab.extensions.replay.clients import (
    client_of_rate,
    concurrency,
)

USERS, THINK_TIME, RATE = 3, 0.004, 30.0
SERVER = {"tensor_parallel_size": 1, "max_num_batched_tokens": 512, "max_num_seqs": 8}
SERVER |= {"version": "0.12.0", "gpu": "H100", "gpu_memory_utilization": 0.9}
VLLM = {"backend": "vllm", "model_id": "meta-llama/Llama-3.1-8B", "completed": 24}
VLLM |= {"request_rate": "inf", "max_concurrency": USERS, **SERVER}


def vllm_file(requests: pd.DataFrame, **more) -> str:
    """A result of vLLM's client of what a simulation has served."""
    waits = requests.first_token_time - requests.arrival_time
    lists = {
        "input_lens": requests.prompt_len.tolist(),
        "output_lens": requests.output_len.tolist(),
        "start_times": (1000 + requests.arrival_time).tolist(),
        "ttfts": waits.tolist(),
        "itls": [np.diff(times).tolist() for times in requests.token_times],
        "errors": [""] * len(requests),
    }
    return json.dumps({**VLLM, **lists, **more})


def lengths() -> list[tuple[int, int]]:
    rng = np.random.default_rng(1)
    prompts, outputs = rng.integers(50, 900, 24), rng.integers(5, 40, 24)
    return list(zip(prompts.tolist(), outputs.tolist(), strict=True))


def check(path, *settings):
    cfg = config_of("task=validate", f"task.run={path}", *settings)
    (case,) = build(cfg.task).check(cfg)
    return case


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """Requests that the simulated server has served: to users who think, to a rate and users, and
    at a rate alone.
    """
    blank = pd.DataFrame(lengths(), columns=["prompt_len", "output_len"])
    blank = blank.assign(arrival_time=0.0, first_token_time=1.0, token_times=[[1.0, 1.5]] * 24)
    path = tmp_path_factory.mktemp("blank") / "result.json"
    path.write_text(vllm_file(blank, max_concurrency=None))
    replay = check(path).as_run
    times = np.cumsum(np.random.default_rng(2).exponential(1 / RATE, 24))
    times -= times[0]
    requests = [Request(i, times[i], *size) for i, size in enumerate(lengths())]
    sources = {
        "users": ClosedLoop(requests, USERS, THINK_TIME),
        "both": ClosedLoop(requests, USERS, keeps_times=True),
        "rate": Arrivals(requests),
    }
    return {
        name: serve(source, replay.engine, replay.executor()).requests()
        for name, source in sources.items()
    }


@pytest.fixture
def closed(served, tmp_path):
    path = tmp_path / "result.json"
    path.write_text(vllm_file(served["users"]))
    return path


def test_a_closed_loop_is_replayed_as_it_was_run(closed):
    case = check(closed)
    loop = case.as_run.loop
    assert (loop.users, loop.think_time) == (USERS, pytest.approx(THINK_TIME, abs=1e-6))
    assert "a closed loop of 3 users, 0.004 s between" in " ".join(case.as_run.describe())
    load = case.as_run.load()
    for column in ("arrival_time", "first_token_time", "finish_time"):
        expected = case.run.requests[column].to_numpy(dtype=float)
        assert load.requests[column].to_numpy() == pytest.approx(expected, abs=1e-6)
    assert load.requests.prompt_len.tolist() == [prompt for prompt, _ in lengths()]


def test_a_faster_server_ends_sooner_with_as_many_users(closed):
    case = check(closed, "executor.tensor_parallel=4")
    as_run, what_if = case.as_run.load(), case.what_if.load()
    durations = [load.requests.finish_time.max() for load in (as_run, what_if)]
    # A token takes half as long: with the recorded times it would end no sooner than the last is
    # sent, after 97 % of the time.
    assert durations[1] < 0.65 * durations[0]
    assert [concurrency(load.requests) for load in (as_run, what_if)] == [USERS, USERS]
    recorded = check(closed, "executor.tensor_parallel=4", "workload.arrivals=null").what_if
    assert recorded.loop is None
    assert recorded.load().requests.finish_time.max() > 0.9 * durations[0]


def test_a_rate_and_users_apply_together(served, tmp_path):
    path = tmp_path / "result.json"
    path.write_text(vllm_file(served["both"], request_rate=RATE))
    case = check(path)
    assert "users, whose requests are due at 30/s" in " ".join(case.as_run.describe())
    due = np.array(case.as_run.loop.due)
    sent = served["both"].arrival_time.to_numpy()
    assert due == pytest.approx(sent)
    requests = case.as_run.load().requests
    assert concurrency(requests) == USERS
    assert requests.finish_time.max() == pytest.approx(served["both"].finish_time.max(), rel=0.05)
    # So few that the limit can't be reached: the recorded times count.
    path.write_text(vllm_file(served["both"], request_rate=RATE, max_concurrency=24))
    assert check(path).as_run.loop is None


def guidellm(strategy, requests):
    rows = [
        {
            "prompt_tokens": row.prompt_len,
            "output_tokens": row.output_len,
            "request_start_time": 1000 + row.arrival_time,
            "time_to_first_token_ms": 1e3 * (row.first_token_time - row.arrival_time),
            "request_latency": row.finish_time - row.arrival_time,
        }
        for row in requests.itertuples()
    ]
    config = {"strategy": strategy, "backend": {"model": "meta-llama/Llama-3.1-8B"}}
    return json.dumps({"benchmarks": [{"config": config, "requests": {"successful": rows}}]})


@pytest.mark.parametrize(
    ("strategy", "users"),
    [
        ({"type_": "synchronous", "max_concurrency": 512}, 1),
        ({"type_": "concurrent", "streams": 3}, 3),
        ({"type_": "throughput", "max_concurrency": 5}, 5),
        ({"type_": "throughput"}, None),
        ({"type_": "poisson", "rate": 30.0, "max_concurrency": 512}, None),
        ({"type_": "constant", "rate": 30.0, "max_concurrency": 5}, 5),
    ],
    ids=str,
)
def test_the_strategy_of_guidellm_is_that_of_the_replay(strategy, users, served, tmp_path):
    path = tmp_path / "benchmarks.json"
    path.write_text(guidellm(strategy, served["users"]))
    (benchmark,) = read_benchmarks(path)
    assert benchmark.client.users == users
    assert benchmark.client.is_stated
    assert benchmark.client.rate == strategy.get("rate", math.inf)
    is_even = strategy["type_"] == "constant"
    assert benchmark.client.cv == 1.0 - is_even


@pytest.mark.parametrize("limit", [None, 0, "inf", math.inf, "Infinity", "none", "x"])
def test_no_limit_of_requests_is_written_in_many_ways(limit):
    assert client_of_rate(2.0, limit).users is None


def aiperf(requests):
    records = []
    for row in requests.itertuples():
        values = {
            "input_sequence_length": row.prompt_len,
            "output_sequence_length": row.output_len,
            "time_to_first_token": 1e3 * (row.first_token_time - row.arrival_time),
            "request_latency": 1e3 * (row.finish_time - row.arrival_time),
        }
        metadata = {"benchmark_phase": "profiling"}
        metadata["request_start_ns"] = int(1e12 + 1e9 * row.arrival_time)
        metrics = {name: {"value": value} for name, value in values.items()}
        records.append(json.dumps({"metadata": metadata, "metrics": metrics}))
    return "\n".join(records)


def test_what_a_file_does_not_state_is_stated_by_the_user(served, tmp_path, capsys):
    path = tmp_path / "profile_export.jsonl"
    path.write_text(aiperf(served["users"]))
    settings = ["hardware=h100", "model=llama3.1-8b", "task.chunk=512", "task.batch=8"]
    replay = check(path, *settings).as_run
    assert (replay.loop, replay.client.is_stated) == (None, False)
    case = check(path, *settings, "workload.users=2")
    assert case.what_if is None
    said = " ".join(case.as_run.describe())
    assert "as you state: workload.users=2" in said
    path.write_text(aiperf(served["rate"]))
    assert check(path, *settings).as_run.loop is None
    case = check(path, *settings, "workload.users=4")
    assert (case.as_run.loop.users, case.what_if) == (4, None)
    # The summary beside the records states how they were sent.
    load = {"input_config": {"loadgen": {"concurrency": 7, "request_rate": None}}}
    (tmp_path / "profile_export_aiperf.json").write_text(json.dumps(load))
    assert check(path, *settings).as_run.loop.users == 7


def test_other_users_than_a_file_states_are_a_further_replay(closed, tmp_path, capsys):
    settings = ["task=validate", f"task.run={closed}", "workload.users=6"]
    result = run(tmp_path, *settings, "workload.think_time=0")
    said = capsys.readouterr().out
    what_if = "workload.users=6 (workload.users=3), workload.think_time=0 s (0.004 s)"
    assert f"what if, as you state: {what_if}" in said
    assert concurrency(result.tables["requests.parquet"]) == 6
    assert result.labels["workload.arrivals"] == "users"
    case = check(closed, "workload.users=3")
    assert case.what_if is None


def test_a_think_time_is_that_of_the_further_replay_only(closed, served, tmp_path):
    as_recorded = check(closed).as_run
    case = check(closed, "workload.think_time=2")
    assert case.as_run.loop == as_recorded.loop
    assert case.what_if.loop.think_time == 2
    assert case.changed == ["workload.think_time=2 s (0.004 s)"]
    path = tmp_path / "rate.json"
    path.write_text(vllm_file(served["rate"], request_rate=RATE, max_concurrency=None))
    case = check(path, "workload.users=2", "workload.think_time=0.5")
    assert case.changed[-1].startswith("workload.think_time=0.5 s")
    typed = ["task=validate", f"task.run={path}", "workload.think_time=2"]
    refusal = refusal_of(*typed)
    assert "workload.think_time=2 has no effect" in refusal
    assert "drop it, or add workload.users=8" in refusal
    assert "has no effect" in refusal_of(*typed, "workload.arrivals=null")


def test_arrivals_of_another_kind_are_refused(closed):
    for setting, words in (
        ("workload.arrivals=poisson", "use null for their recorded times"),
        ("workload.users=0", "workload.users=0 is below 1"),
        ("workload.think_time=-1", "workload.think_time=-1 must be a finite number from 0"),
    ):
        assert words in refusal_of("task=validate", f"task.run={closed}", setting)
    refusal = refusal_of(
        "task=validate", f"task.run={closed}", "workload.arrivals=null", "workload.users=3"
    )
    assert "has no effect on the recorded times" in refusal


def test_a_trace_is_served_to_users(tmp_path):
    path = tmp_path / "trace.csv"
    rows = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    rows += [f"2023-11-16 18:15:{46 + i}.0,40,5" for i in range(6)]
    path.write_text("\n".join(rows))
    settings = ["executor=simulated", "baselines=[]", "workload=trace", f"workload.path={path}"]
    settings += ["workload.arrivals=users", "workload.users=2"]
    result = run(tmp_path, "task=serve", *settings)
    assert concurrency(result.tables["requests.parquet"]) == 2
    assert result.tables["requests.parquet"].finish_time.max() < 1
