"""Iterations of a real server, as vLLM logs them (`--enable-logging-iteration-details`).

A line has the requests and tokens of prompts ("context") and of decodes ("generation"), the
milliseconds of the iteration and the share of the cache in use after it. The same log has the
server's arguments, its version and the size of its cache; one without iterations has these alone.
"""

from __future__ import annotations

import ast
import math
import re
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from sarathi_lab.config.paths import readable
from sarathi_lab.engine.compositions import make_sequence, run_once
from sarathi_lab.engine.executor import Executor
from sarathi_lab.engine.request import Batch
from sarathi_lab.extensions.replay.server_arguments import (
    Statement,
    merged,
    read_arguments,
    selected,
)

FIX = "name the output of a vLLM server started with --enable-logging-iteration-details"
ITERATION = re.compile(
    r"Iteration\(\d+\): (\d+) context requests, (\d+) context tokens, (\d+) generation requests, "
    r"(\d+) generation tokens, iteration elapsed time: ([\d.]+) ms, \S+ KV cache usage: ([\d.]+)%"
)
ARGUMENTS = re.compile(r"non-default args: (\{.*\})")
VERSION = re.compile(r"(?:version |engine \(v)(\d+\.\d+)")
ENGINE = re.compile(r"engine \(v[^)]*\) with config: (.*)")
BUDGET = re.compile(r"Chunked prefill is enabled with max_num_batched_tokens=(\d+)")
CACHE = re.compile(r"KV cache size: ([\d,]+) tokens")
OPENING, CLOSING, QUOTES = "([{<", ")]}>", "'\""
DEFAULT_BLOCK = 16  # tokens of a block of vLLM's
COUNTS = ["num_prefills", "num_prefill_tokens", "num_decodes", "num_decode_tokens"]
KINDS = {(True, False): "prompts", (False, True): "decodes", (True, True): "both"}
SHORTEST = 1e-4  # seconds, below which no GPU runs a model's iteration
NO_LOG = pd.DataFrame(columns=[*COUNTS, "seconds", "cached"], dtype=float)


def read_log(path: Path) -> tuple[pd.DataFrame, Statement]:
    """Read a server's log: its iterations (`COUNTS`, `seconds` and `cached`, which are tokens, NaN
    if the log has no size of the cache), none in another file, and what it states of the server.
    """
    with readable(path, FIX):
        text = path.read_text(encoding="utf-8", errors="replace")
    table = pd.DataFrame(ITERATION.findall(text), columns=list(NO_LOG)).astype(float)
    table = table[table.num_prefill_tokens + table.num_decode_tokens > 0].reset_index(drop=True)
    num_tokens = math.nan
    if size := CACHE.search(text):
        num_tokens = int(size[1].replace(",", ""))
    cached = num_tokens * table.cached / 100
    table = table.assign(seconds=1e-3 * table.seconds, cached=cached)
    return table, _statement(path, text, num_tokens)


def cautions_of_log(logged: pd.DataFrame) -> list[str]:
    """Warn where times of iterations are not the device's."""
    num_short = int((logged.seconds < SHORTEST).sum())
    if num_short == 0:
        return []
    return [
        f"{num_short} of {len(logged)} logged iterations take less than {1e3 * SHORTEST:g} ms, "
        "which is no time of a device: asynchronous scheduling logs the host's; log again with "
        "--no-async-scheduling"
    ]


def _statement(path: Path, text: str, num_tokens: float) -> Statement:
    """Read what a log states of its server, whose cache has `num_tokens` (NaN: not logged)."""
    resolved: dict[str, Any] = {}  # with defaults
    if engine := ENGINE.search(text):
        resolved |= selected("vllm", named_values(engine[1]))
    if budget := BUDGET.search(text):
        resolved["max_num_batched_tokens"] = int(budget[1])
    if version := VERSION.search(text):
        resolved["version"] = version[1]
    typed: dict[str, Any] = {}
    if arguments := ARGUMENTS.search(text):
        typed |= named_values(arguments[1][1:-1])
    if not math.isnan(num_tokens):
        block_size = int(typed.get("block_size") or DEFAULT_BLOCK)
        resolved["num_gpu_blocks"] = int(num_tokens) // block_size
        typed.pop("num_gpu_blocks_override", None)  # which that size follows from
    return merged(
        read_arguments("vllm", resolved, str(path), is_dump=True),
        read_arguments("vllm", typed, str(path), is_complete=arguments is not None),
    )


