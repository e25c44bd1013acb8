"""Errors of the simulated points, as tables and as a picture."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sarathi_lab.results.plots.files import save_figure
from sarathi_lab.results.plots.style import (
    WIDTH,
    finished,
    legend_below,
    marker,
    panels,
    tick_in_steps,
)

FOLDER = Path(__file__).parent / "results"
SERIES = ["gpu", "model", "backend", "weights"]
METRICS = {"ttft": "TTFT", "tpot": "TPOT", "e2e": "end to end"}
LEVEL = "analytic"  # of the picture
GAP = 0.05  # of the slower time, from which a pair counts
FEW = 10  # a series of fewer points gets no panel


def write_report(results: pd.DataFrame, num_points: int, reasons: Counter[str]) -> None:
    """Print coverage and errors, and write `errors.csv` and `points.png` beside the results."""
    table = with_errors(results)
    for level, own in table.groupby("cost_model"):
        print(f"\n{level}: {len(own)} points of {num_points}")
        for by in (SERIES, ["backend", "weights", "concurrency"], ["backend", "weights", "tp"]):
            print("\n" + summary(own, by).to_string(index=False, float_format="{:.2f}".format))
    print("\nnot tried:")
    for reason, count in reasons.most_common():
        print(f"  {count:5} {reason}")
    errors = summary(table, ["cost_model", *SERIES])
    errors.to_csv(FOLDER / "errors.csv", index=False, float_format="%.3f")
    found = orders(pd.concat([table, by_measured_products(table)]))
    print("\nwhich of two servers is faster:\n" + found.to_string(index=False))
    found.to_csv(FOLDER / "orders.csv", index=False)
    own = table[table.cost_model == LEVEL]
    if own.groupby(SERIES).size().max() >= FEW:
        save_figure(picture(own), FOLDER / "points.png")


def with_errors(results: pd.DataFrame) -> pd.DataFrame:
    """The results with relative errors; end to end is TTFT and what follows the first token."""
    table = results.copy()
    for whose in ("real", "sim", "spread"):
        table[f"{whose}_e2e"] = table[f"{whose}_ttft"] + (table.osl - 1) * table[f"{whose}_tpot"]
    for metric in METRICS:
        for whose in ("sim", "spread"):
            table[f"{whose}_{metric}_error"] = (
                table[f"{whose}_{metric}"] / table[f"real_{metric}"] - 1
            )
    return table


def summary(table: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    """By group: points, and of each metric the median and mean absolute error and the median error
    (bias); where users were spread, too, the bias then and the share of points between the two.
    """

    def row(group: pd.DataFrame) -> pd.Series:
        values: dict[str, float] = {"points": len(group)}
        for metric in METRICS:
            error = group[f"sim_{metric}_error"]
            values[f"{metric}_median"] = error.abs().median()
            values[f"{metric}_mean"] = error.abs().mean()
            values[f"{metric}_bias"] = error.median()
        spread = group.spread_ttft_error.dropna()
        values["ttft_spread_bias"] = spread.median()
        between = (group.spread_ttft <= group.real_ttft) & (group.real_ttft <= group.sim_ttft)
        values["ttft_between"] = between[spread.index].mean()
        return pd.Series(values)

    return table.groupby(by, dropna=False).apply(row, include_groups=False).reset_index()


def by_measured_products(table: pd.DataFrame) -> pd.DataFrame:
    """vLLM's times by its operation tables, other servers' by formula: the tables are vLLM's."""
    own = (table.cost_model == "profiled") == (table.backend == "vllm")
    return table[own].assign(cost_model="vLLM's by tables")


def orders(table: pd.DataFrame) -> pd.DataFrame:
    """Of two servers on the same GPUs, model, lengths and users, by time: pairs that differ by more
    than `GAP`, and in how many the simulated one that is faster is the real one.
    """
    same = ["cost_model", *SERIES[:2], "weights", "tp", "isl", "osl", "concurrency"]
    pairs = table.merge(table, on=same, suffixes=("", "_other")).query("backend < backend_other")
    rows = []
    for by, group in pairs.groupby([*same[:4], "backend", "backend_other"]):
        for metric in METRICS:
            real, other = group[f"real_{metric}"], group[f"real_{metric}_other"]
            simulated = group[f"sim_{metric}"] - group[f"sim_{metric}_other"]
            counts = (real - other).abs() > GAP * np.maximum(real, other)
            right = (real - other) * simulated > 0
            rows.append([*by, metric, counts.sum(), (right & counts).sum()])
    return pd.DataFrame(rows, columns=[*same[:4], "backend", "other", "metric", "pairs", "right"])


def picture(table: pd.DataFrame) -> Figure:
    """TTFT above, TPOT below."""
    shown = {
        f"{name}, simulated / real": table.assign(
            ratio=table[f"sim_{metric}"] / table[f"real_{metric}"]
        )
        for metric, name in (("ttft", "TTFT"), ("tpot", "TPOT"))
    }
    return ratios(shown, "Simulated servers over measured ones")


def ratios(shown: Mapping[str, pd.DataFrame], title: str) -> Figure:
    """A row for each of `shown`, tables with a column `ratio`, by what that is: over concurrency
    and by tensor parallelism, a column a series.
    """
    names = [name for name, own in next(iter(shown.values())).groupby(SERIES) if len(own) >= FEW]
    size = (WIDTH, 0.9 + 2.2 * len(shown))
    figure, axes = panels(len(shown), len(names), size, sharex=True, sharey="row")
    for row, (label, table) in enumerate(shown.items()):
        own_axes = axes[row * len(names) : (row + 1) * len(names)]
        series = dict(list(table.groupby(SERIES)))
        for ax, name in zip(own_axes, names, strict=True):
            _panel(ax, series[name])
        own_axes[0].set_ylabel(label)
        if table.ratio.between(0.5, 2).all():  # too few decades for ticks
            own_axes[0].set_yscale("linear")
    for ax, (gpu, model, backend, weights) in zip(axes, names, strict=False):
        bits = 8 if weights == "fp8" else 16
        ax.set_title(f"{model}\n{backend}, {gpu}\n{bits}-bit", fontsize=8)
    for ax in axes[-len(names) :]:
        ax.set_xlabel("users")
    keys, _ = axes[0].get_legend_handles_labels()
    legend_below(figure, keys)
    return finished(figure, title)


def _panel(ax: Axes, table: pd.DataFrame) -> None:
    ax.axhline(1, color="0.3", linewidth=1)
    for i, tp in enumerate((1, 2, 4, 8)):
        own = table[table.tp == tp]
        x = own.concurrency * 2 ** (0.12 * (i - 1.5))  # apart, so that none hides another
        ax.plot(x, own.ratio, marker(i), color=f"C{i}", markersize=4, alpha=0.7, label=f"tp {tp}")
    ax.set(xscale="log", yscale="log")
    for axis in (ax.xaxis, ax.yaxis):
        tick_in_steps(axis)
