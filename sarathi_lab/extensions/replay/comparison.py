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
NUM_WINDOWS = 8  # of a load
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
        requests, blocks = self.run.requests, over_time(self.run, self.iterations).real_blocks
        return _quantities(requests, float(requests.finish_time.max()), blocks, math.nan)

    @property
    def simulated(self) -> dict[str, float]:
        """The same of the replay."""
        end, preempted = self.iterations.end.max(), self.iterations.num_preemptions.sum()
        blocks = over_time(self.run, self.iterations).simulated_blocks
        return _quantities(self.requests, float(end), blocks, float(preempted))


def _quantities(
    requests: pd.DataFrame, duration: float, blocks: pd.Series, num_preemptions: float
) -> dict[str, float]:
    found = {**throughput(requests, duration), **latency(requests)}
    return {**found, **quantiles("blocks_used", blocks), "num_preemptions": num_preemptions}


def mean_of(summaries: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Average what all loads have."""
    return {
        name: float(np.mean([one[name] for one in summaries]))
        for name in summaries[0]
        if all(name in one for one in summaries)
    }


def validation_table(
    real: Mapping[str, float],
    simulated: Mapping[str, float],
    changed: Mapping[str, float] | None = None,
) -> pd.DataFrame:
    """Compare quantities: metric, quantile, unit, real, simulated and their relative error, NaN
    without a measurement; if settings were `changed`, `what_if` and its ratio to the replay as run.
    """
    names = {
        f"{metric}_{quantile}".rstrip("_"): (metric, quantile, unit)
        for metric, unit in UNITS.items()
        for quantile in ("", "mean", "p50", "p90", "p99")
    }
    names = {name: row for name, row in names.items() if name in real and name in simulated}
    table = pd.DataFrame([*names.values()], columns=["metric", "quantile", "unit"])
    table["real"], table["simulated"] = ([one[name] for name in names] for one in (real, simulated))
    table["error"] = table.simulated / table.real - 1
    if changed is not None:
        table["what_if"] = [changed.get(name, math.nan) for name in names]
        table["change"] = table.what_if / table.simulated - 1
    return table


def mean_errors(table: pd.DataFrame) -> dict[str, float]:
    """Select the relative error of each wait's mean."""
    means = table[(table["quantile"] == "mean") & table.metric.isin(WAITS)]
    return dict(zip(means.metric, means.error, strict=True))


def over_time(run: RealRun, iterations: pd.DataFrame) -> pd.DataFrame:
    """Sample requests and blocks at the `time` (seconds) of each row of the run's timeline."""
    line, num_blocks = run.timeline, run.settings.num_blocks or math.nan
    is_recorded = line.kv_cache_pct.any()
    samples: dict[str, Any] = {"time": line.t, "real_running": line.running}
    samples["real_waiting"] = line.waiting
    samples["real_blocks"] = line.kv_cache_pct / 100 * num_blocks if is_recorded else math.nan
    last = np.searchsorted(iterations.end, line.t, side="right")
    for name in ("running", "waiting", "blocks_used"):
        values = np.concatenate([[0.0], iterations[f"num_{name}"]])
        samples[f"simulated_{name.partition('_')[0]}"] = values[last]
    return pd.DataFrame(samples)


def part_table(loads: Sequence[Load], changed: Sequence[Load] = ()) -> pd.DataFrame:
    """Compare mean waits (seconds) part by part: of several loads each, of one the requests sent in
    `NUM_WINDOWS` stretches of time, `since` a second. Columns as "ttft real" by `STYLES`.
    """
    rows = []
    for place, load in enumerate(loads):
        is_split = len(loads) == 1 and not load.run.means
        arrival = load.run.requests.arrival_time.to_numpy()
        number = min(NUM_WINDOWS, len(arrival)) if is_split else 1
        tables = {"real": load.run.requests, "simulated": load.requests}
        tables |= {"what if": changed[place].requests} if changed else {}
        seconds = {whose: waits(table) for whose, table in tables.items()}
        for part in np.array_split(np.arange(len(arrival)), number):
            row: dict[str, Any] = {"load": load.run.name, "since": arrival[part[0]]}
            for wait, (whose, found) in product(WAITS, seconds.items()):
                row[f"{wait} {whose}"] = pd.Series(found[wait][part]).mean()
            row |= {f"{wait} real": mean for wait, mean in load.run.means.items()}
            rows.append(row)
    return pd.DataFrame(rows)


def worst_part(parts: pd.DataFrame) -> str:
    """Describe where the end-to-end times of a `part_table` differ by the largest factor."""
    ratio = parts["latency simulated"] / parts["latency real"]
    worst = parts.iloc[int(np.abs(np.log(ratio.to_numpy())).argmax())]
    where = f"sent from {worst.since:.1f} s on"
    if parts.load.nunique() > 1:
        where = f"of {worst.load}"
    return (
        f"  largest difference end to end, for requests {where}: real "
        f"{worst['latency real']:.3g} s, simulated {worst['latency simulated']:.3g} s"
    )


def picture(
    loads: Sequence[Load], parts: pd.DataFrame, changed: Sequence[Load], where: str
) -> Figure:
    """Draw distributions of waits above; below `over_time` of a recorded run, else `part_table`."""
    figure, axes = panels(2, 3, (12, 6.4))
    known = [one.run.requests for one in loads if not one.run.means]
    tables = {"real": known, "simulated": [one.requests for one in loads]}
    tables |= {"what if": [one.requests for one in changed]} if changed else {}
    for whose, some in tables.items():
        for ax, (name, (factor, label)) in zip(axes[:3], SHOWN.items(), strict=True):
            if some:
                seconds = np.concatenate([waits(one)[name] for one in some])
                ax.ecdf(pd.Series(factor * seconds).dropna(), label=whose, **STYLES[whose])
            ax.set(xlabel=label, ylabel="share of requests", ylim=(0, 1))
    if len(loads) == 1 and len(loads[0].run.timeline):
        use = over_time(loads[0].run, loads[0].iterations).set_index("time")
        use = use.rename(columns=lambda name: " ".join(reversed(name.split("_"))))
        _draw(axes[3:], use, IN_USE, linewidth=1.2)
        if not use["blocks real"].any():
            axes[5].set_title("the run did not record them", fontsize="small")
    else:
        by = parts.set_index(parts.since if len(loads) == 1 else parts.index + 1)
        _draw(axes[3:], by.rename_axis("sent" if len(loads) == 1 else "load"), SHOWN, marker=".")
    axes[3 if len(loads) > 1 else 0].legend(fontsize="small")
    return finished(figure, where)


def _draw(axes: Sequence[Axes], table: pd.DataFrame, shown: Mapping[str, Any], **look: Any) -> None:
    """Draw quantities (factor and label) by the index of a table, a panel each."""
    unit = "" if table.index.name == "load" else " [s]"
    for ax, (name, (factor, label)) in zip(axes, shown.items(), strict=True):
        for whose in (one for one in STYLES if f"{name} {one}" in table):
            values = factor * table[f"{name} {whose}"]
            ax.plot(table.index, values, label=whose, **STYLES[whose], **look)
        ax.set(xlabel=f"{table.index.name}{unit}", ylabel=label, ylim=(0, None))
