"""Files of further clients, parts of files, conversations and cached tokens: what is replayed and
what is said of the rest. All files are invented.
"""

from __future__ import annotations

import gzip
import json
import re
import sqlite3
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from composed import config_of, refusal_of

from sarathi_lab.config.errors import UserError
from sarathi_lab.config.instantiate import build
from sarathi_lab.extensions.replay.bench_files import read_benchmarks

MODEL = "meta-llama/Llama-3.1-8B"
# Of each request: seconds at which it is sent, prompt tokens, and seconds of its tokens after that.
REQUESTS = [(1000.0, 100, [0.2, 0.3, 0.5]), (1000.5, 50, [0.1, 0.15])]
EXPECTED = {
    "prompt_len": [100, 50],
    "output_len": [3, 2],
    "arrival_time": [0.0, 0.5],
    "first_token_time": [0.2, 0.6],
    "finish_time": [0.5, 0.65],
}
MEANS = {"ttft": 0.06, "tpot": 0.011, "latency": 0.4}
NO_MEANS = {"backend": "vllm", "completed": 2, "total_input_tokens": 8, "total_output_tokens": 8}


def gaps(times: list[float]) -> list[float]:
    return np.diff(times).tolist()


def inference_perf(sent, prompt_len, times, **changes):
    info = {
        "input_tokens": prompt_len,
        "output_tokens": len(times),
        "output_token_times": [sent + time for time in times],
    }
    ends = {"start_time": sent, "end_time": sent + times[-1]}
    request = json.dumps({"model": MODEL})
    return {**ends, "request": request, "response": "x", "info": info, "error": None, **changes}


def newer_inference_perf(sent, prompt_len, times):
    old = inference_perf(sent, prompt_len, times)
    info = old.pop("info")
    usage = {"prompt_tokens_details": {"cached_tokens": 32}}
    response = {
        "output_tokens": info["output_tokens"],
        "output_token_times": info["output_token_times"],
        "server_usage": usage,
    }
    return {**old, "info": {"input_tokens": prompt_len, "response_metrics": response}}


def newest_inference_perf(sent, prompt_len, times):
    """With what a request had of text beside what it had of images and sound."""
    newer = newer_inference_perf(sent, prompt_len, times)
    info = {**newer["info"], "request_metrics": {"text": {"input_tokens": prompt_len}}}
    del info["input_tokens"]
    return {**newer, "info": info}


def inference_perf_by_server(sent, prompt_len, times):
    """With the tokens as the server counted them."""
    old = inference_perf(sent, prompt_len, times)
    times = old["info"]["output_token_times"]
    usage = {"prompt_tokens": prompt_len}
    return {
        **old,
        "info": {"response_metrics": {"output_token_times": times, "server_usage": usage}},
    }


def vllm_detailed(**changes):
    return {
        "backend": "vllm",
        "model_id": MODEL,
        "request_rate": 2.0,
        "max_concurrency": None,
        "completed": 2,
        "input_lens": [100, 50],
        "output_lens": [3, 2],
        "start_times": [1000.0, 1000.5],
        "ttfts": [0.2, 0.1],
        "itls": [[0.1, 0.2], [0.05]],
        "errors": ["", ""],
        **changes,
    }


def older_guidellm():
    rows = [
        {
            "prompt_tokens": prompt_len,
            "output_tokens": len(times),
            "start_time": sent,
            "time_to_first_token_ms": 1e3 * times[0],
            "request_latency": times[-1],
        }
        for sent, prompt_len, times in REQUESTS
    ]
    strategy = {"type_": "poisson", "rate": 5.0}
    worker = {"backend_model": MODEL}
    requests = {"successful": rows, "errored": [], "incomplete": []}
    return {
        "benchmarks": [{"args": {"strategy": strategy}, "worker": worker, "requests": requests}]
    }


FILES = {
    "inference-perf": [inference_perf(*request) for request in REQUESTS],
    "newer inference-perf": [newer_inference_perf(*request) for request in REQUESTS],
    "newest inference-perf": [newest_inference_perf(*request) for request in REQUESTS],
    "inference-perf by the server": [inference_perf_by_server(*request) for request in REQUESTS],
    "vllm": vllm_detailed(),
    "older guidellm": older_guidellm(),
}


