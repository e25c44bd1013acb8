"""The map of the task `crossover`."""

from __future__ import annotations

from functools import partial
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from sarathi_lab.results.plots.style import AXIS_NAMES, WIDTH, finished, legend_below, use_style

PANEL_NAMES = {"batch": "batch size", "seq_len": "P + D"}
GREY = "0.82"
GAINS = "RdBu"  # red loses, blue gains, for the colour-blind, too
STRONGEST = 30  # percent of gain or loss from which a colour is full


def crossover_map(
    table: pd.DataFrame, where: str, *, y: str = "batch", baseline: str = "request_level"
) -> Figure:
    """Draw gains over one baseline in percent: P:D along x, `y` upwards, a panel a chunk.

    `where` names model and device; `y` is "batch" or "seq_len"; each value of the other has a row
    of panels. Blue gains, red loses, fully from `STRONGEST` percent on; white is neutral, or with a
    question mark undecided; grey did not fit.
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
        cells, row=other, col="chunk", sharex=False, sharey=False, height=2.1, margin_titles=True
    )
    grid.map_dataframe(partial(_heat_panel, y=y))
    rows = PANEL_NAMES[other] + " {row_name}"
    grid.set_titles(col_template="chunk {col_name}", row_template=rows)
    for ax in grid.axes.flat:
        is_left, is_low = ax in grid.axes[:, 0], ax in grid.axes[-1]
        ax.set_xlabel(AXIS_NAMES["pd_ratio"].split(",")[0] if is_low else "")
        ax.set_ylabel(AXIS_NAMES[y] if is_left else "")
    grid.figure.set_size_inches(min(WIDTH, 2.2 * len(values[1]) + 0.8), 1.9 * len(values[0]) + 1.1)
    grid.figure.set_layout_engine("constrained")
    words = {f"-{STRONGEST} % and worse": 0.0, "within 2 %": 0.5, f"+{STRONGEST} % and better": 1.0}
    colours: dict[str, Any] = {label: plt.get_cmap(GAINS)(at) for label, at in words.items()}
    if cells.percent.isna().any():
        colours["not run: exceeds the cache, or the chunk is below the batch"] = GREY
    if (cells.outcome == "undecided").any():
        colours["? undecided: noise, or too few rounds"] = "none"
    keys = [Patch(facecolor=one, edgecolor="0.6", label=label) for label, one in colours.items()]
    legend_below(grid.figure, keys)
    return finished(grid.figure, f"{where}: gain in steady throughput over {baseline} [%]")


def _heat_panel(data: pd.DataFrame, *, y: str, **_: object) -> None:
    import seaborn as sns

    ax = plt.gca()
    ax.grid(False)
    ax.set_facecolor(GREY)  # shows where nothing could run
    doubt = data.outcome.eq("undecided").map({True: "?", False: ""})
    shown = data.assign(
        shade=data.percent.mask(data.outcome.isin(["neutral", "undecided"]), 0.0),
        text=data.percent.map("{:+.0f}".format) + doubt,
    )
    texts, shades = (
        shown.pivot(index=y, columns="pd_ratio", values=name).iloc[::-1]
        for name in ("text", "shade")
    )
    colour = {"vmin": -STRONGEST, "vmax": STRONGEST, "cmap": GAINS, "cbar": False}
    sns.heatmap(shades, annot=texts, fmt="", linewidths=0.5, ax=ax, **colour)
