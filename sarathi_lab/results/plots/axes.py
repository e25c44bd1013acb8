"""Where the axes of quantities begin, and what their labels state: one rule for every sweep.

- An amount (tokens/s, seconds, a share) begins at zero: twice as high is twice as much.
- A ratio to another run is compared with 1, not with zero: its axis shows 1 and begins near the
  smallest value, which its label states. It begins at zero, too, where the largest ratio is more
  than twice the smallest.
- Values that differ by more than `WIDE_RANGE` have a logarithmic axis, and so have settings in
  geometric steps. The label states it.

docs/how-to/sweeps.md has the same rule.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.ticker import MaxNLocator, NullLocator
from numpy.typing import NDArray

from sarathi_lab.results.plots import style

WIDE_RANGE = 20  # largest over smallest value from which an axis is logarithmic
GEOMETRIC = 1.5  # ratio of neighbouring settings from which theirs is
LEAST_RANGE = 0.25  # of the largest ratio, so that 1 % does not look like a trend
LONGEST_BAR = 2.5  # times the largest value up to which intervals stretch an axis
HEADROOM = 1.06
STEP = 0.05  # of the places where axes of ratios begin
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


def scale_of(rows: pd.DataFrame, quantity: str) -> Scale:
    """Return the scale for all `value`s of a quantity with their intervals (`low`, `high`)."""
    low = float(rows["value"].min())
    high = float(rows["value"].max())
    if math.isnan(low):
        return Scale(0.0, 1.0)
    ends = rows["high"].fillna(rows["value"])
    top = max(high, min(float(ends.max()), LONGEST_BAR * high))
    if low > 0 and high / low > WIDE_RANGE:
        return Scale(low / 1.3, 1.3 * top, is_log=True, note=LOG_SCALE)
    if is_ratio(quantity):
        return _scale_of_ratio(low, high, top)
    start = HEADROOM * min(0.0, low)  # differences may be negative
    end = HEADROOM * top
    if top <= 0:
        end = 1.0
    return Scale(start, end)


def _scale_of_ratio(low: float, high: float, top: float) -> Scale:
    bottom = min(1.0, low)
    end = max(1.0, top)
    if high > 2 * low:
        return Scale(0.0, HEADROOM * end)
    span = end - bottom
    missing = max(0.0, LEAST_RANGE * end - span)
    margin = missing / 2 + (HEADROOM - 1) * span  # below and above
    num_steps = math.floor((bottom - margin) / STEP)
    start = max(0.0, STEP * num_steps)
    note = ""
    if start > 0:
        note = f"axis from {start:g}"
    return Scale(start, end + margin, note=note)


def set_quantity_axis(ax: Axes, scale: Scale, *, along_x: bool) -> None:
    """Give an axes the scale of its quantity, along x where names are in rows."""
    kind = "log" if scale.is_log else "linear"
    axis: Axis
    if along_x:
        axis = ax.xaxis
        ax.set_xscale(kind)
        ax.set_xlim(scale.start, scale.end)
    else:
        axis = ax.yaxis
        ax.set_yscale(kind)
        ax.set_ylim(scale.start, scale.end)
    if scale.is_log:
        style.tick_in_steps(axis)
    elif along_x:
        axis.set_major_locator(MaxNLocator(3))  # panels in rows are narrow


def is_geometric(values: NDArray[np.float64]) -> bool:
    """Return whether sorted settings grow by factors rather than by steps."""
    if len(values) < 3 or values[0] <= 0:
        return False
    return bool((values[1:] / values[:-1]).min() > GEOMETRIC)


def set_setting_axis(ax: Axes, values: NDArray[np.float64], name: str) -> str:
    """Place a numeric setting's sorted `values` along x; returns the label of the axis."""
    is_log = is_geometric(values)
    style.scale_x(ax, values, is_log=is_log)
    ax.xaxis.set_minor_locator(NullLocator())
    ax.margins(x=0.08)
    label = style.axis_name(name)
    if is_log:
        return f"{label}, {LOG_SCALE}"
    return label
