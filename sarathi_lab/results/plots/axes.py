"""Where the axes of quantities begin, and what their labels state: one rule for every picture.

- An amount (tokens/s, seconds, a share) begins at zero: twice as high is twice as much.
- A ratio to another run is compared with 1, not with zero: its axis shows 1 and begins near the
  smallest value, which its label states. It is drawn as an amount where the largest ratio is more
  than twice the smallest.
- Values that differ by more than `WIDE_RANGE` have a logarithmic axis, and so have settings in
  geometric steps. The label states it.

docs/how-to/sweeps.md has the same rule.
"""

from __future__ import annotations

import math
import textwrap
from dataclasses import dataclass

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, NullLocator

from sarathi_lab.results.plots import style

WIDE_RANGE = 20  # largest over smallest value from which an axis is logarithmic
GEOMETRIC = 1.5  # ratio of neighbouring settings from which theirs is
LEAST_RANGE = 0.25  # of the largest ratio, so that 1 % does not look like a trend
LONGEST_BAR = 2.5  # times the largest value up to which intervals stretch an axis
HEADROOM = 1.06
STEP = 0.05  # of the places where axes of ratios begin
LABEL = 26  # letters of an axis label's line
LOG_SCALE = "log\N{NO-BREAK SPACE}scale"


@dataclass(frozen=True)
class Scale:
    """The range of a quantity's axis, and the `note` that its label ends with."""

    start: float
    end: float
    is_log: bool = False
    note: str = ""


def is_ratio(quantity: str) -> bool:
    """Return whether a quantity is a ratio to another run, as `throughput_vs_orca`."""
    return "_vs_" in quantity


def is_wide(values: pd.Series) -> bool:
    """Return whether amounts differ by more than `WIDE_RANGE`."""
    low = float(values.min())
    high = float(values.max())
    return low > 0 and high / low > WIDE_RANGE


def scale_of(rows: pd.DataFrame, *, is_ratio: bool, is_log: bool) -> Scale:
    """Return the scale for all `value`s of a quantity with their intervals (`low`, `high`)."""
    low = float(rows["value"].min())
    high = float(rows["value"].max())
    ends = rows["high"].fillna(rows["value"])
    # A single wide interval would leave the values themselves no room.
    longest = min(float(ends.max()), LONGEST_BAR * high)
    top = max(high, longest)
    if is_log and low > 0:
        start = low / 1.3
        end = 1.3 * top
        return Scale(start, end, is_log=True, note=LOG_SCALE)
    if is_ratio and high <= 2 * low:
        return _scale_beside_one(low, top)
    start = HEADROOM * min(0.0, low)  # differences may be negative
    end = HEADROOM * top
    if top <= 0:
        end = 1.0
    return Scale(start, end)


def _scale_beside_one(low: float, top: float) -> Scale:
    """Return the scale of ratios that shows 1, from the smallest ratio to the `top`."""
    bottom = min(1.0, low)
    end = max(1.0, top)
    span = end - bottom
    least_span = LEAST_RANGE * end
    missing = max(0.0, least_span - span)
    margin = missing / 2  # below and above
    margin += (HEADROOM - 1) * span
    num_steps = math.floor((bottom - margin) / STEP)
    start = max(0.0, STEP * num_steps)
    note = ""
    if start > 0:
        note = f"axis from {start:g}".replace(" ", "\N{NO-BREAK SPACE}")
    return Scale(start, end + margin, note=note)


def set_quantity_axis(ax: Axes, scale: Scale, label: str, *, along_x: bool = False) -> None:
    """Scale and label the axis of a quantity, along x where names are in rows."""
    kind = "linear"
    if scale.is_log:
        kind = "log"
    ends = (scale.start, scale.end)
    if scale.note:
        label = f"{label}, {scale.note}"
    label = textwrap.fill(label, LABEL)
    if along_x:
        ax.set(xscale=kind, xlim=ends, xlabel=label)
        ax.xaxis.set_major_locator(MaxNLocator(3))  # panels in rows are narrow
    else:
        ax.set(yscale=kind, ylim=ends, ylabel=label)
    if not scale.is_log:
        return
    if along_x:
        style.tick_in_steps(ax.xaxis)
    else:
        style.tick_in_steps(ax.yaxis)


def is_geometric(values: pd.Series) -> bool:
    """Return whether the numbers of a setting grow by factors rather than by steps."""
    in_order = np.unique(values.dropna())
    if len(in_order) < 3 or in_order[0] <= 0:
        return False
    factors = in_order[1:] / in_order[:-1]
    return bool(factors.min() > GEOMETRIC)


def set_setting_axis(ax: Axes, values: pd.Series, label: str, *, is_log: bool) -> None:
    """Place the numbers of a setting along x."""
    style.scale_x(ax, np.unique(values), is_log=is_log)
    ax.xaxis.set_minor_locator(NullLocator())
    ax.margins(x=0.08)
    if is_log:
        label = f"{label}, {LOG_SCALE}"
    ax.set_xlabel(textwrap.fill(label, LABEL))
