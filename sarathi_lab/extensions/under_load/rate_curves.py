"""The picture of a search: latencies over the rate of requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pandas as pd
from matplotlib.artist import Artist
from matplotlib.figure import Figure

from sarathi_lab.extensions.under_load.search import RunAtRate, is_sustained
from sarathi_lab.results.plots.axes import LOG_SCALE, WIDE_RANGE
from sarathi_lab.results.plots.plot import Look, PanelLayout, plot
from sarathi_lab.results.plots.style import WIDTH, finished, legend_below, tick_in_steps
from sarathi_lab.results.serving_metrics import Slo, bounded

MET = Look("objective met", "C0", "", "o")
MISSED = Look("objective missed", "C1", "", "X")
BOUND = Look("bound of the objective", "black", "--")
CAPACITY = Look("capacity", "0.4", ":")
WORDS = {"scheduling_delay": "scheduling delay"}  # of bounds that are no abbreviation


def rate_curves(runs: Sequence[RunAtRate], slo: Slo, capacity: float, title: str) -> Figure:
    """Draw a panel per bound of `slo`: the bounded quantile over the rate, crossed where a run
    missed the objective.

    The capacity is that of the runs with the most requests; the search's shorter ones are hollow.
    """
    most_requests = max(run.num_requests for run in runs)
    looks: dict[str, Look] = {}
    rows = []
    for run in runs:
        look = MET if is_sustained(run.requests, slo) else MISSED
        if run.num_requests < most_requests:
            look = replace(look, name=f"{look.name}, fewer requests", is_hollow=True)
        looks[look.name] = look
        for name, seconds in bounded(run.requests, slo).items():
            row = {"panel": name, "rate": run.rate, "value": 1e3 * seconds, "look": look}
            rows.append(row)
    bounds = slo.bounds
    marks = pd.DataFrame(rows)
    size = (min(WIDTH, 4.6 * len(bounds)), 3.6)
    grid = PanelLayout(list(bounds), len(bounds), size)
    figure, axes = plot(marks, x="rate", grid=grid)
    for name, bound in bounds.items():
        ax = axes[name]
        ax.axhline(1e3 * bound, color=BOUND.colour, ls=BOUND.dash, lw=0.9)
        if capacity > 0:
            ax.axvline(capacity, color=CAPACITY.colour, ls=CAPACITY.dash)
        ax.set_xscale("log")
        tick_in_steps(ax.xaxis)
        label = f"{_quantity(slo, name)} [ms]"
        values = marks["value"][marks["panel"] == name]
        low = min(1e3 * bound, float(values.min()))
        if low > 0 and values.max() > WIDE_RANGE * low:
            ax.set_yscale("log")
            tick_in_steps(ax.yaxis)
            label += f", {LOG_SCALE}"
        else:
            ax.set_ylim(bottom=0)
        ax.set(xlabel=f"request rate [1/s], {LOG_SCALE}", ylabel=label)
    keys: list[Artist] = [look.key() for look in looks.values()]
    keys.append(BOUND.key())
    if capacity > 0:
        keys.append(replace(CAPACITY, name=f"capacity, {capacity:.3g}/s").key())
    legend_below(figure, keys)
    return finished(figure, title)


def _quantity(slo: Slo, bound: str) -> str:
    """Return what a bound is for, such as "TTFT P99"."""
    percent = 100 * slo.quantile_of(bound)
    return f"{WORDS.get(bound, bound.upper())} P{percent:g}"