def check_requests(requests):
    for name, values in EXPECTED.items():
        assert requests[name].astype(float).tolist() == pytest.approx(values, abs=1e-6), name


@pytest.mark.parametrize("name", FILES)
def test_every_client_gives_the_same_requests(name, tmp_path):
    path = tmp_path / "file.json"
    path.write_text(json.dumps(FILES[name]))
    (benchmark,) = read_benchmarks(path)
    check_requests(benchmark.requests)


def test_a_packed_file_with_a_byte_order_mark_is_read(tmp_path):
    path = tmp_path / "file.json.gz"
    path.write_bytes(gzip.compress(("\ufeff" + json.dumps(vllm_detailed())).encode()))
    check_requests(read_benchmarks(path)[0].requests)


@pytest.fixture
def database(tmp_path) -> Path:
    path = tmp_path / "benchmark_data.db"
    with sqlite3.connect(path) as connection:
        connection.execute(
            "CREATE TABLE result(start_time REAL, latency REAL, first_chunk_latency REAL, "
            "prompt_tokens INTEGER, completion_tokens INTEGER, inter_token_latencies TEXT, "
            "success INTEGER)"
        )
        for sent, prompt_len, times in REQUESTS:
            row = (sent, times[-1], times[0], prompt_len, len(times), json.dumps(gaps(times)), 1)
            connection.execute("INSERT INTO result VALUES (?,?,?,?,?,?,?)", row)
        connection.execute("INSERT INTO result VALUES (1, NULL, NULL, 9, 0, NULL, 0)")
    connection.close()
    return path


def test_evalscopes_database_is_read_with_its_arguments(database):
    arguments = {"model": MODEL, "parallel": 4, "rate": -1}
    database.with_name("benchmark_args.json").write_text(json.dumps(arguments))
    (benchmark,) = read_benchmarks(database)
    check_requests(benchmark.requests)
    assert benchmark.requests.token_times[0] == pytest.approx([0.2, 0.3, 0.5])
    assert benchmark.cautions[0] == "2 of 3 requests replayed; 1 failed"
    assert benchmark.server[0].settings == {"model": MODEL}


def test_another_programs_database_is_refused(tmp_path):
    path = tmp_path / "other.db"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE t(a)")
    connection.close()
    with pytest.raises(UserError, match="without evalscope's table of results"):
        read_benchmarks(path)


LLMPERF = [
    {
        "error_code": None,
        "ttft_s": times[0],
        "end_to_end_latency_s": times[-1],
        "number_input_tokens": prompt_len,
        "number_output_tokens": len(times),
    }
    for _, prompt_len, times in REQUESTS
]


def test_llmperfs_users_send_one_after_the_other(tmp_path):
    path = tmp_path / "x_individual_responses.json"
    failed = {**LLMPERF[0], "error_code": 429, "number_output_tokens": 0}
    path.write_text(json.dumps([*LLMPERF, failed]))
    (benchmark,) = read_benchmarks(path)
    assert "2 of 3 requests replayed; 1 failed" in benchmark.cautions
    assert any("LLMPerf's default of 10 is taken" in caution for caution in benchmark.cautions)
    path.with_name("x_summary.json").write_text(json.dumps({"num_concurrent_requests": 1}))
    (benchmark,) = read_benchmarks(path)
    assert benchmark.client.users == 1
    assert benchmark.requests.arrival_time.tolist() == pytest.approx([0.0, 0.5])


def test_llmperfs_file_may_have_another_name_and_break_off(tmp_path):
    path = tmp_path / "copy.json"
    path.write_text(json.dumps([*LLMPERF, LLMPERF[0]], indent=1)[:-40])
    (benchmark,) = read_benchmarks(path)
    assert "2 of 3 requests replayed; 1 damaged (is cut off at line" in benchmark.cautions[0]


