"""Kendall's test of a monotone trend of few values, and Sen's slope.

They are those of scipy.stats, whose import takes half a second of every command: as long as three
runs that task=advise simulates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
EXACT_UP_TO = 33  # values without ties, from which the normal distribution is taken


def rising_pvalue(x: Sequence[float] | Floats, y: Sequence[float] | Floats) -> float:
    """Return the one-sided p-value of Kendall's tau (1938) for values `y` that rise with `x`; NaN
    for fewer than two values, or if all of one side are equal.
    """
    signs_x = _signs(x)
    signs_y = _signs(y)
    num_pairs = len(signs_x)
    num_tied_x = int(np.count_nonzero(signs_x == 0))
    num_tied_y = int(np.count_nonzero(signs_y == 0))
    if num_pairs in (num_tied_x, num_tied_y):
        return math.nan
    products = signs_x * signs_y
    num_discordant = int(np.count_nonzero(products < 0))
    is_tied = num_tied_x > 0 or num_tied_y > 0
    number = len(x)
    num_fewest = min(num_discordant, num_pairs - num_discordant)
    if not is_tied and (number <= EXACT_UP_TO or num_fewest <= 1):
        return _exact(number, num_discordant)
    deviation = math.sqrt(_variance(x, y))
    return 0.5 * math.erfc(float(products.sum()) / deviation / math.sqrt(2))


def median_slope(x: Sequence[float] | Floats, y: Sequence[float] | Floats) -> float:
    """Return the median slope between all pairs of points that differ in `x` (Sen, 1968)."""
    run = _differences(x)
    rise = _differences(y)
    is_ahead = run != 0
    return float(np.median(rise[is_ahead] / run[is_ahead]))


def _differences(values: Sequence[float] | Floats) -> Floats:
    """Return the differences of all pairs of values, the later less the earlier."""
    array = np.asarray(values, dtype=float)
    earlier, later = np.triu_indices(len(array), k=1)
    return array[later] - array[earlier]


def _signs(values: Sequence[float] | Floats) -> Floats:
    return np.sign(_differences(values))


def _exact(number: int, num_discordant: int) -> float:
    """Return the share of orders of `number` values with at most `num_discordant` inversions."""
    # Exact integers: the k-th value adds 0 to k - 1 inversions to those of the values before it.
    orders = [1]
    for size in range(2, number + 1):
        longer = [0] * (len(orders) + size - 1)
        for inversions, count in enumerate(orders):
            for added in range(size):
                longer[inversions + added] += count
        orders = longer
    return sum(orders[: num_discordant + 1]) / math.factorial(number)


def _variance(x: Sequence[float] | Floats, y: Sequence[float] | Floats) -> float:
    """Return the variance of concordant less discordant pairs, with ties (Kendall, 1970)."""
    number = len(x)
    tied_x = _tied(x)
    tied_y = _tied(y)
    pairs = number * (number - 1)
    variance = float(pairs * (2 * number + 5))
    for tied in (tied_x, tied_y):
        variance -= float((tied * (tied - 1) * (2 * tied + 5)).sum())
    variance /= 18
    pairs_x = float((tied_x * (tied_x - 1)).sum())
    pairs_y = float((tied_y * (tied_y - 1)).sum())
    variance += pairs_x * pairs_y / (2 * pairs)
    if number > 2:
        triples_x = float((tied_x * (tied_x - 1) * (tied_x - 2)).sum())
        triples_y = float((tied_y * (tied_y - 1) * (tied_y - 2)).sum())
        variance += triples_x * triples_y / (9 * pairs * (number - 2))
    return variance


def _tied(values: Sequence[float] | Floats) -> Floats:
    """Return how many values are equal, of each group of such."""
    _, counts = np.unique(np.asarray(values, dtype=float), return_counts=True)
    return counts.astype(float)
