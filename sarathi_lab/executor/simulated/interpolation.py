"""Functions through measured times: along one size, on a grid of several, or fitted to any rows.

Single points are computed with plain floats: scipy and numpy take several times as long for them.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from operator import mul

import numpy as np
import pandas as pd
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Rows = NDArray[np.int64]  # row numbers
HELD_OUT_BLOCKS = 10  # of neighbours held out together, as tables are often dense at a step


def curve(sizes: Floats, seconds: Floats) -> Callable[[int], float]:
    """Make a function of seconds by size, linear between the ascending `sizes`, constant below.

    Above the last size a token costs as much as in the cheapest row of the upper half, so that a
    large batch pays for no half-empty tile, and never less than the last row.
    """
    upper = sizes >= sizes[-1] / 2
    per_token = float((seconds[upper] / sizes[upper]).min())
    last, last_seconds = float(sizes[-1]), float(seconds[-1])

    @cache
    def time(size: int) -> float:
        if size <= last:
            return float(np.interp(size, sizes, seconds))
        return max(last_seconds, per_token * size)

    return time


def curve_error(sizes: Floats, seconds: Floats) -> float:
    """Compute the mean relative error of blocks of rows interpolated from the others; the first and
    the last row are never held out, as tables are not made for extrapolation.
    """
    return _held_out_error(
        seconds, lambda kept, block: np.interp(sizes[block], sizes[kept], seconds[kept])
    )


def _held_out_error(seconds: Floats, predict: Callable[[Rows, Rows], Floats]) -> float:
    """Compute the mean relative error of blocks of inner rows that `predict` gets from the rest."""
    inner = np.arange(1, len(seconds) - 1)
    errors: list[float] = []
    for block in np.array_split(inner, min(HELD_OUT_BLOCKS, len(inner))):
        kept = np.delete(np.arange(len(seconds)), block)
        errors += np.abs(predict(kept, block) / seconds[block] - 1).tolist()
    return float(np.mean(errors)) if errors else 0.0


def neighbours_error(lines: Iterable[tuple[Floats, Floats]]) -> float:
    """Compute the mean relative error of inner seconds [..., n] interpolated from their neighbours
    along an axis [n], over all `lines`.
    """
    errors = []
    for axis, along in lines:
        if len(axis) > 2:
            weight = (axis[1:-1] - axis[:-2]) / (axis[2:] - axis[:-2])
            predicted = along[..., :-2] * (1 - weight) + along[..., 2:] * weight
            errors.append(np.abs(predicted / along[..., 1:-1] - 1).ravel())
    return float(np.concatenate(errors).mean()) if errors else 0.0


class Grid:
    """Values on a full grid, linear along each axis; points outside move to the nearest edge."""

    def __init__(self, axes: Sequence[Floats], values: Floats) -> None:
        self._axes = [axis.tolist() for axis in axes]
        self._strides = [int(np.prod(values.shape[i + 1 :])) for i in range(values.ndim)]
        self._flat = values.ravel().tolist()
        lines = ((axis, np.moveaxis(values, i, -1)) for i, axis in enumerate(axes))
        self.error = neighbours_error(lines)

    def clamp(self, point: Sequence[float]) -> list[float]:
        """Move `point` to the nearest edge if it is outside."""
        return [min(max(x, axis[0]), axis[-1]) for x, axis in zip(point, self._axes, strict=True)]

    def at(self, point: Sequence[float]) -> float:
        """Interpolate at `point`."""
        corners = [(0, 1.0)]  # offset into the flat values, and weight
        for x, axis, stride in zip(point, self._axes, self._strides, strict=True):
            i, upper = place(axis, x)
            base = i * stride
            lower = [(at + base, weight * (1.0 - upper)) for at, weight in corners]
            if upper > 0.0:
                lower += [(at + base + stride, weight * upper) for at, weight in corners]
            corners = lower
        flat = self._flat
        return sum([flat[at] * weight for at, weight in corners])


def place(axis: Sequence[float], x: float) -> tuple[int, float]:
    """Find the interval of an ascending axis nearest to `x`, and the place in it, from 0 to 1."""
    if x <= axis[0]:
        return 0, 0.0
    if x >= axis[-1]:
        return len(axis) - 1, 0.0
    i = bisect_right(axis, x) - 1
    return i, (x - axis[i]) / (axis[i + 1] - axis[i])


def make_grid(table: pd.DataFrame, columns: Sequence[str]) -> Grid | None:
    """Make the grid of most rows' `seconds` (`full_grid`). None if less than half of the rows are
    on it or an axis has a single value.
    """
    rows = full_grid(table[[*columns, "seconds"]], columns)
    axes = [np.unique(rows[column].to_numpy(float)) for column in columns]
    if len(rows) <= len(table) / 2 or min(len(axis) for axis in axes) < 2:
        return None
    ordered = rows.sort_values(list(columns)).seconds.to_numpy(float)
    return Grid(axes, ordered.reshape([len(axis) for axis in axes]))


def full_grid(rows: pd.DataFrame, columns: Sequence[str]) -> pd.DataFrame:
    """Drop the rows with the rarest values of `columns` until each combination of values exists."""
    while True:
        values = [rows[column].value_counts() for column in columns]
        expected = math.prod(len(counts) for counts in values)
        if len(rows) >= expected:
            return rows
        share = [counts * len(counts) / expected for counts in values]
        worst = min(range(len(columns)), key=lambda i: (share[i].min(), -len(share[i])))
        rows = rows[rows[columns[worst]] != share[worst].idxmin()]


class RatioGrid:
    """Ratios of measured to computed seconds at two sizes, linear in all logarithms; outside, and
    where an axis has no row for longer sizes, that of the nearest edge.
    """

    def __init__(self, ratios: pd.DataFrame) -> None:
        """`ratios` by the first size (rows) and the second (columns)."""
        filled = ratios.sort_index().sort_index(axis=1)
        filled = filled.ffill(axis=1).bfill(axis=1).ffill().bfill()
        axes = [np.log(axis.to_numpy(float)) for axis in filled.axes]
        self._logs = Grid(axes, np.log(filled.to_numpy(float)))

    def ratio(self, first: float, second: float) -> float:
        return math.exp(self._logs.at((math.log(first), math.log(second))))


def log_distance(one: Sequence[int], other: Sequence[int]) -> float:
    """Compute the distance of two shapes: the logarithms of their sizes' ratios, summed."""
    return sum(abs(math.log(a / b)) for a, b in zip(one, other, strict=True))


