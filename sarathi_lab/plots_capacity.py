"""Pictures of the search for a capacity: what users feel by rate. A table in, a figure out."""

from __future__ import annotations

from typing import Literal

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sarathi_lab.plots import MARKERS, use_style
from sarathi_lab.slo import Slo

# By bound: the column of capacity.parquet that it is for, and its name.
BOUNDED = {
    "tbt": ("tbt_p99", "TBT P99 [ms]"),
    "ttft": ("ttft_p99", "TTFT P99 [ms]"),
    "tpot": ("tpot_p99", "TPOT P99 [ms]"),
    "scheduling_delay": ("scheduling_delay_p50", "scheduling delay P50 [ms]"),
}


def rate_curves(table: pd.DataFrame, slo: Slo, capacity: float, where: str) -> Figure:
    """A panel per bound of `slo`: the quantile against the rate, a line per seed, filled where the run met all bounds.

    `table` has the columns of capacity.parquet; `where` names policy, model and device.
    """
    use_style()
    names = [name for name in BOUNDED if name in slo.bounds]
    figure, axes = plt.subplots(1, len(names), figsize=(4.6 * len(names), 3.6), layout="constrained", squeeze=False)
    for ax, name in zip(axes[0], names, strict=True):
        column, label = BOUNDED[name]
        bounded_quantile(table, column, 1e3 * slo.bounds[name], ax=ax)
        if capacity > 0:
            ax.axvline(capacity, color="0.4", linestyle=":", label=f"capacity {capacity:.3g}/s")
        ax.set(xlabel="requests per second", ylabel=label)
    axes[0][0].legend(fontsize="small")
    figure.suptitle(f"{where}, {slo.name}")
    plt.close(figure)
    return figure


def bounded_quantile(table: pd.DataFrame, column: str, bound: float, *, ax: Axes) -> Axes:
    """Milliseconds of `column` against the rate with its `bound` (ms), a line per seed."""
    for i, (seed, rows) in enumerate(table.groupby("seed")):
        line, marker = rows.sort_values("rate"), MARKERS[i % len(MARKERS)]
        ax.plot(line.rate, 1e3 * line[column], color=f"C{i}", linewidth=0.9)
        fills: dict[bool, Literal["full", "none"]] = {True: "full", False: "none"}
        for is_met, fill in fills.items():
            own = line[line.slo_met == is_met]
            label = f"seed {seed}" if is_met else None
            ax.plot(own.rate, 1e3 * own[column], marker, fillstyle=fill, color=f"C{i}", label=label)
    ax.axhline(bound, color="black", linestyle="--", linewidth=0.9, label="bound")
    ax.set(xscale="log")
    for formatted in (ax.xaxis.set_major_formatter, ax.xaxis.set_minor_formatter):
        formatted("{x:.3g}")
    ax.tick_params(axis="x", which="both", labelsize="x-small")
    positive = table[column].gt(0).all()
    ax.set_yscale("log" if positive else "linear")
    return ax
