"""Tables and picture of a real server's loads beside their replays."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from sarathi_lab.extensions.replay.benchmark import WAITS, end_of, quantities_of
from sarathi_lab.extensions.replay.real_run import RealRun
from sarathi_lab.results.plots.plot import Look, PanelLayout, distribution, plot, styled
from sarathi_lab.results.plots.style import finished, legend_below
from sarathi_lab.results.result import DisplayTable
from sarathi_lab.results.serving_metrics import quantiles, waits

QUANTILES = ("", "mean", "p50", "p90", "p99")


class Quantity(NamedTuple):
    """How a quantity is shown.

    Attributes:
        unit: In tables.
        heading: On the terminal.
        shown_unit: On the terminal and in the picture.
        factor: From the table's unit to the one that is shown.
        axis: Its name in the picture; "": it is not drawn.
    """

    unit: str
    heading: str
    shown_unit: str
    factor: float = 1.0
    axis: str = ""


QUANTITIES = {
    "ttft": Quantity("s", "TTFT", "s", axis="time to first token"),
    "tpot": Quantity("s", "TPOT", "ms", 1e3, axis="time per output token"),
    "latency": Quantity("s", "end to end", "s", axis="end to end"),
    "tbt": Quantity("s", "TBT", "ms", 1e3),
    "output_throughput": Quantity("tokens/s", "throughput", "output tokens/s"),
    "request_throughput": Quantity("requests/s", "throughput", "requests/s"),
    "duration": Quantity("s", "duration", "s"),
    "num_preemptions": Quantity("", "preemptions", ""),
    "blocks_used": Quantity("blocks", "KV blocks in use", ""),
}
NUM_WINDOWS = 8  # of a load
CHANGED = "what if"
LOOKS = {
    "real": Look("real", "0.25"),
    "simulated": Look("simulated", "C1", "--"),
    CHANGED: Look(CHANGED, "C0", ":"),
}


class Use(NamedTuple):
    """What of a server is in use: the ledger's column of it, and its label in the picture."""

    column: str
    label: str


