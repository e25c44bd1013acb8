"""Tables and picture of a real server's loads beside their replays."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sarathi_lab.extensions.replay.real_run import RealRun
from sarathi_lab.results.metrics import throughput
from sarathi_lab.results.plots.style import finished, panels
from sarathi_lab.results.serving_metrics import latency, quantiles, waits

WAITS = ("ttft", "tpot", "latency")  # seconds of a request, as metrics.md defines them
UNITS = {
    **dict.fromkeys((*WAITS, "tbt"), "s"),
    "output_throughput": "tokens/s",
    "request_throughput": "requests/s",
    "duration": "s",
    "num_preemptions": "",
    "blocks_used": "blocks",
}
QUANTILES = ("", "mean", "p50", "p90", "p99")
NUM_WINDOWS = 8  # of a load
# Columns of the ledger's iterations.
OF_ITERATIONS = {
    "running": "num_running",
    "waiting": "num_waiting",
    "blocks": "num_blocks_used",
}
STYLES: dict[str, dict[str, Any]] = {
    "real": {"color": "0.25"},
    "simulated": {"color": "C1", "linestyle": "--"},
    "what if": {"color": "C0", "linestyle": ":"},
}
SHOWN = {
    "ttft": (1.0, "time to first token [s]"),
    "tpot": (1e3, "time per output token [ms]"),
    "latency": (1.0, "end to end [s]"),
}
IN_USE = {
    "running": (1.0, "requests that run"),
    "waiting": (1.0, "requests that wait"),
    "blocks": (1.0, "KV blocks in use"),
}


@dataclass(frozen=True)
class Load:
    """A real server's load and its replay: the ledger's tables, `iterations` and `requests`."""

    run: RealRun
    iterations: pd.DataFrame
    requests: pd.DataFrame

    @property
    def real(self) -> dict[str, float]:
        """Measured quantities by the names of metrics.md."""
        if self.run.means:
            return {f"{name}_mean": value for name, value in self.run.means.items()}
        requests = self.run.requests
        blocks = over_time(self.run, self.iterations).real_blocks
        return _quantities(requests, float(requests.finish_time.max()), blocks, math.nan)

    @property
    def simulated(self) -> dict[str, float]:
        """The same of the replay."""
        end = float(self.iterations.end.max())
        num_preemptions = float(self.iterations.num_preemptions.sum())
        blocks = over_time(self.run, self.iterations).simulated_blocks
        return _quantities(self.requests, end, blocks, num_preemptions)


def _quantities(
    requests: pd.DataFrame, duration: float, blocks: pd.Series, num_preemptions: float
) -> dict[str, float]:
    return {
        **throughput(requests, duration),
        **latency(requests),
        **quantiles("blocks_used", blocks),
        "num_preemptions": num_preemptions,
    }


def mean_of(summaries: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Average what all loads have."""
    means = {}
    for name in summaries[0]:
        values = [summary[name] for summary in summaries if name in summary]
        if len(values) == len(summaries):
            means[name] = float(np.mean(values))
    return means


def validation_table(
    real: Mapping[str, float],
    simulated: Mapping[str, float],
    changed: Mapping[str, float] | None = None,
) -> pd.DataFrame:
    """Compare quantities: metric, quantile, unit, real, simulated and their relative error, NaN
    without a measurement; if settings were `changed`, `what_if` and its ratio to the replay as run.
    """
    rows = []
    for metric, unit in UNITS.items():
        for quantile in QUANTILES:
            name = f"{metric}_{quantile}".rstrip("_")
            if name not in real or name not in simulated:
                continue
            row: dict[str, Any] = {"metric": metric, "quantile": quantile, "unit": unit}
            row |= {"real": real[name], "simulated": simulated[name]}
            if changed is not None:
                row["what_if"] = changed.get(name, math.nan)
            rows.append(row)
    columns = ["metric", "quantile", "unit", "real", "simulated"]
    if changed is not None:
        columns.append("what_if")
    table = pd.DataFrame(rows, columns=columns)
    # Behind what it compares.
    table.insert(columns.index("simulated") + 1, "error", table.simulated / table.real - 1)
    if changed is not None:
        table["change"] = table.what_if / table.simulated - 1
    return table


def mean_errors(table: pd.DataFrame) -> dict[str, float]:
    """Select the relative error of each wait's mean."""
    means = table[(table["quantile"] == "mean") & table.metric.isin(WAITS)]
    return dict(zip(means.metric, means.error, strict=True))


def over_time(run: RealRun, iterations: pd.DataFrame) -> pd.DataFrame:
    """Sample requests and blocks at the `time` (seconds) of each row of the run's timeline."""
    line = run.timeline
    num_blocks = run.settings.num_blocks or math.nan
    real_blocks: Any = math.nan
    if line.kv_cache_pct.any():
        real_blocks = line.kv_cache_pct / 100 * num_blocks
    samples: dict[str, Any] = {
        "time": line.t,
        "real_running": line.running,
        "real_waiting": line.waiting,
        "real_blocks": real_blocks,
    }
    last = np.searchsorted(iterations.end, line.t, side="right")
    for name, column in OF_ITERATIONS.items():
        # Before the first iteration nothing is in use.
        values = np.concatenate([[0.0], iterations[column]])
        samples[f"simulated_{name}"] = values[last]
    return pd.DataFrame(samples)


