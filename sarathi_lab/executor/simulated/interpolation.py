"""Functions through measured times: along one size, on a grid of several, or fitted to any rows.

Single points are computed with plain floats: scipy and numpy take several times as long for them.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from operator import mul

import numpy as np
import pandas as pd
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Numbers = Floats | pd.Series | Sequence[float]


def curve(sizes: Numbers, seconds: Numbers) -> Callable[[int], float]:
    """Make a function of seconds by size, linear between the ascending `sizes`, constant below.

    Above the last size a token costs as much as in the cheapest row of the upper half, so that a
    large batch pays for no half-empty tile, and never less than the last row.
    """
    measured_sizes = np.asarray(sizes, float)
    measured_seconds = np.asarray(seconds, float)
    largest = float(measured_sizes[-1])
    seconds_of_largest = float(measured_seconds[-1])
    in_upper_half = measured_sizes >= largest / 2
    costs = measured_seconds / measured_sizes
    per_token = float(costs[in_upper_half].min())

    @cache
    def time(size: int) -> float:
        if size > largest:
            return max(seconds_of_largest, per_token * size)
        seconds_at_size = np.interp(size, measured_sizes, measured_seconds)
        return float(seconds_at_size)

    return time


class GridInterpolation:
    """Values on a full grid, linear along each axis; points outside move to the nearest edge.

    Args:
        axes: Ascending sizes, one array for each axis.
        values: The value at each combination of sizes, [*lengths of the axes].
    """

    def __init__(self, axes: Sequence[Floats], values: Floats) -> None:
        values = np.ascontiguousarray(values)
        self._axes: list[list[float]] = [axis.tolist() for axis in axes]
        self._flat: list[float] = values.ravel().tolist()
        # Steps in the flat values from a size to the next: 1 along the last axis.
        self._strides = [num_bytes // values.itemsize for num_bytes in values.strides]

    def clamp(self, point: Sequence[float]) -> list[float]:
        """Move `point` to the nearest edge if it is outside."""
        clamped = []
        for x, axis in zip(point, self._axes, strict=True):
            smallest = axis[0]
            largest = axis[-1]
            clamped.append(min(max(x, smallest), largest))
        return clamped

    def at(self, point: Sequence[float]) -> float:
        """Interpolate at `point`."""
        # The corners of the cell around the point: offsets into the flat values, and weights.
        corners = [(0, 1.0)]
        for x, axis, stride in zip(point, self._axes, self._strides, strict=True):
            index, upper_share = interval(axis, x)
            lower = index * stride
            upper = lower + stride
            lower_share = 1.0 - upper_share
            next_corners = []
            for offset, weight in corners:
                next_corners.append((offset + lower, weight * lower_share))
            if upper_share > 0.0:  # else the upper corner may be past the edge
                for offset, weight in corners:
                    next_corners.append((offset + upper, weight * upper_share))
            corners = next_corners
        value = 0.0
        for offset, weight in corners:
            value += self._flat[offset] * weight
        return value


def interval(axis: Sequence[float], x: float) -> tuple[int, float]:
    """Find the interval of an ascending axis that is nearest to `x`.

    Returns:
        The index of its lower end, and how far `x` is towards the upper one, from 0 to below 1.
    """
    last = len(axis) - 1
    if x <= axis[0]:
        return 0, 0.0
    if x >= axis[last]:
        return last, 0.0
    upper_index = bisect_right(axis, x)
    index = upper_index - 1
    lower = axis[index]
    upper = axis[upper_index]
    share = (x - lower) / (upper - lower)
    return index, share


def make_grid(table: pd.DataFrame, columns: Sequence[str]) -> GridInterpolation | None:
    """Make the grid of most rows' `seconds` over `columns`.

    Returns:
        None if less than half of the rows are on a full grid, or an axis has a single value.
    """
    rows = full_grid(table, columns)
    if len(rows) <= len(table) / 2:
        return None
    for column in columns:
        if rows[column].nunique() < 2:
            return None
    return grid_of(rows, columns, "seconds")


def grid_of(table: pd.DataFrame, columns: Sequence[str], values: str) -> GridInterpolation:
    """Make the grid of the column `values` over `columns`, of the rows that `full_grid` leaves."""
    rows = full_grid(table, columns).sort_values(list(columns))
    axes = []
    for column in columns:
        sizes = rows[column].to_numpy(float)
        axes.append(np.unique(sizes))
    lengths = [len(axis) for axis in axes]
    # Rows are sorted by all columns, so they lie as in an array, the last axis fastest.
    flat = rows[values].to_numpy(float)
    return GridInterpolation(axes, flat.reshape(lengths))


def full_grid(rows: pd.DataFrame, columns: Sequence[str]) -> pd.DataFrame:
    """Drop the rows with the rarest values of `columns` until each combination of values exists."""
    while True:
        # Rows by value, of each column.
        counts = {column: rows[column].value_counts() for column in columns}
        lengths = [len(rows_of_value) for rows_of_value in counts.values()]
        num_combinations = math.prod(lengths)
        if len(rows) >= num_combinations:
            return rows
        column = _rarest_column(counts, num_combinations)
        rarest_value = counts[column].idxmin()
        rows = rows[rows[column] != rarest_value]


def _rarest_column(counts: Mapping[str, pd.Series], num_combinations: int) -> str:
    """Return the column with the value of whose combinations the least share exists; of equal ones,
    the column of more values.
    """

    def rarity(column: str) -> tuple[float, int]:
        rows_of_value = counts[column]
        num_values = len(rows_of_value)
        num_expected = num_combinations / num_values
        return rows_of_value.min() / num_expected, -num_values

    return min(counts, key=rarity)


class RatioInterpolation:
    """Ratios of measured to computed seconds at two sizes, linear in all logarithms.

    Outside, and where an axis has no row for longer sizes, the ratio is that of the nearest edge.
    Two sizes without a row, although a larger call has one, have the ratio 1: the computed seconds.
    """

    def __init__(self, first: Numbers, second: Numbers, ratios: Numbers) -> None:
        rows = pd.DataFrame({"first": first, "second": second, "ratio": ratios})
        table = rows.pivot_table(index="first", columns="second", values="ratio")
        has_row = table.notna().to_numpy()
        is_gap = _is_below(has_row) & ~has_row
        table = table.mask(is_gap, 1.0)
        sizes_of_first = table.index.to_numpy(float)
        sizes_of_second = table.columns.to_numpy(float)
        # The nearest edge: first along the second size, then along the first.
        table = table.ffill(axis=1).bfill(axis=1)
        table = table.ffill().bfill()
        log_ratios = np.log(table.to_numpy(float))
        axes = [np.log(sizes_of_first), np.log(sizes_of_second)]
        self._logs = GridInterpolation(axes, log_ratios)

    def ratio(self, first: float, second: float) -> float:
        """Return the ratio at the sizes `first` and `second`."""
        point = (math.log(first), math.log(second))
        log_ratio = self._logs.at(point)
        return math.exp(log_ratio)


def _is_below(has_row: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return which cells have a row that is as large in both sizes, themselves included."""
    from_largest = np.flip(has_row)  # both axes
    along_first = np.maximum.accumulate(from_largest, axis=0)
    along_both = np.maximum.accumulate(along_first, axis=1)
    return np.flip(along_both)


