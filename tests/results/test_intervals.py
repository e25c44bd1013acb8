"""Medians and bootstrap intervals against hand-worked and known cases, and what is not to be
believed.
"""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest

from sarathi_lab.results.intervals import bootstrap, median_of


def test_a_median_and_quantiles_by_hand():
    found = median_of([1.0, 2.0, 3.0, 4.0, 10.0], max_spread=10)
    assert (found.median, found.q20, found.q80, found.num_pairs, found.reason) == (
        3.0,
        1.0,
        4.0,
        5,
        None,
    )


def test_three_samples_have_the_interval_of_all_their_resamples():
    """Of 27 draws of (1, 2, 4) 7 have the median 1 and 7 the median 4: more than 2.5 % on either
    side.
    """
    medians = [sorted(drawn)[1] for drawn in product((1.0, 2.0, 4.0), repeat=3)]
    assert (medians.count(1.0), medians.count(4.0)) == (7, 7)
    assert bootstrap([1.0, 2.0, 4.0]) == (1.0, 4.0)
    assert bootstrap([1.0, 2.0, 4.0], level=0.4) == (
        2.0,
        2.0,
    )  # 30 % on either side, more than 7 of 27


def test_the_interval_covers_the_true_median_as_often_as_it_says():
    random = np.random.default_rng(7)
    hits = 0
    for _ in range(200):
        low, high = bootstrap(list(random.normal(5.0, 1.0, 21)))
        hits += low <= 5.0 <= high
    assert 0.90 <= hits / 200 <= 0.99


def test_more_samples_narrow_the_interval_as_theory_has_it():
    """The standard error of a normal median is 1.253 sigma / sqrt(n)."""
    random = np.random.default_rng(3)
    widths = []
    for _ in range(40):
        low, high = bootstrap(list(random.normal(0.0, 1.0, 101)))
        widths.append(high - low)
    assert np.mean(widths) == pytest.approx(2 * 1.96 * 1.253 / math.sqrt(101), rel=0.15)


def test_the_same_samples_give_the_same_interval():
    samples = list(np.random.default_rng(0).normal(1.0, 0.1, 9))
    assert median_of(samples, 1.0) == median_of(samples, 1.0)
    assert bootstrap(samples, seed=1) == bootstrap(samples, seed=1)


@pytest.mark.parametrize(
    ("samples", "reason"),
    [
        ([1.0, 1.1, 0.9], None),
        ([1.0, 1.1], "2 of 3 pairs"),
        ([1.0, 2.0, 4.0], "spread 75%, more than 20%"),
        ([1.0, math.inf, math.inf], "below the noise"),
        ([math.nan, math.nan], "could not be measured"),
        ([], "could not be measured"),
        ([0.0, 0.0, 0.0], "spread inf%, more than 20%"),
    ],
)
def test_what_is_too_wide_says_why(samples, reason):
    assert median_of(samples, max_spread=0.2).reason == reason


def test_pairs_that_could_not_be_measured_do_not_count():
    found = median_of([2.0, math.nan, 2.0, 2.0], max_spread=0.1)
    assert (found.median, found.num_pairs, found.reason) == (2.0, 3, None)
