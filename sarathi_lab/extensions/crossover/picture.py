"""The map of the task `crossover`."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from sarathi_lab.results.plots.heat import HeatRow, gain_scale, heat_map
from sarathi_lab.results.plots.style import finished

NOT_RUN = "not run: exceeds the cache, or the chunk is below the batch"


def crossover_map(table: pd.DataFrame, where: str, baseline: str = "request_level") -> Figure:
    """Draw gains over one baseline in percent: P:D along x, batch upwards, a panel per P + D and
    chunk; `where` names model and device.
    """
    cells = table[table.baseline == baseline]
    percent = 100 * cells.gain
    cells = cells.assign(
        shade=percent.mask(cells.outcome == "neutral", 0.0),
        text=percent.map("{:+.0f}".format),
    )
    title = f"gain in steady throughput over {baseline} [%]"
    scale = gain_scale(title)
    rows = [
        HeatRow(group, scale, label=f"P + D {seq_len}")
        for seq_len, group in cells.groupby("seq_len")
    ]
    figure = heat_map(rows, x="pd_ratio", y="batch", col="chunk", not_run=NOT_RUN)
    return finished(figure, f"{where}: {title}")
