"""A run as a trace for Perfetto (ui.perfetto.dev) or chrome://tracing: a row per stage,
micro-batches and bubbles.

Format: the JSON array of Chrome's trace event format; "X" is an event with a duration, "M" names a
row.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pandas as pd

MICROSECONDS = 1e6  # the format's unit, in one second
COUNTS = ["num_prefill_tokens", "num_decode_tokens", "prefill_kv_tokens", "decode_kv_tokens"]


def write_trace(
    path: Path, iterations: pd.DataFrame, stages: pd.DataFrame, bubbles: pd.DataFrame
) -> None:
    """Write the ledger's three tables as trace events, a row per stage."""
    events = chain(_row_names(stages), _iterations(iterations, stages), _bubbles(bubbles))
    with path.open("w") as file:  # one by one: a long run on many stages has millions
        file.write("[")
        for i, event in enumerate(events):
            file.write((",\n" if i else "\n") + json.dumps(event))
        file.write("\n]\n")


def _row_names(stages: pd.DataFrame) -> Iterator[dict[str, Any]]:
    row = {"ph": "M", "name": "thread_name", "pid": 0}
    for stage in sorted(stages.stage.unique().tolist()):
        yield {**row, "tid": stage, "args": {"name": f"stage {stage}"}}


def _iterations(iterations: pd.DataFrame, stages: pd.DataFrame) -> Iterator[dict[str, Any]]:
    counts: Any = iterations.set_index("iteration")[COUNTS].to_dict("index")
    rows: Iterable[Any] = stages.itertuples(index=False)
    for row in rows:
        count = counts[row.iteration]
        parts = [("prefill", count["num_prefill_tokens"]), ("decode", count["num_decode_tokens"])]
        work = " + ".join(f"{number} {kind}" for kind, number in parts if number)
        name = f"iteration {row.iteration}: {work}"
        yield _event(name, "iteration", row, {"iteration": row.iteration, **count})


def _bubbles(bubbles: pd.DataFrame) -> Iterator[dict[str, Any]]:
    rows: Iterable[Any] = bubbles.itertuples(index=False)
    for row in rows:
        args = {"cause": row.cause, "before": row.iteration - 1, "after": row.iteration}
        yield _event(f"bubble {row.cause}", "bubble", row, args)


def _event(name: str, category: str, row: Any, args: dict[str, Any]) -> dict[str, Any]:
    start, duration = row.start * MICROSECONDS, (row.end - row.start) * MICROSECONDS
    event = {"ph": "X", "name": name, "cat": category, "pid": 0, "tid": row.stage}
    return {**event, "ts": start, "dur": duration, "args": args}
