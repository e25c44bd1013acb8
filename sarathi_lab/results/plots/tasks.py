"""Pictures of a capacity search and of the iterations of runs."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from sarathi_lab.results.plots.style import (
    WIDTH,
    finished,
    keys_of,
    legend_below,
    marker,
    panels,
    tick_in_steps,
)
from sarathi_lab.results.serving_metrics import Slo

# By bound: the column of capacity.parquet that it is for, and its name.
BOUNDED = {
    "tbt": ("tbt_p99", "TBT P99 [ms]"),
    "ttft": ("ttft_p99", "TTFT P99 [ms]"),
    "tpot": ("tpot_p99", "TPOT P99 [ms]"),
    "scheduling_delay": ("scheduling_delay_p50", "scheduling delay P50 [ms]"),
}
# Column of the iterations, factor and y label.
CURVES = (
    ("num_prefill_tokens", 1.0, "prompt tokens"),
    ("num_decode_tokens", 1.0, "decodes"),
    ("busy", 1e3, "iteration time [ms]"),
    ("num_waiting", 1.0, "requests waiting"),
)
NUM_MARKERS = 10
LABEL_WIDTH = 52  # characters


def rate_curves(table: pd.DataFrame, slo: Slo, capacity: float, where: str) -> Figure:
    """Draw a panel per bound of `slo`: the quantile over the rate, a line per seed, filled where a
    run met all bounds.

    `table` has the columns of capacity.parquet; `where` names policy, model and device.
    """
    names = [name for name in BOUNDED if name in slo.bounds]
    figure, axes = panels(1, len(names), (min(WIDTH, 4.6 * len(names)), 3.6))
    for ax, name in zip(axes, names, strict=True):
        column, label = BOUNDED[name]
        for i, (seed, rows) in enumerate(table.groupby("seed")):
            line = rows.sort_values("rate")
            style: dict[str, Any] = {"color": f"C{i}", "marker": marker(i), "linestyle": ""}
            ax.plot(line.rate, 1e3 * line[column], color=f"C{i}", linewidth=0.9)
            for own, fill, key in (
                (line[line.slo_met], "full", f"seed {seed}"),
                (line[~line.slo_met], "none", None),
            ):
                ax.plot(own.rate, 1e3 * own[column], fillstyle=fill, label=key, **style)
        ax.axhline(1e3 * slo.bounds[name], color="black", ls="--", lw=0.9, label="bound")
        is_log = table[column].gt(0).all()
        ax.set(xscale="log", yscale="log" if is_log else "linear")
        for axis in (ax.xaxis, ax.yaxis) if is_log else (ax.xaxis,):
            tick_in_steps(axis)
        if capacity > 0:
            ax.axvline(capacity, color="0.4", linestyle=":", label=f"capacity {capacity:.3g}/s")
        ax.set(xlabel="requests per second", ylabel=label)
    axes[0].legend(fontsize="small")
    return finished(figure, f"{where}, {slo.name}")


def curves(runs: Mapping[str, pd.DataFrame], x: str = "iteration") -> Figure:
    """Draw batches, times and queues of each run's iterations (tables by name) against `x`:
    "iteration", or "end" for the time.
    """
    shown = [curve for curve in CURVES if any(curve[0] in table for table in runs.values())]
    figure, axes = panels(len(shown), 1, (9, 1.9 * len(shown) + 0.8), sharex=True)
    steps: Any = "steps-pre" if x == "end" else "default"  # an iteration lasts until its end
    for ax, (column, scale, words) in zip(axes, shown, strict=True):
        for i, (name, table) in enumerate(runs.items()):
            if column in table and x in table:
                every = max(1, len(table) // NUM_MARKERS)
                style: dict[str, Any] = {"ls": ("-", "--", "-.", ":")[i % 4], "color": f"C{i}"}
                style |= {"marker": marker(i), "markersize": 4, "markevery": every}
                label = textwrap.fill(name, LABEL_WIDTH, break_on_hyphens=False)
                ax.plot(table[x], scale * table[column], label=label, drawstyle=steps, **style)
        ax.set_ylabel(words)
    axes[-1].set_xlabel("time [s]" if x == "end" else x)
    legend_below(figure, keys_of(axes[:1]))
    return finished(figure)
