"""Files of benchmark clients: read alike, loaded, replayed, and refused in one line if damaged."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest
from composed import checked, config_of, run

import sarathi_lab as lab
from sarathi_lab.config.errors import UserError
from sarathi_lab.config.instantiate import build
from sarathi_lab.executor.simulated.executor import SimulatedExecutor
from sarathi_lab.extensions.replay.bench_files import read_benchmarks
from sarathi_lab.extensions.replay.iteration_log import LoggedIteration, cautions_of_log, predicted

# The same two requests as each client records them: sent 0.5 s apart, tokens at 0.2, 0.3, 0.5 s
# and at 0.1, 0.15 s after; one more failed.
VLLM = {
    "backend": "vllm",
    "model_id": "meta-llama/Llama-3.1-8B",
    "request_rate": 2.0,
    "max_concurrency": None,
    "completed": 2,
    "input_lens": [100, 50, 70],
    "output_lens": [3, 2, 0],
    "start_times": [1000.0, 1000.5, 1001.0],
    "ttfts": [0.2, 0.1, 0.0],
    "itls": [[0.1, 0.2], [0.05], []],
    "errors": ["", "", "Bad Gateway"],
}


def guidellm(**changes):
    requests = [
        {
            "prompt_tokens": prompt_len,
            "output_tokens": output_len,
            "request_start_time": sent,
            "time_to_first_token_ms": 1e3 * ttft,
            "request_latency": latency,
            **changes,
        }
        for prompt_len, output_len, sent, ttft, latency in (
            (100, 3, 1000.0, 0.2, 0.5),
            (50, 2, 1000.5, 0.1, 0.15),
        )
    ]
    statuses = {"successful": requests, "errored": [{}], "incomplete": []}
    strategy = {"type_": "constant", "rate": 2.0}
    return {"benchmarks": [{"config": {"strategy": strategy}, "requests": statuses}]}


def aiperf_record(sent, prompt_len, times):
    values = {
        "input_sequence_length": (prompt_len, "tokens"),
        "output_sequence_length": (len(times), "tokens"),
        "time_to_first_token": (1e3 * times[0], "ms"),
        "inter_chunk_latency": ((1e3 * np.diff(times)).tolist(), "ms"),
        "request_latency": (1e3 * times[-1], "ms"),
    }
    metadata = {"benchmark_phase": "profiling", "request_start_ns": int(sent * 1e9)}
    metrics = {name: {"value": value, "unit": unit} for name, (value, unit) in values.items()}
    return {"metadata": metadata, "metrics": metrics, "error": None}


AIPERF = [
    aiperf_record(1000.0, 100, [0.2, 0.3, 0.5]),
    aiperf_record(1000.5, 50, [0.1, 0.15]),
    {
        "metadata": {"benchmark_phase": "profiling", "request_start_ns": 1},
        "metrics": {},
        "error": {"code": 499},
    },
]
NOT_STREAMED = {**AIPERF[0], "metrics": {"request_latency": {"value": 500.0}}}
SGLANG = {name: value for name, value in VLLM.items() if name not in ("start_times", "model_id")}
SGLANG |= {"total_output_tokens_retokenized": 5, "request_rate": float("inf"), "max_concurrency": 1}
SGLANG |= {
    "server_info": {
        "model_path": "meta-llama/Llama-3.1-8B",
        "chunked_prefill_size": 512,
        "max_running_requests": 8,
        "version": "0.5.23",
    }
}
PPAS = {
    "trace_id": 0,
    "configured_prompt_tokens": 100,
    "configured_output_tokens": 4,
    "phase_schedule": "2:2.0,2:4.0",
    "seed": 0,
    "config_name": "mbt_512_s8",
    "max_num_batched_tokens": 512,
    "max_num_seqs": 8,
    "avg_latency": 0.5,
    "avg_ttft": 0.2,
    "avg_tpot": 0.1,
    "failed": 0,
}
MODEL_OF_PPAS = "START SERVER: vllm serve meta-llama/Llama-3.1-8B --port 8000"
ITERATION = (
    "(APIServer pid=1) INFO 11-25 10:04:33 [loggers.py:199] Engine 000: Iteration({}): "
    "{} context requests, {} context tokens, {} generation requests, {} generation tokens, "
    "iteration elapsed time: {:.2f} ms, GPU KV cache usage: 1.0%\n"
)
LOG = "non-default args: {'model': 'meta-llama/Llama-3.1-8B', 'max_num_batched_tokens': 64, "
LOG += "'max_num_seqs': 8}\nengine (v0.32.0) with\nGPU KV cache size: 16,384 tokens\n"
LOG += "".join(
    ITERATION.format(i, *batch)
    for i, batch in enumerate([(1, 64, 0, 0, 9.0), (2, 60, 0, 0, 8.0), (0, 0, 1, 1, 5.0)])
)
FILES = {
    "result.json": json.dumps(VLLM),
    "benchmarks.json": json.dumps(guidellm(), indent=2),
    "profile_export.jsonl": "\n".join(map(json.dumps, AIPERF)),
}


@pytest.mark.parametrize("name", FILES)
def test_every_client_gives_the_same_requests(name, tmp_path):
    path = tmp_path / name
    path.write_text(FILES[name])
    (found,) = read_benchmarks(path)
    requests = found.requests
    assert requests[["prompt_len", "output_len"]].to_numpy().tolist() == [[100, 3], [50, 2]]
    for column, times in (
        ("arrival_time", [0.0, 0.5]),
        ("first_token_time", [0.2, 0.6]),
        ("finish_time", [0.5, 0.65]),
    ):
        assert requests[column].to_numpy() == pytest.approx(times)
    if name != "benchmarks.json":
        assert requests.token_times[0] == pytest.approx([0.2, 0.3, 0.5])
    loaded = lab.load(path)
    assert len(loaded.requests) == 2
    run = loaded.runs.iloc[0]
    assert (run.num_failed, run.num_output_tokens, run.executor) == (1, 5, "server")
    assert run.ttft_mean == pytest.approx(0.15)
    assert run.throughput == pytest.approx(155 / 0.65)


def test_appended_results_are_a_run_each(tmp_path):
    path = tmp_path / "result.json"
    path.write_text("\n".join(json.dumps({**VLLM, "request_rate": rate}) for rate in (1.0, 2.0)))
    assert lab.load(path).varying == ["workload.rate"]


def test_a_file_is_replayed_with_the_servers_arguments_beside_it(tmp_path):
    path = tmp_path / "result.json"
    path.write_text(json.dumps(VLLM))
    words = "does not state the server's GPU; add hardware=NAME"
    with pytest.raises(UserError, match=words):
        checked("task=validate", f"task.run={path}")
    settings = ["task=validate", f"task.run={path}", "hardware=a100", "model=llama3.1-8b"]
    settings.append("host=none")
    engine = {"model": "x", "max_num_seqs": 8, "max_num_batched_tokens": 512}
    (tmp_path / "meta.json").write_text(json.dumps({"engine_kwargs": engine}))
    errors = run(tmp_path, *settings).summary
    assert {"error/ttft", "error/tpot", "error/latency"} < set(errors)
    path.write_text(json.dumps({"benchmarks": 2 * guidellm()["benchmarks"]}))
    both = run(tmp_path, *settings)
    assert both.tables["parts"].load.tolist() == ["1: guidellm at 2.0/s", "2: guidellm at 2.0/s"]
    assert both.summary["num_requests"] == 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "has no benchmark"),
        ("{", "is cut off at line 1"),
        ("[1]", "entry 1 is not a JSON object"),
        ('{"a": 1}', "none of the known clients"),
        ('[{"id": "x", "conversations": [{"from": "human", "value": "a"}]}]', "workload=prompts"),
        ('{"prompt": "a", "output_tokens": 4}', "workload=prompts"),
        ('{"benchmarks": []}', "has no benchmark"),
        ('{"benchmarks": [{}]}', "lacks 'requests'"),
        (json.dumps(guidellm(request_latency=None)), "latency is missing"),
        (json.dumps(guidellm(time_to_first_token_ms=None)), "were not streamed"),
        (json.dumps(NOT_STREAMED), "were not streamed"),
        (json.dumps(guidellm(prompt_tokens=0)), "prompt_len=0"),
        (json.dumps({**VLLM, "errors": 3 * ["timeout"]}), "3 failed; see the server's log"),
        (json.dumps({**VLLM, "ttfts": [0.1]}), "ttfts has 1 entries, input_lens has 3"),
        (json.dumps({**SGLANG, "request_rate": 0}), "request_rate=0 is not above 0"),
        (str({**PPAS, "phase_schedule": "2:0"}), "is damaged"),
        ('{"benchmarks": [{"requests": {"successful": []}}]}', "it has no request"),
        (json.dumps({**VLLM, "ttfts": 3 * [float("nan")]}), "row 1: first_token is missing"),
        (json.dumps({**VLLM, "output_lens": [-1, -2, 0]}), "2 damaged (row 1: output_len=-1)"),
        (json.dumps({"backend": "vllm", "completed": 2}), "--save-detailed"),
        (json.dumps({**AIPERF[0], "metrics": {}}), "row 1: prompt_len is missing"),
    ],
)
def test_other_files_are_refused_in_one_line(text, words, tmp_path):
    path = tmp_path / "file.json"
    path.write_text(text)
    with pytest.raises(UserError) as error:
        lab.load(path)
    assert words in str(error.value)
    assert str(error.value).startswith(str(path))
    assert "\n" not in str(error.value)


def test_labels_of_servers_are_compared():
    """A file that `vllm bench serve --append-result` of vLLM 0.32 wrote of two servers."""
    results = lab.load("tests/data/vllm_bench_serve.jsonl")
    assert list(results.runs["policy"]) == ["vllm", "sarathi"]
    assert len(results.requests) == 12
    (row,) = results.compare(to="vllm").query("policy == 'sarathi'").to_dict("records")
    assert row["throughput_vs_vllm"] == pytest.approx(0.9596, abs=1e-4)


def test_what_sglang_does_not_record_is_drawn_and_its_server_is_read(tmp_path):
    path = tmp_path / "sglang.jsonl"
    path.write_text(json.dumps(SGLANG))
    (found,) = read_benchmarks(path)
    # One at a time, all there at once: the second is sent when the first has ended.
    assert found.requests.arrival_time.tolist() == pytest.approx([0.0, 0.5])
    assert found.requests.token_times[1] == pytest.approx([0.6, 0.65])
    cfg = config_of("task=validate", f"task.run={path}", "hardware=a100")
    (case,) = build(cfg.task).check(cfg)
    assert (case.as_run.engine.policy.name, case.as_run.engine.policy.budget) == ("sglang", 512)
    assert case.as_run.backend.host.name == "sglang_0_5"
    assert case.what_if is None


@pytest.mark.parametrize(
    ("prompt_len", "said"),
    [
        (100_000, "all its prompts in the time of the run need"),
        (5_000, "a prompt in the mean time to the first token needs"),
    ],
)
def test_prompts_that_the_card_could_not_compute_are_refused_as_cached(prompt_len, said, tmp_path):
    """A replay of them would be right by chance: the benchmark repeats what it sends."""
    path = tmp_path / "sglang.jsonl"
    path.write_text(json.dumps(SGLANG | {"input_lens": [prompt_len] * 3}))
    cfg = config_of("task=validate", f"task.run={path}", "hardware=a100")
    with pytest.raises(UserError, match=f"{said} .* TFLOP/s, more than the 312 of hardware a100"):
        build(cfg.task).check(cfg)


def test_means_of_ppas_logs_are_held_against_their_arrivals_drawn_again(tmp_path):
    path = tmp_path / "log.txt"
    others = {"config_name": "ppas_1k_s8", "max_num_batched_tokens": 1024}
    path.write_text(f"{MODEL_OF_PPAS}\n{PPAS}\nSTOP SERVER\n{PPAS | others}\n")
    settings = ["task=validate", f"task.run={path}", "hardware=a100", "host=vllm_0_19"]
    cfg = config_of(*settings)
    first, second = build(cfg.task).check(cfg)
    assert (first.as_run.engine.policy.name, first.as_run.engine.policy.budget) == ("vllm_v1", 512)
    assert (second.as_run.engine.policy.name, second.as_run.engine.batch_size) == ("p_pas", 8)
    table = run(tmp_path, *settings).tables["validation"]
    assert table.metric.tolist() == ["ttft", "tpot", "latency"]
    assert table.real.tolist() == pytest.approx([0.2, 0.1, 0.5])
    path.write_text(str(PPAS)[:200])
    with pytest.raises(UserError, match="is damaged"):
        checked(*settings)


def test_a_log_of_iterations_is_timed_alone_and_compared_beside_a_clients_file(tmp_path):
    log, path = tmp_path / "server.log", tmp_path / "result.json"
    log.write_text(LOG)
    path.write_text(json.dumps(VLLM))
    settings = ["task=validate", "hardware=a100", f"task.run={log}"]
    table = run(tmp_path, *settings).tables["schedule"]
    alone = table.set_index(["batch", "quantity"])
    assert alone.real["all", "iterations"] == alone.simulated["all", "iterations"] == 3
    assert alone.real["prompts", "time of one"] == pytest.approx(8.5)
    assert alone.simulated["prompts", "tokens of one"] == 62
    settings[2:] = [f"task.run={path}", f"task.log={log}"]
    result = run(tmp_path, *settings)
    beside = result.tables["schedule"].set_index(["batch", "quantity"])
    assert beside.simulated["all", "tokens of one"] == pytest.approx(153 / 6)
    assert str(result.shown[-1]).startswith("The simulation misses your run by")
    for changed, words in (
        ([f"task.run={log}", "chunk=32"], "has no arrivals"),
        ([f"task.run={path}", f"task.log={path}"], "states nothing of a server"),
    ):
        with pytest.raises(UserError, match=words):
            checked("task=validate", "hardware=a100", "host=none", *changed)


def test_logged_decodes_share_what_is_cached_beside_the_prompts():
    logged = pd.DataFrame([LoggedIteration(1, 10, 4, 4, seconds=0.01, cached=410.0)])
    executor = SimulatedExecutor(lambda batch: float(batch.decode_kv_tokens))
    assert predicted(logged, executor).seconds.tolist() == pytest.approx([400], abs=4)


def cautions_of(path, content):
    path.write_text(content)
    return [benchmark.cautions for benchmark in read_benchmarks(path)]


def test_what_of_a_clients_requests_is_not_replayed_is_said(tmp_path):
    path = tmp_path / "file.json"
    failed = "2 of 3 requests replayed; 1 failed"
    assert cautions_of(path, json.dumps(VLLM)) == [[failed]]
    drafted = {**VLLM, "output_lens": [9, 6, 0]}
    ((_, chunks),) = cautions_of(path, json.dumps(drafted))
    assert "15 tokens came in 5 chunks" in chunks
    assert "times between tokens (tbt) are not compared" in chunks
    cancelled = {**AIPERF[2], "error": None}
    cancelled["metadata"] = {**cancelled["metadata"], "was_cancelled": True}
    assert cautions_of(path, "\n".join(map(json.dumps, [*AIPERF[:2], cancelled]))) == [
        ["2 of 3 requests replayed; 1 cancelled"]
    ]


def test_a_load_without_a_finished_request_does_not_refuse_the_others(tmp_path):
    path = tmp_path / "benchmarks.json"
    empty = {"requests": {"successful": [], "errored": [{}, {}], "incomplete": []}}
    loads = [empty, *guidellm()["benchmarks"]]
    (cautions,) = cautions_of(path, json.dumps({"benchmarks": loads}))
    assert cautions[-1].startswith("load 1 of 2 is left out: 0 of 2 requests replayed; 2 failed")


def test_times_of_a_log_that_are_not_the_devices_are_named():
    logged = pd.DataFrame({"seconds": [0.09, 3e-5, 3e-5]})
    (caution,) = cautions_of_log(logged)
    assert "2 of 3 logged iterations take less than 0.1 ms" in caution
    assert not cautions_of_log(logged[:1])
