"""The picture of a search: latencies over the rate of requests."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
from matplotlib.figure import Figure

from sarathi_lab.extensions.under_load.search import RunAtRate, is_sustained
from sarathi_lab.results.plots.plot import Grid, Look, plot
from sarathi_lab.results.plots.style import WIDTH, finished, legend_below, tick_in_steps
from sarathi_lab.results.serving_metrics import Slo, bounded

MET = Look("met", "C0", "", "o")
MISSED = Look("missed", "C1", "", "X")


def rate_curves(runs: Sequence[RunAtRate], slo: Slo, capacity: float, title: str) -> Figure:
    """Draw a panel per bound of `slo`: the bounded quantile over the rate, crossed where a run
    missed the objective.
    """
    bounds = slo.bounds
    rows = []
    for run in runs:
        look = MET if is_sustained(run.requests, slo) else MISSED
        for name, seconds in bounded(run.requests, slo).items():
            row = {"panel": name, "rate": run.rate, "value": 1e3 * seconds, "look": look}
            rows.append(row)
    size = (min(WIDTH, 4.6 * len(bounds)), 3.6)
    grid = Grid(list(bounds), len(bounds), size)
    figure, axes = plot(pd.DataFrame(rows), x="rate", grid=grid)
    for name, bound in bounds.items():
        ax = axes[name]
        ax.axhline(1e3 * bound, color="black", ls="--", lw=0.9)
        if capacity > 0:
            ax.axvline(capacity, color="0.4", ls=":")
        ax.set_xscale("log")
        tick_in_steps(ax.xaxis)
        ax.set(xlabel="requests per second", ylabel=f"{_quantity(slo, name)} [ms]")
    legend_below(figure, [MET.key(), MISSED.key()], "objective")
    return finished(figure, title)


def _quantity(slo: Slo, bound: str) -> str:
    """Return what a bound is for, such as "scheduling delay P50"."""
    percent = 100 * slo.quantile_of(bound)
    words = bound.replace("_", " ")
    return f"{words} P{percent:g}"
