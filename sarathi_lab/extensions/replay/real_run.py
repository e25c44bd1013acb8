"""A recorded run of a real server, read from its folder, and its comparison with a replay.

The folder has what LLMServingSim keeps of a vLLM run (github.com/casys-kaist/LLMServingSim):

- `meta.json`: `vllm_version`, `model`, `engine_kwargs`; maybe `kv_cache` and `resolved_config`;
- `requests.jsonl`, a request a line: `input_toks`, `output_toks`; `arrival_time`, seconds of the
  client's clock; `queued_ts`, `scheduled_ts`, `first_token_ts`, `last_token_ts`, seconds of the
  engine's;
- `config.json`, if there is one: which `hardware`, and how its devices are linked;
- `timeseries.csv`, if there is one: `t`, `running`, `waiting`, `kv_cache_pct` once in a while.

In place of the folder, a file of a benchmark client (`bench_files`) may be named, with
`meta.json` beside it: its times are the client's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from sarathi_lab.config.errors import UserError
from sarathi_lab.config.paths import json_object, readable
from sarathi_lab.extensions.replay.bench_files import is_benchmark_file, read_benchmarks
from sarathi_lab.results.metrics import throughput
from sarathi_lab.results.serving_metrics import QUANTILES, Floats, quantiles, waits

BLOCK_SIZE = 16  # vLLM's default
NULL_BLOCKS = 1  # of vLLM's blocks, never allocated
ENGINE_TIMES = ("queued_ts", "scheduled_ts", "first_token_ts", "last_token_ts")
COUNTS = ("input_toks", "output_toks")
NEEDED = (*COUNTS, "arrival_time", *ENGINE_TIMES)
# Columns of the ledger's table that a run has.
OF_LEDGER = {
    "arrival_time": "arrival_time",
    "scheduled_ts": "first_scheduled_time",
    "first_token_ts": "first_token_time",
    "last_token_ts": "finish_time",
    "input_toks": "prompt_len",
    "output_toks": "output_len",
}
SERIES = ("t", "running", "waiting", "kv_cache_pct")
AGAIN = "record the run again"
WAITS = ("ttft", "tpot", "latency")  # seconds of a request, as METRICS.md defines them
RATES = {"output_throughput": "tokens/s", "request_throughput": "requests/s", "duration": "s"}
COLUMNS = ("metric", "quantile", "unit", "real", "simulated", "error")
MEAN = "mean"
FIX = "name the folder of a run, with meta.json and requests.jsonl, or a benchmark client's file"


@dataclass(frozen=True)
class RealRun:
    """Settings of a server (None: not recorded) and its measurements.

    `requests` has the ledger's columns that a run records, with times in seconds since the first
    arrival. The engine's clock is shifted so that the shortest way from arrival to queue is zero:
    what all requests take to the engine is in neither these times nor in simulated ones.
    `timeline` has `SERIES`, in seconds since about then, and may be empty.
    """

    source: str
    server: str
    version: str
    model: str
    hardware: str | None
    dtype: str
    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int | None
    block_size: int
    num_gpu_blocks: int | None
    gpu_memory_utilization: float | None
    enable_prefix_caching: bool | None
    async_scheduling: bool | None
    tensor_parallel_size: int
    data_parallel_size: int
    enable_expert_parallel: bool
    graph_tokens: int  # of the largest CUDA graph; 0 without any
    link: tuple[float, float] | None  # bytes/s and seconds
    requests: pd.DataFrame
    timeline: pd.DataFrame

    @property
    def duration(self) -> float:
        """Seconds from the first arrival to the last token."""
        return float(self.requests.finish_time.max())

    @property
    def num_blocks(self) -> int | None:
        """Blocks that requests can have; None if not known."""
        return None if self.num_gpu_blocks is None else self.num_gpu_blocks - NULL_BLOCKS

    @property
    def blocks_used(self) -> pd.Series | None:
        """Blocks in use over time, if both their share and their number are known."""
        share = self.timeline.kv_cache_pct
        if self.num_blocks is None or not share.any():
            return None
        return share / 100 * self.num_blocks


def read_run(folder: str | Path) -> RealRun:
    """Read the run in `folder`. Raises UserError that names the file and what is wrong in it."""
    place = Path(folder).expanduser()
    if is_benchmark_file(place):
        requests, place = _of_benchmark(place), place.parent
    elif place.is_dir():
        requests = _requests(place / "requests.jsonl")
    else:
        raise UserError(f"task.run={folder} is not a folder; {FIX}")
    meta = _json(place / "meta.json")
    config = _json(place / "config.json") if (place / "config.json").is_file() else {}
    engine = _part(meta, "engine_kwargs", place / "meta.json")
    cache, resolved = _maybe(meta, "kv_cache"), _maybe(meta, "resolved_config")
    scheduler = _maybe(resolved, "scheduler_config")
    instance = _first_instance(config)

    def named(key: str, *others: Mapping[str, Any], default: Any = None) -> Any:
        values = (one[key] for one in (engine, *others) if one.get(key) is not None)
        return next(values, default)

    def needed(key: str, *others: Mapping[str, Any]) -> Any:
        if (value := named(key, *others)) is None:
            raise UserError(f"{place / 'meta.json'} has no {key}; add it to engine_kwargs")
        return value

    max_num_seqs = needed("max_num_seqs", scheduler)
    return RealRun(
        source=str(place),
        server="vllm",
        version=str(meta.get("vllm_version", "")),
        model=str(needed("model", meta)),
        hardware=instance.get("hardware") or _maybe(meta, "hardware").get("device_name"),
        dtype=str(named("dtype", default="auto")),
        max_num_batched_tokens=needed("max_num_batched_tokens", scheduler),
        max_num_seqs=max_num_seqs,
        max_model_len=named("max_model_len", _maybe(resolved, "model_config")),
        block_size=named("block_size", cache, default=BLOCK_SIZE),
        num_gpu_blocks=cache.get("num_gpu_blocks"),
        gpu_memory_utilization=named(
            "gpu_memory_utilization", cache, default=_maybe(instance, "npu_mem").get("mem_util")
        ),
        enable_prefix_caching=named("enable_prefix_caching", cache),
        async_scheduling=named("async_scheduling", scheduler),
        tensor_parallel_size=named("tensor_parallel_size", default=1),
        data_parallel_size=named("data_parallel_size", default=1),
        enable_expert_parallel=bool(named("enable_expert_parallel", default=False)),
        graph_tokens=_graph_tokens(bool(engine.get("enforce_eager")), max_num_seqs, resolved),
        link=_link(config),
        requests=requests,
        timeline=_timeline(place / "timeseries.csv"),
    )


def _of_benchmark(path: Path) -> pd.DataFrame:
    benchmarks = read_benchmarks(path)
    if len(benchmarks) > 1:
        raise UserError(f"{path} has {len(benchmarks)} benchmarks; record one in a file")
    return benchmarks[0].requests


def _requests(path: Path) -> pd.DataFrame:
    rows = list(_lines(path))
    if not rows:
        raise UserError(f"{path} is empty; {FIX}")
    table = pd.DataFrame(rows)
    if missing := [name for name in NEEDED if name not in table]:
        raise UserError(
            f"{path} has no {missing[0]}; a request needs {', '.join(NEEDED)}: record them"
        )
    for name in NEEDED:
        numbers = pd.to_numeric(table[name], errors="coerce")
        least = 1 if name in COUNTS else 0
        bad = ~(numbers >= least) | np.isinf(numbers)
        _refuse(path, table, name, bad, f"is not a number from {least}")
        table[name] = numbers
    for before, after in pairwise(ENGINE_TIMES):
        _refuse(path, table, after, table[after] < table[before], f"is before {before}")
    arrival = table.arrival_time - table.arrival_time.min()
    offset = (table.queued_ts - arrival).min()
    for name in ENGINE_TIMES:
        table[name] -= offset
    table = table.assign(arrival_time=arrival).sort_values("arrival_time", ignore_index=True)
    found = table[list(OF_LEDGER)].rename(columns=OF_LEDGER)
    found.insert(0, "request_id", range(len(found)))
    unknown: list[Any] = [[] for _ in rows]
    return found.assign(token_times=unknown)


def _refuse(path: Path, table: pd.DataFrame, name: str, bad: Any, why: str) -> None:
    if bad.any():
        row = int(np.argmax(np.asarray(bad)))
        raise UserError(
            f"{path} line {row + 1}: {name}={table[name].iloc[row]} {why}; correct or remove it"
        )


def _timeline(path: Path) -> pd.DataFrame:
    if not path.is_file():
        return pd.DataFrame(columns=list(SERIES), dtype=float)
    with readable(path, "correct it, or delete it"):
        table = pd.read_csv(path)
    if missing := [name for name in SERIES if name not in table]:
        raise UserError(f"{path} has no column {missing[0]}; add it, or delete the file")
    numbers = table[list(SERIES)].apply(pd.to_numeric, errors="coerce")
    for name in SERIES:
        _refuse(path, table, name, ~(numbers[name] >= 0), "is not a number from 0")
    return numbers


def _lines(path: Path) -> Iterator[Mapping[str, Any]]:
    for number, line in enumerate(_text(path).splitlines(), start=1):
        if line.strip():
            yield json_object(line, f"{path} line {number}", AGAIN)


def _json(path: Path) -> Mapping[str, Any]:
    return json_object(_text(path), str(path), AGAIN)


def _text(path: Path) -> str:
    with readable(path, FIX):
        return path.read_text(encoding="utf-8")


def _part(of: Mapping[str, Any], key: str, path: Path) -> Mapping[str, Any]:
    if not isinstance(of.get(key), dict):
        raise UserError(f"{path} has no {key}, the arguments of the engine; record the run again")
    return dict(of[key])


def _maybe(of: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    return value if isinstance(value := of.get(key), dict) else {}


def _first_instance(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the first engine of LLMServingSim's configuration."""
    try:
        return dict(config["nodes"][0]["instances"][0])
    except (KeyError, IndexError, TypeError, ValueError):
        return {}


