"""Pictures of the search for a capacity: what users feel by rate. A table in, a figure out."""

from __future__ import annotations

import itertools
from typing import Literal

import matplotlib.pyplot as plt
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from sarathi_lab.results.plots.sweeps import AXIS_NAMES, MARKERS, use_style
from sarathi_lab.results.slo import Slo

# By bound: the column of capacity.parquet that it is for, and its name.
BOUNDED = {
    "tbt": ("tbt_p99", "TBT P99 [ms]"),
    "ttft": ("ttft_p99", "TTFT P99 [ms]"),
    "tpot": ("tpot_p99", "TPOT P99 [ms]"),
    "scheduling_delay": ("scheduling_delay_p50", "scheduling delay P50 [ms]"),
}


def rate_curves(table: pd.DataFrame, slo: Slo, capacity: float, where: str) -> Figure:
    """A panel per bound of `slo`: the quantile against the rate, a line per seed, filled where the
    run met all bounds.

    `table` has the columns of capacity.parquet; `where` names policy, model and device.
    """
    use_style()
    names = [name for name in BOUNDED if name in slo.bounds]
    figure, axes = plt.subplots(
        1, len(names), figsize=(4.6 * len(names), 3.6), layout="constrained", squeeze=False
    )
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


PANEL_NAMES = {"batch": "batch size", "seq_len": "P + D"}


def crossover_map(
    table: pd.DataFrame, where: str, *, y: str = "batch", baseline: str = "request_level"
) -> Figure:
    """`crossover`'s gains over one baseline in percent: P:D along x, `y` upwards, a panel per
    chunk.

    `where` names model and device; `y` is "batch" or "seq_len"; each value of the other has a row
    of panels. Blue gains, red loses, white is neutral, grey could not run.
    """
    use_style()
    table = table[table.baseline == baseline]
    other = "seq_len" if y == "batch" else "batch"
    rows, columns = sorted(table[other].unique()), sorted(table.chunk.unique())
    size = (2.6 + 2.6 * len(columns), 1.0 + 2.4 * len(rows))
    figure, axes = plt.subplots(
        len(rows), len(columns), figsize=size, layout="constrained", squeeze=False
    )
    limit = 100 * float(table.gain.abs().max())
    ticks = {
        "index": sorted(table[y].unique(), reverse=True),
        "columns": sorted(table.pd_ratio.unique()),
    }
    for (i, row), (j, chunk) in itertools.product(enumerate(rows), enumerate(columns)):
        cells = table[(table[other] == row) & (table.chunk == chunk)]
        gains = 100 * cells.pivot(index=y, columns="pd_ratio", values="gain").reindex(
            **ticks
        ).astype(float)
        is_neutral = (
            cells.pivot(index=y, columns="pd_ratio", values="outcome").reindex(**ticks) == "neutral"
        )
        _panel(gains, gains.mask(is_neutral, 0.0), limit, axes[i, j])
        axes[i, j].set(xlabel=AXIS_NAMES["pd_ratio"].split(",")[0], ylabel=AXIS_NAMES[y])
        axes[i, j].set_title(f"chunk {chunk}, {PANEL_NAMES[other]} {row}")
    figure.suptitle(f"{where}: gain in steady throughput over {baseline} [%]")
    plt.close(figure)
    return figure


def _panel(numbers: pd.DataFrame, colours: pd.DataFrame, limit: float, ax: Axes) -> None:
    ax.grid(False)
    ax.set_facecolor("0.93")  # shows where nothing could run
    palette = sns.color_palette("vlag_r", as_cmap=True)
    sns.heatmap(
        colours,
        annot=numbers,
        fmt="+.0f",
        vmin=-limit,
        vmax=limit,
        cmap=palette,
        cbar=False,
        linewidths=0.5,
        ax=ax,
    )


KINDS = {"prefill": "tokens of one prompt", "decode": "decodes, one a sequence"}


def iteration_times(table: pd.DataFrame, where: str) -> Figure:
    """Milliseconds over tokens, a line per context, the roofline dotted; `where` names model and
    device.
    """
    use_style()
    figure, axes = plt.subplots(1, 2, figsize=(10, 4.2), layout="constrained", sharey=True)
    for ax, (kind, xlabel) in zip(axes, KINDS.items(), strict=True):
        rows = table[table.kind == kind].sort_values("tokens")
        for i, (context, line) in enumerate(rows.groupby("context")):
            ax.plot(
                line.tokens,
                1e3 * line.seconds,
                marker="o",
                color=f"C{i}",
                label=f"context {context}",
            )
            ax.fill_between(line.tokens, 1e3 * line.q20, 1e3 * line.q80, color=f"C{i}", alpha=0.2)
            ax.plot(line.tokens, 1e3 * line.roofline, linestyle=":", color=f"C{i}")
        ax.set(
            xscale="log",
            yscale="log",
            xlabel=xlabel,
            ylabel="iteration time [ms]" if kind == "prefill" else "",
        )
        ax.set_xticks(
            sorted(rows.tokens.unique()), [str(tokens) for tokens in sorted(rows.tokens.unique())]
        )
        ax.minorticks_off()
    axes[0].plot([], [], linestyle=":", color="0.4", label="roofline")
    axes[0].legend(fontsize="small")
    figure.suptitle(where)
    plt.close(figure)
    return figure


# Column of `sweep.csv`, factor and words.
PANELS = (
    ("tbt_p99", 1e3, "time between tokens, P99 [ms]"),
    ("ttft_p50", 1e3, "time to first token, P50 [ms]"),
    ("ttft_p99", 1e3, "time to first token, P99 [ms]"),
    ("throughput", 1.0, "throughput [tokens/s]"),
)
MIXES = ("never mixes prompts and decodes", "mixes, whole prompts", "mixes, cuts prompts")


def kind_of(run: pd.Series) -> str:
    """Whether a run put prompts beside decodes, and whether it read a prompt's cache again, as
    cutting makes it.
    """
    if pd.isna(run.decode_time_marginal):
        return MIXES[0]
    return MIXES[2] if run.kv_reread_factor > 1 else MIXES[1]


def policies(runs: pd.DataFrame) -> Figure:
    """Latency and throughput of every policy of a sweep (its `name`), in the order of the gaps
    between tokens.
    """
    use_style()
    names = [name for name, _, _ in PANELS]
    kinds = runs.apply(kind_of, axis="columns")
    runs = runs[["name", *names]].assign(kind=kinds).sort_values("tbt_p99")
    figure, axes = plt.subplots(
        1, len(PANELS), figsize=(13, 0.24 * len(runs) + 1.6), sharey=True, layout="constrained"
    )
    style = {"hue": "kind", "hue_order": MIXES, "style": "kind", "style_order": MIXES, "s": 45}
    for ax, (column, factor, words) in zip(axes, PANELS, strict=True):
        table = runs.assign(shown=factor * runs[column])
        sns.scatterplot(table, x="shown", y="name", ax=ax, legend=ax is axes[0], zorder=3, **style)
        if table.shown.max() > 4 * table.shown.min():
            ax.set_xscale("log")
            ax.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
            ax.xaxis.set_major_formatter("{x:g}")
            ax.xaxis.set_minor_formatter(NullFormatter())
        else:
            ax.set_xlim(left=0)
        ax.set(xlabel=words, ylabel="")
    handles, labels = axes[0].get_legend_handles_labels()
    axes[0].legend_.remove()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(MIXES))
    plt.close(figure)
    return figure
