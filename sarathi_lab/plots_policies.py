"""The picture of experiment `policies`: what each system's policy gives on the same arrivals."""

from __future__ import annotations

import matplotlib.pyplot as plt
import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from sarathi_lab.plots import use_style

# Column of `sweep.csv`, factor and words.
PANELS = (
    ("tbt_p99", 1e3, "time between tokens, P99 [ms]"),
    ("ttft_p50", 1e3, "time to first token, P50 [ms]"),
    ("ttft_p99", 1e3, "time to first token, P99 [ms]"),
    ("throughput", 1.0, "throughput [tokens/s]"),
)
KINDS = ("never mixes prompts and decodes", "mixes, whole prompts", "mixes, cuts prompts")


def kind_of(run: pd.Series) -> str:
    """Whether a run put prompts beside decodes, and whether it read a prompt's cache again, as cutting makes it."""
    if pd.isna(run.decode_time_marginal):
        return KINDS[0]
    return KINDS[2] if run.kv_reread_factor > 1 else KINDS[1]


def policies(runs: pd.DataFrame) -> Figure:
    """Latency and throughput of every policy of a sweep (its `name`), in the order of the gaps between tokens."""
    use_style()
    names = [name for name, _, _ in PANELS]
    kinds = runs.apply(kind_of, axis="columns")
    runs = runs[["name", *names]].assign(kind=kinds).sort_values("tbt_p99")
    figure, axes = plt.subplots(1, len(PANELS), figsize=(13, 0.24 * len(runs) + 1.6), sharey=True, layout="constrained")
    style = {"hue": "kind", "hue_order": KINDS, "style": "kind", "style_order": KINDS, "s": 45}
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
    figure.legend(handles, labels, loc="outside lower center", ncols=len(KINDS))
    plt.close(figure)
    return figure