def _graph_tokens(is_eager: bool, max_num_seqs: int, resolved: Mapping[str, Any]) -> int:
    """Return the recorded size, else vLLM's default: twice the sequences, 512 at most."""
    if is_eager:
        return 0
    stated = _maybe(resolved, "compilation_config").get("max_cudagraph_capture_size")
    return int(min(2 * max_num_seqs, 512) if stated is None else stated)


def _link(config: Mapping[str, Any]) -> tuple[float, float] | None:
    """Convert the link between devices from GB/s and nanoseconds."""
    rate, latency = config.get("link_bw"), config.get("link_latency")
    if not (isinstance(rate, int | float) and isinstance(latency, int | float)):
        return None
    return (rate * 1e9, latency * 1e-9) if rate > 0 and latency >= 0 else None


def validation_table(
    run: RealRun, requests: pd.DataFrame, iterations: pd.DataFrame
) -> pd.DataFrame:
    """Compare `run` with the ledger's tables of its replay, in `COLUMNS`; the error is relative,
    NaN without a measurement. Blocks in use are quantiles over the run's seconds.
    """
    table = pd.DataFrame(_rows(run, requests, iterations), columns=list(COLUMNS[:-1]))
    return table.assign(error=table.simulated / table.real - 1)


def _rows(
    run: RealRun, requests: pd.DataFrame, iterations: pd.DataFrame
) -> Iterator[tuple[str, str, str, float, float]]:
    real, simulated = waits(run.requests), waits(requests)
    for metric in WAITS:
        yield from _quantiles(metric, "s", real[metric], simulated[metric])
    rates = throughput(run.requests, run.duration)
    simulated_rates = throughput(requests, float(iterations.end.max()))
    for metric, unit in RATES.items():
        yield metric, "", unit, rates[metric], simulated_rates[metric]
    yield "num_preemptions", "", "", math.nan, float(iterations.num_preemptions.sum())
    both = over_time(run, iterations)
    if both.real_blocks.notna().any():
        yield from _quantiles("blocks_used", "blocks", both.real_blocks, both.simulated_blocks)


