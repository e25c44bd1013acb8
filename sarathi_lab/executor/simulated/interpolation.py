"""Functions through measured times: along one size, on a grid of several, or fitted to any rows.

Single points are computed with plain floats: scipy and numpy take several times as long for them.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from operator import mul
from typing import cast

import numpy as np
import pandas as pd
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Numbers = Floats | pd.Series | Sequence[float]
Shape = tuple[int, ...]  # sizes
Axis = Sequence[float]  # ascending sizes
Point = Sequence[float]  # a size on each axis
Curve = Callable[[int], float]  # seconds by size


def curve(sizes: Numbers, seconds: Numbers) -> Curve:
    """Make a function of seconds by size, linear between the ascending `sizes`, constant below.

    Above the last size a token costs as much as in the cheapest row of the upper half, so that a
    large batch pays for no half-empty tile, and never less than the last row.
    """
    measured_sizes = np.asarray(sizes, float)
    measured_seconds = np.asarray(seconds, float)
    largest = float(measured_sizes[-1])
    seconds_of_largest = float(measured_seconds[-1])
    in_upper_half = measured_sizes >= largest / 2
    costs = measured_seconds[in_upper_half] / measured_sizes[in_upper_half]
    per_token = float(costs.min())

    @cache
    def time(size: int) -> float:
        if size > largest:
            extrapolated = per_token * size
            return max(seconds_of_largest, extrapolated)
        return float(np.interp(size, measured_sizes, measured_seconds))

    return time


class Grid:
    """Sizes on a full grid; points outside move to the nearest edge.

    Args:
        axes: Ascending sizes, one sequence for each axis.
    """

    def __init__(self, axes: Sequence[Axis]) -> None:
        self._axes = axes

    def clamp(self, point: Point) -> list[float]:
        """Move `point` to the nearest edge if it is outside."""
        clamped = []
        for x, axis in zip(point, self._axes, strict=True):
            smallest = axis[0]
            largest = axis[-1]
            clamped.append(min(max(x, smallest), largest))
        return clamped

    def corners(self, point: Point) -> list[tuple[int, float]]:
        """Return the corners of the cell around a point, as offsets into the grid's values (the
        last axis fastest) and weights: one corner at first, up to twice as many an axis.
        """
        corners = [(0, 1.0)]
        for x, axis in zip(point, self._axes, strict=True):
            index, upper_share = interval(axis, x)
            length = len(axis)
            ends = [(index, 1.0 - upper_share)]
            if upper_share > 0.0:  # else the upper end may be past the edge
                ends.append((index + 1, upper_share))
            before = corners
            corners = []
            for end, end_share in ends:
                for offset_before, share_before in before:
                    offset = offset_before * length + end
                    share = share_before * end_share
                    corners.append((offset, share))
        return corners


class GridInterpolation(Grid):
    """Values on a full grid, linear along each axis; points outside move to the nearest edge.

    Args:
        axes: Ascending sizes, one sequence for each axis.
        values: The value at each combination of sizes, [*lengths of the axes].
    """

    def __init__(self, axes: Sequence[Axis], values: Floats) -> None:
        super().__init__(axes)
        self._values: list[float] = values.ravel().tolist()

    def at(self, point: Point) -> float:
        """Interpolate at `point`."""
        value = 0.0
        for offset, weight in self.corners(point):
            value += self._values[offset] * weight
        return value


def interval(axis: Axis, x: float) -> tuple[int, float]:
    """Find the interval of an ascending axis that is nearest to `x`.

    Returns:
        The index of its lower end, and how far `x` is towards the upper one, from 0 to below 1.
    """
    upper_index = bisect_right(axis, x)
    index = upper_index - 1
    if upper_index == 0:
        return 0, 0.0
    if upper_index == len(axis):
        return index, 0.0
    lower = axis[index]
    upper = axis[upper_index]
    width = upper - lower
    share = (x - lower) / width
    return index, share


def make_grid(table: pd.DataFrame, columns: Sequence[str]) -> GridInterpolation | None:
    """Make the grid of most rows' `seconds` over `columns`.

    Returns:
        None if less than half of the rows are on a full grid, or an axis has a single value.
    """
    rows = full_grid(table, columns)
    if len(rows) <= len(table) / 2:
        return None
    num_values = rows[list(columns)].nunique()
    if num_values.min() < 2:
        return None
    return grid_of(rows, columns, "seconds")


def grid_of(table: pd.DataFrame, columns: Sequence[str], values: str) -> GridInterpolation:
    """Make the grid of the column `values` over `columns`, of the rows that `full_grid` leaves."""
    rows = full_grid(table, columns)
    by_sizes = rows.set_index(list(columns))
    cells = by_sizes[values].sort_index()  # the last axis fastest
    axes = []
    for column in columns:
        sizes = cells.index.unique(column)
        axes.append(sizes.tolist())
    return GridInterpolation(axes, cells.to_numpy(float))


def full_grid(rows: pd.DataFrame, columns: Sequence[str]) -> pd.DataFrame:
    """Drop the rows with the rarest values of `columns` until each combination of values exists."""
    while True:
        # By column, the number of rows of each value.
        counts = {column: rows[column].value_counts() for column in columns}
        num_combinations = 1
        for rows_by_value in counts.values():
            num_combinations *= len(rows_by_value)
        if len(rows) >= num_combinations:
            return rows
        column = _rarest_column(counts, num_combinations)
        rarest_value = counts[column].idxmin()
        rows = rows[rows[column] != rarest_value]


def _rarest_column(counts: Mapping[str, pd.Series], num_combinations: int) -> str:
    """Return the column that has the rarest value, by the share of the value's rows in a full grid
    that exist; of equal ones, the column of more values.

    Args:
        counts: By column, the number of rows of each value.
        num_combinations: Rows of the full grid.
    """

    def rarity(column: str) -> tuple[float, int]:
        rows_by_value = counts[column]
        num_values = len(rows_by_value)
        rows_in_grid = num_combinations / num_values  # of each value
        share = rows_by_value.min() / rows_in_grid
        return share, -num_values

    return min(counts, key=rarity)


class RatioInterpolation:
    """Ratios of measured to computed seconds at two sizes, linear in all logarithms.

    Outside, and where an axis has no row for longer sizes, the ratio is that of the nearest edge.
    Two sizes without a row, although a larger call has one, have the ratio 1: the computed seconds.
    """

    def __init__(
        self,
        first: Numbers,
        second: Numbers,
        ratios: Numbers,
    ) -> None:
        rows = pd.DataFrame({"first": first, "second": second, "ratio": ratios})
        logs = rows.apply(np.log)
        measured = logs.pivot_table(index="first", columns="second", values="ratio")
        filled = _without_gaps(measured)
        first_axis = filled.index.tolist()
        second_axis = filled.columns.to_numpy(float).tolist()
        log_ratios = filled.to_numpy(float)
        self._logs = GridInterpolation([first_axis, second_axis], log_ratios)

    def ratio(self, first: float, second: float) -> float:
        """Return the ratio at the sizes `first` and `second`."""
        log_first = math.log(first)
        log_second = math.log(second)
        log_ratio = self._logs.at((log_first, log_second))
        return math.exp(log_ratio)


def _without_gaps(logs: pd.DataFrame) -> pd.DataFrame:
    """Return a table of logarithms of ratios by two sizes with a value in each cell: that of 1 in
    gaps between rows, the nearest one beyond them.
    """
    # Whether a cell has a row that is at least as large in both sizes.
    has_row = logs.notna().astype(int)
    from_largest = has_row.iloc[::-1, ::-1]
    along_first = from_largest.cummax(axis="index")
    along_both = along_first.cummax(axis="columns")
    has_larger_row = along_both.astype(bool)
    is_gap = logs.isna() & has_larger_row
    between_rows = logs.mask(is_gap, 0.0)
    before_second = between_rows.ffill(axis="columns")
    along_second = before_second.bfill(axis="columns")
    before_first = along_second.ffill(axis="index")
    return before_first.bfill(axis="index")


def nearest_shape(
    rows: pd.DataFrame, columns: Sequence[str], distance: Callable[[Shape], float]
) -> tuple[Shape, pd.DataFrame]:
    """Return the values of `columns` at the least `distance`, and the rows that have them."""
    names = list(columns)
    by_shape = rows.groupby(names, sort=False)
    groups = {}
    for key, group in by_shape:
        shape = cast(Shape, key)
        plain_shape = tuple(map(int, shape))  # without numpy's integers
        groups[plain_shape] = group
    nearest = min(groups, key=distance)
    return nearest, groups[nearest]


def log_distance(shape: Sequence[float], other: Sequence[float]) -> float:
    """Compute the distance of two shapes: the logarithms of their sizes' ratios, summed."""
    distance = 0.0
    for size, other_size in zip(shape, other, strict=True):
        log_ratio = math.log(size / other_size)
        distance += abs(log_ratio)
    return distance


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

    def __init__(
        self,
        features: Floats,
        sizes: Floats,
        seconds: Floats,
    ) -> None:
        costs = fitted_costs(features, seconds)
        self._costs: list[float] = costs.tolist()
        # What the costs leave: the mean ratio by size.
        fitted_seconds = features @ costs
        ratios = pd.Series(seconds / fitted_seconds)
        mean_ratios = ratios.groupby(sizes).mean()
        measured_sizes = mean_ratios.index.tolist()
        values = np.asarray(mean_ratios, float)
        self._ratios = GridInterpolation([measured_sizes], values)

    def time(self, size: float, *features: float) -> float:
        """Compute the seconds of one row."""
        fitted = sum(map(mul, self._costs, features))
        ratio = self._ratios.at((size,))
        return ratio * fitted


