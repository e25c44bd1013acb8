"""The picture of Fig 12: the bubble time of requests, and when they were done."""

from __future__ import annotations

from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sarathi_lab.plots import PAPER, use_style

NAMES = {
    "sarathi": "SARATHI, TP8 x PP8",
    "tp_pp_orca": "Orca (best), TP8 x PP8",
    "tp_8rep": "Orca (best), 8 replicas of TP8",
}
STYLES = ("--", "-", "-.", (0, (1, 1)))


def draw_fig12(points: pd.DataFrame) -> Figure:
    """CDF of the bubble time and time to completion, from points in the columns of `figure.parquet`.

    One line style a device, dotted black for the paper.
    """
    use_style()
    figure, axes = plt.subplots(1, 2, figsize=(10, 5), layout="constrained")
    # Panel "a" holds quantiles by share of requests; people read a CDF the other way round.
    for ax, panel, x, y in ((axes[0], "a", "y", "x"), (axes[1], "b", "x", "y")):
        _lines(ax, points[points.panel == panel], x, y)
    axes[0].set_xlabel("bubble time of a request [s]")
    axes[0].set_ylabel("share of requests")
    axes[0].set_xlim(left=0)
    axes[1].set_xlabel("requests done")
    axes[1].set_ylabel("time [s]")
    handles, labels = axes[1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, fontsize="small")
    plt.close(figure)  # callers hold it; an open figure would be drawn once more by a notebook
    return figure


def _lines(ax: Axes, points: pd.DataFrame, x: str, y: str) -> None:
    devices = [device for device in dict.fromkeys(points.device) if device != "paper"]
    for i, (series, name) in enumerate(NAMES.items()):
        for device, line in points[points.series == series].groupby("device", sort=False):
            ordered = line.sort_values("x")
            style: dict[str, Any] = {"color": f"C{i}", "label": f"{name}, {str(device).removeprefix('simulated ')}"}
            if device == "paper":
                style = {**PAPER, "label": "the paper" if i == 0 else None}
            else:
                style["linestyle"] = STYLES[devices.index(device) % len(STYLES)]
            ax.plot(ordered[x], ordered[y], **style)