def nearest_shape(
    rows: pd.DataFrame, columns: Sequence[str], distance: Callable[[tuple[int, ...]], float]
) -> tuple[tuple[int, ...], pd.DataFrame]:
    """Return the values of `columns` at the least `distance`, and the rows that have them."""
    shapes = rows[list(columns)]
    distinct = shapes.drop_duplicates().to_numpy(int)
    candidates = [tuple(shape) for shape in distinct.tolist()]
    nearest = min(candidates, key=distance)
    has_shape = (shapes == list(nearest)).all(axis=1)
    return nearest, rows[has_shape]


def log_distance(shape: Sequence[int], other: Sequence[int]) -> float:
    """Compute the distance of two shapes: the logarithms of their sizes' ratios, summed."""
    distance = 0.0
    for size, other_size in zip(shape, other, strict=True):
        distance += abs(math.log(size / other_size))
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

    def __init__(self, features: Floats, sizes: Floats, seconds: Floats) -> None:
        from scipy.optimize import nnls  # takes 0.3 s, and most tables are grids

        # Relative to the seconds, which all are 1 then: so errors count as shares of the seconds.
        relative = features / seconds[:, None]
        relative_seconds = np.ones(len(seconds))
        # Of length 1, as features differ by magnitudes and the rank below has a tolerance.
        norms = np.linalg.norm(relative, axis=0)
        relative /= norms
        independent = _independent_columns(relative)
        fitted, _ = nnls(relative[:, independent], relative_seconds)
        costs = np.zeros(len(norms))
        costs[independent] = fitted / norms[independent]
        self._costs: list[float] = costs.tolist()
        # What the costs leave: the mean ratio by size.
        computed = features @ costs
        ratios = pd.Series(seconds / computed).groupby(sizes).mean()
        measured_sizes = ratios.index.to_numpy(float)
        self._ratios = GridInterpolation([measured_sizes], np.asarray(ratios, float))

    def time(self, size: float, *features: float) -> float:
        """Compute the seconds of one row."""
        seconds = sum(map(mul, self._costs, features))
        return self._ratios.at((size,)) * seconds


def _independent_columns(values: Floats) -> list[int]:
    """Return the columns that do not depend linearly on earlier ones."""
    independent: list[int] = []
    num_columns = values.shape[1]
    for column in range(num_columns):
        candidates = [*independent, column]
        rank = np.linalg.matrix_rank(values[:, candidates], tol=1e-6)
        if rank == len(candidates):
            independent.append(column)
    return independent
