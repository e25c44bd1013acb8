"""A real run beside its replay: what requests waited, and what was in use over time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sarathi_lab.results.plots.style import finished, panels
from sarathi_lab.results.real_run import RealRun
from sarathi_lab.results.serving_metrics import waits

REAL: dict[str, Any] = {"color": "0.25"}
SIMULATED: dict[str, Any] = {"color": "C1", "linestyle": "--"}
WAITS = {
    "ttft": (1.0, "time to first token [s]"),
    "tpot": (1e3, "time per output token [ms]"),
    "latency": (1.0, "end to end [s]"),
}


def validation(run: RealRun, requests: pd.DataFrame, both: pd.DataFrame, where: str) -> Figure:
    """Distributions of waits above; below over time, from `over_time`'s table, requests that run
    and wait, and blocks in use where the run tells them.
    """
    figure, axes = panels(2, 3, (12, 6.4))
    real, simulated = waits(run.requests), waits(requests)
    for ax, (name, (factor, label)) in zip(axes[:3], WAITS.items(), strict=True):
        for values, style, whose in (
            (real[name], REAL, "real"),
            (simulated[name], SIMULATED, "simulated"),
        ):
            ordered = np.sort(factor * values[~np.isnan(values)])
            ax.plot(ordered, np.linspace(0, 1, len(ordered)), label=whose, **style)
        ax.set(xlabel=label, ylabel="share of requests", ylim=(0, 1))
    axes[0].legend(fontsize="small")
    for ax, name in zip(axes[3:], ("running", "waiting", "blocks"), strict=True):
        _over_time(ax, both, name)
    axes[3].set_ylabel("requests that run")
    axes[4].set_ylabel("requests that wait")
    axes[5].set_ylabel("KV blocks in use")
    if both.real_blocks.isna().all():
        note = "the run did not record them"
        axes[5].text(0.5, 0.03, note, transform=axes[5].transAxes, ha="center", fontsize="small")
    return finished(figure, where)


def _over_time(ax: Axes, both: pd.DataFrame, name: str) -> None:
    for whose, style in (("real", REAL), ("simulated", SIMULATED)):
        ax.plot(both.time, both[f"{whose}_{name}"], linewidth=1.2, **style)
    ax.set(xlabel="time [s]", ylim=(0, None))