def named_values(text: str) -> dict[str, Any]:
    """Read "a=1, b='x'" or "'a': 1, 'b': 'x'"; a value that is no literal of Python stays text."""
    values = {}
    for part in _split(text):
        separated = re.match(r"\s*['\"]?([\w-]+)['\"]?\s*[:=]\s*(.*?)\s*$", part, re.DOTALL)
        if separated is None:
            continue
        name, value = separated.groups()
        values[name] = value
        with suppress(ValueError, SyntaxError):
            values[name] = ast.literal_eval(value)
    return values


def _split(text: str) -> list[str]:
    """Cut `text` at the commas outside brackets and quotes."""
    parts, depth, quote, start = list[str](), 0, "", 0
    for place, character in enumerate(text):
        if quote:
            quote = "" if character == quote else quote
        elif character in QUOTES:
            quote = character
        elif character in OPENING:
            depth += 1
        elif character in CLOSING:
            depth -= 1
        elif character == "," and depth == 0:
            parts.append(text[start:place])
            start = place + 1
    return [*parts, text[start:]]


def predicted(logged: pd.DataFrame, executor: Executor) -> pd.DataFrame:
    """Run logged iterations one by one on `executor`. As the log has no lengths, prompts begin
    there, and decodes share what else is cached.
    """
    rows, names = [], ["num_prefills", "num_prefill_tokens", "num_decodes"]
    columns = [*(logged[one].astype(int).tolist() for one in names), logged.cached.tolist()]
    for prompts, prefill_tokens, num_decodes, cached in zip(*columns, strict=True):
        batch, others = Batch(), max(0.0, np.nan_to_num(cached) - prefill_tokens)
        context = max(1, int(others / max(num_decodes, 1)))
        for order in range(num_decodes):
            batch.add(make_sequence(context, is_decode=True, order=order), 1)
        chunks = np.array_split(np.arange(prefill_tokens), max(prompts, 1))
        for order, chunk in enumerate(chunks, num_decodes):
            if len(chunk):
                batch.add(make_sequence(0, len(chunk), emits=True, order=order), len(chunk))
        result = run_once(executor, batch)
        rows.append([batch.num_prefill_tokens, batch.num_decode_tokens, result.end - result.start])
    return pd.DataFrame(rows, columns=["num_prefill_tokens", "num_decode_tokens", "seconds"])


def schedule_table(logged: pd.DataFrame, simulated: pd.DataFrame) -> pd.DataFrame:
    """Compare schedules by what is in a batch: iterations, and their mean tokens and time."""
    rows = []
    both = [table.assign(batch=_kinds(table)) for table in (logged, simulated)]
    for kind in (*KINDS.values(), "all"):
        parts = [one if kind == "all" else one[one.batch == kind] for one in both]
        tokens = [(one.num_prefill_tokens + one.num_decode_tokens).mean() for one in parts]
        rows.append((kind, "iterations", "", *map(len, parts)))
        rows.append((kind, "tokens of one", "", *tokens))
        rows.append((kind, "time of one", "ms", *(1e3 * one.seconds.mean() for one in parts)))
    table = pd.DataFrame(rows, columns=["batch", "quantity", "unit", "real", "simulated"])
    return table.assign(error=table.simulated / table.real.where(table.real > 0) - 1)


def shared(logged: pd.DataFrame, simulated: pd.DataFrame) -> float:
    """Return the share of logged iterations with the tokens of a simulated one, counted once."""
    names = ["num_prefill_tokens", "num_decode_tokens"]
    first, second = (
        Counter(table[names].astype(int).itertuples(index=False, name=None))
        for table in (logged, simulated)
    )
    return (first & second).total() / max(len(logged), 1)


def _kinds(table: pd.DataFrame) -> list[str]:
    pairs = zip(table.num_prefill_tokens > 0, table.num_decode_tokens > 0, strict=True)
    return [KINDS[bool(prompts), bool(decodes)] for prompts, decodes in pairs]
