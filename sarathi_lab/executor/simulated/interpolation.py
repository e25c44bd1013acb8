"""Functions through measured times: along one size, on a grid of several, or fitted to any rows.

Single points are computed with plain floats: scipy and numpy take several times as long for them.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import cache
from operator import mul
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Numbers = Any  # an array or a column of numbers


def curve(sizes: Numbers, seconds: Numbers) -> Callable[[int], float]:
    """Make a function of seconds by size, linear between the ascending `sizes`, constant below.

    Above the last size a token costs as much as in the cheapest row of the upper half, so that a
    large batch pays for no half-empty tile, and never less than the last row.
    """
    measured_sizes = np.asarray(sizes, float)
    measured_seconds = np.asarray(seconds, float)
    largest = float(measured_sizes[-1])
    seconds_of_largest = float(measured_seconds[-1])
    is_upper = measured_sizes >= largest / 2
    costs = measured_seconds[is_upper] / measured_sizes[is_upper]
    per_token = float(costs.min())

    @cache
    def time(size: int) -> float:
        if size <= largest:
            return float(np.interp(size, measured_sizes, measured_seconds))
        return max(seconds_of_largest, per_token * size)

    return time


class GridInterpolation:
    """Values on a full grid, linear along each axis; points outside move to the nearest edge.

    Args:
        axes: Ascending sizes, one array for each axis.
        values: The value at each combination of sizes, [*lengths of the axes].
    """

    def __init__(self, axes: Sequence[Floats], values: Floats) -> None:
        self._axes = [axis.tolist() for axis in axes]
        # Steps in the flat values from a size to the next: 1 along the last axis.
        self._strides = [1]
        for length in reversed(values.shape[1:]):
            self._strides.insert(0, self._strides[0] * length)
        self._flat = values.ravel().tolist()

    def clamp(self, point: Sequence[float]) -> list[float]:
        """Move `point` to the nearest edge if it is outside."""
        clamped = []
        for x, axis in zip(point, self._axes, strict=True):
            clamped.append(min(max(x, axis[0]), axis[-1]))
        return clamped

    def at(self, point: Sequence[float]) -> float:
        """Interpolate at `point`."""
        # The corners of the cell around the point: offsets into the flat values, and weights.
        corners = [(0, 1.0)]
        for x, axis, stride in zip(point, self._axes, self._strides, strict=True):
            i, share = interval(axis, x)
            lower = i * stride
            next_corners = [(offset + lower, weight * (1.0 - share)) for offset, weight in corners]
            if share > 0.0:  # else the upper corner may be past the edge
                upper = lower + stride
                next_corners += [(offset + upper, weight * share) for offset, weight in corners]
            corners = next_corners
        flat = self._flat
        return sum([flat[offset] * weight for offset, weight in corners])


def interval(axis: Sequence[float], x: float) -> tuple[int, float]:
    """Find the interval of an ascending axis that is nearest to `x`.

    Returns:
        The index of its lower end, and how far `x` is towards the upper one, from 0 to below 1.
    """
    if x <= axis[0]:
        return 0, 0.0
    if x >= axis[-1]:
        return len(axis) - 1, 0.0
    i = bisect_right(axis, x) - 1
    lower = axis[i]
    return i, (x - lower) / (axis[i + 1] - lower)


def make_grid(table: pd.DataFrame, columns: Sequence[str]) -> GridInterpolation | None:
    """Make the grid of most rows' `seconds` over `columns`.

    Returns:
        None if less than half of the rows are on a full grid, or an axis has a single value.
    """
    rows = full_grid(table, columns)
    if len(rows) <= len(table) / 2:
        return None
    if min(rows[column].nunique() for column in columns) < 2:
        return None
    return grid_of(rows, columns, "seconds")


def grid_of(table: pd.DataFrame, columns: Sequence[str], values: str) -> GridInterpolation:
    """Make the grid of the column `values` over `columns`, of the rows that `full_grid` leaves."""
    rows = full_grid(table, columns).sort_values(list(columns))
    axes = [np.unique(rows[column].to_numpy(float)) for column in columns]
    lengths = [len(axis) for axis in axes]
    return GridInterpolation(axes, rows[values].to_numpy(float).reshape(lengths))


def full_grid(rows: pd.DataFrame, columns: Sequence[str]) -> pd.DataFrame:
    """Drop the rows with the rarest values of `columns` until each combination of values exists."""
    while True:
        counts = {column: rows[column].value_counts() for column in columns}
        num_combinations = math.prod(map(len, counts.values()))
        if len(rows) >= num_combinations:
            return rows
        # The share of a value's combinations that exist; of equal ones, the axis of more values.
        rarest = (math.inf, 0)
        rarest_column = ""
        for column, of_column in counts.items():
            num_expected = num_combinations / len(of_column)
            rarity = (of_column.min() / num_expected, -len(of_column))
            if rarity < rarest:
                rarest = rarity
                rarest_column = column
        rarest_value = counts[rarest_column].idxmin()
        rows = rows[rows[rarest_column] != rarest_value]


class RatioInterpolation:
    """Ratios of measured to computed seconds at two sizes, linear in all logarithms.

    Outside, and where an axis has no row for longer sizes, the ratio is that of the nearest edge.
    Two sizes without a row, although a larger call has one, have the ratio 1: the computed seconds.
    """

    def __init__(self, first: Numbers, second: Numbers, ratios: Numbers) -> None:
        rows = pd.DataFrame({"first": first, "second": second, "ratio": ratios})
        table = rows.pivot_table(index="first", columns="second", values="ratio")
        has_row = table.notna().to_numpy()
        table = table.where(has_row | ~_is_below(has_row), 1.0)
        table = table.ffill(axis=1).bfill(axis=1).ffill().bfill()  # the nearest edge
        axes = [np.log(axis.to_numpy(float)) for axis in table.axes]
        self._logs = GridInterpolation(axes, np.log(table.to_numpy(float)))

    def ratio(self, first: float, second: float) -> float:
        """Return the ratio at the sizes `first` and `second`."""
        point = (math.log(first), math.log(second))
        return math.exp(self._logs.at(point))


def _is_below(has_row: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return which cells have a row that is as large in both sizes, themselves included."""
    from_largest = has_row[::-1, ::-1]
    along_rows = np.maximum.accumulate(from_largest, axis=0)
    along_both = np.maximum.accumulate(along_rows, axis=1)
    return along_both[::-1, ::-1]


