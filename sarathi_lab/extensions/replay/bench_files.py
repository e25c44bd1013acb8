"""Requests of a real server, as benchmark clients record them.

| client | file |
| --- | --- |
| `vllm bench serve --save-result --save-detailed` | a JSON object, or one a line |
| `guidellm benchmark run` | `benchmarks.json`, a benchmark a rate |
| `aiperf profile` | `profile_export.jsonl`, a request a line, times in milliseconds |
| SGLang's `bench_serving --output-details` | a JSON object a line |
| `benchmark_vLLM.py` of ppas-vllm | its output: a mapping a line, with means of a run |

Every time counts from when the client sent the request, as the clients count it themselves, so
that waiting in the client is in none of them. GuideLLM records no times between tokens, SGLang's
client not when it sent a request, and ppas-vllm no request: its arrivals follow from their seed.
"""

from __future__ import annotations

import ast
import heapq
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from sarathi_lab.config.errors import UserError
from sarathi_lab.config.paths import json_object, read_object, readable
from sarathi_lab.engine.ledger import REQUEST_COLUMNS
from sarathi_lab.extensions.replay.clients import (
    CLOCK,
    Client,
    client_of_rate,
    client_of_strategy,
    inferred,
    is_number,
)
from sarathi_lab.extensions.replay.server_arguments import (
    Statement,
    as_object,
    read_arguments,
    selected,
)
from sarathi_lab.results.metrics import throughput
from sarathi_lab.results.serving_metrics import latency

CLIENTS = "vllm bench serve (with --save-detailed), GuideLLM, AIPerf (profile_export.jsonl)"
FIX = f"name a file of {CLIENTS}, SGLang's bench_serving (with --output-details) or ppas-vllm"
LEAST = {"prompt_len": 1, "output_len": 1, "sent": 0, "ttft": 0, "latency": 0}
# The clients' names of these columns, and of `gaps` and `error`.
GUIDELLM = ["prompt_tokens", "output_tokens", "request_start_time", "time_to_first_token_ms"]
GUIDELLM += ["request_latency"]
AIPERF = ["input_sequence_length", "output_sequence_length", "request_start_ns"]
AIPERF += ["time_to_first_token", "request_latency", "inter_chunk_latency"]
VLLM = ["input_lens", "output_lens", "start_times", "ttfts", "itls", "errors"]
OF_VLLM = ["prompt_len", "output_len", "sent", "ttft", "gaps", "error"]
# What SGLang's scheduler states of itself.
MADE_BY_SGLANG = ("effective_max_running_requests_per_dp", "token_capacity", "max_total_num_tokens")
NOT_STREAMED = "has no times of first tokens, as answers were not streamed; run it again streaming"
# Share of tokens that have a time each, below which a client has recorded chunks of several.
TOKENS_TIMED = 0.9
PPAS_MEANS = {"avg_latency": "latency", "avg_ttft": "ttft", "avg_tpot": "tpot"}


@dataclass(frozen=True)
class Benchmark:
    """One load on a server. `requests` has the finished ones in the ledger's columns: times in
    seconds since the first was sent, NaN where only the server has the value. `server` has what is
    recorded of its arguments, `policy` is a name of conf/policy, `means` has the mean waits
    (seconds) where no request is recorded, `client` how they were sent, and `cautions` what of the
    requests is not known or not replayed.
    """

    labels: Mapping[str, Any]
    requests: pd.DataFrame
    num_failed: int
    server: Sequence[Statement] = ()
    policy: str = "vllm_v1"
    means: Mapping[str, float] = field(default_factory=dict)
    cautions: Sequence[str] = ()
    client: Client = CLOCK

    @property
    def summary(self) -> dict[str, float]:
        """Return quantities by the names of metrics.md."""
        rates = throughput(self.requests, float(self.requests.finish_time.max()))
        return {**rates, **latency(self.requests), "num_failed": self.num_failed}


def read_benchmarks(path: Path) -> list[Benchmark]:
    """Read all benchmarks in a client's file. Raises UserError for what is none."""
    try:
        if not (benchmarks := list(_from_ppas(path))):
            benchmarks = _from_objects(read_objects(path, FIX), path)
    except (KeyError, TypeError, AttributeError, ValueError, SyntaxError, ArithmeticError) as error:
        reason = f"lacks {error}" if isinstance(error, KeyError) else f"is damaged ({error})"
        raise UserError(f"{path} {reason}; {FIX}") from None
    if not benchmarks:
        raise UserError(f"{path} has no benchmark; {FIX}")
    return benchmarks