IN_USE = {
    "running": Use("num_running", "requests that run"),
    "waiting": Use("num_waiting", "requests that wait"),
    "blocks": Use("num_blocks_used", "KV blocks in use"),
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
        blocks = over_time(self.run, self.iterations).real_blocks
        return _quantities(self.run.requests, end_of(self.run.requests), blocks, math.nan)

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
        **quantities_of(requests, duration),
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
    for metric, quantity in QUANTITIES.items():
        for quantile in QUANTILES:
            name = f"{metric}_{quantile}".rstrip("_")
            if name not in real or name not in simulated:
                continue
            row: dict[str, object] = {"metric": metric, "quantile": quantile}
            row["unit"] = quantity.unit
            row |= {"real": real[name], "simulated": simulated[name]}
            if changed is not None:
                row["what_if"] = changed.get(name, math.nan)
            rows.append(row)
    columns = ["metric", "quantile", "unit", "real", "simulated"]
    if changed is not None:
        columns.append("what_if")
    table = pd.DataFrame(rows, columns=columns)
    error = table.simulated / table.real - 1
    behind_simulated = columns.index("simulated") + 1
    table.insert(behind_simulated, "error", error)
    if changed is not None:
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
        for name, value in row.items():
            if name in ("real", "simulated", "what_if"):
                shown[name.replace("_", " ")] = _in_four_digits(quantity.factor * value)
            elif name in ("error", "change"):
                shown[name] = value
        rows.append(shown)
    return DisplayTable(rows, left=[""], formats={"error": "+.1%", "change": "+.1%"})


def _in_four_digits(value: float) -> str:
    """Return a number in four digits, or whole; "-" for none."""
    if math.isnan(value):
        return "-"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def parts_display(parts: pd.DataFrame) -> DisplayTable:
    """Return the mean waits of several loads (`part_table`), real and simulated."""
    table = parts[["load"]].copy()
    for whose in ("real", "simulated"):
        for wait in ("ttft", "latency"):
            quantity = QUANTITIES[wait]
            heading = f"{quantity.heading}\n{whose}\n[{quantity.shown_unit}]"
            table[heading] = parts[f"{wait} {whose}"]
    formats = dict.fromkeys(map(str, table), ".3g")
    return DisplayTable(table.to_dict("records"), left=["load"], formats=formats)


def mean_errors(table: pd.DataFrame) -> dict[str, float]:
    """Select the relative error of each wait's mean."""
    is_mean = table["quantile"] == "mean"
    means = table[is_mean & table.metric.isin(WAITS)]
    return dict(zip(means.metric, means.error, strict=True))


def errors_of_longest(table: pd.DataFrame) -> dict[str, float]:
    """Select the relative error of the longest waits, which runs are judged by, where the real ones
    are recorded.
    """
    longest = table[(table["quantile"] == "p99") & table.metric.isin(("ttft", "tbt"))]
    errors = {}
    for metric, error in zip(longest.metric, longest.error, strict=True):
        if not math.isnan(error):
            errors[f"{metric}_p99"] = error
    return errors


def over_time(run: RealRun, iterations: pd.DataFrame) -> pd.DataFrame:
    """Sample requests and blocks at the `time` (seconds) of each row of the run's timeline."""
    line = run.timeline
    num_blocks = run.settings.num_blocks or math.nan
    real_blocks: object = math.nan
    if line.kv_cache_pct.any():
        real_blocks = line.kv_cache_pct / 100 * num_blocks
    samples: dict[str, object] = {
        "time": line.t,
        "real_running": line.running,
        "real_waiting": line.waiting,
        "real_blocks": real_blocks,
    }
    # The last iteration that had ended at each sample.
    last = np.searchsorted(iterations.end, line.t, side="right")
    for name, use in IN_USE.items():
        # Before the first iteration nothing is in use.
        values = np.concatenate([[0.0], iterations[use.column]])
        samples[f"simulated_{name}"] = values[last]
    return pd.DataFrame(samples)


def part_table(loads: Sequence[Load], changed: Sequence[Load] = ()) -> pd.DataFrame:
    """Compare mean waits (seconds) part by part: of several loads each, of one the requests sent in
    `NUM_WINDOWS` stretches of time, `since` a second. Columns as "ttft real" by `LOOKS`.
    """
    rows = []
    for number, load in enumerate(loads):
        tables = {"real": load.run.requests, "simulated": load.requests}
        if changed:
            tables[CHANGED] = changed[number].requests
        seconds = {whose: waits(table) for whose, table in tables.items()}
        arrivals = load.run.requests.arrival_time.to_numpy()
        num_parts = 1
        if len(loads) == 1 and not load.run.means:
            num_parts = min(NUM_WINDOWS, len(arrivals))
        for part in np.array_split(np.arange(len(arrivals)), num_parts):
            since = arrivals[part[0]]
            row: dict[str, object] = {"load": load.run.name, "since": since}
            for wait, whose in product(WAITS, seconds):
                of_part = pd.Series(seconds[whose][wait][part])
                row[f"{wait} {whose}"] = of_part.mean()
            # A client that recorded no request has means of all, in place of waits.
            for wait, mean in load.run.means.items():
                row[f"{wait} real"] = mean
            rows.append(row)
    return pd.DataFrame(rows)


def worst_part(parts: pd.DataFrame) -> str:
    """Describe where the end-to-end times of a `part_table` differ by the largest factor."""
    ratio = parts["latency simulated"] / parts["latency real"]
    # Half as long is as far off as twice as long.
    factors = np.abs(np.log(ratio.to_numpy()))
    if np.isnan(factors).all():
        return "  no end-to-end times are recorded"
    position = int(np.nanargmax(factors))
    worst = parts.iloc[position]
    which = _selection(parts, position)
    return (
        f"  mean time end to end {which}: real {worst['latency real']:.3g} s, simulated "
        f"{worst['latency simulated']:.3g} s"
    )


def _selection(parts: pd.DataFrame, position: int) -> str:
    """Name the requests of the part at `position` of a `part_table`, which differs most."""
    if parts.load.nunique() > 1:
        return f"of the load that differs most, {parts.load.iloc[position]}"
    if len(parts) == 1:
        return "of all requests"
    end = "the end"
    if position + 1 < len(parts):
        end = f"{parts.since.iloc[position + 1]:.1f} s"
    since = f"{parts.since.iloc[position]:.1f} s"
    return f"in the stretch that differs most, of requests sent from {since} to {end}"


def picture(
    loads: Sequence[Load], parts: pd.DataFrame, changed: Sequence[Load], title: str
) -> Figure:
    """Draw distributions of waits above; below `over_time` of a recorded run, else `part_table`."""
    below = _panels_below(loads, parts, changed)
    rows = [*_rows_of_waits(loads, changed), *below.rows()]
    shares = [f"share {wait}" for wait in WAITS]
    layout = PanelLayout([*shares, *below.labels], 3, (12, 6.4))
    figure, axes = plot(pd.concat(rows), x="at", grid=layout)
    for wait in WAITS:
        axes[f"share {wait}"].set(xlabel=_label(wait), ylabel="share of requests", ylim=(0, 1))
    for name, label in below.labels.items():
        axes[name].set(xlabel=below.xlabel, ylabel=label, ylim=(0, None))
    if "blocks" in below.labels and not below.table["blocks real"].any():
        axes["blocks"].set_title("the run did not record them", fontsize="small")
    keys = []
    for whose, look in LOOKS.items():
        if whose != CHANGED or changed:
            keys.append(look.key())
    legend_below(figure, keys)
    return finished(figure, title)


@dataclass(frozen=True)
class PanelsBelow:
    """The lower row of the picture.

    Attributes:
        table: A row where a point is, `at`, with columns as "ttft real", by `LOOKS`.
        labels: Of the quantities, a panel each.
        xlabel: What `at` is.
        marker: Of a point; "": none, where there are many.
    """

    table: pd.DataFrame
    labels: Mapping[str, str]
    xlabel: str
    marker: str = "."

    def rows(self) -> list[pd.DataFrame]:
        """Return the points of each panel and look."""
        rows = []
        for name in self.labels:
            factor = 1.0
            if name in QUANTITIES:
                factor = QUANTITIES[name].factor
            for whose, look in LOOKS.items():
                column = f"{name} {whose}"
                if column not in self.table:
                    continue
                points = pd.DataFrame({"at": self.table["at"], "panel": name})
                points["value"] = factor * self.table[column]
                rows.append(styled(points, replace(look, marker=self.marker)))
        return rows


def _panels_below(
    loads: Sequence[Load], parts: pd.DataFrame, changed: Sequence[Load]
) -> PanelsBelow:
    waits_drawn = {wait: _label(wait) for wait in WAITS}
    if len(loads) > 1:
        numbers = range(1, len(parts) + 1)  # of the loads
        return PanelsBelow(parts.assign(at=numbers), waits_drawn, "load")
    (load,) = loads
    if load.run.timeline.empty:
        return PanelsBelow(parts.rename(columns={"since": "at"}), waits_drawn, "sent [s]")
    samples = over_time(load.run, load.iterations)
    table = pd.DataFrame({"at": samples.time})
    for name in IN_USE:
        table[f"{name} real"] = samples[f"real_{name}"]
        table[f"{name} simulated"] = samples[f"simulated_{name}"]
    if changed:
        of_changed = over_time(load.run, changed[0].iterations)
        for name in IN_USE:
            table[f"{name} {CHANGED}"] = of_changed[f"simulated_{name}"]
    in_use = {name: use.label for name, use in IN_USE.items()}
    return PanelsBelow(table, in_use, "time [s]", marker="")


def _label(wait: str) -> str:
    """Return the label of a wait's axis, with its unit."""
    quantity = QUANTITIES[wait]
    return f"{quantity.axis} [{quantity.shown_unit}]"


def _rows_of_waits(loads: Sequence[Load], changed: Sequence[Load]) -> list[pd.DataFrame]:
    """Return the distribution of each wait, a panel each."""
    tables = {
        "real": [load.run.requests for load in loads if not load.run.means],
        "simulated": [load.requests for load in loads],
        CHANGED: [load.requests for load in changed],
    }
    rows = []
    for whose, requests in tables.items():
        if not requests:
            continue
        look = replace(LOOKS[whose], drawstyle="steps-post")
        for wait in WAITS:
            seconds = np.concatenate([waits(table)[wait] for table in requests])
            shares = distribution(pd.Series(QUANTITIES[wait].factor * seconds))
            rows.append(styled(shares.assign(panel=f"share {wait}"), look))
    return rows
