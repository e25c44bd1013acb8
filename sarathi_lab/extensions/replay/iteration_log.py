"""Iterations of a real server, as vLLM logs them (`--enable-logging-iteration-details`).

A line has the requests and tokens of prompts ("context") and of decodes ("generation"), the
milliseconds of the iteration and, from 0.17 on, the share of the cache in use after it.
"""

from __future__ import annotations

import re
from typing import NamedTuple

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
CACHE_TOKENS = re.compile(r"KV cache size: ([\d,]+) tokens")
KINDS = ("prompts", "decodes", "both", "all")  # of iterations, by what is in the batch
TOKENS = ["num_prefill_tokens", "num_decode_tokens"]
UNITS = {
    "iterations": "",
    "tokens of one": "",
    "time of one": "ms",
}
SHORTEST = 1e-4  # seconds, below which no GPU runs a model's iteration


class LoggedIteration(NamedTuple):
    """A row of `read_iterations`."""

    num_prefills: float
    num_prefill_tokens: float
    num_decodes: float
    num_decode_tokens: float
    seconds: float
    cached: float  # tokens, NaN where the log does not tell


NO_LOG = pd.DataFrame(columns=[*LoggedIteration._fields], dtype=float)


def read_iterations(text: str) -> pd.DataFrame:
    """Read a log's iterations, in the columns of `LoggedIteration`: `cached` is NaN if the
    log has no size of the cache or no use of it. Other texts have no iterations.
    """
    matches = pd.DataFrame(ITERATION.findall(text), columns=list(NO_LOG))
    lines = matches.apply(pd.to_numeric, errors="coerce").astype(float)
    num_tokens = lines.num_prefill_tokens + lines.num_decode_tokens
    iterations = lines[num_tokens > 0].reset_index(drop=True)
    cache_tokens = np.nan
    size = CACHE_TOKENS.search(text)
    if size is not None:
        cache_tokens = int(size[1].replace(",", ""))
    cached = cache_tokens * iterations.cached / 100  # logged in percent
    return iterations.assign(seconds=1e-3 * iterations.seconds, cached=cached)


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
    columns = list(LoggedIteration._fields)
    rows = []
    for values in logged[columns].itertuples(index=False):
        batch = _batch_of(LoggedIteration(*values))
        result = run_once(executor, batch)
        seconds = result.end - result.start
        rows.append([batch.num_prefill_tokens, batch.num_decode_tokens, seconds])
    return pd.DataFrame(rows, columns=[*TOKENS, "seconds"])


def _batch_of(logged: LoggedIteration) -> Batch:
    """Make the batch of a logged iteration."""
    num_decodes = int(logged.num_decodes)
    context = _context_of_decodes(logged)
    batch = Batch()
    for order in range(num_decodes):
        decode = make_sequence(context, is_decode=True, order=order)
        batch.add(decode, 1)
    # The log has the tokens of all prompts together: shares as equal as can be.
    num_prompts = max(int(logged.num_prefills), 1)
    num_each, num_longer = divmod(int(logged.num_prefill_tokens), num_prompts)
    for number in range(num_prompts):
        num_tokens = num_each + (number < num_longer)
        if num_tokens:
            prompt = make_sequence(0, num_tokens, emits=True, order=num_decodes + number)
            batch.add(prompt, num_tokens)
    return batch


def _context_of_decodes(logged: LoggedIteration) -> int:
    """Return the cached tokens of a decode, each of which has as many."""
    if np.isnan(logged.cached) or logged.num_decodes == 0:
        return 1
    # The log is written after the iteration, whose prompts are in the cache by then.
    of_decodes = logged.cached - logged.num_prefill_tokens
    of_each = of_decodes / logged.num_decodes
    return max(1, int(of_each))


def schedule_table(logged: pd.DataFrame, simulated: pd.DataFrame) -> pd.DataFrame:
    """Compare schedules by what is in a batch: iterations, and their mean tokens and time."""
    rows = []
    for kind in KINDS:
        real = _means(_of_kind(logged, kind))
        replayed = _means(_of_kind(simulated, kind))
        for quantity, unit in UNITS.items():
            rows.append([kind, quantity, unit, real[quantity], replayed[quantity]])
    columns = ["batch", "quantity", "unit", "real", "simulated"]
    table = pd.DataFrame(rows, columns=columns)
    # A kind that the log lacks has no error.
    measured = table.real.where(table.real > 0)
    return table.assign(error=table.simulated / measured - 1)


def _of_kind(iterations: pd.DataFrame, kind: str) -> pd.DataFrame:
    """Select the iterations of one of `KINDS`."""
    has_prompts = iterations.num_prefill_tokens > 0
    has_decodes = iterations.num_decode_tokens > 0
    if kind == "prompts":
        return iterations[has_prompts & ~has_decodes]
    if kind == "decodes":
        return iterations[has_decodes & ~has_prompts]
    if kind == "both":
        return iterations[has_prompts & has_decodes]
    return iterations


def _means(iterations: pd.DataFrame) -> dict[str, float]:
    """Return the quantities of `UNITS`."""
    num_tokens = iterations[TOKENS].sum(axis="columns")
    milliseconds = 1e3 * iterations.seconds
    return {
        "iterations": len(iterations),
        "tokens of one": num_tokens.mean(),
        "time of one": milliseconds.mean(),
    }