def test_llmperfs_time_between_tokens_has_no_time_to_the_first(tmp_path):
    """Of 100 tokens, 0.5 s to the first and 20 ms to each further one: LLMPerf states 24.8 ms."""
    summary = {
        **SUMMARIES["llmperf"],
        "results_num_completed_requests": 2,
        "results_ttft_s_mean": 0.5,
        "results_end_to_end_latency_s_mean": 2.48,
        "results_inter_token_latency_s_mean": 0.0248,
        "results_number_output_tokens_mean": 100,
    }
    path = tmp_path / "x_summary.json"
    path.write_text(json.dumps(summary))
    (benchmark,) = read_benchmarks(path)
    assert benchmark.means["tpot"] == pytest.approx(0.02)
    response = {"ttft_s": 0.5, "end_to_end_latency_s": 2.48, "number_input_tokens": 9}
    path = tmp_path / "x_individual_responses.json"
    path.write_text(json.dumps([{**response, "number_output_tokens": 100}] * 2))
    (benchmark,) = read_benchmarks(path)
    assert benchmark.summary["tpot_mean"] == pytest.approx(0.02)
    assert "totals differ" not in "; ".join(benchmark.cautions)


def average(value, unit):
    return {"unit": unit, "avg": value}


AVERAGES = {
    "request_latency": average(400.0, "ms"),
    "time_to_first_token": average(60.0, "ms"),
    "inter_token_latency": average(11.0, "ms"),
    "input_sequence_length": average(512.0, "tokens"),
    "output_sequence_length": average(24.0, "tokens"),
    "request_count": average(6.0, "requests"),
}
WARMUP = {"type": "concurrency", "concurrency": 1, "exclude_from_results": True}
SUMMARIES = {
    "vllm": {
        **{name: vllm_detailed()[name] for name in ("backend", "model_id", "request_rate")},
        "completed": 6,
        "total_input_tokens": 6 * 512,
        "total_output_tokens": 6 * 24,
        "mean_ttft_ms": 60.0,
        "mean_tpot_ms": 11.0,
        "mean_e2el_ms": 400.0,
    },
    "aiperf": {**AVERAGES, "input_config": {"loadgen": {"request_rate": 2.0}}},
    "genai-perf": {
        **AVERAGES,
        "input_config": {"perf_analyzer": {"stimulus": {"request_rate": 2.0}}},
    },
    "llmperf": {
        "num_concurrent_requests": 2,
        "results_ttft_s_mean": 0.06,
        "results_inter_token_latency_s_mean": 0.4 / 24,
        "results_end_to_end_latency_s_mean": 0.06 + 23 * 0.011,
        "results_number_input_tokens_mean": "512",
        "results_number_output_tokens_mean": "24",
        "results_num_completed_requests": 6,
    },
    "guidellm": {
        "benchmarks": [
            {
                "config": {"strategy": {"kind": "poisson", "rate": 2.0}},
                "requests": {"successful": [], "errored": [], "incomplete": []},
                "metrics": {
                    "request_totals": {"successful": 6, "errored": 0, "incomplete": 0},
                    "prompt_token_count": {"successful": {"mean": 512.0}},
                    "output_token_count": {"successful": {"mean": 24.0}},
                    "time_to_first_token_ms": {"successful": {"mean": 60.0}},
                    "inter_token_latency_ms": {"successful": {"mean": 11.0}},
                    "time_per_output_token_ms": {"successful": {"mean": 13.0}},
                    "request_latency": {"successful": {"mean": 0.4}},
                },
            }
        ]
    },
    "inference-perf": {
        "load_summary": {"count": 6, "requested_rate": 2.0},
        "successes": {
            "count": 6,
            "latency": {
                "request_latency": {"mean": 0.4},
                "time_to_first_token": {"mean": 0.06},
                "time_per_output_token": {"mean": 0.011},
            },
            "prompt_len": {"mean": 512.0},
            "output_len": {"mean": 24.0},
        },
    },
    "evalscope": {
        "Time taken for tests (s)": 3.0,
        "Request rate (req/s)": 2.0,
        "Succeed requests": 6,
        "Average latency (s)": 0.4,
        "Average time to first token (s)": 0.06,
        "Average time per output token (s)": 0.011,
        "Average input tokens per request": 512.0,
        "Average output tokens per request": 24.0,
    },
}


@pytest.mark.parametrize("name", SUMMARIES)
def test_summaries_are_replayed_by_their_means(name, tmp_path):
    path = tmp_path / "summary.json"
    path.write_text(json.dumps(SUMMARIES[name]))
    (benchmark,) = read_benchmarks(path)
    # The same time per token: LLMPerf's follows from the other two.
    means = {**MEANS, "latency": 0.313} if name == "llmperf" else MEANS
    assert benchmark.means == pytest.approx(means)
    assert set(benchmark.requests.prompt_len) == {512}
    assert set(benchmark.requests.output_len) == {24}
    assert len(benchmark.requests) == 6
    assert "only means are compared" in benchmark.cautions[-1]
    is_of_users = name == "llmperf"
    assert (benchmark.client.users == 2) == is_of_users