class Costs:
    """Non-negative costs of `features` [rows, n], fitted to relative errors of `seconds` [rows],
    times the remaining ratio by `sizes`, interpolated and constant beyond.
    """

    def __init__(self, features: Floats, sizes: Floats, seconds: Floats) -> None:
        self._costs = _fit_costs(features, seconds)
        ratios = pd.Series(seconds / (features @ self._costs)).groupby(sizes).mean()
        self._sizes, self._ratios = ratios.index.tolist(), ratios.tolist()

    def time(self, size: float, *features: float) -> float:
        return self._ratio(size) * sum(map(mul, self._costs, features))

    def _ratio(self, size: float) -> float:
        i = bisect_left(self._sizes, size)
        if i == 0 or i == len(self._sizes):
            return self._ratios[min(i, len(self._ratios) - 1)]
        weight = (size - self._sizes[i - 1]) / (self._sizes[i] - self._sizes[i - 1])
        return self._ratios[i - 1] + weight * (self._ratios[i] - self._ratios[i - 1])


def costs_error(features: Floats, sizes: Floats, seconds: Floats) -> float:
    """Compute the held-out error of `Costs`, as `curve_error` does."""

    def predict(kept: Rows, block: Rows) -> Floats:
        costs = Costs(features[kept], sizes[kept], seconds[kept])
        return np.array([costs.time(sizes[i], *features[i].tolist()) for i in block])

    return _held_out_error(seconds, predict)


def _fit_costs(features: Floats, seconds: Floats) -> list[float]:
    """Fit a non-negative cost of each feature by least squares of relative errors.

    A feature that depends linearly on earlier ones in this table (no row has a context, all decodes
    have the same) costs nothing.
    """
    from scipy.optimize import nnls  # takes 0.3 s, and most tables are grids

    scaled = features / seconds[:, None]
    scale = np.linalg.norm(scaled, axis=0)
    chosen: list[int] = []
    for i in range(features.shape[1]):
        if np.linalg.matrix_rank((scaled / scale)[:, [*chosen, i]], tol=1e-6) > len(chosen):
            chosen.append(i)
    costs = np.zeros(features.shape[1])
    costs[chosen] = nnls((scaled / scale)[:, chosen], np.ones(len(seconds)))[0] / scale[chosen]
    return costs.tolist()