def _quantiles(
    metric: str, unit: str, real: pd.Series | Floats, simulated: pd.Series | Floats
) -> Iterator[tuple[str, str, str, float, float]]:
    first, second = quantiles("", real), quantiles("", simulated)
    for name in (MEAN, *(f"p{int(q * 100)}" for q in QUANTILES)):
        if f"_{name}" in first and f"_{name}" in second:
            yield metric, name, unit, first[f"_{name}"], second[f"_{name}"]


def over_time(run: RealRun, iterations: pd.DataFrame) -> pd.DataFrame:
    """Sample running and waiting requests and blocks in use, real and simulated, at the `time`
    (seconds) of each row of the run's timeline.
    """
    line = run.timeline
    samples: dict[str, Any] = {"time": line.t, "real_running": line.running}
    samples["real_waiting"] = line.waiting
    samples["real_blocks"] = np.nan if run.blocks_used is None else run.blocks_used
    last = np.searchsorted(iterations.end, line.t, side="right") - 1
    for name in ("running", "waiting", "blocks_used"):
        values = iterations[f"num_{name}"].to_numpy(float)
        at = np.where(last >= 0, values[np.maximum(last, 0)], 0.0)
        samples[f"simulated_{name.partition('_')[0]}"] = at
    return pd.DataFrame(samples)


def mean_errors(table: pd.DataFrame) -> dict[str, float]:
    """Select the relative error of each wait's mean."""
    means = table[(table["quantile"] == MEAN) & table.metric.isin(WAITS)]
    return dict(zip(means.metric, means.error, strict=True))