def nearest_shape(
    rows: pd.DataFrame, columns: Sequence[str], distance: Callable[[tuple[int, ...]], float]
) -> tuple[tuple[int, ...], pd.DataFrame]:
    """Return the values of `columns` at the least `distance`, and the rows that have them."""
    shapes = rows[list(columns)]
    different = shapes.drop_duplicates().to_numpy(int).tolist()
    nearest = min(map(tuple, different), key=distance)
    has_shape = (shapes == list(nearest)).all(axis=1)
    return nearest, rows[has_shape]


def log_distance(shape: Sequence[int], other: Sequence[int]) -> float:
    """Compute the distance of two shapes: the logarithms of their sizes' ratios, summed."""
    return sum(abs(math.log(a / b)) for a, b in zip(shape, other, strict=True))


class Costs:
    """Non-negative costs of features, times the ratio that they leave by one size.

    The costs are fitted to relative errors of the seconds. The ratio is interpolated, and constant
    beyond the sizes. A feature that depends linearly on earlier ones in these rows (no row has a
    context, all decodes have the same) costs nothing.

    Args:
        features: What seconds are counted by, [rows, n].
        sizes: The size by which the ratio differs, [rows].
        seconds: Measured ones, [rows].
    """

    def __init__(self, features: Floats, sizes: Floats, seconds: Floats) -> None:
        from scipy.optimize import nnls  # takes 0.3 s, and most tables are grids

        relative = features / seconds[:, None]  # so that errors count relative to the seconds
        norms = np.linalg.norm(relative, axis=0)
        relative /= norms
        independent = _independent_columns(relative)
        fitted, _ = nnls(relative[:, independent], np.ones(len(seconds)))
        costs = np.zeros(len(norms))
        costs[independent] = fitted / norms[independent]
        self._costs = costs.tolist()
        remaining = pd.Series(seconds / (features @ costs))
        ratios = remaining.groupby(sizes).mean()
        self._ratios = GridInterpolation([ratios.index.to_numpy(float)], np.asarray(ratios, float))

    def time(self, size: float, *features: float) -> float:
        """Compute the seconds of one row."""
        seconds = sum(map(mul, self._costs, features))
        return self._ratios.at((size,)) * seconds


def _independent_columns(values: Floats) -> list[int]:
    """Return the columns that do not depend linearly on earlier ones."""
    independent: list[int] = []
    for column in range(values.shape[1]):
        rank = np.linalg.matrix_rank(values[:, [*independent, column]], tol=1e-6)
        if rank > len(independent):
            independent.append(column)
    return independent
