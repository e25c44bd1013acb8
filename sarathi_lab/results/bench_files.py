"""Requests of a real server, as benchmark clients record them.

| client | file |
| --- | --- |
| `vllm bench serve --save-result --save-detailed` | a JSON object, or one a line |
| `guidellm benchmark run` | `benchmarks.json`, a benchmark a rate |
| `aiperf profile` | `profile_export.jsonl`, a request a line |

Every time counts from when the client sent the request, as the clients count it themselves, so
that waiting in the client is in none of them. GuideLLM records no times between tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from sarathi_lab.config.errors import UserError
from sarathi_lab.config.paths import json_object, readable
from sarathi_lab.engine.ledger import REQUEST_COLUMNS
from sarathi_lab.results.metrics import throughput
from sarathi_lab.results.serving_metrics import latency

CLIENTS = "vllm bench serve (with --save-detailed), GuideLLM or AIPerf (profile_export.jsonl)"
FIX = f"name a file of {CLIENTS}"
SECONDS = {"s": 1.0, "sec": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
NUMBERS = ["prompt_len", "output_len", "sent", "ttft", "latency"]
LEAST = [1, 1, 0, 0, 0]
NO_GAPS = {"value": [], "unit": "ms"}
VLLM_LISTS = {
    "input_lens": "prompt_len",
    "output_lens": "output_len",
    "start_times": "sent",
    "ttfts": "ttft",
    "itls": "gaps",
    "errors": "error",
}
GUIDELLM = {
    "prompt_tokens": "prompt_len",
    "output_tokens": "output_len",
    "request_start_time": "sent",
    "time_to_first_token_ms": "ttft",
    "request_latency": "latency",
}


@dataclass(frozen=True)
class Benchmark:
    """One load on a server. `requests` has the finished ones in the ledger's columns: times in
    seconds since the first was sent, NaN where only the server has the value.
    """

    settings: Mapping[str, Any]
    requests: pd.DataFrame
    num_failed: int

    @property
    def summary(self) -> dict[str, float]:
        """Return quantities by the names of METRICS.md."""
        rates = throughput(self.requests, float(self.requests.finish_time.max()))
        return {**rates, **latency(self.requests), "num_failed": self.num_failed}


def is_benchmark_file(path: Path) -> bool:
    """Return whether `path` is a file of JSON or JSON lines."""
    return path.is_file() and path.suffix in (".json", ".jsonl")


def read_benchmarks(path: Path) -> list[Benchmark]:
    """Read all benchmarks in a client's file. Raises UserError for what is none."""
    objects = _objects(path)
    try:
        benchmarks = list(_benchmarks(objects, path))
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        reason = f"lacks {error}" if isinstance(error, KeyError) else f"is damaged ({error})"
        raise UserError(f"{path} {reason}; {FIX}") from None
    if not benchmarks:
        raise UserError(f"{path} has no benchmark; {FIX}")
    return benchmarks


def _objects(path: Path) -> list[dict[str, Any]]:
    with readable(path, FIX):
        text = path.read_text(encoding="utf-8")
    try:
        return [json.loads(text)]
    except (ValueError, RecursionError):
        lines = [(i, line) for i, line in enumerate(text.splitlines(), 1) if line.strip()]
        return [json_object(line, f"{path} line {i}", FIX) for i, line in lines]


def _benchmarks(objects: Sequence[Mapping[str, Any]], path: Path) -> Iterator[Benchmark]:
    first = objects[0] if objects else {}
    if "metadata" in first and "metrics" in first:
        yield _from_aiperf(objects, path)
    elif "benchmarks" in first:
        for benchmark in first["benchmarks"]:
            yield _from_guidellm(benchmark, path)
    elif "backend" in first and "completed" in first:
        for one in objects:
            yield _from_vllm(one, path)
    elif first:
        raise UserError(f"{path} was written by none of the known clients; {FIX}")


