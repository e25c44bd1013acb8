"""A real run beside its replay: how far each quantile is off, and both over time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd

from sarathi_lab.results.metrics import throughput
from sarathi_lab.results.real_run import RealRun
from sarathi_lab.results.serving_metrics import QUANTILES, Floats, quantiles, waits

WAITS = ("ttft", "tpot", "latency")  # seconds of a request, as METRICS.md defines them
RATES = {"output_throughput": "tokens/s", "request_throughput": "requests/s", "duration": "s"}
COLUMNS = ("metric", "quantile", "unit", "real", "simulated", "error")
MEAN = "mean"


def validation_table(
    run: RealRun, requests: pd.DataFrame, iterations: pd.DataFrame
) -> pd.DataFrame:
    """`COLUMNS`: what `run` measured beside the ledger's tables of its replay; the error is
    relative, NaN where nobody measured. Blocks in use are quantiles over the run's seconds.
    """
    table = pd.DataFrame(_rows(run, requests, iterations), columns=list(COLUMNS[:-1]))
    return table.assign(error=table.simulated / table.real - 1)


def _rows(
    run: RealRun, requests: pd.DataFrame, iterations: pd.DataFrame
) -> Iterator[tuple[str, str, str, float, float]]:
    real, simulated = waits(run.requests), waits(requests)
    for metric in WAITS:
        yield from _quantiles(metric, "s", real[metric], simulated[metric])
    rates = throughput(run.requests, run.duration)
    own_rates = throughput(requests, float(iterations.end.max()))
    for metric, unit in RATES.items():
        yield metric, "", unit, rates[metric], own_rates[metric]
    yield "num_preemptions", "", "", math.nan, float(iterations.num_preemptions.sum())
    both = over_time(run, iterations)
    if both.real_blocks.notna().any():
        yield from _quantiles("blocks_used", "blocks", both.real_blocks, both.simulated_blocks)


def _quantiles(
    metric: str, unit: str, real: pd.Series | Floats, simulated: pd.Series | Floats
) -> Iterator[tuple[str, str, str, float, float]]:
    first, second = quantiles("", real), quantiles("", simulated)
    for name in (MEAN, *(f"p{int(q * 100)}" for q in QUANTILES)):
        if f"_{name}" in first and f"_{name}" in second:
            yield metric, name, unit, first[f"_{name}"], second[f"_{name}"]


def over_time(run: RealRun, iterations: pd.DataFrame) -> pd.DataFrame:
    """Running and waiting requests and blocks in use, real and simulated, at the `time` (seconds)
    of each row of the run's timeline.
    """
    line = run.timeline
    found: dict[str, Any] = {"time": line.t, "real_running": line.running}
    found["real_waiting"] = line.waiting
    found["real_blocks"] = np.nan if run.blocks_used is None else run.blocks_used
    last = np.searchsorted(iterations.end, line.t, side="right") - 1
    for name in ("running", "waiting", "blocks_used"):
        values = iterations[f"num_{name}"].to_numpy(float)
        at = np.where(last >= 0, values[np.maximum(last, 0)], 0.0)
        found[f"simulated_{name.partition('_')[0]}"] = at
    return pd.DataFrame(found)


def mean_errors(table: pd.DataFrame) -> dict[str, float]:
    """The relative error of the mean of each wait."""
    means = table[(table["quantile"] == MEAN) & table.metric.isin(WAITS)]
    return dict(zip(means.metric, means.error, strict=True))