def _from_objects(objects: Sequence[Mapping[str, Any]], path: Path) -> list[Benchmark]:
    first = objects[0] if objects else {"benchmarks": []}
    if "metadata" in first and "metrics" in first:
        return [_from_aiperf(objects, path)]
    if "benchmarks" in first:
        return _loads_of_guidellm(first["benchmarks"], path)
    if "completed" in first and "backend" in first:
        return [_from_lists(one, path) for one in objects]
    raise UserError(f"{path} was written by none of the known clients; {FIX}")


def read_objects(path: Path, fix: str) -> list[dict[str, Any]]:
    """Read a file with an object of JSON, or with one a line. Raises UserError with the `fix`."""
    with readable(path, fix):
        text = path.read_text(encoding="utf-8")
    try:
        return [json.loads(text)]
    except (ValueError, RecursionError):
        lines = [(i, line) for i, line in enumerate(text.splitlines(), 1) if line.strip()]
        return [json_object(line, f"{path} line {i}", fix) for i, line in lines]


def finite_numbers(path: Path, table: pd.DataFrame, least: Mapping[str, int]) -> pd.DataFrame:
    """Select the columns of `least`, of finite numbers from that one on. Raises UserError."""
    if missing := [name for name in least if name not in table]:
        raise UserError(f"{path} has no {missing[0]}; it needs {', '.join(least)}: record them")
    numbers = table[list(least)].apply(pd.to_numeric, errors="coerce")
    for name, minimum in least.items():
        is_bad = ~((numbers[name] >= minimum) & (numbers[name] < np.inf))
        refuse_rows(path, table[name], is_bad, f"is not a number from {minimum}")
    return numbers


def refuse_rows(path: Path, column: pd.Series, is_bad: pd.Series, why: str) -> None:
    """Raise UserError for the first row of a column that `is_bad`, if there is one."""
    if is_bad.any():
        row = int(is_bad.argmax())
        raise UserError(
            f"{path} row {row + 1}: {column.name}={column[row]} {why}; correct or remove it"
        )


def _from_lists(content: Mapping[str, Any], path: Path) -> Benchmark:
    """Read a result of vLLM's client, or of SGLang's, which was derived from it."""
    is_sglang = "total_output_tokens_retokenized" in content
    names = [name for name in VLLM if name != "start_times" or not is_sglang]
    if missing := [name for name in names if name not in content]:
        fix = "it again with --output-details"
        fix = fix if is_sglang else "vllm bench serve again with --save-detailed"
        raise UserError(f"{path} has no {missing[0]}; run {fix}")
    table = pd.DataFrame({name: content[name] for name in names})
    table = table.rename(columns=dict(zip(VLLM, OF_VLLM, strict=True)))
    # Files of older versions have no latencies.
    table["latency"] = content.get("latencies") or table.ttft + table.gaps.map(sum)
    finished = table[(table.output_len > 0) & (table.error == "")].copy()
    rate, most, caution = content.get("request_rate"), content.get("max_concurrency"), ""
    server = _server_of(content, path, is_sglang=is_sglang)
    model = content.get("model_id") or server.settings.get("model")
    label = "sglang" if is_sglang else content.get("label") or content["backend"]
    client = client_of_rate(rate, most)
    if is_sglang:
        due = _due(len(finished), client.rate)
        finished["sent"] = _sent(finished.latency, due, most)
        client = replace(client, due=tuple(due - due[0]))
        caution = "the file has no times at which requests were sent: here "
        caution += "all at once" if client.rate == np.inf else f"drawn at random at {rate}/s"
        caution += "" if is_number(rate) else f", as its rate is {rate}"
        caution += f", at most {most} at a time" * bool(most)
    labels = {"policy": label, "model": model, "workload.rate": rate, "batch": most}
    of_server = {"server": [server], "policy": "sglang" if is_sglang else "vllm_v1"}
    num_failed = len(table) - len(finished)
    of_client = {"cautions": [caution] if caution else [], "client": client}
    return _benchmark(labels, finished, num_failed, path, **of_client, **of_server)


def _server_of(content: Mapping[str, Any], path: Path, *, is_sglang: bool) -> Statement:
    """Read what a result states of the server: SGLang's description of itself, or vLLM's model and
    what `--metadata` added.
    """
    if not is_sglang:
        metadata = selected("vllm", content, is_typed=True)
        return read_arguments("vllm", {"model": content.get("model_id"), **metadata}, str(path))
    info = as_object(content.get("server_info"))
    states = info.get("internal_states")
    state = as_object(states[0]) if isinstance(states, list) and states else {}
    memory = as_object(state.get("memory_usage"))
    # What the server made of arguments that were left to it comes first: those were stated.
    made = {name: part.get(name) for part in (state, memory) for name in MADE_BY_SGLANG}
    arguments = {name: value for name, value in made.items() if value is not None}
    arguments |= {name: value for name, value in info.items() if value is not None}
    return read_arguments("sglang", arguments, str(path), is_dump=True, is_complete=bool(info))


