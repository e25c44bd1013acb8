"""Pictures of the tasks: capacity, crossover, iteration times, and policies side by side."""

from __future__ import annotations

from functools import partial
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sarathi_lab.results.plots.style import (
    AXIS_NAMES,
    finished,
    marker,
    panels,
    tick_in_steps,
    use_style,
)
from sarathi_lab.results.slo import Slo

# By bound: the column of capacity.parquet that it is for, and its name.
BOUNDED = {
    "tbt": ("tbt_p99", "TBT P99 [ms]"),
    "ttft": ("ttft_p99", "TTFT P99 [ms]"),
    "tpot": ("tpot_p99", "TPOT P99 [ms]"),
    "scheduling_delay": ("scheduling_delay_p50", "scheduling delay P50 [ms]"),
}
PANEL_NAMES = {"batch": "batch size", "seq_len": "P + D"}
KINDS = {"prefill": "tokens of one prompt", "decode": "decodes, one a sequence"}
# Column of `sweep.csv`, factor and heading.
PANELS = (
    ("tbt_p99", 1e3, "time between tokens, P99 [ms]"),
    ("ttft_p50", 1e3, "time to first token, P50 [ms]"),
    ("ttft_p99", 1e3, "time to first token, P99 [ms]"),
    ("throughput", 1.0, "throughput [tokens/s]"),
)
MIXES = ("never mixes prompts and decodes", "mixes, whole prompts", "mixes, cuts prompts")


def rate_curves(table: pd.DataFrame, slo: Slo, capacity: float, where: str) -> Figure:
    """A panel per bound of `slo`: the quantile over the rate, filled where a run met all bounds.

    `table` has the columns of capacity.parquet; `where` names policy, model and device.
    """
    names = [name for name in BOUNDED if name in slo.bounds]
    figure, axes = panels(1, len(names), (4.6 * len(names), 3.6))
    for ax, name in zip(axes, names, strict=True):
        column, label = BOUNDED[name]
        _bounded_quantile(table, column, 1e3 * slo.bounds[name], ax)
        if capacity > 0:
            ax.axvline(capacity, color="0.4", linestyle=":", label=f"capacity {capacity:.3g}/s")
        ax.set(xlabel="requests per second", ylabel=label)
    axes[0].legend(fontsize="small")
    return finished(figure, f"{where}, {slo.name}")


def _bounded_quantile(table: pd.DataFrame, column: str, bound: float, ax: Axes) -> None:
    """Milliseconds of `column` over the rate with its `bound` (ms), a line per seed."""
    for i, (seed, rows) in enumerate(table.groupby("seed")):
        line = rows.sort_values("rate")
        style: dict[str, Any] = {"color": f"C{i}", "marker": marker(i), "linestyle": ""}
        ax.plot(line.rate, 1e3 * line[column], color=f"C{i}", linewidth=0.9)
        met, failed = line[line.slo_met], line[~line.slo_met]
        ax.plot(met.rate, 1e3 * met[column], label=f"seed {seed}", **style)
        ax.plot(failed.rate, 1e3 * failed[column], fillstyle="none", **style)
    ax.axhline(bound, color="black", linestyle="--", linewidth=0.9, label="bound")
    ax.set(xscale="log", yscale="log" if table[column].gt(0).all() else "linear")
    ax.xaxis.set_major_formatter("{x:.3g}")
    ax.xaxis.set_minor_formatter("{x:.3g}")
    ax.tick_params(axis="x", which="both", labelsize="x-small")


def crossover_map(
    table: pd.DataFrame, where: str, *, y: str = "batch", baseline: str = "request_level"
) -> Figure:
    """`crossover`'s gains over one baseline in percent: P:D along x, `y` upwards, a panel a chunk.

    `where` names model and device; `y` is "batch" or "seq_len"; each value of the other has a row
    of panels. Blue gains, red loses, white is neutral, grey could not run.
    """
    import seaborn as sns  # takes two seconds

    use_style()
    other = "seq_len" if y == "batch" else "batch"
    axes = [other, "chunk", y, "pd_ratio"]
    cells = table[table.baseline == baseline].set_index(axes)
    values = [sorted(set(cells.index.get_level_values(name))) for name in axes]
    whole = pd.MultiIndex.from_product(values, names=axes)  # also what could not run
    cells = cells.assign(percent=100 * cells.gain).reindex(whole).reset_index()
    grid = sns.FacetGrid(
        cells, row=other, col="chunk", sharex=False, sharey=False, height=2.6, aspect=1.1
    )
    limit = float(cells.percent.abs().max())
    grid.map_dataframe(partial(_heat_panel, y=y, limit=limit))
    grid.set_titles(f"chunk {{col_name}}, {PANEL_NAMES[other]} {{row_name}}")
    for ax in grid.axes.flat:
        ax.set(xlabel=AXIS_NAMES["pd_ratio"].split(",")[0], ylabel=AXIS_NAMES[y])
    grid.figure.set_layout_engine("constrained")
    return finished(grid.figure, f"{where}: gain in steady throughput over {baseline} [%]")


