"""Mann and Kendall's test for an upward trend, and Sen's slope, of a handful of means.

SciPy has both, but its import takes a second, longer than most simulated runs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import combinations

MOST_EXACT = 33  # values; of more the normal distribution is as good


def upward_probability(times: Sequence[float], values: Sequence[float]) -> float:
    """Return the one-sided p-value of values that rise with time (Mann, 1945; Kendall, 1975).

    It is exact for distinct times and values, and by the normal distribution where some are equal,
    or there are more than `MOST_EXACT`. Pairs of equal times count as no trend.
    """
    score = 0
    for (time, value), (later, later_value) in combinations(zip(times, values, strict=True), 2):
        score += _sign(later - time) * _sign(later_value - value)
    number = len(values)
    are_distinct = len(set(times)) == len(set(values)) == number
    if not are_distinct or number > MOST_EXACT:
        return _normal_probability(score, times, values)
    num_pairs = number * (number - 1) // 2
    num_inversions = (num_pairs - score) // 2
    counts = _inversion_counts(number)
    return sum(counts[: num_inversions + 1]) / math.factorial(number)


def sen_slope(times: Sequence[float], values: Sequence[float]) -> float:
    """Return the median slope between pairs of values at distinct times (Sen, 1968)."""
    slopes = []
    for (time, value), (later, later_value) in combinations(zip(times, values, strict=True), 2):
        if later != time:
            slopes.append((later_value - value) / (later - time))
    slopes.sort()
    middle = len(slopes) // 2
    if len(slopes) % 2:
        return slopes[middle]
    return (slopes[middle - 1] + slopes[middle]) / 2


def _sign(value: float) -> int:
    return (value > 0) - (value < 0)


def _normal_probability(score: int, times: Sequence[float], values: Sequence[float]) -> float:
    """Return the probability of a score at least as high in random order, ties corrected for
    (Kendall, Rank Correlation Methods, 1970, chapter 4).
    """
    if len(set(times)) == 1 or len(set(values)) == 1:
        return 1.0
    number = len(values)
    num_ordered = number * (number - 1)
    of_times = [count for count in Counter(times).values() if count > 1]
    of_values = [count for count in Counter(values).values() if count > 1]
    variance = _weight(number) - sum(map(_weight, of_times)) - sum(map(_weight, of_values))
    variance += _pairs(of_times) * _pairs(of_values) / (2 * num_ordered)
    if number > 2:
        triples = _triples(of_times) * _triples(of_values)
        variance += triples / (9 * num_ordered * (number - 2))
    return 0.5 * math.erfc(score / math.sqrt(2 * variance))


def _weight(count: int) -> float:
    """Return the variance of the score of so many distinct values in random order."""
    return count * (count - 1) * (2 * count + 5) / 18


def _pairs(counts: Sequence[int]) -> int:
    return sum(count * (count - 1) for count in counts)


def _triples(counts: Sequence[int]) -> int:
    return sum(count * (count - 1) * (count - 2) for count in counts)


def _inversion_counts(number: int) -> list[int]:
    """Return how many orders of `number` values have 0, 1, ... inversions."""
    counts = [1]
    for size in range(2, number + 1):
        # The next value stands behind 0 to size - 1 smaller ones.
        longer = [0] * (len(counts) + size - 1)
        for num_inversions, count in enumerate(counts):
            for added in range(size):
                longer[num_inversions + added] += count
        counts = longer
    return counts
