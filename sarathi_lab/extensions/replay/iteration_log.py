"""Iterations of a real server, as vLLM logs them (`--enable-logging-iteration-details`).

A line has the requests and tokens of prompts ("context") and of decodes ("generation"), the
milliseconds of the iteration and, from 0.17 on, the share of the cache in use after it.
"""

from __future__ import annotations

import re
from collections import Counter

import numpy as np
import pandas as pd

from sarathi_lab.engine.compositions import make_sequence, run_once
from sarathi_lab.engine.executor import Executor
from sarathi_lab.engine.request import Batch

ITERATION = re.compile(
    r"Iteration\(\d+\): (\d+) context requests, (\d+) context tokens, (\d+) generation requests, "
    r"(\d+) generation tokens, iteration elapsed time: ([\d.]+) ms"
    r"(?:, \S+ KV cache usage: ([\d.]+)%)?"
)
CACHE = re.compile(r"KV cache size: ([\d,]+) tokens")
COUNTS = ["num_prefills", "num_prefill_tokens", "num_decodes", "num_decode_tokens"]
KINDS = {(True, False): "prompts", (False, True): "decodes", (True, True): "both"}
SHORTEST = 1e-4  # seconds, below which no GPU runs a model's iteration
NO_LOG = pd.DataFrame(columns=[*COUNTS, "seconds", "cached"], dtype=float)


def read_iterations(text: str) -> pd.DataFrame:
    """Read the iterations of a log's text: `COUNTS`, `seconds`, and `cached` tokens, NaN if the log
    has no size of the cache or no use of it. Other texts have none.
    """
    table = pd.DataFrame(ITERATION.findall(text), columns=list(NO_LOG))
    table = table.apply(pd.to_numeric, errors="coerce").astype(float)
    table = table[table.num_prefill_tokens + table.num_decode_tokens > 0].reset_index(drop=True)
    size = CACHE.search(text)
    num_tokens = np.nan
    if size is not None:
        num_tokens = int(size[1].replace(",", ""))
    cached = num_tokens * table.cached / 100
    return table.assign(seconds=1e-3 * table.seconds, cached=cached)


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


def predicted(logged: pd.DataFrame, executor: Executor) -> pd.DataFrame:
    """Run logged iterations one by one on `executor`. As the log has no lengths, prompts begin
    there, and decodes share what else is cached.
    """
    rows = []
    counts = logged[["num_prefills", "num_prefill_tokens", "num_decodes"]].astype(int)
    cached_tokens = logged.cached.fillna(0.0).tolist()
    for row, cached in zip(counts.to_numpy().tolist(), cached_tokens, strict=True):
        num_prefills, num_prompt_tokens, num_decodes = row
        others = max(0.0, cached - num_prompt_tokens)
        context = max(1, int(others / max(num_decodes, 1)))
        batch = Batch()
        for order in range(num_decodes):
            batch.add(make_sequence(context, is_decode=True, order=order), 1)
        chunks = np.array_split(np.arange(num_prompt_tokens), max(num_prefills, 1))
        for order, chunk in enumerate(chunks, num_decodes):
            if len(chunk):
                batch.add(make_sequence(0, len(chunk), emits=True, order=order), len(chunk))
        result = run_once(executor, batch)
        seconds = result.end - result.start
        rows.append([batch.num_prefill_tokens, batch.num_decode_tokens, seconds])
    return pd.DataFrame(rows, columns=["num_prefill_tokens", "num_decode_tokens", "seconds"])


def schedule_table(logged: pd.DataFrame, simulated: pd.DataFrame) -> pd.DataFrame:
    """Compare schedules by what is in a batch: iterations, and their mean tokens and time."""
    rows = []
    both = [table.assign(batch=_kinds(table)) for table in (logged, simulated)]
    for kind in (*KINDS.values(), "all"):
        selected = both
        if kind != "all":
            selected = [table[table.batch == kind] for table in both]
        tokens = [(table.num_prefill_tokens + table.num_decode_tokens).mean() for table in selected]
        milliseconds = [1e3 * table.seconds.mean() for table in selected]
        rows.append((kind, "iterations", "", *map(len, selected)))
        rows.append((kind, "tokens of one", "", *tokens))
        rows.append((kind, "time of one", "ms", *milliseconds))
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
