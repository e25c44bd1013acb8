"""The picture of a real server's loads beside their replays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from sarathi_lab.extensions.replay.benchmark import WAITS
from sarathi_lab.extensions.replay.comparison import (
    CHANGED,
    QUANTITIES,
    REAL,
    SIMULATED,
    ReplayedLoad,
    over_time,
)
from sarathi_lab.results.plots.plot import Look, PanelLayout, distribution, plot, styled
from sarathi_lab.results.plots.style import finished, legend_below
from sarathi_lab.results.serving_metrics import waits

LOOKS = {
    REAL: Look(REAL, "0.25"),
    SIMULATED: Look(SIMULATED, "C1", "--"),
    CHANGED: Look(CHANGED, "C0", ":"),
}
WAIT_LABELS = {
    "ttft": "time to first token [s]",
    "tpot": "time per output token [ms]",
    "latency": "end to end [s]",
}
USE_LABELS = {
    "running": "requests that run",
    "waiting": "requests that wait",
    "blocks": "KV blocks in use",
}


def picture(
    loads: Sequence[ReplayedLoad],
    parts: pd.DataFrame,
    changed: Sequence[ReplayedLoad],
    title: str,
) -> Figure:
    """Draw distributions of waits above; below what was `over_time` in use where one run recorded
    it, else mean waits by load or, of one load, by time (`parts` of a `part_table`).
    """
    labels = WAIT_LABELS
    xlabel = "sent [s]"
    table = parts.assign(at=parts.since)
    marker = "."
    if len(loads) > 1:
        xlabel = "load"
        table = parts.assign(at=range(1, len(parts) + 1))
    elif len(loads[0].run.timeline):
        labels = USE_LABELS
        xlabel = "time [s]"
        table = _use(loads[0], changed)
        marker = ""
    rows = _waits(loads, changed) + _points(table, labels, marker)
    layout = PanelLayout([*(f"share {wait}" for wait in WAITS), *labels], 3, (12, 6.4))
    figure, axes = plot(pd.concat(rows), x="at", grid=layout)
    for wait, label in WAIT_LABELS.items():
        axes[f"share {wait}"].set(
            xlabel=label,
            ylabel="share of requests",
            ylim=(0, 1),
        )
    for name, label in labels.items():
        axes[name].set(
            xlabel=xlabel,
            ylabel=label,
            ylim=(0, None),
        )
    drawn = [look for whose, look in LOOKS.items() if changed or whose != CHANGED]
    legend_below(figure, [look.key() for look in drawn])
    return finished(figure, title)


def _use(load: ReplayedLoad, changed: Sequence[ReplayedLoad]) -> pd.DataFrame:
    """Return what is in use over time, also with changed settings."""
    use = over_time(load)
    for changed_load in changed:
        changed_use = over_time(changed_load)
        for name in USE_LABELS:
            use[f"{name} {CHANGED}"] = changed_use[f"{name} {SIMULATED}"]
    return use.assign(at=use.time)


def _points(table: pd.DataFrame, names: Mapping[str, str], marker: str) -> list[pd.DataFrame]:
    """Return the marks of columns such as "ttft real", a panel for each of the `names`."""
    rows = []
    for name in names:
        factor = QUANTITIES[name].factor if name in QUANTITIES else 1.0
        for whose, look in LOOKS.items():
            values = table.get(f"{name} {whose}")
            if values is not None:
                points = pd.DataFrame(
                    {
                        "at": table["at"],
                        "panel": name,
                        "value": factor * values,
                    }
                )
                rows.append(styled(points, replace(look, marker=marker)))
    return rows


def _waits(loads: Sequence[ReplayedLoad], changed: Sequence[ReplayedLoad]) -> list[pd.DataFrame]:
    """Return the distribution of each wait, a panel each."""
    tables = {
        REAL: [load.run.requests for load in loads if not load.run.means],
        SIMULATED: [load.requests for load in loads],
        CHANGED: [load.requests for load in changed],
    }
    rows = []
    for whose, requests in tables.items():
        look = replace(LOOKS[whose], drawstyle="steps-post")
        for wait in WAITS:
            seconds = [waits(table)[wait] for table in requests]
            values = pd.Series(np.concatenate([[], *seconds]))
            shares = distribution(QUANTITIES[wait].factor * values)
            rows.append(styled(shares.assign(panel=f"share {wait}"), look))
    return rows
