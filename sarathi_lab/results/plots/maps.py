"""Heat maps of a sweep: a row of panels for each quantity and each value of further settings."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
from matplotlib.figure import Figure

from sarathi_lab.config.console import amount
from sarathi_lab.results.intervals import BAND
from sarathi_lab.results.plots.axes import is_ratio
from sarathi_lab.results.plots.choice import PlotAxes
from sarathi_lab.results.plots.heat import GAIN, amount_scale, heat_map
from sarathi_lab.results.plots.plot import UNSTEADY_RUNS, column_of
from sarathi_lab.results.plots.sweep_rows import at_each_value, named, names_of
from sarathi_lab.results.sweep_analysis import is_numeric
from sarathi_lab.results.table import is_share

EXCLAMATION = " !"  # after the number of a run that is not steady, as in a sweep's table


def draw_maps(
    rows: pd.DataFrame, axes: PlotAxes, quantities: Sequence[str], *, undecided: str
) -> Figure:
    """Draw medians (`sweep_rows.long_rows`); `undecided` explains the mark of such ratios."""
    settings = [axes.x, str(axes.hue), *axes.others]
    if axes.col:
        settings.append(axes.col)
    cells = rows.dropna(subset="value")
    if "policy" not in settings:
        # Of the baselines only the ratios to them are shown.
        is_baseline = cells["is_baseline"].astype(bool)
        cells = cells[~is_baseline]
    for setting in settings:
        cells = at_each_value(cells, setting)
        if not is_numeric(cells, setting):
            cells = cells.assign(**{setting: names_of(cells, setting)})
    tables = []
    for quantity in quantities:
        of_quantity = cells[cells["quantity"] == quantity]
        if is_ratio(quantity):
            tables.append(_gains(of_quantity))
        else:
            tables.append(_amounts(of_quantity))
    table = pd.concat(tables, ignore_index=True)
    label_of_row = []
    for _, cell in table.iterrows():
        label = cell["label"]
        values = named(cell, axes.others)
        if values:
            label += f", {values}"
        label_of_row.append(label)
    notes = []
    if not table["is_decided"].all():
        notes.append(f"~: {undecided}")
    if table["is_unsteady"].any():
        notes.append(f"{EXCLAMATION.strip()}: {UNSTEADY_RUNS}")
    table = table.assign(row=label_of_row)
    return heat_map(table, x=axes.x, y=str(axes.hue), col=axes.col, notes=notes)


def _gains(cells: pd.DataFrame) -> pd.DataFrame:
    """Show ratios as gains in percent; those that are undecided or small have no colour."""
    gain = cells["value"] - 1
    percent = 100 * gain
    is_decided = cells["is_decided"]
    has_colour = is_decided & (percent.abs() > 100 * BAND)
    better = percent.mask(cells["is_less_better"], -percent)
    number = percent.map("{:+.0f}".format)
    number = number.where(is_decided, "~" + number)
    heading = str(cells["heading"].iloc[0])
    ratio, _, _ = heading.partition(" (")
    label = ratio.replace(" / ", " over ")
    scales = [GAIN] * len(cells)
    return cells.assign(
        label=f"{label} [%]",
        scale=column_of(scales, cells),
        shade=better.where(has_colour, 0.0),
        text=number + _marks(cells),
    )


def _amounts(cells: pd.DataFrame) -> pd.DataFrame:
    first = cells.iloc[0]
    scale = amount_scale(
        cells["value"],
        is_less_better=first["is_less_better"],
        may_be_log=not is_share(first["quantity"]),  # the shares that matter are near to all
    )
    scales = [scale] * len(cells)
    return cells.assign(
        label=first["heading"],
        scale=column_of(scales, cells),
        shade=cells["value"],
        text=cells["value"].map(amount) + _marks(cells),
    )


def _marks(cells: pd.DataFrame) -> pd.Series:
    """Return what is behind the number of each run that is not steady."""
    return cells["is_unsteady"].map({True: EXCLAMATION, False: ""})
