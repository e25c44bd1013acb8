"""The test of a monotone trend of few values by Mann and Kendall, and Sen's slope.

They are those of scipy.stats, whose import takes half a second of every command: as long as three
runs that task=advise simulates.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]


def rising_pvalue(values: ArrayLike) -> float:
    """Return the one-sided p-value of a rise of values in their order (Mann, 1945).

    That is Kendall's tau (1938) of values and their positions: exact, or by the normal distribution
    where some are equal (Kendall, 1975).

    Returns:
        A probability; NaN for fewer than two values, or if all are equal.
    """
    differences = _differences(values)
    signs = np.sign(differences)
    if not signs.any():
        return math.nan
    if signs.all():
        is_inversion = signs < 0
        num_inversions = int(is_inversion.sum())
        number = np.size(values)
        return _share_of_orders(number, num_inversions)
    deviation = math.sqrt(_variance(values))
    score = float(signs.sum()) / deviation
    # The upper tail of the normal distribution, by the standard library's function.
    distance = score / math.sqrt(2)
    return 0.5 * math.erfc(distance)


def median_slope(x: ArrayLike, y: ArrayLike) -> float:
    """Return the median slope between all pairs of points that differ in `x` (Sen, 1968)."""
    run = _differences(x)
    rise = _differences(y)
    is_ahead = run != 0
    slopes = rise[is_ahead] / run[is_ahead]
    slope = np.median(slopes)
    return float(slope)


def _differences(values: ArrayLike) -> Floats:
    """Return the differences of all pairs of values, the later less the earlier."""
    array: Floats = np.asarray(values, dtype=float)
    number = len(array)
    # Indices above the diagonal: each pair once, the earlier value first.
    earlier, later = np.triu_indices(number, k=1)
    return array[later] - array[earlier]


def _share_of_orders(number: int, most_inversions: int) -> float:
    """Return the share of orders of `number` values with at most so many inversions."""
    shares = np.ones(1)  # by the number of inversions
    for size in range(2, number + 1):
        # The next value is less than 0 to size - 1 of those before it, each as likely.
        share_of_value = 1 / size
        shares_of_value = np.full(size, share_of_value)
        shares = np.convolve(shares, shares_of_value)
    end = most_inversions + 1
    share = shares[:end].sum()
    return float(share)


def _variance(values: ArrayLike) -> float:
    """Return the variance of rising less falling pairs, where some values are equal."""
    _, sizes = np.unique(values, return_counts=True)
    number = np.size(values)
    variance = _variance_of_distinct(number)
    for size in sizes.tolist():
        variance -= _variance_of_distinct(size)
    return variance


def _variance_of_distinct(number: int) -> float:
    """Return the variance of rising less falling pairs of values that all differ."""
    num_pairs = math.comb(number, 2)
    return num_pairs * (2 * number + 5) / 9
