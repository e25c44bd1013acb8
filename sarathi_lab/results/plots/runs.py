"""The picture of one run, iteration by iteration and request by request, and that of several."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sarathi_lab.config.console import amount
from sarathi_lab.results.plots import style
from sarathi_lab.results.table import heading

# Column of the iterations, factor and y label.
CURVES = (
    ("num_prefill_tokens", 1.0, "prompt tokens"),
    ("num_decode_tokens", 1.0, "decodes"),
    ("busy", 1e3, "iteration time [ms]"),
    ("num_waiting", 1.0, "requests waiting"),
)
STACKED = {
    "tokens in the batch": {"prompt tokens": "num_prefill_tokens", "decodes": "num_decode_tokens"},
    "requests": {"running": "num_running", "waiting": "num_waiting"},
}
CURVE_MARKERS = 10
LABEL_WIDTH = 52  # characters
PERCENTILES = (0.5, 0.99)


def draw_run(iterations: pd.DataFrame, requests: pd.DataFrame, title: str) -> Figure:
    """Draw a run's tokens and requests over time, and the distributions of its TTFT and TBT."""
    style.use_style()
    figure = style.plt.figure(figsize=(style.WIDTH, 6.4), layout="constrained")
    rows: Any = [*([name, name] for name in STACKED), ["ttft", "tbt"]]
    grid = figure.subplot_mosaic(rows, height_ratios=[1, 1, 1.3])
    for name, kinds in STACKED.items():
        _stack(grid[name], iterations, kinds)
        grid[name].set_ylabel(name)
    grid["requests"].set_xlabel("time [s]")
    gaps = requests["token_times"].map(np.diff)
    waits = requests["first_token_time"] - requests["arrival_time"]
    _distribution(grid["ttft"], waits.to_numpy(float), "ttft")
    _distribution(grid["tbt"], np.concatenate([np.zeros(0), *gaps]), "tbt")
    return style.finished(figure, title)


def _stack(ax: Axes, iterations: pd.DataFrame, kinds: Mapping[str, str]) -> None:
    """Draw columns of the iterations on top of each other, each from its start to its end."""
    start, end = (iterations[one].to_numpy(float) for one in ("start", "end"))
    times = np.column_stack([start, end]).ravel()
    gaps = 2 * np.flatnonzero(start[1:] > end[:-1]) + 2  # places of the iterations after them
    below = np.zeros(len(times))
    for i, (label, column) in enumerate(kinds.items()):
        top = below + np.repeat(iterations[column].to_numpy(float), 2)
        x, low, high = (np.insert(one, gaps, np.nan) for one in (times, below, top))
        ax.fill_between(x, low, high, color=f"C{i}", label=label, linewidth=0)
        below = top
    ax.set(xlim=(0, times[-1]), ylim=(0, None))
    ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _distribution(ax: Axes, seconds: np.ndarray[Any, np.dtype[np.float64]], name: str) -> None:
    """Draw the share of `seconds` up to each value, with lines at `PERCENTILES`."""
    known = 1e3 * seconds[np.isfinite(seconds)]
    label = heading(f"{name}_p50").replace(" P50", "")
    ax.set(xlabel=label, ylabel="share", ylim=(0, 1.02))
    if not len(known):
        return
    ax.ecdf(known, color="C0")
    for share, look in zip(PERCENTILES, ("--", ":"), strict=True):
        value = float(np.quantile(known, share))
        words = f"P{100 * share:.0f}: {amount(value)} ms"
        ax.axvline(value, color="black", ls=look, lw=1.0, label=words)
    if known.min() > 0 and known.max() > 3 * known.min():
        ax.set_xscale("log")
        style.tick_in_steps(ax.xaxis)
    ax.legend(loc="best", frameon=True)


def curves(runs: Mapping[str, pd.DataFrame], x: str) -> Figure:
    """Draw the iterations of runs (tables by name) against `x`: "iteration", or "end" for time."""
    shown = [curve for curve in CURVES if any(curve[0] in table for table in runs.values())]
    figure, axes = style.panels(len(shown), 1, (9, 1.9 * len(shown) + 0.5), sharex=True)
    steps: Any = "steps-pre" if x == "end" else "default"  # an iteration lasts until its end
    colours = style.colours(list(runs))
    for ax, (column, scale, words) in zip(axes, shown, strict=True):
        for i, (name, table) in enumerate(runs.items()):
            if column in table and x in table:
                every = max(1, len(table) // CURVE_MARKERS)
                look: dict[str, Any] = {"ls": ("-", "--", "-.", ":")[i % 4], "color": colours[name]}
                look |= {"marker": style.marker(i), "markersize": 4, "markevery": every}
                label = textwrap.fill(name, LABEL_WIDTH, break_on_hyphens=False)
                ax.plot(table[x], scale * table[column], label=label, drawstyle=steps, **look)
        ax.set_ylabel(words)
    axes[-1].set_xlabel("time [s]" if x == "end" else x)
    style.legend_below(figure, style.keys_of(axes[:1]))
    return style.finished(figure)
