"""A run as a trace for Perfetto (ui.perfetto.dev) or chrome://tracing: a row per stage with
micro-batches and bubbles, a process per instance of a cluster.

Format: the JSON array of Chrome's trace event format; "X" is an event with a duration, "M" names a
row.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path
from typing import Any, cast

import pandas as pd

MICROSECONDS = 1e6  # the format's unit, in one second
COUNTS = ["num_prefill_tokens", "num_decode_tokens", "prefill_kv_tokens", "decode_kv_tokens"]


def write_trace(
    path: Path, iterations: pd.DataFrame, stages: pd.DataFrame, bubbles: pd.DataFrame
) -> None:
    """Write the ledger's three tables as trace events."""
    with path.open("w") as file:  # one by one: a long run on many stages has millions
        file.write("[")
        for i, event in enumerate(_events(iterations, stages, bubbles)):
            file.write((",\n" if i else "\n") + json.dumps(event))
        file.write("\n]\n")


def _events(
    iterations: pd.DataFrame, stages: pd.DataFrame, bubbles: pd.DataFrame
) -> Iterator[dict[str, Any]]:
    instances = iterations.instance if "instance" in iterations else 0
    rows = iterations.assign(instance=instances).set_index("iteration")
    for instance, stage in product(sorted(set(rows.instance)), sorted(set(stages.stage))):
        row = {"ph": "M", "name": "thread_name", "pid": int(instance), "tid": int(stage)}
        yield {**row, "args": {"name": f"stage {stage}"}}
    counts: Any = rows[COUNTS].to_dict("index")
    places = rows.instance.to_dict()
    for span in cast(Iterable[Any], stages.itertuples(index=False)):
        count = counts[span.iteration]
        parts = [("prefill", count["num_prefill_tokens"]), ("decode", count["num_decode_tokens"])]
        work = " + ".join(f"{number} {kind}" for kind, number in parts if number)
        name = f"iteration {span.iteration}: {work}"
        event = _event(name, "iteration", span, {"iteration": span.iteration, **count})
        yield {**event, "pid": places[span.iteration]}
    for gap in cast(Iterable[Any], bubbles.itertuples(index=False)):
        args = {"cause": gap.cause, "before": gap.iteration - 1, "after": gap.iteration}
        yield _event(f"bubble {gap.cause}", "bubble", gap, args)


def _event(name: str, category: str, row: Any, args: dict[str, Any]) -> dict[str, Any]:
    start, duration = row.start * MICROSECONDS, (row.end - row.start) * MICROSECONDS
    event = {"ph": "X", "name": name, "cat": category, "pid": 0, "tid": row.stage}
    return {**event, "ts": start, "dur": duration, "args": args}
