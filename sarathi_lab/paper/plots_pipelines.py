"""The picture of Fig 12: `pipelines.fig12`'s rows beside the paper's points."""

from __future__ import annotations

from collections.abc import Mapping

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sarathi_lab.plots import PAPER, use_style
from sarathi_lab.results import load_paper

NAMES = {
    "sarathi": "SARATHI, TP8 x PP8",
    "tp_pp_orca": "Orca (best), TP8 x PP8",
    "tp_8rep": "Orca (best), 8 replicas of TP8",
}
PANELS = {"a": ("fig12a", "bubble_s", "cdf"), "b": ("fig12b", "num_requests", "time_s")}
STYLES = ("--", "-")


def fig12(versions: Mapping[str, pd.DataFrame]) -> Figure:
    """CDF of the bubble time and time to completion; `versions` maps up to two names to rows of `pipelines.fig12`."""
    use_style()
    figure, axes = plt.subplots(1, 2, figsize=(10, 4.8), layout="constrained")
    for panel, ax in zip(PANELS, axes, strict=True):
        for style, (version, rows) in zip(STYLES, versions.items(), strict=False):
            _lines(ax, rows[rows.panel == panel], version, style)
        _paper_points(ax, panel)
    axes[0].set_xlabel("bubble time of a request [s]")
    axes[0].set_ylabel("share of requests")
    axes[0].set_xlim(left=0)
    axes[1].set_xlabel("requests done")
    axes[1].set_ylabel("time [s]")
    figure.legend(*axes[1].get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize="small")
    plt.close(figure)  # callers hold it; an open figure would be drawn once more by a notebook
    return figure


def _lines(ax: Axes, rows: pd.DataFrame, version: str, style: str) -> None:
    for i, (series, name) in enumerate(NAMES.items()):
        shown = rows[rows.series == series]
        if not shown.empty:
            ax.plot(shown.x, shown.y, style, color=f"C{i}", label=f"{name}, {version}")


def _paper_points(ax: Axes, panel: str) -> None:
    figure, x, y = PANELS[panel]
    for i, (_, points) in enumerate(load_paper(figure).groupby("series")):
        label = "the paper" if i == 0 else None
        ax.plot(points[x], points[y], label=label, **PAPER)
