"""Pictures of the iterations of runs."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from sarathi_lab.results.plots import style

# Column of the iterations, factor and y label.
CURVES = (
    ("num_prefill_tokens", 1.0, "prompt tokens"),
    ("num_decode_tokens", 1.0, "decodes"),
    ("busy", 1e3, "iteration time [ms]"),
    ("num_waiting", 1.0, "requests waiting"),
)
NUM_MARKERS = 10
LABEL_WIDTH = 52  # characters


def curves(runs: Mapping[str, pd.DataFrame], x: str = "iteration") -> Figure:
    """Draw the iterations of runs (tables by name) against `x`: "iteration", or "end" for time."""
    shown = [curve for curve in CURVES if any(curve[0] in table for table in runs.values())]
    figure, axes = style.panels(len(shown), 1, (9, 1.9 * len(shown) + 0.8), sharex=True)
    steps: Any = "steps-pre" if x == "end" else "default"  # an iteration lasts until its end
    for ax, (column, scale, words) in zip(axes, shown, strict=True):
        for i, (name, table) in enumerate(runs.items()):
            if column in table and x in table:
                every = max(1, len(table) // NUM_MARKERS)
                look: dict[str, Any] = {"ls": ("-", "--", "-.", ":")[i % 4], "color": f"C{i}"}
                look |= {"marker": style.marker(i), "markersize": 4, "markevery": every}
                label = textwrap.fill(name, LABEL_WIDTH, break_on_hyphens=False)
                ax.plot(table[x], scale * table[column], label=label, drawstyle=steps, **look)
        ax.set_ylabel(words)
    axes[-1].set_xlabel("time [s]" if x == "end" else x)
    style.legend_below(figure, style.keys_of(axes[:1]))
    return style.finished(figure)