def _due(number: int, rate: float) -> NDArray[np.float64]:
    """Draw Poisson arrivals of a `rate` (seconds)."""
    return np.cumsum(np.random.default_rng(0).exponential(1 / rate, number))


def _sent(latency: pd.Series, due: NDArray[np.float64], most: int | None) -> list[float]:
    """Hold each request that is `due` until fewer than `most` are unanswered."""
    running, sent = list[float](), list[float]()
    for time, seconds in zip(due, latency, strict=True):
        is_full = most is not None and len(running) >= most
        sent.append(max(float(time), heapq.heappop(running)) if is_full else float(time))
        heapq.heappush(running, sent[-1] + seconds)
    return sent


def _from_ppas(path: Path) -> Iterator[Benchmark]:
    """Read the runs in a log of ppas-vllm; other files have none."""
    model = None
    with readable(path, FIX):
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    for line in lines:
        if started := re.match(r"START SERVER: vllm serve (\S+)", line):
            model = started[1]
        elif line.startswith("{'trace_id'"):
            # Imported here, as that takes seconds.
            from sarathi_lab.extensions.after_sarathi.adaptive_budgets import phased

            row = ast.literal_eval(line)
            phases = [tuple(map(float, one.split(":"))) for one in row["phase_schedule"].split(",")]
            requests = pd.DataFrame({"arrival_time": phased(phases, int(row["seed"]))})
            unknown: list[Any] = [[]] * len(requests)
            requests = requests.assign(
                request_id=requests.index,
                prompt_len=int(row["configured_prompt_tokens"]),
                output_len=int(row["configured_output_tokens"]),
                token_times=unknown,
            )
            arguments = {name: row[name] for name in ("max_num_batched_tokens", "max_num_seqs")}
            policy = "p_pas" if row["config_name"].startswith("ppas") else "vllm_v1"
            label = f"{row['config_name']}, {row['phase_schedule']}, seed {row['seed']}"
            yield Benchmark(
                {"policy": label, "executor": "server", "is_baseline": False},
                requests.reindex(columns=list(REQUEST_COLUMNS)),
                int(row["failed"]),
                [read_arguments("vllm", {"model": model, **arguments}, str(path))],
                policy,
                {wait: float(row[name]) for name, wait in PPAS_MEANS.items()},
                ["the log has means only, of a client that takes time for each prompt token"],
            )


def _loads_of_guidellm(contents: Sequence[Mapping[str, Any]], path: Path) -> list[Benchmark]:
    """Read all loads of a sweep but those without a finished request; of those alone, none can be
    left out. Raises UserError.
    """
    filled, cautions = [], []
    for number, content in enumerate(contents, 1):
        requests = content["requests"]
        if requests["successful"]:
            filled.append(content)
            continue
        unfinished = [*(requests.get("errored") or []), *(requests.get("incomplete") or [])]
        cautions.append(
            f"load {number} of {len(contents)} has no finished request ({len(unfinished)} failed), "
            "and is left out"
        )
    benchmarks = [_from_guidellm(content, path) for content in filled or contents]
    if filled:
        first = benchmarks[0]
        benchmarks[0] = replace(first, cautions=[*first.cautions, *cautions])
    return benchmarks


def _from_guidellm(content: Mapping[str, Any], path: Path) -> Benchmark:
    requests = content["requests"]
    table = pd.DataFrame(requests["successful"], columns=GUIDELLM).set_axis([*LEAST], axis=1)
    if len(table) and table.ttft.isna().all():
        raise UserError(f"{path} {NOT_STREAMED}")
    table["ttft"] *= 1e-3
    table["gaps"] = [[]] * len(table)
    stated = as_object(content.get("config")) or as_object(content.get("args"))
    strategy = as_object(stated.get("strategy"))
    labels = {"policy": "guidellm", "workload.rate": strategy.get("rate")}
    backend = as_object(stated.get("backend")) or as_object(content.get("worker"))
    model = backend.get("model") or backend.get("backend_model")
    server = [read_arguments("vllm", {"model": model}, str(path))]
    num_failed = len(requests.get("errored") or []) + len(requests.get("incomplete") or [])
    client = client_of_strategy(strategy)
    num_cached = sum(_has_cached_tokens(request) for request in requests["successful"])
    cautions = [f"cached tokens of {num_cached} requests are not replayed"] if num_cached else []
    of_client = {"cautions": cautions, "client": client}
    return _benchmark(labels, table, num_failed, path, server=server, **of_client)


