"""Draws the paper's figures: its points as crosses, predictions as lines (profiled solid, analytic dashed)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from sarathi_lab.paper.plots_pipelines import draw_fig12
from sarathi_lab.plots import use_style


@dataclass(frozen=True)
class Look:
    """How one figure is drawn; `series` leaves only those whose name ends so."""

    title: str
    x: str
    y: str
    log_x: bool = False
    log_y: bool = False
    series: tuple[str, ...] = ()
    columns: int = 3


LOOKS = {
    "fig03": Look("Fig 3: time per token by operation", "batch", "ms per token", log_y=True, columns=2),
    "fig04": Look("Fig 4: one layer", "batch", "tokens per ms, or FLOPs per byte", log_x=True, log_y=True, columns=2),
    "fig07": Look("Fig 7: tile quantization", "prompt tokens", "ms per iteration", columns=1),
    "fig08": Look("Fig 8: decode speed-up, chunk 256", "batch", "decode alone / piggybacked", columns=1),
    "fig09": Look("Fig 9: throughput over request-level batching", "P:D", "throughput / baseline", log_x=True),
    "fig10": Look("Fig 10: seconds to serve B requests", "batch", "seconds", series=("total", "attn")),
    "fig11": Look(
        "Fig 11: Orca and SARATHI over request-level batching", "length (a), P:D (b)", "throughput / baseline"
    ),
    "fig13": Look("Fig 13: chunk size", "chunk [tokens]", "speed / un-chunked"),
    "table2": Look("Table 2: one batch", "tokens", "ms"),
    "table4": Look("Table 4: chunk 256", "sequence length [tokens]", "ratio", columns=2),
}


def draw(figure: str, points: pd.DataFrame) -> Figure:
    """One figure of the paper from the points in the columns of `figure.parquet`; one axes a panel."""
    shown = points[points.figure == figure]
    if figure == "fig12":
        return draw_fig12(shown)
    use_style()
    look = LOOKS[figure]
    if look.series:
        shown = shown[shown.series.str.endswith(look.series)]
    panels = list(dict.fromkeys(shown.panel))
    columns = min(look.columns, len(panels))
    rows = math.ceil(len(panels) / columns)
    canvas, grid = plt.subplots(
        rows, columns, figsize=(max(6.0, 4.2 * columns), 3.6 * rows), squeeze=False, layout="constrained"
    )
    for ax in grid.flat[len(panels) :]:
        ax.set_axis_off()
    for ax, panel in zip(grid.flat, panels, strict=False):
        _panel(ax, shown[shown.panel == panel], look)
        ax.set_title(panel)
    canvas.suptitle(look.title)
    canvas.legend(handles=_keys(shown), loc="outside lower center", ncols=2, fontsize="small")
    plt.close(canvas)  # callers hold it; an open figure would be drawn once more by a notebook
    return canvas


def _panel(ax: Axes, points: pd.DataFrame, look: Look) -> None:
    styles = _styles(points)
    for i, (series, rows) in enumerate(points.groupby("series", sort=False)):
        for device, line in rows.groupby("device", sort=False):
            ordered = line.sort_values("x")
            style: dict[str, Any] = {"linestyle": styles.get(str(device), "")}
            if device == "paper":
                style["marker"] = "x"
            elif len(ordered) == 1:  # a line of one point would not be seen
                style = {"linestyle": "", "marker": "o", "fillstyle": "none"}
            label = str(series) if device == rows.device.iloc[0] else None
            ax.plot(ordered.x, ordered.y, color=f"C{i % 10}", label=label, markersize=4, linewidth=1.2, **style)
    if look.log_x:
        ax.set_xscale("log", base=2) if points.x.max() > 100 and points.x.min() >= 1 else None
    ax.set_yscale("log") if look.log_y else ax.set_ylim(bottom=0 if points.y.min() > 0 and points.y.max() > 3 else None)
    ax.set_xlabel(look.x)
    ax.set_ylabel(look.y)
    ax.legend(fontsize="x-small")


def _styles(points: pd.DataFrame) -> dict[str, Any]:
    """Line style by device; what is counted, not served, is dotted."""
    devices = [str(device) for device in dict.fromkeys(points.device) if device != "paper"]
    return {device: _style(", analytic" in device, "counted" in device) for device in devices}


def _style(is_analytic: bool, is_counted: bool) -> Any:
    if is_counted:
        return (0, (1, 4)) if is_analytic else (0, (1, 1))
    return "--" if is_analytic else "-"


def _keys(points: pd.DataFrame) -> list[Line2D]:
    """What the kinds of line mean."""
    keys = (
        [Line2D([], [], color="black", marker="x", linestyle="", label="paper")]
        if (points.device == "paper").any()
        else []
    )
    return keys + [Line2D([], [], color="black", linestyle=s, label=device) for device, s in _styles(points).items()]