def fitted_costs(features: Floats, seconds: Floats) -> Floats:
    """Return the cost of each of the `features` [rows, n] by which they come to `seconds` [rows]
    with the least sum of squared relative errors.
    """
    from scipy.optimize import nnls  # takes 0.3 s, and most tables are grids

    # Both sides are divided by the seconds, so that errors count as shares of the seconds.
    relative = features / seconds[:, None]
    relative_seconds = np.ones(len(seconds))
    # Features differ by magnitudes, and the rank of columns has a tolerance: columns of length 1.
    norms = np.linalg.norm(relative, axis=0)  # [n]
    columns = relative / norms
    independent = _independent_columns(columns)
    chosen_columns = columns[:, independent]
    fitted, _ = nnls(chosen_columns, relative_seconds)
    costs = np.zeros(len(norms))
    costs[independent] = fitted / norms[independent]
    return costs


def _independent_columns(values: Floats) -> list[int]:
    """Return the columns that do not depend linearly on earlier ones."""
    independent: list[int] = []
    num_columns = values.shape[1]
    for column in range(num_columns):
        candidates = [*independent, column]
        chosen = values[:, candidates]
        rank = np.linalg.matrix_rank(chosen, tol=1e-6)
        if rank == len(candidates):
            independent.append(column)
    return independent
