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

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from sarathi_lab.config.errors import UserError
from sarathi_lab.config.paths import read_object, readable
from sarathi_lab.executor.simulated.cuda_graphs import CudaGraphs
from sarathi_lab.extensions.replay.bench_files import (
    finite_numbers,
    is_benchmark_file,
    read_benchmarks,
    read_objects,
    refuse_rows,
)
from sarathi_lab.results.metrics import throughput
from sarathi_lab.results.serving_metrics import latency, quantiles

NULL_BLOCKS = 1  # of vLLM's blocks, never allocated
ENGINE_TIMES = ("queued_ts", "scheduled_ts", "first_token_ts", "last_token_ts")
# Columns of a run with their least value.
REQUEST = {"input_toks": 1, "output_toks": 1, "arrival_time": 0, **dict.fromkeys(ENGINE_TIMES, 0)}
SERIES = dict.fromkeys(("t", "running", "waiting", "kv_cache_pct"), 0)
# Columns of the ledger's table that a run has.
OF_LEDGER = {
    "arrival_time": "arrival_time",
    "scheduled_ts": "first_scheduled_time",
    "first_token_ts": "first_token_time",
    "last_token_ts": "finish_time",
    "input_toks": "prompt_len",
    "output_toks": "output_len",
}
WAITS = ("ttft", "tpot", "latency")  # seconds of a request, as METRICS.md defines them
UNITS = {
    **dict.fromkeys(WAITS, "s"),
    "output_throughput": "tokens/s",
    "request_throughput": "requests/s",
    "duration": "s",
    "num_preemptions": "",
    "blocks_used": "blocks",
}
# vLLM's numbers of its modes of CUDA graphs.
GRAPH_MODES: Mapping[Any, str] = {
    0: "none",
    1: "piecewise",
    2: "full",
    (2, 0): "full_decode_only",
    (2, 1): "full_and_piecewise",
}
FIX = "name the folder of a run, with meta.json and requests.jsonl, or a benchmark client's file"


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Settings of vLLM by their names there, with its defaults; None: not recorded."""

    model: str
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int | None = None
    dtype: str = "auto"
    block_size: int = 16
    num_gpu_blocks: int | None = None
    gpu_memory_utilization: float = 0.9
    enable_prefix_caching: bool = True
    async_scheduling: bool | None = None
    tensor_parallel_size: int = 1
    data_parallel_size: int = 1
    enable_expert_parallel: bool = False
    enforce_eager: bool = False
    cudagraph_mode: str | int | Sequence[int] = "full_and_piecewise"
    cudagraph_capture_sizes: Sequence[int] | None = None
    max_cudagraph_capture_size: int | None = None

    @property
    def num_blocks(self) -> int | None:
        """Blocks that requests can have."""
        return None if self.num_gpu_blocks is None else self.num_gpu_blocks - NULL_BLOCKS

    @property
    def graphs(self) -> dict[str, Any]:
        """Settings of `CudaGraphs`: the mode by its name or vLLM's number (a pair for decodes and
        others), and sizes up to by default twice the sequences, but at most the token budget.
        """
        stated = self.cudagraph_mode
        key = stated if isinstance(stated, (str, int)) else tuple(stated)
        mode = "none" if self.enforce_eager else GRAPH_MODES.get(key, str(key).lower())
        budget = self.max_num_batched_tokens
        if sizes := [one for one in self.cudagraph_capture_sizes or () if one <= budget]:
            return {"mode": mode, "sizes": sizes}
        largest = self.max_cudagraph_capture_size or min(2 * self.max_num_seqs, 512)
        return {"mode": mode, "largest": min(largest, budget)}

    @property
    def graph_tokens(self) -> int:
        """Tokens of the largest CUDA graph, 0 without any."""
        return max(CudaGraphs(**self.graphs).captured, default=0)


@dataclass(frozen=True)
class RealRun:
    """Settings of a server and its measurements.

    `requests` has the ledger's columns that a run records, with times in seconds since the first
    arrival. The engine's clock is shifted so that the shortest way from arrival to queue is zero:
    what all requests take to the engine is in neither these times nor in simulated ones.
    `timeline` has `SERIES`, in seconds since about then, and may be empty.
    """

    source: str
    version: str
    settings: ServerSettings
    hardware: str | None
    link: tuple[float, float] | None  # bytes/s and seconds
    requests: pd.DataFrame
    timeline: pd.DataFrame

    @property
    def duration(self) -> float:
        """Seconds from the first arrival to the last token."""
        return float(self.requests.finish_time.max())


def read_run(folder: str | Path) -> RealRun:
    """Read the run in `folder`. Raises UserError that names the file and what is wrong in it."""
    place = Path(folder).expanduser()
    if is_benchmark_file(place):
        benchmarks = read_benchmarks(place)
        if len(benchmarks) > 1:
            raise UserError(f"{place} has {len(benchmarks)} benchmarks; record one in a file")
        requests, place = benchmarks[0].requests, place.parent
    elif place.is_dir():
        requests = _requests(place / "requests.jsonl")
    else:
        raise UserError(f"task.run={folder} is not a folder; {FIX}")
    meta = read_object(place / "meta.json", FIX)
    config_path = place / "config.json"
    config = read_object(config_path, FIX) if config_path.is_file() else {}
    instance = _first_instance(config)
    rate, delay = config.get("link_bw"), config.get("link_latency")  # GB/s, nanoseconds
    return RealRun(
        source=str(place),
        version=str(meta.get("vllm_version", "")),
        settings=_settings(place / "meta.json", meta, instance),
        hardware=instance.get("hardware") or _part(meta, "hardware").get("device_name"),
        link=(rate * 1e9, delay * 1e-9) if rate and delay is not None else None,
        requests=requests,
        timeline=_timeline(place / "timeseries.csv"),
    )


def _settings(path: Path, meta: Mapping[str, Any], instance: Mapping[str, Any]) -> ServerSettings:
    """Merge what the parts of a run's files state, the engine's arguments last."""
    if not isinstance(meta.get("engine_kwargs"), dict):
        raise UserError(f"{path} has no engine_kwargs, vLLM's arguments; record the run again")
    resolved = _part(meta, "resolved_config")
    stated = {"model": meta.get("model")}
    stated["gpu_memory_utilization"] = _part(instance, "npu_mem").get("mem_util")
    stated["max_model_len"] = _part(resolved, "model_config").get("max_model_len")
    parts = [stated, *(_part(resolved, f"{name}_config") for name in ("scheduler", "compilation"))]
    engine = meta["engine_kwargs"]
    parts += [_part(meta, "kv_cache"), _part(engine, "compilation_config"), engine]
    names = [one.name for one in fields(ServerSettings)]
    found = {name: part[name] for part in parts for name in names if part.get(name) is not None}
    for name in ("model", "max_num_seqs", "max_num_batched_tokens"):
        if name not in found:
            raise UserError(f"{path} has no {name}; add it to engine_kwargs")
    return ServerSettings(**found)


def _part(of: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return an object in `of`, which may be text, as after --compilation-config; else none."""
    value = of.get(key)
    if isinstance(value, str):
        with suppress(ValueError):
            value = json.loads(value)
    return value if isinstance(value, dict) else {}


