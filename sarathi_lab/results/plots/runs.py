"""The picture of one run, iteration by iteration and request by request, and that of several."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from sarathi_lab.config.console import amount
from sarathi_lab.results.plots import style
from sarathi_lab.results.plots.plot import Grid, Look, plot, styled
from sarathi_lab.results.table import heading

# By column of the iterations the factor and the y label.
CURVES = {
    "num_prefill_tokens": (1.0, "prompt tokens"),
    "num_decode_tokens": (1.0, "decodes"),
    "busy": (1e3, "iteration time [ms]"),
    "num_waiting": (1.0, "requests waiting"),
}
STACKED = {
    "tokens in the batch": {"prompt tokens": "num_prefill_tokens", "decodes": "num_decode_tokens"},
    "requests": {"running": "num_running", "waiting": "num_waiting"},
}
DASHES = ("-", "--", "-.", ":")
LABEL_WIDTH = 52  # characters
PERCENTILES = {0.5: "--", 0.99: ":"}


def draw_run(iterations: pd.DataFrame, requests: pd.DataFrame, title: str) -> Figure:
    """Draw a run's tokens and requests over time, and the distributions of its TTFT and TBT."""
    style.use_style()
    figure = style.plt.figure(figsize=(style.WIDTH, 6.4), layout="constrained")
    rows: Any = [*([name, name] for name in STACKED), ["ttft", "tbt"]]
    grid = figure.subplot_mosaic(rows, height_ratios=[1, 1, 1.3])
    for name, columns in STACKED.items():
        _stack(grid[name], iterations, columns)
        grid[name].set_ylabel(name)
    grid["requests"].set_xlabel("time [s]")
    gaps = requests["token_times"].map(np.diff)
    waits = requests["first_token_time"] - requests["arrival_time"]
    _distribution(grid["ttft"], waits.to_numpy(float), "ttft")
    _distribution(grid["tbt"], np.concatenate([np.zeros(0), *gaps]), "tbt")
    return style.finished(figure, title)


def _stack(ax: Axes, iterations: pd.DataFrame, columns: Mapping[str, str]) -> None:
    """Draw columns of the iterations on top of each other, each from its start to its end."""
    start = iterations["start"].to_numpy(float)
    end = iterations["end"].to_numpy(float)
    times = np.column_stack([start, end]).ravel()
    # Nothing is drawn between iterations that do not follow at once: NaN there.
    gaps = 2 * np.flatnonzero(start[1:] > end[:-1]) + 2
    x = np.insert(times, gaps, np.nan)
    below = np.zeros(len(times))
    for i, (label, column) in enumerate(columns.items()):
        top = below + np.repeat(iterations[column].to_numpy(float), 2)
        low = np.insert(below, gaps, np.nan)
        high = np.insert(top, gaps, np.nan)
        ax.fill_between(x, low, high, color=f"C{i}", label=label, linewidth=0)
        below = top
    ax.set(xlim=(0, times[-1]), ylim=(0, None))
    ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _distribution(ax: Axes, seconds: NDArray[np.float64], name: str) -> None:
    """Draw the share of `seconds` up to each value, with lines at `PERCENTILES`."""
    milliseconds = 1e3 * seconds[np.isfinite(seconds)]
    label = heading(f"{name}_p50").replace(" P50", "")
    ax.set(xlabel=label, ylabel="share", ylim=(0, 1.02))
    if not len(milliseconds):
        return
    ax.ecdf(milliseconds, color="C0")
    for share, dash in PERCENTILES.items():
        value = float(np.quantile(milliseconds, share))
        percentile = f"P{100 * share:.0f}: {amount(value)} ms"
        ax.axvline(value, color="black", ls=dash, lw=1.0, label=percentile)
    low = milliseconds.min()
    if low > 0 and milliseconds.max() > 3 * low:
        ax.set_xscale("log")
        style.tick_in_steps(ax.xaxis)
    ax.legend(loc="best", frameon=True)


def curves(runs: Mapping[str, pd.DataFrame], x: str) -> Figure:
    """Draw the iterations of runs (tables by name) against `x`: "iteration", or "end" for time."""
    looks = _looks_of_runs(list(runs), x)
    rows = []
    for name, table in runs.items():
        for column, (scale, _) in CURVES.items():
            if column in table and x in table:
                values = pd.DataFrame({"at": table[x], "value": scale * table[column]})
                rows.append(styled(values.assign(panel=column), looks[name]))
    marks = pd.concat(rows)
    drawn = set(marks["panel"])
    shown = [column for column in CURVES if column in drawn]
    size = (9, 1.9 * len(shown) + 0.5)
    grid = Grid(shown, 1, size, {"sharex": True})
    figure, axes = plot(marks, x="at", grid=grid)
    for column in shown:
        _, label = CURVES[column]
        axes[column].set_ylabel(label)
    axes[shown[-1]].set_xlabel("time [s]" if x == "end" else x)
    style.legend_below(figure, [look.key() for look in looks.values()])
    return style.finished(figure)


def _looks_of_runs(names: Sequence[str], x: str) -> dict[str, Look]:
    """Return a look for each run, of which colours and dashes differ."""
    colours = style.colours(names)
    looks = {}
    for number, name in enumerate(names):
        looks[name] = Look(
            name=textwrap.fill(name, LABEL_WIDTH, break_on_hyphens=False),
            colour=colours[name],
            dash=DASHES[number % len(DASHES)],
            marker=style.marker(number),
            size=4.0,
            # An iteration lasts until its end.
            drawstyle="steps-pre" if x == "end" else "default",
            is_thinned=True,
        )
    return looks
