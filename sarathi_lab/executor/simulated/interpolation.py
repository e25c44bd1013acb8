"""Functions through measured times: along one size, on a grid of several, or fitted to any rows."""

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
Rows = NDArray[np.int64]  # their numbers
HELD_OUT_BLOCKS = 10  # of neighbours left out together, as a table is often dense where times step


def curve(sizes: Floats, seconds: Floats) -> Callable[[int], float]:
    """Seconds by size, linear between the ascending `sizes`, constant below the first.

    Past the last one a token costs what it does in the cheapest row of the upper half, so a large
    batch pays for no half-empty tile, and never less than the last row.
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
    """Mean relative error of rows left out in blocks and interpolated from the others; the first
    and the last row are not left out: a table is not made to be extended.
    """
    return _held_out_error(
        seconds, lambda kept, block: np.interp(sizes[block], sizes[kept], seconds[kept])
    )


def _held_out_error(seconds: Floats, predicted: Callable[[Rows, Rows], Floats]) -> float:
    """That of what is `predicted` of blocks of inner rows by those that are kept."""
    inner = np.arange(1, len(seconds) - 1)
    errors: list[float] = []
    for block in np.array_split(inner, min(HELD_OUT_BLOCKS, len(inner))):
        kept = np.delete(np.arange(len(seconds)), block)
        errors += np.abs(predicted(kept, block) / seconds[block] - 1).tolist()
    return float(np.mean(errors)) if errors else 0.0


class Grid:
    """Seconds on a full grid, linear in each of its axes; plain floats, as numpy is slow at one
    point. A point outside is moved to the nearest edge: `inside` tells which.
    """

    def __init__(self, axes: Sequence[Floats], seconds: Floats) -> None:
        self._axes = [axis.tolist() for axis in axes]
        self._strides = [int(np.prod(seconds.shape[i + 1 :])) for i in range(seconds.ndim)]
        self._flat = seconds.ravel().tolist()
        lines = ((axis, np.moveaxis(seconds, i, -1)) for i, axis in enumerate(axes))
        self.error = neighbours_error(lines)

    def inside(self, point: Sequence[float]) -> list[float]:
        return [min(max(x, axis[0]), axis[-1]) for x, axis in zip(point, self._axes, strict=True)]

    def time(self, point: Sequence[float]) -> float:
        """Seconds at a point inside."""
        corners = [(0, 1.0)]  # offset into the flat table, and weight
        for x, axis, stride in zip(point, self._axes, self._strides, strict=True):
            i = min(max(bisect_right(axis, x) - 1, 0), len(axis) - 2)
            upper = (x - axis[i]) / (axis[i + 1] - axis[i])
            base = i * stride
            if upper <= 0.0:
                corners = [(at + base, weight) for at, weight in corners]
            elif upper >= 1.0:
                corners = [(at + base + stride, weight) for at, weight in corners]
            else:
                lower = 1.0 - upper
                corners = [(at + base, weight * lower) for at, weight in corners] + [
                    (at + base + stride, weight * upper) for at, weight in corners
                ]
        flat = self._flat
        return sum([flat[at] * weight for at, weight in corners])


def grid_of(table: pd.DataFrame, columns: Sequence[str]) -> Grid | None:
    """The grid of most rows (`full_grid`), of their `seconds`. None if less than half of the rows
    are on it or an axis has a single value.
    """
    rows = full_grid(table[[*columns, "seconds"]], columns)
    axes = [np.unique(rows[column].to_numpy(float)) for column in columns]
    if len(rows) <= len(table) / 2 or min(len(axis) for axis in axes) < 2:
        return None
    ordered = rows.sort_values(list(columns)).seconds.to_numpy(float)
    return Grid(axes, ordered.reshape([len(axis) for axis in axes]))


def full_grid(rows: pd.DataFrame, columns: Sequence[str]) -> pd.DataFrame:
    """`rows` without those whose value of one of `columns` few others share, until each combination
    of values is there.
    """
    while True:
        values = [rows[column].value_counts() for column in columns]
        expected = math.prod(len(counts) for counts in values)
        if len(rows) >= expected:
            return rows
        share = [counts * len(counts) / expected for counts in values]
        worst = min(range(len(columns)), key=lambda i: (share[i].min(), -len(share[i])))
        rows = rows[rows[columns[worst]] != share[worst].idxmin()]


class RatioGrid:
    """Measured over computed seconds at two sizes, linear in all logarithms; outside, and where the
    longer sizes of an axis have no row, that of the nearest edge.
    """

    def __init__(self, ratios: pd.DataFrame) -> None:
        """`ratios` by the first size (rows) and the second (columns)."""
        filled = ratios.sort_index().sort_index(axis=1)
        filled = filled.ffill(axis=1).bfill(axis=1).ffill().bfill()
        self._axes = [np.log(axis.to_numpy(float)).tolist() for axis in filled.axes]
        self._logs = np.log(filled.to_numpy(float)).tolist()

    def ratio(self, first: float, second: float) -> float:
        (i, upper), (j, right) = (
            _place(axis, math.log(size))
            for axis, size in zip(self._axes, (first, second), strict=True)
        )
        rows = self._logs[i], self._logs[min(i + 1, len(self._logs) - 1)]
        low, high = (row[j] + right * (row[min(j + 1, len(row) - 1)] - row[j]) for row in rows)
        return math.exp(low + upper * (high - low))


def _place(axis: Sequence[float], x: float) -> tuple[int, float]:
    """The interval of an ascending axis that `x` is in, or nearest to, and where, from 0 to 1."""
    i = min(max(bisect_right(axis, x) - 1, 0), max(len(axis) - 2, 0))
    if len(axis) == 1:
        return 0, 0.0
    return i, min(max((x - axis[i]) / (axis[i + 1] - axis[i]), 0.0), 1.0)


def apart(one: Sequence[int], other: Sequence[int]) -> float:
    """The distance of two shapes: the logarithms of their sizes' ratios, summed."""
    return sum(abs(math.log(a / b)) for a, b in zip(one, other, strict=True))


