"""Kendall's test and Sen's slope are those of scipy.stats."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import kendalltau, theilslopes

from sarathi_lab.results.kendall import median_slope, rising_pvalue


@pytest.mark.parametrize("number", [2, 3, 10, 33, 34, 40])
@pytest.mark.parametrize("is_tied", [False, True])
def test_it_gives_scipys_values(number, is_tied):
    draw = np.random.default_rng(number)
    for _ in range(10):
        x = np.sort(draw.normal(size=number))
        y = draw.normal(size=number)
        if is_tied:
            x = np.round(2 * x)
            y = np.round(2 * y)
        expected = kendalltau(x, y, alternative="greater").pvalue
        assert rising_pvalue(x, y) == pytest.approx(expected, abs=1e-12, nan_ok=True)
        if len(set(x)) > 1:
            assert median_slope(x, y) == pytest.approx(theilslopes(y, x).slope)


def test_a_rise_without_exception_is_as_rare_as_one_order_of_all():
    assert rising_pvalue(range(5), [1, 2, 3, 4, 5]) == pytest.approx(1 / math.factorial(5))
