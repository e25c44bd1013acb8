"""Matrix products of any shape by the rows of a table."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import pairwise

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from sarathi_lab.executor.simulated.interpolation import apart, full_grid, neighbours_error

Floats = NDArray[np.float64]
SHAPE = ["in_features", "out_features"]
# Seconds of a product by tokens, in_features and out_features.
Formula = Callable[[int, int, int], float]


class ProductTable:
    """Seconds of products [tokens, in] x [in, out], through `rows` of one type of elements (columns
    tokens, in_features, out_features, seconds), by number of tokens.

    Times are linear in tokens, and their logarithms in those of in_features and out_features
    between the shapes of the table's grid. A shape outside takes the nearest one's time, as does a
    number of tokens, scaled by `formula`.
    """

    def __init__(self, rows: pd.DataFrame, formula: Formula) -> None:
        self._formula = formula
        self._curves: dict[tuple[int, int], tuple[Floats, Floats]] = {}
        for _, own in rows.sort_values("tokens").groupby(SHAPE):
            shape = int(own.in_features.iloc[0]), int(own.out_features.iloc[0])
            self._curves[shape] = own.tokens.to_numpy(float), own.seconds.to_numpy(float)
        grid = full_grid(rows[SHAPE].drop_duplicates(), SHAPE)
        self._axes = [sorted(set(grid[column].astype(int))) for column in SHAPE]
        self.error = neighbours_error(self._curves.values())

    def has(self, in_features: int, out_features: int) -> bool:
        """Whether the table has this very shape."""
        return (in_features, out_features) in self._curves

    def curve(self, in_features: int, out_features: int) -> Callable[[int], float]:
        """Seconds of one shape by tokens."""
        shape = (in_features, out_features)
        corners = {shape: 1.0} if self.has(*shape) else self._corners(shape)
        if corners is None:
            return self._scaled(shape)

        @cache
        def time(tokens: int) -> float:
            logs = (share * math.log(self._at(tokens, near)) for near, share in corners.items())
            return math.exp(sum(logs))

        return time

    def _corners(self, shape: tuple[int, int]) -> dict[tuple[int, int], float] | None:
        """The shapes of the grid around `shape`, and their shares; None outside."""
        sides = [_sides(axis, size) for axis, size in zip(self._axes, shape, strict=True)]
        if not all(sides):
            return None
        ins, outs = sides
        return {(i, o): a * b for i, a in ins.items() for o, b in outs.items() if a * b}

    def _scaled(self, shape: tuple[int, int]) -> Callable[[int], float]:
        """The nearest shape's time: in the grid's box the nearest edge, else the nearest row's."""
        edge = tuple(
            min(max(size, axis[0]), axis[-1]) for size, axis in zip(shape, self._axes, strict=True)
        )
        if len(self._axes[0]) > 1 and len(self._axes[1]) > 1:
            near = (edge[0], edge[1])
        else:
            near = min(self._curves, key=partial(apart, shape))
        at_near = self.curve(*near)

        @cache
        def time(tokens: int) -> float:
            return at_near(tokens) * self._formula(tokens, *shape) / self._formula(tokens, *near)

        return time

    def _at(self, tokens: int, shape: tuple[int, int]) -> float:
        """Seconds of a shape of the table."""
        sizes, seconds = self._curves[shape]
        inside = min(max(tokens, int(sizes[0])), int(sizes[-1]))
        time = float(np.interp(inside, sizes, seconds))
        if inside == tokens:
            return time
        return time * self._formula(tokens, *shape) / self._formula(inside, *shape)


def _sides(axis: Sequence[int], size: int) -> dict[int, float]:
    """The two neighbours of `size` on an axis with their shares by logarithm; none outside."""
    if size in axis:
        return {size: 1.0}
    if not axis or not axis[0] < size < axis[-1]:
        return {}
    i = bisect_right(axis, size)
    low, high = list(pairwise(axis))[i - 1]
    upper = math.log(size / low) / math.log(high / low)
    return {low: 1 - upper, high: upper}
