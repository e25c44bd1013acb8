"""The folder of a run, and what stands beside a client's file.

A folder has what LLMServingSim keeps of a vLLM run (github.com/casys-kaist/LLMServingSim):

- `meta.json`: `vllm_version`, `model`, `engine_kwargs`; maybe `kv_cache` and `resolved_config`;
- `requests.jsonl`, a request a line: `input_toks`, `output_toks`; `arrival_time`, seconds of the
  client's clock; `queued_ts`, `scheduled_ts`, `first_token_ts`, `last_token_ts`, seconds of the
  engine's;
- `config.json`, if there is one: which `hardware`, and how its devices are linked;
- `timeseries.csv`, if there is one: `t`, `running`, `waiting`, `kv_cache_pct` once in a while.

A client's file and a log of iterations may have `meta.json` beside them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pandas as pd

from sarathi_lab.config.errors import UserError
from sarathi_lab.config.paths import read_object, readable
from sarathi_lab.extensions.replay.benchmark import CONVERSATION, Benchmark, in_ledgers_columns
from sarathi_lab.extensions.replay.first_engine import with_rules_of_version
from sarathi_lab.extensions.replay.json_values import list_of, number_of
from sarathi_lab.extensions.replay.server_arguments import (
    Statement,
    arguments_of_sections,
    as_object,
    merged,
    read_arguments,
    selected,
)
from sarathi_lab.workload.recording import RowCheck, recorded
from sarathi_lab.workload.text_files import json_rows, read_text

FIX = "name the folder of a run, with meta.json and requests.jsonl, or a benchmark client's file"
REQUESTS = "requests.jsonl"
META = "meta.json"
CONFIG = "config.json"
TIMELINE = "timeseries.csv"
ENGINE_TIMES = ("queued_ts", "scheduled_ts", "first_token_ts", "last_token_ts")
LENGTHS = ("input_toks", "output_toks")
TIMES = ("arrival_time", *ENGINE_TIMES)
SERIES = ["t", "running", "waiting", "kv_cache_pct"]
# Columns of the ledger's table that a run has by other names.
OF_LEDGER = {
    "scheduled_ts": "first_scheduled_time",
    "first_token_ts": "first_token_time",
    "last_token_ts": "finish_time",
    "input_toks": "prompt_len",
    "output_toks": "output_len",
}
# Keys of meta.json that are no arguments of the server.
OF_META = (
    "engine_kwargs",
    "kv_cache",
    "resolved_config",
    "hardware",
    "schema_version",
    "dataset_path",
    "dataset_hash",
    "num_requests",
    "started_at",
    "finished_at",
    "tick_seconds",
)
SHOWN_FILES = 5  # of a folder in a message


@dataclass(frozen=True)
class Surroundings:
    """What files beside the requests state.

    Attributes:
        statements: Of the server.
        hardware: Name of the GPU; None: not recorded.
        link: Bytes/s and seconds of the devices' link.
        timeline: `SERIES` once in a while, from about the first arrival on; maybe empty.
    """

    statements: Sequence[Statement]
    hardware: str | None
    link: tuple[float, float] | None
    timeline: pd.DataFrame


def no_requests() -> Benchmark:
    """Make a benchmark without requests, of a log of iterations alone."""
    return Benchmark({}, in_ledgers_columns(pd.DataFrame()), 0)


def read_folder(folder: Path) -> Benchmark:
    """Read a folder's requests. Raises UserError for one that has none."""
    path = folder / REQUESTS
    if not path.is_file():
        names = sorted(entry.name for entry in folder.iterdir() if entry.is_file())
        listed = ", ".join(names[:SHOWN_FILES]) or "no files"
        raise UserError(
            f"{folder} has no {REQUESTS}, but {listed}; name one of its files (a client's results, "
            f"or a log), or record {META} and {REQUESTS} there"
        )
    rows = json_rows(read_text(path, str(path), FIX))
    if rows is None:
        raise UserError(f"{path} is empty or not JSON; {FIX}")
    table = pd.DataFrame(list(rows.objects), index=list(rows.lines))
    numbers, check = _checked(table, path, [*LENGTHS, *TIMES], "line")
    for before, after in pairwise(ENGINE_TIMES):
        check.require(table[after], ~(numbers[after] < numbers[before]))
    numbers = numbers.rename(columns=OF_LEDGER).assign(arrival=numbers.arrival_time)
    recording = recorded(numbers, check, rows.damaged)
    if recording.requests.empty:
        raise UserError(f"{path} has no request that can be replayed ({recording.example}); {FIX}")
    requests = _with_times_of_run(recording.requests)
    caution = recording.describe_left_out()
    return Benchmark(
        {},
        requests,
        sum(recording.left_out.values()),
        cautions=[caution] if caution else [],
        conversation=recording.requests[CONVERSATION],
    )