def _heat_panel(data: pd.DataFrame, *, y: str, limit: float, **_: object) -> None:
    import seaborn as sns

    ax = plt.gca()
    ax.grid(False)
    ax.set_facecolor("0.93")  # shows where nothing could run
    colours = data.assign(percent=data.percent.mask(data.outcome == "neutral", 0.0))
    numbers, shades = (
        each.pivot(index=y, columns="pd_ratio", values="percent").iloc[::-1]
        for each in (data, colours)
    )
    palette = sns.color_palette("vlag_r", as_cmap=True)
    colour = {"vmin": -limit, "vmax": limit, "cmap": palette, "cbar": False}
    sns.heatmap(shades, annot=numbers, fmt="+.0f", linewidths=0.5, ax=ax, **colour)


def iteration_times(table: pd.DataFrame, where: str) -> Figure:
    """Milliseconds over tokens, a line per context, the roofline dotted; `where` is the title."""
    figure, axes = panels(1, 2, (10, 4.2), sharey=True)
    for ax, (kind, xlabel) in zip(axes, KINDS.items(), strict=True):
        rows = table[table.kind == kind].sort_values("tokens")
        for i, (context, line) in enumerate(rows.groupby("context")):
            own, label = f"C{i}", f"context {context}"
            ax.plot(line.tokens, 1e3 * line.seconds, marker="o", color=own, label=label)
            ax.fill_between(line.tokens, 1e3 * line.q20, 1e3 * line.q80, color=own, alpha=0.2)
            ax.plot(line.tokens, 1e3 * line.roofline, linestyle=":", color=own)
        ax.set(xscale="log", yscale="log", xlabel=xlabel)
        sizes = sorted(rows.tokens.unique())
        ax.set_xticks(sizes, list(map(str, sizes)))
        ax.minorticks_off()
    axes[0].set_ylabel("iteration time [ms]")
    axes[0].plot([], [], linestyle=":", color="0.4", label="roofline")
    axes[0].legend(fontsize="small")
    return finished(figure, where)


def kind_of(run: pd.Series) -> str:
    """Whether a run put prompts beside decodes, and read a prompt's cache again, as cuts do."""
    if pd.isna(run.decode_time_marginal):
        return MIXES[0]
    return MIXES[2] if run.kv_reread_factor > 1 else MIXES[1]


def policies(runs: pd.DataFrame) -> Figure:
    """Latency and throughput of a sweep's policies (`name`), by the gaps between tokens."""
    import seaborn as sns

    runs = runs.assign(kind=runs.apply(kind_of, axis="columns")).sort_values("tbt_p99")
    figure, axes = panels(1, len(PANELS), (13, 0.24 * len(runs) + 1.6), sharey=True)
    style = {"hue": "kind", "hue_order": MIXES, "style": "kind", "style_order": MIXES, "s": 45}
    for ax, (column, factor, heading) in zip(axes, PANELS, strict=True):
        table = runs.assign(shown=factor * runs[column])
        sns.scatterplot(table, x="shown", y="name", ax=ax, legend=ax is axes[0], zorder=3, **style)
        if table.shown.max() > 4 * table.shown.min():
            ax.set_xscale("log")
            tick_in_steps(ax.xaxis)
        else:
            ax.set_xlim(left=0)
        ax.set(xlabel=heading, ylabel="")
    handles, labels = axes[0].get_legend_handles_labels()
    if (legend := axes[0].get_legend()) is not None:
        legend.remove()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(MIXES))
    return finished(figure)