@pytest.mark.parametrize(("latency", "unit"), [(1.4, "sec"), (1.4e6, "us"), (1400.0, "ms")])
def test_times_of_a_summary_are_in_the_unit_that_it_states(latency, unit, tmp_path):
    path = tmp_path / "summary.json"
    path.write_text(json.dumps({**AVERAGES, "request_latency": average(latency, unit)}))
    (benchmark,) = read_benchmarks(path)
    assert benchmark.means["latency"] == pytest.approx(1.4)
    assert "does not state how requests were sent" in benchmark.cautions[0]
    path.write_text(json.dumps({**AVERAGES, "request_latency": average(1.0, "min")}))
    with pytest.raises(UserError, match="request_latency is in min, not in one of s, "):
        read_benchmarks(path)


def test_a_summary_of_a_rate_with_a_limit_is_sent_at_that_rate(tmp_path):
    summary = {**SUMMARIES["vllm"], "max_concurrency": 3}
    assert "at random at 2/s, at most 3 at a time" in cautions_of(tmp_path, summary)


def test_means_that_contradict_each_other_are_named(tmp_path):
    summary = {**SUMMARIES["vllm"], "mean_tpot_ms": 5.0}
    assert "per token is 5 ms, and by its latency" in cautions_of(tmp_path, summary)
    assert "per token is" not in cautions_of(tmp_path, SUMMARIES["vllm"])
    # Nor is a mean contradicted that a file does not state.
    summary.pop("mean_ttft_ms")
    assert "per token is" not in cautions_of(tmp_path, summary)


def cautions_of(tmp_path: Path, content) -> str:
    path = tmp_path / "file.json"
    path.write_text(json.dumps(content))
    (benchmark,) = read_benchmarks(path)
    return "; ".join(benchmark.cautions)


def test_a_files_own_totals_are_held_against_what_was_read(tmp_path):
    totals = {"mean_ttft_ms": 150.0, "duration": 0.65, "output_throughput": 5 / 0.65}
    assert not cautions_of(tmp_path, vllm_detailed(**totals))
    in_milliseconds = vllm_detailed(**totals, ttfts=[200.0, 100.0])
    assert "ttft_mean 0.15 (150 read)" in cautions_of(tmp_path, in_milliseconds)
    assert "num_requests 3 (2 read)" in cautions_of(tmp_path, vllm_detailed(completed=3))


def test_one_bad_record_does_not_refuse_the_others(tmp_path):
    bad = vllm_detailed(start_times=[float("nan"), 1000.5])
    assert "1 of 2 requests replayed; 1 damaged (row 1: arrival is missing)" in cautions_of(
        tmp_path, bad
    )
    bad = vllm_detailed(output_lens=[3, -1])
    assert "1 damaged (row 2: output_len=-1)" in cautions_of(tmp_path, bad)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("value", [None, "x", [], {}, -1, float("inf")], ids=str)
def test_no_value_gives_more_than_a_line(name, value, tmp_path):
    """Each key of the first request, and of what is around it, with a value that it can't have."""
    path = tmp_path / "file.json"
    text = json.dumps(FILES[name])
    refusals = []
    for key in sorted(set(re.findall(r'"(\w+)": ', text))):
        spoilt = json.loads(text, object_hook=partial(spoiled, key=key, value=value))
        path.write_text(json.dumps(spoilt))
        refusals += refusals_of(path)
    assert refusals
    assert not any("\n" in refusal for refusal in refusals)


def spoiled(entry: dict, key: str, value) -> dict:
    return {**entry, key: value} if key in entry else entry


def refusals_of(path: Path) -> list[str]:
    try:
        read_benchmarks(path)
    except UserError as error:
        return [str(error)]
    return []


def test_a_sample_and_what_was_not_finished_is_said(tmp_path):
    content = older_guidellm()
    (load,) = content["benchmarks"]
    load["metrics"] = {"request_totals": {"successful": 40}}
    load["requests"]["incomplete"] = [{"prompt_tokens": 9}]
    said = cautions_of(tmp_path, content)
    assert "2 of 3 requests replayed; 1 incomplete" in said
    assert "the file has 2 of 40 finished requests, a sample" in said