def neighbours_error(lines: Iterable[tuple[Floats, Floats]]) -> float:
    """Mean relative error of inner seconds [..., n] interpolated from their neighbours along an
    axis [n], of all lines with some.
    """
    errors = []
    for axis, along in lines:
        if len(axis) > 2:
            weight = (axis[1:-1] - axis[:-2]) / (axis[2:] - axis[:-2])
            predicted = along[..., :-2] * (1 - weight) + along[..., 2:] * weight
            errors.append(np.abs(predicted / along[..., 1:-1] - 1).ravel())
    return float(np.concatenate(errors).mean()) if errors else 0.0


class Costs:
    """Non-negative costs of `features` [rows, n], fitted to relative errors of `seconds` [rows],
    times what their sum leaves of the rows' times, interpolated along `sizes`, constant beyond.
    """

    def __init__(self, features: Floats, sizes: Floats, seconds: Floats) -> None:
        self._costs = _fitted(features, seconds)
        left = pd.Series(seconds / (features @ self._costs)).groupby(sizes).mean()
        self._sizes, self._left = left.index.tolist(), left.tolist()

    def time(self, size: float, *features: float) -> float:
        return self._correction(size) * sum(map(mul, self._costs, features))

    def _correction(self, size: float) -> float:
        """Plain floats: numpy is slower."""
        i = bisect_left(self._sizes, size)
        if i == 0 or i == len(self._sizes):
            return self._left[min(i, len(self._left) - 1)]
        weight = (size - self._sizes[i - 1]) / (self._sizes[i] - self._sizes[i - 1])
        return self._left[i - 1] + weight * (self._left[i] - self._left[i - 1])


def costs_error(features: Floats, sizes: Floats, seconds: Floats) -> float:
    """As `curve_error`, of `Costs`."""

    def predicted(kept: Rows, block: Rows) -> Floats:
        costs = Costs(features[kept], sizes[kept], seconds[kept])
        return np.array([costs.time(sizes[i], *features[i].tolist()) for i in block])

    return _held_out_error(seconds, predicted)


def _fitted(features: Floats, seconds: Floats) -> list[float]:
    """Non-negative cost of each feature, by least squares of relative errors.

    A feature that repeats earlier ones in this table (no row has a context, all decodes have the
    same) costs nothing.
    """
    scaled = features / seconds[:, None]
    scale = np.linalg.norm(scaled, axis=0)
    chosen: list[int] = []
    for i in range(features.shape[1]):
        if np.linalg.matrix_rank((scaled / scale)[:, [*chosen, i]], tol=1e-6) > len(chosen):
            chosen.append(i)
    costs = np.zeros(features.shape[1])
    while chosen:
        found = np.linalg.lstsq(scaled[:, chosen], np.ones(len(seconds)), rcond=None)[0]
        if (found >= 0).all():
            costs[chosen] = found
            break
        chosen.pop(int(np.argmin(found * scale[chosen])))
    return costs.tolist()
