"""The trend of a handful of means, against SciPy's."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import kendalltau, theilslopes

from sarathi_lab.results.mann_kendall import sen_slope, upward_probability

POINTS = st.lists(
    st.tuples(st.integers(0, 12), st.floats(0, 9).map(lambda value: round(value, 1))),
    min_size=3,
    max_size=12,
)


@settings(max_examples=60)
@given(points=POINTS)
def test_upward_probability_is_scipys(points: list[tuple[int, float]]) -> None:
    times, values = zip(*sorted(points), strict=True)
    expected = kendalltau(times, values, alternative="greater").pvalue
    if expected != expected:  # all times or all values are equal
        expected = 1.0
    assert upward_probability(times, values) == pytest.approx(expected, rel=1e-9)


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # in SciPy's interval of it
@settings(max_examples=30)
@given(points=POINTS.filter(lambda points: len({time for time, _ in points}) > 1))
def test_sen_slope_is_scipys(points: list[tuple[int, float]]) -> None:
    times, values = zip(*sorted(points), strict=True)
    assert sen_slope(times, values) == pytest.approx(theilslopes(values, times).slope)


def test_few_values_can_not_show_a_trend_and_many_can() -> None:
    assert upward_probability(range(4), [1.0, 2.0, 3.0, 4.0]) == pytest.approx(1 / 24)
    many = [float(value) for value in range(40)]
    assert upward_probability(many, many) < 1e-9
    assert upward_probability(many, many[::-1]) > 0.99