def _from_vllm(content: Mapping[str, Any], path: Path) -> Benchmark:
    if missing := [name for name in VLLM_LISTS if name not in content]:
        raise UserError(
            f"{path} has no {missing[0]}; run vllm bench serve again with --save-detailed"
        )
    table = pd.DataFrame({column: content[name] for name, column in VLLM_LISTS.items()})
    # Files of older versions have no latencies.
    table["latency"] = content.get("latencies") or table.ttft + table.gaps.map(sum)
    finished = table[(table.output_len > 0) & (table.error == "")]
    settings = {
        "policy": content["backend"],
        "model": content.get("model_id"),
        "workload.rate": content.get("request_rate"),
        "batch": content.get("max_concurrency"),
    }
    return _benchmark(settings, finished, len(table) - len(finished), path)


def _from_guidellm(content: Mapping[str, Any], path: Path) -> Benchmark:
    requests = content["requests"]
    table = pd.DataFrame(requests["successful"], columns=list(GUIDELLM)).rename(columns=GUIDELLM)
    table["ttft"] *= 1e-3
    table["gaps"] = [[]] * len(table)
    strategy = (content.get("config") or {}).get("strategy") or {}
    settings = {"policy": "guidellm", "workload.rate": strategy.get("rate")}
    failed = len(requests.get("errored") or []) + len(requests.get("incomplete") or [])
    return _benchmark(settings, table, failed, path)


def _from_aiperf(records: Sequence[Mapping[str, Any]], path: Path) -> Benchmark:
    profiled = [one for one in records if one["metadata"].get("benchmark_phase") == "profiling"]
    rows = []
    for one in (one for one in profiled if not one.get("error")):
        metrics = one["metrics"]
        rows.append(
            {
                "prompt_len": metrics["input_sequence_length"]["value"],
                "output_len": metrics["output_sequence_length"]["value"],
                "sent": one["metadata"]["request_start_ns"] * 1e-9,
                "ttft": float(_seconds(metrics["time_to_first_token"])),
                "gaps": _seconds(metrics.get("inter_chunk_latency", NO_GAPS)).tolist(),
                "latency": float(_seconds(metrics["request_latency"])),
            }
        )
    return _benchmark({"policy": "aiperf"}, pd.DataFrame(rows), len(profiled) - len(rows), path)


def _seconds(metric: Mapping[str, Any]) -> np.ndarray:
    """Convert a metric of AIPerf, a number or a list of them, to seconds."""
    return np.asarray(metric["value"], dtype=float) * SECONDS[metric["unit"]]


def _benchmark(
    settings: Mapping[str, Any], table: pd.DataFrame, num_failed: int, path: Path
) -> Benchmark:
    """Make a benchmark of `table`: sent, ttft, latency, gaps (seconds), prompt_len, output_len."""
    if table.empty:
        raise UserError(f"{path}: all {num_failed} requests failed; see the server's log")
    table = table.sort_values("sent", ignore_index=True)
    numbers = table[NUMBERS].apply(pd.to_numeric, errors="coerce")
    is_valid = np.isfinite(numbers).all(axis=1) & (numbers >= LEAST).all(axis=1)
    if not is_valid.all():
        shown = ", ".join(
            f"{name}={value}" for name, value in table[NUMBERS].iloc[is_valid.argmin()].items()
        )
        raise UserError(f"{path} has a request with {shown}; {FIX}")
    sent = numbers.sent - numbers.sent.min()
    first = sent + numbers.ttft
    columns = {
        "request_id": table.index,
        "arrival_time": sent,
        "first_token_time": first,
        "finish_time": np.maximum(sent + numbers.latency, first),
        "prompt_len": numbers.prompt_len.astype(int),
        "output_len": numbers.output_len.astype(int),
        "token_times": [
            [start, *(start + np.cumsum(gaps))] if gaps else []
            for start, gaps in zip(first, table.gaps, strict=True)
        ],
    }
    requests = pd.DataFrame(columns).reindex(columns=list(REQUEST_COLUMNS))
    labels = {"executor": "server", "is_baseline": False, "path": str(path)}
    return Benchmark({**settings, **labels}, requests, num_failed)
