"""The picture of `crossover.crossover`: where chunked prefill pays. A table in, a figure out."""

from __future__ import annotations

import itertools

import matplotlib.pyplot as plt
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sarathi_lab.plots import AXIS_NAMES, use_style

PANEL_NAMES = {"batch": "batch size", "seq_len": "P + D"}


def crossover_map(table: pd.DataFrame, where: str, *, y: str = "batch", baseline: str = "request_level") -> Figure:
    """`crossover`'s gains over one baseline in percent: P:D along x, `y` upwards, a panel per chunk.

    `where` names model and device; `y` is "batch" or "seq_len"; each value of the other has a row of panels. Blue
    gains, red loses, white is neutral, grey could not run.
    """
    use_style()
    table = table[table.baseline == baseline]
    other = "seq_len" if y == "batch" else "batch"
    rows, columns = sorted(table[other].unique()), sorted(table.chunk.unique())
    size = (2.6 + 2.6 * len(columns), 1.0 + 2.4 * len(rows))
    figure, axes = plt.subplots(len(rows), len(columns), figsize=size, layout="constrained", squeeze=False)
    limit = 100 * float(table.gain.abs().max())
    ticks = {"index": sorted(table[y].unique(), reverse=True), "columns": sorted(table.pd_ratio.unique())}
    for (i, row), (j, chunk) in itertools.product(enumerate(rows), enumerate(columns)):
        cells = table[(table[other] == row) & (table.chunk == chunk)]
        gains = 100 * cells.pivot(index=y, columns="pd_ratio", values="gain").reindex(**ticks).astype(float)
        is_neutral = cells.pivot(index=y, columns="pd_ratio", values="outcome").reindex(**ticks) == "neutral"
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
        colours, annot=numbers, fmt="+.0f", vmin=-limit, vmax=limit, cmap=palette, cbar=False, linewidths=0.5, ax=ax
    )