def test_one_bad_load_does_not_refuse_the_others(tmp_path):
    path = tmp_path / "results.jsonl"
    loads = [vllm_detailed(), vllm_detailed(request_rate=0)]
    path.write_text("\n".join(map(json.dumps, loads)))
    (benchmark,) = read_benchmarks(path)
    assert benchmark.cautions == [
        "load 2 of 2 is left out: is damaged (request_rate=0 is not above 0)"
    ]


def test_one_load_that_can_not_be_simulated_does_not_refuse_the_others(tmp_path):
    path = tmp_path / "results.jsonl"
    loads = [vllm_detailed(input_lens=[100, 10**6]), vllm_detailed()]
    path.write_text("\n".join(map(json.dumps, loads)))
    settings = ["hardware=h100", "task.chunk=2048", "task.batch=64", "max_model_len=4096"]
    cfg = config_of("task=validate", f"task.run={path}", *settings)
    (case,) = build(cfg.task).check(cfg)
    assert case.run.name.startswith("2: vllm")
    (caution,) = case.run.cautions
    assert caution.startswith("load 1: vllm at 2.0/s is left out: ")
    path.write_text(json.dumps(loads[0]))
    assert "exceeds max_model_len=4096" in refusal_of(
        "task=validate", f"task.run={path}", *settings
    )


def test_a_request_that_the_server_has_answered_is_not_too_long_for_it(tmp_path):
    path = tmp_path / "result.json"
    path.write_text(json.dumps(vllm_detailed(max_model_len=100)))
    replay = replayed(path)
    assert replay.engine.max_model_len == 103
    assert "up to 103 tokens, more than max_model_len=100" in " ".join(replay.describe())


def test_files_without_times_of_sending_are_drawn_at_their_rate(tmp_path):
    content = vllm_detailed()
    del content["start_times"]
    said = cautions_of(tmp_path, content)
    assert "no times at which requests were sent: they are sent at random at 2/s" in said


BURSTS = {
    "vllm": ({"burstiness": 0.25}, 2.0),
    "smooth": ({"burstiness": 4}, 0.5),
    "even": ({"burstiness": float("inf")}, 0.0),
    "poisson": ({}, 1.0),
}


@pytest.mark.parametrize("name", BURSTS)
def test_gaps_vary_as_the_clients_burstiness_says(name, tmp_path):
    changes, cv = BURSTS[name]
    path = tmp_path / "result.json"
    path.write_text(json.dumps({**SUMMARIES["vllm"], "completed": 4000, **changes}))
    (benchmark,) = read_benchmarks(path)
    gaps = np.diff(benchmark.requests.arrival_time)
    assert gaps.mean() == pytest.approx(0.5, rel=0.1)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.1, abs=1e-9)


@pytest.mark.parametrize(
    ("config", "cv"),
    [
        (
            {"loadgen": {"request_rate": 2.0, "arrival_pattern": "gamma", "arrival_smoothness": 4}},
            0.5,
        ),
        ({"loadgen": {"request_rate": 2.0, "arrival_smoothness": 0.25}}, 2.0),
        ({"loadgen": {"request_rate": 2.0, "arrival_pattern": "constant"}}, 0.0),
        ({"loadgen": {"request_rate": 2.0, "request_rate_mode": "poisson"}}, 1.0),
        ({"phases": [WARMUP, {"type": "gamma", "rate": 2.0, "smoothness": 4}]}, 0.5),
        ({"phases": [{"type": "constant", "rate": 2.0}]}, 0.0),
        ({"phases": [{"type": "poisson", "rate": 2.0}, WARMUP]}, 1.0),
    ],
    ids=str,
)
def test_gaps_vary_as_aiperfs_pattern_says(config, cv, tmp_path):
    path = tmp_path / "summary.json"
    path.write_text(json.dumps({**AVERAGES, "input_config": config}))
    (benchmark,) = read_benchmarks(path)
    assert (benchmark.client.rate, benchmark.client.cv) == (2.0, cv)