def _checked(
    table: pd.DataFrame,
    path: Path,
    columns: Sequence[str],
    unit: str,
) -> tuple[pd.DataFrame, RowCheck]:
    """Read the numbers of a file's columns, and check its rows, which are counted in a `unit`.
    Raises UserError for a missing column.
    """
    check = RowCheck(table.index, unit)
    numbers = pd.DataFrame(index=table.index)
    for name in columns:
        if name not in table:
            needed = ", ".join(columns)
            raise UserError(f"{path} has no {name}; it needs {needed}: record them")
        is_length = name in LENGTHS
        least = 1 if is_length else 0
        numbers[name] = check.numbers(table[name], least, is_whole=is_length)
    return numbers, check


def _with_times_of_run(requests: pd.DataFrame) -> pd.DataFrame:
    """Return requests with times since the first arrival, as the ledger has them."""
    # The shortest way to the queue counts as zero: what all take is in no simulated time either.
    shortest = (requests.queued_ts - requests.arrival).min()
    requests = requests.assign(arrival_time=requests.arrival - requests.arrival.min())
    times = ["first_scheduled_time", "first_token_time", "finish_time"]
    requests[times] -= shortest
    columns = ["arrival_time", "prompt_len", "output_len", *times]
    return in_ledgers_columns(requests[columns])


def read_surroundings(path: Path) -> Surroundings:
    """Read what the files of a folder, or beside a client's file, state. Raises UserError."""
    is_folder = path.is_dir()
    folder = path if is_folder else path.parent
    config_path = folder / CONFIG
    config: Mapping[str, object] = {}
    if is_folder and config_path.is_file():
        config = read_object(config_path, FIX)
    instance = _first_instance(config)
    statements = list[Statement]()
    meta_path = folder / META
    meta: Mapping[str, object] = {}
    if is_folder or meta_path.is_file():
        meta = read_object(meta_path, FIX)
        statements.append(_of_meta(meta_path, meta))
    # What the server states of its share of the memory counts before LLMServingSim's.
    share = as_object(instance.get("npu_mem")).get("mem_util")
    if not any("cache.memory_share" in statement.settings for statement in statements):
        of_memory = {"gpu_memory_utilization": share}
        statements.append(read_arguments("vllm", of_memory, str(config_path)))
    device_name = instance.get("hardware") or as_object(meta.get("hardware")).get("device_name")
    hardware = str(device_name) if device_name else None
    timeline = pd.DataFrame(columns=SERIES, dtype=float)
    if is_folder and (folder / TIMELINE).is_file():
        timeline = _timeline(folder / TIMELINE)
    return Surroundings(statements, hardware, _link_of(config), timeline)


def _first_instance(config: Mapping[str, object]) -> Mapping[str, object]:
    """Return the first engine in LLMServingSim's configuration; empty without any."""
    with suppress(KeyError, IndexError, TypeError):
        nodes = list_of(config["nodes"])
        instances = list_of(as_object(nodes[0])["instances"])
        return as_object(instances[0])
    return {}


def _link_of(config: Mapping[str, object]) -> tuple[float, float] | None:
    """Return bytes a second and seconds of the link in LLMServingSim's configuration, if any."""
    gigabytes_per_second = number_of(config.get("link_bw"))
    nanoseconds = number_of(config.get("link_latency"))
    # An unknown number is NaN, which is not above zero.
    if gigabytes_per_second > 0 and not math.isnan(nanoseconds):
        return gigabytes_per_second * 1e9, nanoseconds * 1e-9
    return None


def _timeline(path: Path) -> pd.DataFrame:
    """Read the samples of a run's use. Raises UserError for a damaged file."""
    with readable(path, "correct it, or delete it"):
        table = pd.read_csv(path)
    numbers, check = _checked(table, path, SERIES, "row")
    return numbers[check.is_usable].reset_index(drop=True)


def _of_meta(path: Path, meta: Mapping[str, object]) -> Statement:
    """Read `meta.json`: vLLM's arguments, and what it made of them. Raises UserError."""
    engine = meta.get("engine_kwargs")
    if not isinstance(engine, dict):
        raise UserError(f"{path} has no engine_kwargs, vLLM's arguments; record the run again")
    resolved = as_object(meta.get("resolved_config"))
    made = arguments_of_sections({**resolved, "kv_cache": meta.get("kv_cache")})
    others = {name: value for name, value in meta.items() if name not in OF_META}
    source = str(path)
    statement = merged(
        read_arguments("vllm", made, source, is_dump=True),
        read_arguments("vllm", selected("vllm", others, is_typed=True), source, is_typed=True),
        read_arguments("vllm", engine, source, is_typed=True, is_complete=True),
    )
    return with_rules_of_version(statement)