def _first_instance(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the first engine of LLMServingSim's configuration."""
    try:
        return dict(config["nodes"][0]["instances"][0])
    except (KeyError, IndexError, TypeError, ValueError):
        return {}


def _requests(path: Path) -> pd.DataFrame:
    rows = read_objects(path, FIX)
    if not rows:
        raise UserError(f"{path} is empty; {FIX}")
    table = finite_numbers(path, pd.DataFrame(rows), REQUEST)
    for before, after in pairwise(ENGINE_TIMES):
        refuse_rows(path, table[after], table[after] < table[before], f"is before {before}")
    table["arrival_time"] -= table.arrival_time.min()
    table[[*ENGINE_TIMES]] -= (table.queued_ts - table.arrival_time).min()
    table = table.sort_values("arrival_time", ignore_index=True)[list(OF_LEDGER)]
    unknown: list[Any] = [[] for _ in rows]
    return table.rename(columns=OF_LEDGER).assign(request_id=table.index, token_times=unknown)


def _timeline(path: Path) -> pd.DataFrame:
    if not path.is_file():
        return pd.DataFrame(columns=list(SERIES), dtype=float)
    with readable(path, "correct it, or delete it"):
        table = pd.read_csv(path)
    return finite_numbers(path, table, SERIES)


def validation_table(
    run: RealRun, requests: pd.DataFrame, iterations: pd.DataFrame
) -> pd.DataFrame:
    """Compare `run` with the ledger's tables of its replay: metric, quantile, unit, real, simulated
    and their relative error, NaN without a measurement. Blocks in use are quantiles over the run's
    seconds.
    """
    both, preemptions = over_time(run, iterations), float(iterations.num_preemptions.sum())
    real = _summary(run.requests, run.duration, math.nan, both.real_blocks)
    duration = float(iterations.end.max())
    simulated = _summary(requests, duration, preemptions, both.simulated_blocks)
    rows = [
        (metric, quantile, unit, real[metric, quantile], simulated[metric, quantile])
        for metric, unit in UNITS.items()
        for quantile in ("", "mean", "p50", "p90", "p99")
        if (metric, quantile) in real.keys() & simulated.keys()
    ]
    table = pd.DataFrame(rows, columns=["metric", "quantile", "unit", "real", "simulated"])
    return table.assign(error=table.simulated / table.real - 1)


def _summary(
    requests: pd.DataFrame, duration: float, num_preemptions: float, blocks: pd.Series
) -> dict[tuple[str, str], float]:
    """Return quantities by metric and quantile, which is empty where there is one value."""
    single = {**throughput(requests, duration), "num_preemptions": num_preemptions}
    several = {**latency(requests), **quantiles("blocks_used", blocks)}
    return {(name, ""): value for name, value in single.items()} | {
        (name.rpartition("_")[0], name.rpartition("_")[2]): value for name, value in several.items()
    }


def over_time(run: RealRun, iterations: pd.DataFrame) -> pd.DataFrame:
    """Sample running and waiting requests and blocks in use, real and simulated, at the `time`
    (seconds) of each row of the run's timeline.
    """
    line, num_blocks = run.timeline, run.settings.num_blocks or math.nan
    is_recorded = line.kv_cache_pct.any()
    samples: dict[str, Any] = {"time": line.t, "real_running": line.running}
    samples["real_waiting"] = line.waiting
    samples["real_blocks"] = line.kv_cache_pct / 100 * num_blocks if is_recorded else math.nan
    last = np.searchsorted(iterations.end, line.t, side="right")
    for name in ("running", "waiting", "blocks_used"):
        values = np.concatenate([[0.0], iterations[f"num_{name}"]])
        samples[f"simulated_{name.partition('_')[0]}"] = values[last]
    return pd.DataFrame(samples)


def mean_errors(table: pd.DataFrame) -> dict[str, float]:
    """Select the relative error of each wait's mean."""
    means = table[(table["quantile"] == "mean") & table.metric.isin(WAITS)]
    return dict(zip(means.metric, means.error, strict=True))
