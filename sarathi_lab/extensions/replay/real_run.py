"""A recorded run of a real server, read from its folder or from the file of a client.

The folder has what LLMServingSim keeps of a vLLM run (github.com/casys-kaist/LLMServingSim):

- `meta.json`: `vllm_version`, `model`, `engine_kwargs`; maybe `kv_cache` and `resolved_config`;
- `requests.jsonl`, a request a line: `input_toks`, `output_toks`; `arrival_time`, seconds of the
  client's clock; `queued_ts`, `scheduled_ts`, `first_token_ts`, `last_token_ts`, seconds of the
  engine's;
- `config.json`, if there is one: which `hardware`, and how its devices are linked;
- `timeseries.csv`, if there is one: `t`, `running`, `waiting`, `kv_cache_pct` once in a while.

A file of a benchmark client (`bench_files`), whose times are the client's, and a log of iterations
(`iteration_log`) may have `meta.json` beside them for what they do not state of the server. What of
a server's arguments the simulator has is one table for all of them (`server_arguments`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, combinations, pairwise
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
from sarathi_lab.extensions.replay.clients import inferred
from sarathi_lab.extensions.replay.iteration_log import FIX as LOG_FIX
from sarathi_lab.extensions.replay.iteration_log import NO_LOG, read_log
from sarathi_lab.extensions.replay.server_arguments import (
    Statement,
    as_object,
    merged,
    read_arguments,
    selected,
)

BLOCK_SIZE = 16  # tokens, where no file states them
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
FIX = "name the folder of a run, with meta.json and requests.jsonl, or a benchmark client's file"
# What a replay needs to be stated: as it is called, and as it is typed.
NEEDED = {"model": ("model", "model=NAME"), "hardware": ("GPU", "hardware=NAME")}
TYPED = "task.chunk and task.batch"  # the source of what the command line states of the run
# Keys of meta.json that are no arguments of the server.
OF_META = (
    *("engine_kwargs", "kv_cache", "resolved_config", "hardware", "schema_version"),
    *("dataset_path", "dataset_hash", "num_requests", "started_at", "finished_at"),
    "tick_seconds",
)
# Sections of vLLM's resolved configuration, with its names that are others on its command line.
SECTIONS = ("model", "cache", "scheduler", "parallel", "compilation")
OTHER_NAMES = {"cache_dtype": "kv_cache_dtype", "policy": "scheduling_policy"}


@dataclass(frozen=True)
class ServerSettings:
    """What the sources state of a server, the last one first: settings by the lab's names."""

    statements: Sequence[Statement]

    @property
    def stated(self) -> dict[str, Any]:
        """Settings by the lab's names, and `server_arguments.OF_FILES`."""
        settings: dict[str, Any] = {}
        for statement in self.statements:
            settings |= statement.settings
        return settings

    @property
    def is_complete(self) -> bool:
        """Whether a source has all arguments that are not the server's defaults."""
        return any(statement.is_complete for statement in self.statements)

    @property
    def num_blocks(self) -> int | None:
        """Blocks that requests can have."""
        stated = self.stated
        if "cache.num_blocks" in stated or "cache.tokens" not in stated:
            return stated.get("cache.num_blocks")
        return int(stated["cache.tokens"] // stated.get("cache.block_size", BLOCK_SIZE))

    def notes(self) -> list[str]:
        """Name what of the server's arguments the simulator has not, and where sources differ."""
        notes = []
        for kind, words in (("not_simulated", "not simulated"), ("without_effect", "no effect")):
            names = dict.fromkeys(chain(*(getattr(one, kind) for one in self.statements)))
            if names:
                notes.append(f"{words}: {', '.join(names)}")
        for before, after in combinations(self.statements, 2):
            for name, value in after.settings.items():
                other = before.settings.get(name, value)
                if other != value and name not in ("version", "model", "hardware"):
                    notes.append(
                        f"{after.source} states {name}={value}, {before.source} {other}: "
                        f"{value} is taken"
                    )
        return notes


@dataclass(frozen=True, kw_only=True)
class RealRun(Benchmark):
    """A benchmark and its server's settings. `requests` may be empty, as may `timeline` (`SERIES`,
    from about the first arrival on) and `logged`.
    """

    source: str
    version: str
    settings: ServerSettings
    hardware: str | None
    link: tuple[float, float] | None  # bytes/s and seconds
    timeline: pd.DataFrame
    name: str  # among several loads
    logged: pd.DataFrame  # iterations

    @property
    def longest(self) -> int:
        """Tokens of the longest request; 1 without any."""
        total = self.requests.prompt_len + self.requests.output_len
        return int(total.max()) if len(total) else 1


def read_runs(
    place: str | Path, log: str | None = None, given: Mapping[str, Any] | None = None
) -> list[RealRun]:
    """Read the run in `place`, a load each, with the iterations in `log`; settings that are `given`
    by the lab's names need not be recorded. Raises UserError.
    """
    path, logged, of_log = Path(place).expanduser(), NO_LOG, list[Statement]()
    if log is not None:
        logged, in_log = read_log(beside := Path(log).expanduser())
        if logged.empty and not in_log.settings:
            raise UserError(f"task.log={beside} states nothing of a vLLM server; {LOG_FIX}")
        of_log = [in_log]
    if path.is_dir():
        requests = _requests(path / "requests.jsonl")
        benchmarks = [Benchmark({}, requests, 0, client=inferred(requests))]
    elif not path.is_file():
        raise UserError(f"task.run={place} is not a folder or a file; {FIX}")
    elif len((alone := read_log(path))[0]):
        logged, in_log = alone
        of_log.append(in_log)
        nothing = pd.DataFrame(columns=[*OF_LEDGER.values(), "token_times"])
        benchmarks = [Benchmark({}, nothing, 0)]
    else:
        benchmarks = read_benchmarks(path)
    of_folder, recorded = _recorded(path)
    named = {name: value for name, value in (given or {}).items() if value is not None}
    typed: dict[str, Any] = {name: named[name] for name in ("chunk", "batch") if name in named}
    runs = []
    for i, one in enumerate(benchmarks, 1):
        statements = [*one.server, *of_folder, *of_log]
        if typed:
            statements.append(Statement(TYPED, typed))
        settings = ServerSettings(statements)
        stated = settings.stated
        hardware = recorded["hardware"] or stated.get("hardware")
        rate = one.labels.get("workload.rate")
        label = one.labels.get("policy", "") + (f" at {rate}/s" if rate else "")
        _check_needed(path, {"hardware": hardware, **stated, **named})
        run = RealRun(
            **vars(one),
            **recorded | {"hardware": hardware},
            source=str(path),
            version=str(stated.get("version", "")),
            settings=settings,
            name=f"{i}: {label}",
            logged=logged,
        )
        runs.append(run)
    return runs


def _check_needed(path: Path, known: Mapping[str, Any]) -> None:
    """Raise UserError for what nothing states, and no server has by default."""
    missing = [words for name, words in NEEDED.items() if not known.get(name)]
    if missing:
        what, flags = zip(*missing, strict=True)
        raise UserError(
            f"{path} does not state the server's {', '.join(what)}; add {' '.join(flags)}"
        )


def _recorded(path: Path) -> tuple[list[Statement], dict[str, Any]]:
    """Read what the files beside requests state of the server, and of its hardware and use."""
    folder = path if path.is_dir() else path.parent
    files = ("meta.json", "config.json", "timeseries.csv")
    meta_path, config_path, line_path = (folder / name for name in files)
    statements, meta = list[Statement](), dict[str, Any]()
    if path.is_dir() or meta_path.is_file():
        meta = read_object(meta_path, FIX)
        statements.append(_of_meta(meta_path, meta))
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
    share = as_object(instance.get("npu_mem")).get("mem_util")
    # That of LLMServingSim, where the server does not state its share.
    if share and not any("cache.memory_share" in one.settings for one in statements):
        memory = {"gpu_memory_utilization": share}
        statements.append(read_arguments("vllm", memory, str(config_path)))
    return statements, {
        "hardware": instance.get("hardware") or as_object(meta.get("hardware")).get("device_name"),
        "link": (rate * 1e9, delay * 1e-9) if rate and delay is not None else None,
        "timeline": timeline,
    }


def _of_meta(path: Path, meta: Mapping[str, Any]) -> Statement:
    """Read `meta.json`: vLLM's arguments, and what it made of them. Raises UserError."""
    engine = meta.get("engine_kwargs")
    if not isinstance(engine, dict):
        raise UserError(f"{path} has no engine_kwargs, vLLM's arguments; record the run again")
    resolved = as_object(meta.get("resolved_config"))
    dumps = [as_object(resolved.get(f"{name}_config")) for name in SECTIONS]
    dumps += [{"speculative_config": resolved.get("speculative_config")}]
    dumps += [as_object(meta.get("kv_cache"))]
    made = {
        OTHER_NAMES.get(name, name): value
        for dump in dumps
        for name, value in dump.items()
        if value is not None
    }
    others = {name: value for name, value in meta.items() if name not in OF_META}
    return merged(
        read_arguments("vllm", selected("vllm", made), str(path), is_dump=True),
        read_arguments("vllm", selected("vllm", others, is_typed=True), str(path), is_typed=True),
        read_arguments("vllm", engine, str(path), is_typed=True, is_complete=True),
    )


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
