"""The picture of a search: latencies over the rate of requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pandas as pd
from matplotlib.axes import Axes
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
    num_panels = len(slo.bounds)
    size = (min(WIDTH, 4.6 * num_panels), 3.6)
    looks = _looks(runs, slo)
    marks = _marks(runs, looks, slo)
    layout = PanelLayout(list(slo.bounds), num_panels, size)
    figure, axes = plot(marks, x="rate", grid=layout)
    for name, bound in slo.bounds.items():
        ax = axes[name]
        milliseconds = 1e3 * bound
        _draw_limits(ax, milliseconds, capacity)
        _scale_rates(ax)
        is_of_panel = marks["panel"] == name
        label = f"{_quantity(slo, name)} [ms]"
        _scale_latencies(ax, marks["value"][is_of_panel], milliseconds, label)
    # One key a look: of equal ones the dictionary has the first.
    keys = [look.key() for look in dict.fromkeys(looks)]
    keys.append(BOUND.key())
    if capacity > 0:
        name = f"capacity, {capacity:.3g}/s"
        of_capacity = replace(CAPACITY, name=name)
        keys.append(of_capacity.key())
    legend_below(figure, keys)
    return finished(figure, title)


def _looks(runs: Sequence[RunAtRate], slo: Slo) -> list[Look]:
    """Return how each run is marked."""
    most_requests = max(run.num_requests for run in runs)
    looks = []
    for run in runs:
        look = MET if is_sustained(run.requests, slo) else MISSED
        if run.num_requests < most_requests:
            name = f"{look.name}, fewer requests"
            look = replace(look, name=name, is_hollow=True)
        looks.append(look)
    return looks


def _marks(runs: Sequence[RunAtRate], looks: Sequence[Look], slo: Slo) -> pd.DataFrame:
    """Return a row for each run and bound, whose latency is in milliseconds."""
    rows = []
    for run, look in zip(runs, looks, strict=True):
        for name, seconds in bounded(run.requests, slo).items():
            milliseconds = 1e3 * seconds
            row = {"panel": name, "rate": run.rate, "value": milliseconds, "look": look}
            rows.append(row)
    return pd.DataFrame(rows)


def _draw_limits(ax: Axes, bound: float, capacity: float) -> None:
    """Draw lines at the bound of a latency and at the capacity, if there is one."""
    ax.axhline(bound, color=BOUND.colour, ls=BOUND.dash, lw=0.9)
    if capacity > 0:
        ax.axvline(capacity, color=CAPACITY.colour, ls=CAPACITY.dash)


def _scale_rates(ax: Axes) -> None:
    ax.set_xscale("log")
    ax.set_xlabel(f"request rate [1/s], {LOG_SCALE}")
    tick_in_steps(ax.xaxis)


def _scale_latencies(ax: Axes, latencies: pd.Series, bound: float, label: str) -> None:
    """Begin the axis at 0, but where the low ones could not be told from 0."""
    lowest = min(bound, float(latencies.min()))
    if lowest > 0 and latencies.max() > WIDE_RANGE * lowest:
        ax.set_yscale("log")
        ax.set_ylabel(f"{label}, {LOG_SCALE}")
        tick_in_steps(ax.yaxis)
    else:
        ax.set_ylim(bottom=0)
        ax.set_ylabel(label)


def _quantity(slo: Slo, bound: str) -> str:
    """Return what a bound is for, such as "TTFT P99"."""
    name = WORDS.get(bound, bound.upper())
    percent = 100 * slo.quantile_of(bound)
    return f"{name} P{percent:g}"
