"""Kendall's test and Sen's slope are those of scipy.stats."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import kendalltau, t, theilslopes

from sarathi_lab.results.kendall import median_slope, rising_pvalue
from sarathi_lab.results.load_trend import CHANCE, NUM_BATCHES


@pytest.mark.parametrize("number", [2, 3, 10, 40])
def test_it_gives_scipys_values(number):
    draw = np.random.default_rng(number)
    for _ in range(10):
        x = draw.normal(size=number)
        y = draw.normal(size=number)
        expected = kendalltau(range(number), y, method="exact", alternative="greater")
        assert rising_pvalue(y) == pytest.approx(expected.pvalue, abs=1e-12)
        assert median_slope(x, y) == pytest.approx(theilslopes(y, x).slope)


@pytest.mark.parametrize("number", [10, 40])
def test_it_gives_scipys_values_where_some_are_equal(number):
    draw = np.random.default_rng(number)
    for _ in range(10):
        x = np.round(draw.normal(size=number))
        y = np.round(draw.normal(size=number))
        expected = kendalltau(range(number), y, alternative="greater")
        assert rising_pvalue(y) == pytest.approx(expected.pvalue, abs=1e-12)
        assert median_slope(x, y) == pytest.approx(theilslopes(y, x).slope)


def test_a_rise_without_exception_is_as_rare_as_one_order_of_all():
    assert rising_pvalue([1, 2, 3, 4, 5]) == pytest.approx(1 / math.factorial(5))


def test_equal_values_have_no_trend():
    assert math.isnan(rising_pvalue([3.0, 3.0, 3.0]))


def test_a_server_at_its_limit_is_called_overloaded_in_a_twentieth_of_its_runs():
    assert pytest.approx(t.ppf(0.95, NUM_BATCHES - 1), abs=1e-3) == CHANCE
