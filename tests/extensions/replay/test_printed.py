"""Tables that clients print, kept as text, and summaries that look like a client's."""

from __future__ import annotations

import json

import pytest

from sarathi_lab.config.errors import UserError
from sarathi_lab.extensions.replay.bench_files import read_benchmarks

TABLE = """{above}
============ Serving Benchmark Result ============
{inside}
Successful requests:                     {number}
Benchmark duration (s):                  41.24
Total input tokens:                      4000
Total generated tokens:                  800
---------------Time to First Token----------------
Mean TTFT (ms):                          60.5
Median TTFT (ms):                        58.1
-----Time per Output Token (excl. 1st token)------
Mean TPOT (ms):                          6.5
==================================================
"""


def test_printed_tables_are_means_of_runs(tmp_path):
    """Older clients print the rate above the table, as does a script that has them as comments."""
    above = "Namespace(backend='vllm', model='/m/Llama-3.1-8B')\nTraffic request rate: 2.0"
    first = TABLE.format(above=above, inside="", number=20)
    second = TABLE.format(above="", inside="Maximum request concurrency:  16", number=40)
    path = tmp_path / "serve.log"
    path.write_text("# ".join(["", *first.splitlines(keepends=True)]) + second)
    slow, crowded = read_benchmarks(path)
    assert (len(slow.requests), len(crowded.requests)) == (20, 40)
    assert slow.requests.prompt_len.tolist() == [200] * 20
    assert slow.requests.output_len.tolist() == [40] * 20
    assert (slow.client.rate, slow.client.users) == (2.0, None)
    assert crowded.client.users == 16
    assert [run.server[0].settings["model"] for run in (slow, crowded)] == ["/m/Llama-3.1-8B"] * 2


def test_a_clients_command_above_its_table_tells_model_and_rate(tmp_path):
    path = tmp_path / "notes.md"
    flags = "--model meta/Llama-3.1-8B \\\n --request-rate=1.5 --max-concurrency 16"
    command = f"vllm bench serve --dataset-name random \\\n {flags}\n"
    path.write_text(TABLE.format(above=command, inside="", number=20))
    (benchmark,) = read_benchmarks(path)
    assert (benchmark.client.rate, benchmark.client.users) == (1.5, 16)
    assert benchmark.server[0].settings["model"] == "meta/Llama-3.1-8B"


def test_an_older_table_without_its_rate_says_so(tmp_path):
    path = tmp_path / "table.txt"
    said = "at 0.485/s, the mean, as the rate is not stated"
    path.write_text(TABLE.format(above="", inside="", number=20))
    assert said in " ".join(read_benchmarks(path)[0].cautions)
    path.write_text(TABLE.format(above="", inside="Failed requests:   0", number=20))
    assert said not in " ".join(read_benchmarks(path)[0].cautions)


def test_a_table_in_comments_ends_before_the_next_ones_rate(tmp_path):
    tables = [
        TABLE.format(above=f"Traffic request rate: {rate}", inside="", number=20)
        for rate in (2.0, 4.0)
    ]
    path = tmp_path / "serve.sh"
    path.write_text("# ".join(["", *"".join(tables).splitlines(keepends=True)]))
    assert [benchmark.client.rate for benchmark in read_benchmarks(path)] == [2.0, 4.0]


def test_what_prometheus_had_of_a_server_is_no_clients_summary(tmp_path):
    path = tmp_path / "stage_0_prometheus_metrics.json"
    means = {"count": 9, "prompt_len": {"mean": 30}, "request_latency": {"mean": 1.0}}
    path.write_text(json.dumps({"load_summary": {}, "successes": means, "failures": {}}))
    with pytest.raises(UserError, match="is what Prometheus had of the server; name the client's"):
        read_benchmarks(path)
