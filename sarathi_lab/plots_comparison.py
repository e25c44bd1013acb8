"""Pictures of `comparison`: how runs went over their iterations, and what came out of each."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

import matplotlib.pyplot as plt
import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure

from sarathi_lab.comparison import ComparedRun
from sarathi_lab.plots import MARKERS, use_style

LINES = ("-", "--", ":", "-.")
# Column of the iterations, factor and y label.
CURVES = (
    ("num_prefill_tokens", 1.0, "prompt tokens"),
    ("num_decode_tokens", 1.0, "decodes"),
    ("busy", 1e3, "iteration time [ms]"),
    ("num_waiting", 1.0, "requests waiting"),
)
NUM_MARKERS = 10
LABEL_WIDTH = 52  # characters


def curves(runs: Sequence[ComparedRun], x: str = "iteration") -> Figure:
    """What each run's iterations held and took, a line per run, against `x`: "iteration", or "end" for the time."""
    use_style()
    shown = [curve for curve in CURVES if any(curve[0] in run.iterations for run in runs)]
    figure, axes = plt.subplots(len(shown), 1, figsize=(9, 1.9 * len(shown) + 0.8), sharex=True, layout="constrained")
    for ax, (column, factor, words) in zip(axes, shown, strict=True):
        for i, run in enumerate(runs):
            if column in run.iterations and x in run.iterations:
                marks = max(1, len(run.iterations) // NUM_MARKERS)
                style = {"linestyle": LINES[i % len(LINES)], "marker": MARKERS[i % len(MARKERS)], "markersize": 4}
                style["color"] = f"C{i}"  # the same in all axes, also where a run before has not the column
                style["drawstyle"] = "steps-pre" if x == "end" else "default"  # an iteration lasts until its end
                ax.plot(run.iterations[x], factor * run.iterations[column], label=run.name, markevery=marks, **style)
        ax.set_ylabel(words)
    axes[-1].set_xlabel("time [s]" if x == "end" else x)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, _wrapped(labels), loc="outside lower center", ncols=2)
    plt.close(figure)  # callers hold it; an open figure would be drawn once more by a notebook
    return figure


def ratios(metrics: pd.DataFrame) -> Figure:
    """The ratios of `comparison.compared_metrics` as dots on a logarithmic axis: 1 is the reference's value."""
    use_style()
    table = metrics.xs("ratio", axis="columns", level=1).dropna(how="all")
    long = table.melt(ignore_index=False, var_name="run", value_name="ratio").reset_index()
    figure, ax = plt.subplots(figsize=(8, 0.3 * len(table) + 1.6), layout="constrained")
    markers = list(MARKERS[: table.shape[1]])
    sns.pointplot(long, x="ratio", y="metric", hue="run", linestyle="none", markers=markers, dodge=0.4, ax=ax)
    ax.axvline(1.0, color="black", linestyle=":")
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_formatter("{x:g}")
    ax.set(xlabel="ratio to the reference", ylabel="")
    handles, labels = ax.get_legend_handles_labels()
    if ax.legend_ is not None:
        ax.legend_.remove()
    figure.legend(handles, _wrapped(labels), loc="outside lower center", ncols=2)
    plt.close(figure)
    return figure


def _wrapped(labels: Sequence[str]) -> list[str]:
    """In lines of half the figure's width at most: a single run is called by all its settings."""
    return [textwrap.fill(label, LABEL_WIDTH, break_on_hyphens=False) for label in labels]
