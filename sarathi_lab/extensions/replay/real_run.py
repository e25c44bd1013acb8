"""A recorded run of a real server, read from its folder or from the file of a client.

The folder has what LLMServingSim keeps of a vLLM run (github.com/casys-kaist/LLMServingSim):

- `meta.json`: `vllm_version`, `model`, `engine_kwargs`; maybe `kv_cache` and `resolved_config`;
- `requests.jsonl`, a request a line: `input_toks`, `output_toks`; `arrival_time`, seconds of the
  client's clock; `queued_ts`, `scheduled_ts`, `first_token_ts`, `last_token_ts`, seconds of the
  engine's;
- `config.json`, if there is one: which `hardware`, and how its devices are linked;
- `timeseries.csv`, if there is one: `t`, `running`, `waiting`, `kv_cache_pct` once in a while.

A file of a benchmark client (`bench_files`), whose times are the client's, and a log of iterations
(`iteration_log`) may have `meta.json` beside them for what they do not state of the server.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import pandas as pd

from sarathi_lab.config.errors import UserError
from sarathi_lab.config.paths import read_object, readable
from sarathi_lab.extensions.replay.bench_files import (
    Benchmark,
    finite_numbers,
    read_benchmarks,
    read_objects,
    refuse_rows,
)
from sarathi_lab.extensions.replay.iteration_log import FIX as LOG_FIX
from sarathi_lab.extensions.replay.iteration_log import NO_LOG, read_log

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
GRAPH_MODES: dict[Any, str] = {0: "none", 1: "piecewise", 2: "full"}
GRAPH_MODES |= {(2, 0): "full_decode_only", (2, 1): "full_and_piecewise"}
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


@dataclass(frozen=True, kw_only=True)
class RealRun(Benchmark):
    """A benchmark and its server's settings; `policy` is a name of conf/policy. `requests` may be
    empty, as may `timeline` (`SERIES`, from about the first arrival on) and `logged`.
    """

    source: str
    version: str
    settings: ServerSettings
    hardware: str | None
    link: tuple[float, float] | None  # bytes/s and seconds
    timeline: pd.DataFrame
    name: str  # among several loads
    policy: str
    logged: pd.DataFrame  # iterations


def read_runs(
    place: str | Path, log: str | None = None, given: Mapping[str, Any] | None = None
) -> list[RealRun]:
    """Read the run in `place`, a load each, with the iterations in `log`; settings that are `given`
    by the names of `NEEDED` replace recorded ones. Raises UserError.
    """
    path, logged, of_log = Path(place).expanduser(), NO_LOG, dict[str, Any]()
    if log is not None:
        logged, of_log = read_log(beside := Path(log).expanduser())
        if logged.empty:
            raise UserError(f"task.log={beside} has no iteration of vLLM; {LOG_FIX}")
    if path.is_dir():
        benchmarks = [Benchmark({}, _requests(path / "requests.jsonl"), 0)]
    elif not path.is_file():
        raise UserError(f"task.run={place} is not a folder or a file; {FIX}")
    elif len((alone := read_log(path))[0]):
        logged, of_log = alone
        nothing = pd.DataFrame(columns=[*OF_LEDGER.values(), "token_times"])
        benchmarks = [Benchmark({}, nothing, 0)]
    else:
        benchmarks = read_benchmarks(path)
    stated, recorded = _recorded(path)
    named = {name: value for name, value in (given or {}).items() if value is not None}
    runs = []
    for i, one in enumerate(benchmarks, 1):
        versions = (stated[0].get("version"), of_log.get("version"), one.server.get("version"))
        version = next((str(known) for known in versions if known), "")
        rate = one.labels.get("workload.rate")
        label = one.labels.get("policy", "") + (f" at {rate}/s" if rate else "")
        known = {"host": version, "hardware": recorded["hardware"], **named}
        run = RealRun(
            **vars(one),
            **recorded,
            source=str(path),
            version=version,
            settings=_settings(path, [one.server, *stated, of_log, named], known),
            name=f"{i}: {label}",
            policy=one.server.get("policy", "vllm_v1"),
            logged=logged,
        )
        runs.append(run)
    return runs


def _settings(
    path: Path, parts: Sequence[Mapping[str, Any]], known: Mapping[str, Any]
) -> ServerSettings:
    """Merge what `parts` state, the last one first. Raises UserError for what is neither stated nor
    `known` otherwise.
    """
    names = [one.name for one in fields(ServerSettings)]
    stated = {name: one[name] for one in parts for name in names if one.get(name) is not None}
    has = {name for name, value in {**known, **stated}.items() if value}
    if missing := [words for name, words in NEEDED.items() if name not in has]:
        what, flags = zip(*missing, strict=True)
        raise UserError(
            f"{path} does not state the server's {', '.join(what)}; add {' '.join(flags)}"
        )
    return ServerSettings(**stated)


def _recorded(path: Path) -> tuple[list[Mapping[str, Any]], dict[str, Any]]:
    """Read what the files beside requests state of the server, the engine's arguments last, and of
    its hardware and use.
    """
    folder = path if path.is_dir() else path.parent
    files = ("meta.json", "config.json", "timeseries.csv")
    meta_path, config_path, line_path = (folder / name for name in files)
    has_meta = path.is_dir() or meta_path.is_file()
    meta = read_object(meta_path, FIX) if has_meta else {"engine_kwargs": {}}
    if not isinstance(engine := meta.get("engine_kwargs"), dict):
        raise UserError(f"{meta_path} has no engine_kwargs, vLLM's arguments; record the run again")
    config, instance = dict[str, Any](), dict[str, Any]()
    timeline = pd.DataFrame(columns=list(SERIES), dtype=float)
    if path.is_dir() and config_path.is_file():
        config = read_object(config_path, FIX)
        with suppress(KeyError, IndexError, TypeError, ValueError):  # of LLMServingSim: its first
            instance = dict(config["nodes"][0]["instances"][0])
    if path.is_dir() and line_path.is_file():
        with readable(line_path, "correct it, or delete it"):
            timeline = pd.read_csv(line_path)
        timeline = finite_numbers(line_path, timeline, SERIES)
    rate, delay = config.get("link_bw"), config.get("link_latency")  # GB/s, nanoseconds
    resolved = _part(meta, "resolved_config")
    parts = [
        {
            "version": meta.get("vllm_version"),
            "model": meta.get("model"),
            "gpu_memory_utilization": _part(instance, "npu_mem").get("mem_util"),
            "max_model_len": _part(resolved, "model_config").get("max_model_len"),
        },
        *(_part(resolved, f"{name}_config") for name in ("scheduler", "compilation")),
        _part(meta, "kv_cache"),
        _part(engine, "compilation_config"),
        engine,
    ]
    return parts, {
        "hardware": instance.get("hardware") or _part(meta, "hardware").get("device_name"),
        "link": (rate * 1e9, delay * 1e-9) if rate and delay is not None else None,
        "timeline": timeline,
    }


def _part(of: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return an object in `of`, which may be text, as after --compilation-config; else none."""
    value = of.get(key)
    if isinstance(value, str):
        with suppress(ValueError):
            value = json.loads(value)
    return value if isinstance(value, dict) else {}


def _requests(path: Path) -> pd.DataFrame:
    rows = read_objects(path, FIX)
    if not rows:
        raise UserError(f"{path} is empty; {FIX}")
    table = finite_numbers(path, pd.DataFrame(rows), REQUEST)
    for before, after in pairwise(ENGINE_TIMES):
        refuse_rows(path, table[after], table[after] < table[before], f"is before {before}")
    table["arrival_time"] -= table.arrival_time.min()
    # The shortest way to the queue counts as zero: what all take is in no simulated time either.
    table[[*ENGINE_TIMES]] -= (table.queued_ts - table.arrival_time).min()
    table = table.sort_values("arrival_time", ignore_index=True)[list(OF_LEDGER)]
    unknown: list[Any] = [[] for _ in rows]
    return table.rename(columns=OF_LEDGER).assign(request_id=table.index, token_times=unknown)
