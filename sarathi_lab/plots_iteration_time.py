"""The picture of `task=iteration_time`: where an iteration's time is flat. A table in, a figure out."""

from __future__ import annotations

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.figure import Figure

from sarathi_lab.plots import use_style

KINDS = {"prefill": "tokens of one prompt", "decode": "decodes, one a sequence"}


def iteration_times(table: pd.DataFrame, where: str) -> Figure:
    """Milliseconds over tokens, a line per context, the floor dotted in its colour; `where` names model and device."""
    use_style()
    figure, axes = plt.subplots(1, 2, figsize=(10, 4.2), layout="constrained", sharey=True)
    for ax, (kind, xlabel) in zip(axes, KINDS.items(), strict=True):
        rows = table[table.kind == kind].sort_values("tokens")
        for i, (context, line) in enumerate(rows.groupby("context")):
            ax.plot(line.tokens, 1e3 * line.seconds, marker="o", color=f"C{i}", label=f"context {context}")
            ax.fill_between(line.tokens, 1e3 * line.q20, 1e3 * line.q80, color=f"C{i}", alpha=0.2)
            ax.plot(line.tokens, 1e3 * line.floor, linestyle=":", color=f"C{i}")
        ax.set(xscale="log", yscale="log", xlabel=xlabel, ylabel="iteration time [ms]" if kind == "prefill" else "")
        ax.set_xticks(sorted(rows.tokens.unique()), [str(tokens) for tokens in sorted(rows.tokens.unique())])
        ax.minorticks_off()
    axes[0].plot([], [], linestyle=":", color="0.4", label="floor")
    axes[0].legend(fontsize="small")
    figure.suptitle(where)
    plt.close(figure)
    return figure
