"""A recorded run of a real server, read from its folder or from the file of a client.

The folder has what LLMServingSim keeps of a vLLM run (github.com/casys-kaist/LLMServingSim):

- `meta.json`: `vllm_version`, `model`, `engine_kwargs`; maybe `kv_cache` and `resolved_config`;
- `requests.jsonl`, a request a line: `input_toks`, `output_toks`; `arrival_time`, seconds of the
  client's clock; `queued_ts`, `scheduled_ts`, `first_token_ts`, `last_token_ts`, seconds of the
  engine's;
- `config.json`, if there is one: which `hardware`, and how its devices are linked;
- `timeseries.csv`, if there is one: `t`, `running`, `waiting`, `kv_cache_pct` once in a while.

In place of the folder, a file of a benchmark client (`bench_files`) may be named, whose times are
the client's, or a log of iterations (`iteration_log`). What they do not state of the server is in
`meta.json` beside them, in the log, or on the command line.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pandas as pd

from sarathi_lab.config.errors import UserError
from sarathi_lab.config.paths import read_object, readable
from sarathi_lab.executor.simulated.cuda_graphs import CudaGraphs
from sarathi_lab.extensions.replay.bench_files import (
    Benchmark,
    finite_numbers,
    read_benchmarks,
    read_objects,
    refuse_rows,
)
from sarathi_lab.extensions.replay.iteration_log import NO_LOG, IterationLog, read_log, require_log

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
# vLLM's numbers of its modes of CUDA graphs.
GRAPH_MODES: Mapping[Any, str] = {
    0: "none",
    1: "piecewise",
    2: "full",
    (2, 0): "full_decode_only",
    (2, 1): "full_and_piecewise",
}
FIX = "name the folder of a run, with meta.json and requests.jsonl, or a benchmark client's file"
# What a replay needs to be stated: as it is called, and as it is typed.
NEEDED = {
    "model": ("model", "model=NAME"),
    "hardware": ("GPU", "hardware=NAME"),
    "max_num_batched_tokens": ("token budget", "task.chunk=TOKENS"),
    "max_num_seqs": ("sequences", "task.batch=SEQUENCES"),
    "host": ("host", "host=NAME such as vllm_0_19"),
}


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
    `timeline` has `SERIES`, in seconds since about then, and may be empty, as may `log` be, and
    `requests` where it is the log of one. `means` and `caution` are the benchmark's, `policy` is
    the server's, of conf/policy.
    """

    source: str
    version: str
    settings: ServerSettings
    hardware: str | None
    link: tuple[float, float] | None  # bytes/s and seconds
    requests: pd.DataFrame
    timeline: pd.DataFrame
    name: str = ""  # among several loads
    policy: str = "vllm_v1"
    log: IterationLog = NO_LOG
    means: Mapping[str, float] = field(default_factory=dict)
    caution: str = ""

    @property
    def duration(self) -> float:
        """Seconds from the first arrival to the last token."""
        return float(self.requests.finish_time.max())


def read_runs(
    place: str | Path, log: str | None = None, given: Mapping[str, Any] | None = None
) -> list[RealRun]:
    """Read the run in `place`, a load each, with the iterations in `log`; settings that are `given`
    by the names of `NEEDED` replace recorded ones. Raises UserError that names the file and what is
    wrong in it, or the settings that are stated nowhere.
    """
    path = Path(place).expanduser()
    logged = NO_LOG if log is None else require_log(Path(log).expanduser())
    if path.is_dir():
        benchmarks, folder = [Benchmark({}, _requests(path / "requests.jsonl"), 0)], path
    elif path.is_file():
        folder = path.parent
        if (alone := read_log(path)) is not None:
            nothing = pd.DataFrame(columns=[*OF_LEDGER.values(), "token_times"])
            benchmarks, logged = [Benchmark({"policy": ""}, nothing, 0)], alone
        else:
            benchmarks = read_benchmarks(path)
    else:
        raise UserError(f"task.run={place} is not a folder or a file; {FIX}")
    recorded = _recorded(folder, is_needed=path.is_dir())
    known = {name: value for name, value in (given or {}).items() if value is not None}
    runs = [_real_run(one, path, recorded, logged, known) for one in benchmarks]
    return [replace(run, name=f"{i}: {run.name}") for i, run in enumerate(runs, 1)]


def _recorded(folder: Path, *, is_needed: bool) -> dict[str, Any]:
    """Read what is recorded of a server beside its requests."""
    meta_path, config_path = folder / "meta.json", folder / "config.json"
    has_meta = is_needed or meta_path.is_file()
    meta = read_object(meta_path, FIX) if has_meta else {}
    config = read_object(config_path, FIX) if is_needed and config_path.is_file() else {}
    instance = _first_instance(config)
    rate, delay = config.get("link_bw"), config.get("link_latency")  # GB/s, nanoseconds
    return {
        "server": _stated(meta_path, meta, instance) if has_meta else {},
        "version": str(meta.get("vllm_version", "")),
        "hardware": instance.get("hardware") or _part(meta, "hardware").get("device_name"),
        "link": (rate * 1e9, delay * 1e-9) if rate and delay is not None else None,
        "timeline": _timeline(folder / "timeseries.csv" if is_needed else Path()),
    }


def _real_run(
    benchmark: Benchmark,
    path: Path,
    recorded: Mapping[str, Any],
    log: IterationLog,
    given: Mapping[str, Any],
) -> RealRun:
    """Merge what is stated of a server. Raises UserError for what it is not, in one line."""
    stated: dict[str, Any] = {}
    for part in (benchmark.server, recorded["server"], log.server, given):
        stated |= {name: value for name, value in part.items() if value is not None}
    version = recorded["version"] or log.version or str(benchmark.server.get("version") or "")
    known = {"hardware": recorded["hardware"], "host": version or None} | stated
    if missing := [words for name, words in NEEDED.items() if known.get(name) is None]:
        what, flags = zip(*missing, strict=True)
        raise UserError(
            f"{path} does not state the server's {', '.join(what)}; add {' '.join(flags)}"
        )
    names = {one.name for one in fields(ServerSettings)}
    rate = benchmark.settings.get("workload.rate")
    return RealRun(
        source=str(path),
        version=version,
        settings=ServerSettings(**{key: stated[key] for key in names & stated.keys()}),
        hardware=recorded["hardware"],
        link=recorded["link"],
        requests=benchmark.requests,
        timeline=recorded["timeline"],
        name=benchmark.settings.get("policy", "") + (f" at {rate}/s" if rate else ""),
        policy=stated.get("policy", "vllm_v1"),
        log=log,
        means=benchmark.means,
        caution=benchmark.caution,
    )


def _stated(path: Path, meta: Mapping[str, Any], instance: Mapping[str, Any]) -> dict[str, Any]:
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
    return {name: part[name] for part in parts for name in names if part.get(name) is not None}


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