def part_table(loads: Sequence[Load], changed: Sequence[Load] = ()) -> pd.DataFrame:
    """Compare mean waits (seconds) part by part: of several loads each, of one the requests sent in
    `NUM_WINDOWS` stretches of time, `since` a second. Columns as "ttft real" by `STYLES`.
    """
    rows = []
    for number, load in enumerate(loads):
        tables = {"real": load.run.requests, "simulated": load.requests}
        if changed:
            tables["what if"] = changed[number].requests
        seconds = {whose: waits(table) for whose, table in tables.items()}
        arrivals = load.run.requests.arrival_time.to_numpy()
        num_parts = 1
        if len(loads) == 1 and not load.run.means:
            num_parts = min(NUM_WINDOWS, len(arrivals))
        for part in np.array_split(np.arange(len(arrivals)), num_parts):
            row: dict[str, Any] = {"load": load.run.name, "since": arrivals[part[0]]}
            for wait, whose in product(WAITS, seconds):
                row[f"{wait} {whose}"] = pd.Series(seconds[whose][wait][part]).mean()
            for wait, mean in load.run.means.items():
                row[f"{wait} real"] = mean
            rows.append(row)
    return pd.DataFrame(rows)


def worst_part(parts: pd.DataFrame) -> str:
    """Describe where the end-to-end times of a `part_table` differ by the largest factor."""
    ratio = parts["latency simulated"] / parts["latency real"]
    factors = np.abs(np.log(ratio.to_numpy()))
    if np.isnan(factors).all():
        return "  no end-to-end times are recorded"
    worst = parts.iloc[int(np.nanargmax(factors))]
    selection = f"sent from {worst.since:.1f} s on"
    if parts.load.nunique() > 1:
        selection = f"of {worst.load}"
    return (
        f"  largest difference end to end, for requests {selection}: real "
        f"{worst['latency real']:.3g} s, simulated {worst['latency simulated']:.3g} s"
    )


def picture(
    loads: Sequence[Load], parts: pd.DataFrame, changed: Sequence[Load], title: str
) -> Figure:
    """Draw distributions of waits above; below `over_time` of a recorded run, else `part_table`."""
    figure, axes = panels(2, 3, (12, 6.4))
    _draw_waits(axes[:3], loads, changed)
    run = loads[0].run
    if len(loads) == 1 and len(run.timeline):
        use = over_time(run, loads[0].iterations).set_index("time")
        use = use.rename(columns=lambda name: " ".join(reversed(name.split("_"))))
        _draw_lines(axes[3:], use, IN_USE, linewidth=1.2)
        if not use["blocks real"].any():
            axes[5].set_title("the run did not record them", fontsize="small")
    elif len(loads) == 1:
        _draw_lines(axes[3:], parts.set_index(parts.since.rename("sent")), SHOWN, marker=".")
    else:
        numbers = pd.RangeIndex(1, len(parts) + 1, name="load")
        _draw_lines(axes[3:], parts.set_index(numbers), SHOWN, marker=".")
    with_legend = axes[0] if len(loads) == 1 else axes[3]
    with_legend.legend(fontsize="small")
    return finished(figure, title)


def _draw_waits(axes: Sequence[Axes], loads: Sequence[Load], changed: Sequence[Load]) -> None:
    """Draw the distribution of each wait, a panel each."""
    tables = {
        "real": [load.run.requests for load in loads if not load.run.means],
        "simulated": [load.requests for load in loads],
        "what if": [load.requests for load in changed],
    }
    for ax, (name, (factor, label)) in zip(axes, SHOWN.items(), strict=True):
        for whose, requests in tables.items():
            if requests:
                seconds = np.concatenate([waits(table)[name] for table in requests])
                ax.ecdf(pd.Series(factor * seconds).dropna(), label=whose, **STYLES[whose])
        ax.set(xlabel=label, ylabel="share of requests", ylim=(0, 1))


def _draw_lines(
    axes: Sequence[Axes], table: pd.DataFrame, shown: Mapping[str, Any], **look: Any
) -> None:
    """Draw quantities (factor and label) by the index of a table, a panel each."""
    unit = "" if table.index.name == "load" else " [s]"
    for ax, (name, (factor, label)) in zip(axes, shown.items(), strict=True):
        for whose, style in STYLES.items():
            column = f"{name} {whose}"
            if column in table:
                ax.plot(table.index, factor * table[column], label=whose, **style, **look)
        ax.set(xlabel=f"{table.index.name}{unit}", ylabel=label, ylim=(0, None))