def test_inference_perfs_means_follow_from_its_rates(tmp_path):
    """Stages of some versions have neither the mean of answers nor the number of them."""
    rates = {"output_tokens_per_sec": 12.0, "requests_per_sec": 0.5}
    successes = {"latency": {"request_latency": {"mean": 4.0}}, "prompt_len": {"mean": 512.0}}
    content = {"load_summary": {"count": 6}, "successes": {**successes, "throughput": rates}}
    path = tmp_path / "stage_0_lifecycle_metrics.json"
    path.write_text(json.dumps(content))
    (benchmark,) = read_benchmarks(path)
    assert benchmark.requests.output_len.tolist() == [24] * 6
    assert benchmark.client.rate == 0.5
    assert any("that of its answers is taken" in caution for caution in benchmark.cautions)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"completed": 0, "failed": 8}, "all 8 requests failed"),
        (
            {"total_input_tokens": 0},
            "does not state the mean tokens of a prompt; name a file of vllm bench serve --save-",
        ),
    ],
)
def test_a_summary_says_what_it_lacks(changes, words, tmp_path):
    with pytest.raises(UserError, match=words):
        cautions_of(tmp_path, {**SUMMARIES["vllm"], **changes})


def test_what_is_drawn_otherwise_than_at_random_is_said(tmp_path):
    content = vllm_detailed(burstiness=0.25)
    del content["start_times"]
    assert "are sent at random at 2/s with gamma gaps of cv=2" in cautions_of(tmp_path, content)
    assert "are sent evenly at 2/s" in cautions_of(tmp_path, SUMMARIES["genai-perf"])
    ramp = {"ramp_up_strategy": "linear", "ramp_up_start_rps": 1, "ramp_up_end_rps": 9}
    timed = {**SUMMARIES["vllm"], "duration": 3.0}
    said = cautions_of(tmp_path, {**timed, "request_rate": "inf", **ramp})
    assert "the mean, as the rate is a linear ramp from 1 to 9/s, and" in said
    said = cautions_of(tmp_path, {**timed, "request_rate": "trace"})
    assert "are sent at random at 2/s, the mean, as the rate is trace" in said
    with pytest.raises(UserError, match="burstiness=0 is not above 0"):
        cautions_of(tmp_path, {**SUMMARIES["vllm"], "burstiness": 0})


def test_tokens_that_came_together_are_timed_by_the_token(tmp_path):
    path = tmp_path / "file.json"
    path.write_text(json.dumps(vllm_detailed(output_lens=[9, 6])))
    (benchmark,) = read_benchmarks(path)
    assert not any(benchmark.requests.token_times)
    # 0.3 s of eight tokens, 0.05 s of five.
    assert benchmark.summary["tpot_mean"] == pytest.approx((0.3 / 8 + 0.05 / 5) / 2)


def aiperf_turn(session, turn, sent, prompt_len, times):
    metadata = {
        "benchmark_phase": "profiling",
        "conversation_id": session,
        "turn_index": turn,
        "request_start_ns": int(1e9 * sent),
    }
    metrics = {
        "input_sequence_length": prompt_len,
        "output_sequence_length": len(times),
        "time_to_first_token": 1e3 * times[0],
        "request_latency": 1e3 * times[-1],
        "inter_chunk_latency": [1e3 * gap for gap in gaps(times)],
    }
    return {
        "metadata": metadata,
        "metrics": {name: {"value": value} for name, value in metrics.items()},
        "error": None,
    }


def replayed(path: Path, *settings: str):
    named = ["hardware=h100", "model=llama3.1-8b", "task.chunk=2048", "task.batch=64"]
    cfg = config_of("task=validate", f"task.run={path}", *named, *settings)
    (case,) = build(cfg.task).check(cfg)
    return case.as_run


TIMES = [0.2, 0.25, 0.3, 0.35]


def test_turns_of_a_conversation_find_their_history_and_keep_their_pauses(tmp_path):
    path = tmp_path / "profile_export.jsonl"
    records = [
        aiperf_turn("a", 0, 1000.0, 1600, TIMES),
        aiperf_turn("b", 0, 1000.1, 1600, TIMES),
        aiperf_turn("a", 1, 1001.35, 1664, TIMES),  # a second after the answer
        aiperf_turn("a", 2, 1002.7, 1000, TIMES),  # with less than was said before
    ]
    path.write_text("\n".join(map(json.dumps, records)))
    replay = replayed(path)
    assert "1 conversations, whose turns wait for their answers" in " ".join(replay.describe())
    requests = replay.load().requests
    hits = requests.prefix_hit_tokens.tolist()
    # Whole blocks of 16: of the prompt and what of the answer has keys; all but one token.
    assert hits == [0, 0, 1600, 992]
    assert requests.arrival_time[2] == pytest.approx(requests.finish_time[0] + 1.0, abs=1e-6)


