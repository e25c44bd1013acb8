"""The map of the task `crossover`."""

from __future__ import annotations

from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from sarathi_lab.results.plots.style import AXIS_NAMES, WIDTH, finished, legend_below, use_style

GREY = "0.82"
GAINS = "RdBu"  # red loses, blue gains, for the colour-blind, too
STRONGEST = 30  # percent of gain or loss from which a colour is full


def crossover_map(table: pd.DataFrame, where: str, baseline: str = "request_level") -> Figure:
    """Draw gains over one baseline in percent: P:D along x, batch upwards, a panel per P + D and
    chunk.

    `where` names model and device. Blue gains, red loses, fully from `STRONGEST` percent on; white
    is neutral, grey did not fit.
    """
    use_style()
    axes = ["seq_len", "chunk", "batch", "pd_ratio"]
    cells = table[table.baseline == baseline].set_index(axes)
    values = [sorted(set(cells.index.get_level_values(name))) for name in axes]
    whole = pd.MultiIndex.from_product(values, names=axes)  # also what could not run
    cells = cells.assign(percent=100 * cells.gain).reindex(whole).reset_index()
    panels: Any = {"row": "seq_len", "col": "chunk", "sharex": False, "sharey": False}
    grid = sns.FacetGrid(cells, **panels, height=2.1, margin_titles=True)
    grid.map_dataframe(_heat_panel)
    grid.set_titles(col_template="chunk {col_name}", row_template="P + D {row_name}")
    for ax in grid.axes.flat:
        is_left, is_low = ax in grid.axes[:, 0], ax in grid.axes[-1]
        ax.set_xlabel(AXIS_NAMES["pd_ratio"].split(",")[0] if is_low else "")
        ax.set_ylabel(AXIS_NAMES["batch"] if is_left else "")
    grid.figure.set_size_inches(min(WIDTH, 2.2 * len(values[1]) + 0.8), 1.9 * len(values[0]) + 0.8)
    grid.figure.set_layout_engine("constrained")
    words = {f"-{STRONGEST} % and worse": 0.0, "within 2 %": 0.5, f"+{STRONGEST} % and better": 1.0}
    colours: dict[str, Any] = {label: plt.get_cmap(GAINS)(at) for label, at in words.items()}
    if cells.percent.isna().any():
        colours["not run: exceeds the cache, or the chunk is below the batch"] = GREY
    keys = [Patch(facecolor=one, edgecolor="0.6", label=label) for label, one in colours.items()]
    legend_below(grid.figure, keys)
    return finished(grid.figure, f"{where}: gain in steady throughput over {baseline} [%]")


def _heat_panel(data: pd.DataFrame, **_: object) -> None:
    ax = plt.gca()
    ax.grid(False)
    ax.set_facecolor(GREY)  # shows where nothing could run
    shown = data.assign(
        shade=data.percent.mask(data.outcome == "neutral", 0.0),
        text=data.percent.map("{:+.0f}".format),
    )
    texts, shades = (
        shown.pivot(index="batch", columns="pd_ratio", values=name).iloc[::-1]
        for name in ("text", "shade")
    )
    colour = {"vmin": -STRONGEST, "vmax": STRONGEST, "cmap": GAINS, "cbar": False}
    sns.heatmap(shades, annot=texts, fmt="", linewidths=0.5, ax=ax, **colour)
