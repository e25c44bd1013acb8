"""Tables of a real server's loads beside their replays."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import numpy as np
import pandas as pd

from sarathi_lab.extensions.replay.benchmark import WAITS, end_of, quantities_of
from sarathi_lab.extensions.replay.real_run import RealRun
from sarathi_lab.results.result import DisplayTable
from sarathi_lab.results.serving_metrics import quantiles, waits

Summary = Mapping[str, float]
QUANTILES = ("", "mean", "p50", "p90", "p99")
LONGEST = ("ttft_p99", "tbt_p99")  # that runs are judged by, beside means


class Quantity(NamedTuple):
    """How a quantity is shown.

    Attributes:
        unit: In tables.
        heading: On the terminal.
        shown_unit: On the terminal and in the picture.
        factor: From the table's unit to the one that is shown.
    """

    unit: str
    heading: str
    shown_unit: str
    factor: float = 1.0


QUANTITIES = {
    "ttft": Quantity("s", "TTFT", "s"),
    "tpot": Quantity("s", "TPOT", "ms", 1e3),
    "latency": Quantity("s", "end to end", "s"),
    "tbt": Quantity("s", "TBT", "ms", 1e3),
    "output_throughput": Quantity("tokens/s", "throughput", "output tokens/s"),
    "request_throughput": Quantity("requests/s", "throughput", "requests/s"),
    "duration": Quantity("s", "duration", "s"),
    "num_preemptions": Quantity("", "preemptions", ""),
    "blocks_used": Quantity("blocks", "KV blocks in use", ""),
}
NUM_WINDOWS = 8  # of a load
# Whose values a column has.
REAL = "real"
SIMULATED = "simulated"
CHANGED = "what if"
# What of a server is in use, by the ledger's column of it.
IN_USE = {
    "num_running": "running",
    "num_waiting": "waiting",
    "num_blocks_used": "blocks",
}


@dataclass(frozen=True)
class ReplayedLoad:
    """A real server's load and its replay: the ledger's tables, `iterations` and `requests`."""

    run: RealRun
    iterations: pd.DataFrame
    requests: pd.DataFrame

    @property
    def real(self) -> dict[str, float]:
        """Measured quantities by the names of metrics.md."""
        run = self.run
        if run.means:
            return {f"{name}_mean": value for name, value in run.means.items()}
        return {
            **quantities_of(run.requests, end_of(run.requests)),
            **quantiles("blocks_used", over_time(self)[f"blocks {REAL}"]),
            "num_preemptions": math.nan,
        }

    @property
    def simulated(self) -> dict[str, float]:
        """The same of the replay."""
        return {
            **quantities_of(self.requests, float(self.iterations.end.max())),
            **quantiles("blocks_used", over_time(self)[f"blocks {SIMULATED}"]),
            "num_preemptions": float(self.iterations.num_preemptions.sum()),
        }


def mean_of(summaries: Sequence[Summary]) -> dict[str, float]:
    """Average what all loads have."""
    means = {}
    for name in summaries[0]:
        values = [summary[name] for summary in summaries if name in summary]
        if len(values) == len(summaries):
            means[name] = float(np.mean(values))
    return means


def validation_table(
    real: Summary,
    simulated: Summary,
    changed: Summary | None = None,
) -> pd.DataFrame:
    """Compare quantities: metric, quantile, unit, real, simulated and their relative error, NaN
    without a measurement; if settings were `changed`, `what_if` and its ratio to the replay as run.
    """
    rows = []
    for metric, quantile in product(QUANTITIES, QUANTILES):
        name = f"{metric}_{quantile}".rstrip("_")
        if name in real and name in simulated:
            unit = QUANTITIES[metric].unit
            rows.append([metric, quantile, unit, real[name], simulated[name], name])
    columns = ["metric", "quantile", "unit", "real", "simulated", "name"]
    table = pd.DataFrame(rows, columns=columns)
    names = table.pop("name")
    table["error"] = table.simulated / table.real - 1
    if changed is not None:
        table["what_if"] = names.map(dict(changed))
        table["change"] = table.what_if / table.simulated - 1
    return table


def validation_display(table: pd.DataFrame) -> DisplayTable:
    """Return a `validation_table` as the terminal shows it: what a row is in one column."""
    rows = []
    for row in table.to_dict("records"):
        quantity = QUANTITIES[row["metric"]]
        quantile = row["quantile"].replace("p", "P")
        heading = f"{quantity.heading} {quantile}".rstrip()
        if quantity.shown_unit:
            heading += f" [{quantity.shown_unit}]"
        shown: dict[str, object] = {"": heading}
        for column in ("real", "simulated", "error", "what_if", "change"):
            value = row.get(column)
            if value is None:
                continue
            if column not in ("error", "change"):
                value = _in_four_digits(quantity.factor * value)
            shown[column.replace("_", " ")] = value
        rows.append(shown)
    formats = {"error": "+.1%", "change": "+.1%"}
    return DisplayTable(rows, left=[""], formats=formats)


def _in_four_digits(value: float) -> str:
    """Return a number in four digits, or whole; "-" for none."""
    if math.isnan(value):
        return "-"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def replay_errors(table: pd.DataFrame) -> dict[str, float]:
    """Select the relative errors of mean waits from a `validation_table`, by the wait, and of
    `LONGEST`, where they are recorded.
    """
    errors = {}
    for metric, quantile, error in zip(table.metric, table["quantile"], table.error, strict=True):
        name = f"{metric}_{quantile}"
        if quantile == "mean" and metric in WAITS:
            errors[metric] = error
        elif name in LONGEST and not math.isnan(error):
            errors[name] = error
    return errors


def over_time(load: ReplayedLoad) -> pd.DataFrame:
    """Sample what is in use at the `time` (seconds) of each row of the run's timeline: requests and
    blocks, in columns as "running real".
    """
    line = load.run.timeline
    samples = pd.DataFrame({"time": line.t})
    samples[f"running {REAL}"] = line.running
    samples[f"waiting {REAL}"] = line.waiting
    num_blocks = load.run.settings.num_blocks or math.nan
    is_recorded = line.kv_cache_pct.any()
    samples[f"blocks {REAL}"] = line.kv_cache_pct / 100 * num_blocks if is_recorded else math.nan
    iterations = load.iterations
    # The last iteration that had ended at each sample.
    last = np.searchsorted(iterations.end, line.t, side="right")
    for column, name in IN_USE.items():
        # Before the first iteration nothing is in use.
        values = [0.0, *iterations[column]]
        samples[f"{name} {SIMULATED}"] = np.array(values)[last]
    return samples


def part_table(
    loads: Sequence[ReplayedLoad],
    changed: Sequence[ReplayedLoad] = (),
) -> pd.DataFrame:
    """Compare mean waits (seconds) part by part: of several loads each, of one the requests sent in
    `NUM_WINDOWS` stretches of time, `since` a second. Columns as "ttft real".
    """
    rows = []
    for number, load in enumerate(loads):
        run = load.run
        tables = {REAL: run.requests, SIMULATED: load.requests}
        if changed:
            tables[CHANGED] = changed[number].requests
        arrivals = run.requests.arrival_time.to_numpy()
        num_parts = 1
        if len(loads) == 1 and not run.means:
            num_parts = min(NUM_WINDOWS, len(arrivals))
        positions = np.arange(len(arrivals))
        for part in np.array_split(positions, num_parts):
            row: dict[str, object] = {"load": run.name, "since": arrivals[part[0]]}
            for whose, requests in tables.items():
                row |= _mean_waits(requests.iloc[part], whose)
            # A client that recorded no request has means of all, in place of waits.
            row |= {f"{wait} {REAL}": mean for wait, mean in run.means.items()}
            rows.append(row)
    return pd.DataFrame(rows)


def _mean_waits(requests: pd.DataFrame, whose: str) -> dict[str, float]:
    """Return the mean waits of requests, by such names as "ttft real"."""
    seconds = waits(requests)
    return {f"{wait} {whose}": pd.Series(seconds[wait]).mean() for wait in WAITS}


def loads_display(parts: pd.DataFrame) -> DisplayTable:
    """Return the mean waits of several loads (`part_table`), real and simulated."""
    headings = {
        f"{wait} {whose}": f"{QUANTITIES[wait].heading}\n{whose}\n[s]"
        for whose in (REAL, SIMULATED)
        for wait in ("ttft", "latency")
    }
    table = parts[["load", *headings]].rename(columns=headings)
    formats = dict.fromkeys(headings.values(), ".3g")
    return DisplayTable(table.to_dict("records"), left=["load"], formats=formats)