def test_cached_tokens_are_not_computed(tmp_path):
    content = older_guidellm()
    rows = content["benchmarks"][0]["requests"]["successful"]
    for row in rows:
        row["prompt_tokens"] = 4096
    path = tmp_path / "benchmarks.json"
    path.write_text(json.dumps(content))
    without = replayed(path).load()
    rows[0]["cached_tokens"] = 3968
    rows[1]["input_metrics"] = {"cached_tokens": 2048}
    path.write_text(json.dumps(content))
    replay = replayed(path)
    assert "cached tokens of 2 of them from the start" in " ".join(replay.describe())
    load = replay.load()
    assert load.requests.prefix_hit_tokens.tolist() == [3968, 2048]
    assert load.iterations.num_prefill_tokens.sum() == 2 * 4096 - 3968 - 2048
    assert load.requests.first_token_time[0] < without.requests.first_token_time[0] / 2
    off = replayed(path, "cache.prefix=false").load()
    assert off.requests.prefix_hit_tokens.sum() == 0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("metadata:\n  version: 1\n", "is YAML, which is not read"),
        ("Metric,avg\nTime to First Token (ms),60\n", "is CSV with the columns Metric,avg"),
        ("<html></html>", "is HTML or XML"),
        ("2025-07-17 15:11:32,377 - bench - INFO - 3 requests, sent\n", "is a log, which"),
        (
            json.dumps({"version": "0.1", "experiments": []}),
            "responses without lengths; name its profile_export_genai",
        ),
        (json.dumps({"method": "x", "result": {}}), "has the keys method, result, as of none of"),
        (
            '{"timestamp": 0, "input_length": 10, "output_length": 1, "hash_ids": []}\n',
            "is a trace, which has no results; serve it by workload=trace",
        ),
        (
            "INFO Engine 000: Avg prompt throughput: 1.0 tokens/s\n",
            "is a server's log without iterations; name it as task.log=",
        ),
        ("model: x/y\nmax-num-seqs: 8\n", "describes a server and has no requests; name it as"),
        (
            json.dumps({"framework": "vllm", "tp": 2, "mean_ttft": 0.3}),
            "has results such as mean_ttft, but in the form of no known client",
        ),
        (json.dumps(NO_MEANS), "does not state a mean latency; name a file of vllm bench serve"),
        (
            json.dumps({**NO_MEANS, "total_output_tokens_retokenized": 9}),
            "name a file of bench_serving --output-file FILE --output-details",
        ),
        (json.dumps({"backend": "vllm", "completed": 2}), "serve --save-result --save-detailed"),
        (json.dumps(vllm_detailed(itls=[[], []])), "has no times of first tokens"),
        (json.dumps([inference_perf(1.0, 9, [1.0], info={"input_tokens": 9})]), "not streamed"),
    ],
)
def test_other_files_are_named_with_what_to_do(text, words, tmp_path):
    path = tmp_path / "file"
    path.write_text(text)
    refusal = refusal_of("task=validate", "hardware=h100", f"task.run={path}")
    assert words in refusal
    assert refusal.startswith(str(path))


def test_a_folder_of_other_files_is_named(tmp_path):
    (tmp_path / "server.log").write_text("x")
    refusal = refusal_of("task=validate", "hardware=h100", f"task.run={tmp_path}")
    assert "has no requests.jsonl, but server.log; name one of its files" in refusal


def test_a_client_behind_its_schedule_sent_at_its_own_pace(tmp_path):
    summary = dict(SUMMARIES["inference-perf"])
    summary["load_summary"] = {"count": 6, "requested_rate": 2.0, "achieved_rate": 0.5}
    path = tmp_path / "summary.json"
    path.write_text(json.dumps(summary))
    (benchmark,) = read_benchmarks(path)
    assert benchmark.client.rate == 0.5
    assert any("of 2.0/s that were asked for" in line for line in benchmark.cautions)