def _has_cached_tokens(request: Mapping[str, Any]) -> bool:
    of_prompt = as_object(request.get("input_metrics"))
    return bool(request.get("cached_tokens") or of_prompt.get("cached_tokens"))


def _from_aiperf(records: Sequence[Mapping[str, Any]], path: Path) -> Benchmark:
    profiled = [one for one in records if one["metadata"].get("benchmark_phase") == "profiling"]
    rows = [
        {"inter_chunk_latency": [], **one["metadata"]}
        | {name: metric["value"] for name, metric in one["metrics"].items()}
        for one in profiled
        if not (one.get("error") or one["metadata"].get("was_cancelled"))
    ]
    answered = [row for row in rows if "request_latency" in row]
    if answered and not any("time_to_first_token" in row for row in answered):
        raise UserError(f"{path} {NOT_STREAMED}")
    table = pd.DataFrame({name: [row[name] for row in rows] for name in AIPERF})
    table = table.set_axis([*LEAST, "gaps"], axis=1)
    table[["ttft", "latency"]] *= 1e-3
    table["sent"] *= 1e-9
    table["gaps"] = [[1e-3 * gap for gap in gaps] for gaps in table.gaps]
    num_failed = len(profiled) - len(rows)
    num_turns = sum((row.get("turn_index") or 0) > 0 for row in rows)
    cautions = []
    if num_turns:
        cautions.append(
            "later turns of conversations are replayed without their cached history "
            f"(requests: {num_turns})"
        )
    of_client = {"cautions": cautions, "client": _client_of_aiperf(path)}
    return _benchmark({"policy": "aiperf"}, table, num_failed, path, **of_client)


def _client_of_aiperf(path: Path) -> Client:
    """Read how AIPerf sent its requests from its summary beside them, if that is there."""
    summary = path.with_name("profile_export_aiperf.json")
    if not summary.is_file():
        return CLOCK
    config = as_object(read_object(summary, FIX).get("input_config"))
    load = as_object(config.get("loadgen"))
    if not (load.get("concurrency") or load.get("request_rate")):
        return CLOCK
    return client_of_rate(load.get("request_rate"), load.get("concurrency"))


def _benchmark(
    labels: Mapping[str, Any], table: pd.DataFrame, num_failed: int, path: Path, **more: Any
) -> Benchmark:
    """Make a benchmark of a table of `LEAST` and gaps, in seconds."""
    if table.empty:
        failed = f"all {num_failed} requests failed" if num_failed else "it has no request"
        raise UserError(f"{path}: {failed}; see the server's log")
    table = table.sort_values("sent", ignore_index=True)
    numbers = finite_numbers(path, table, LEAST)
    sent = numbers.sent - numbers.sent.min()
    first = sent + numbers.ttft
    token_times: list[Any] = [
        [start, *(start + np.cumsum(gaps))] if gaps else []
        for start, gaps in zip(first, table.gaps, strict=True)
    ]
    requests = table[["prompt_len", "output_len"]].assign(
        request_id=table.index,
        arrival_time=sent,
        first_token_time=first,
        finish_time=np.maximum(sent + numbers.latency, first),
        token_times=token_times,
    )
    cautions = [*more.pop("cautions", ()), *_cautions_of_tokens(table)]
    if num_failed:
        num_sent = len(requests) + num_failed
        cautions.insert(0, f"{len(requests)} of {num_sent} requests replayed; {num_failed} failed")
    more["cautions"] = cautions
    labels = {**labels, "executor": "server", "is_baseline": False, "path": str(path)}
    client: Client = more.pop("client", CLOCK)
    if not client.source:
        client = inferred(requests)
    more["client"] = client.limited_to(len(requests))
    return Benchmark(labels, requests.reindex(columns=list(REQUEST_COLUMNS)), num_failed, **more)


def _cautions_of_tokens(table: pd.DataFrame) -> list[str]:
    """Warn where clients record times of chunks of several tokens, as drafts give."""
    timed = table[table.gaps.map(len) > 0]
    num_tokens = int(timed.output_len.sum())
    num_chunks = int((1 + timed.gaps.map(len)).sum()) if len(timed) else 0
    if num_chunks >= TOKENS_TIMED * num_tokens:
        return []
    return [
        f"{num_tokens:,} tokens came in {num_chunks:,} chunks, as of drafts: times between tokens "
        "(tbt) are those between chunks"
    ]
