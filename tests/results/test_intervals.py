"""Intervals of medians: by hand, and how often they enclose what they are of; and what is not to be
believed.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from sarathi_lab.results.intervals import (
    FEWEST_PAIRS,
    LEVEL,
    Choices,
    Ends,
    Steps,
    Trials,
    Tried,
    draws_of_median,
    effect,
    ends_of_draws,
    ends_of_median,
    ends_of_share,
    median_of,
    number_in,
    wider,
    within_range,
)

TRIED = Tried(0.5, 4.0, 0.25)


def test_a_median_and_quantiles_by_hand():
    found = median_of([1.0, 2.0, 3.0, 4.0, 10.0, 3.5, 2.5], max_spread=10, is_series=False)
    assert (found.median, found.low, found.high) == (3.0, 1.0, 10.0)
    assert (found.q20, found.q80, found.num_pairs, found.reason) == (2.0, 4.0, 7, None)


@pytest.mark.parametrize(
    ("number", "k", "confidence"),
    [  # 1 - 2 P(X < k) of a binomial X of n throws of a coin
        (3, 1, 0.75),
        (5, 1, 0.9375),
        (6, 1, 0.96875),
        (8, 1, 1 - 2 / 256),  # the second ends would be 93 %
        (9, 2, 1 - 2 * (1 + 9) / 512),
        (15, 4, 1 - 2 * (1 + 15 + 105 + 455) / 32768),
    ],
)
def test_an_interval_is_between_order_statistics_of_known_confidence(number, k, confidence):
    samples = np.random.default_rng(number).permutation(np.arange(1.0, number + 1))
    assert ends_of_median(list(samples), is_series=False) == (k, number + 1 - k, confidence)
    assert (confidence >= LEVEL) == (number >= FEWEST_PAIRS)


def covered(number: int, alike: float, repetitions: int = 400) -> tuple[float, float]:
    """How often the interval of `number` rounds of autocorrelation `alike` encloses the median, and
    the confidence that it states, in the mean.
    """
    random = np.random.default_rng(1000 * number + int(100 * alike))
    fresh = random.normal(size=(repetitions, number))
    rounds = np.empty_like(fresh)
    rounds[:, 0] = fresh[:, 0]
    for i in range(1, number):
        rounds[:, i] = alike * rounds[:, i - 1] + math.sqrt(1 - alike**2) * fresh[:, i]
    found = [ends_of_median(np.exp(row).tolist()) for row in rounds]  # a skewed distribution
    hits = np.mean([ends.low <= 1.0 <= ends.high for ends in found])
    return float(hits), float(np.mean([ends.confidence for ends in found]))


@pytest.mark.parametrize("number", [3, 6, 15])
@pytest.mark.parametrize("alike", [0.0, 0.6])
def test_an_interval_encloses_the_true_median_as_often_as_it_says(number, alike):
    """Where rounds are alike, too, as far as so few of them can show it: of three or four none."""
    hits, stated = covered(number, alike)
    slack = 0.04 if alike == 0 or number > 5 else 0.30
    assert hits >= stated - slack


def test_rounds_that_are_alike_count_as_fewer():
    drifting = [1.0, 1.01, 1.02, 1.03, 1.04, 1.05, 1.06, 1.07, 1.08, 1.09, 1.1, 1.11]
    shuffled = [drifting[i] for i in (5, 0, 9, 3, 11, 1, 7, 4, 10, 2, 8, 6)]
    assert ends_of_median(drifting)[:2] == (1.0, 1.11)
    assert ends_of_median(drifting).confidence < 0.8
    assert ends_of_median(drifting, is_series=False) == ends_of_median(shuffled)
    assert ends_of_median(shuffled) == (1.02, 1.09, pytest.approx(0.9614, abs=1e-4))
    assert ends_of_median([1.0] * 6) == (1.0, 1.0, 0.96875)  # what is computed is no series


@pytest.mark.parametrize(
    ("samples", "reason"),
    [
        ([1.0, 1.1, 0.9, 1.05, 0.95, 1.0], None),
        ([1.0, 1.1, 0.9], "3 of 6 pairs"),
        ([1.0, 2.0, 4.0, 1.5, 3.0, 2.5], "spread 66.7%, more than 20%"),
        ([1.0, math.inf, math.inf, 1.0, 1.0, math.inf], "below the noise"),
        ([math.nan, math.nan], "could not be measured"),
        ([], "could not be measured"),
        ([0.0] * 6, "spread inf%, more than 20%"),
    ],
)
def test_what_is_too_wide_says_why(samples, reason):
    assert median_of(samples, max_spread=0.2).reason == reason


def test_pairs_that_could_not_be_measured_do_not_count():
    found = median_of([2.0, math.nan, *[2.0] * 5], max_spread=0.1)
    assert (found.median, found.num_pairs, found.reason) == (2.0, 6, None)


def test_an_interval_of_draws_is_symmetric_where_errors_multiply():
    low, high, confidence = ends_of_draws(2.0, [1.0, 4.0])
    assert low * high == pytest.approx(4.0)
    assert math.isnan(confidence)
    low, high, _ = ends_of_draws(-1.0, [-3.0, 1.0])  # a loss that may be a gain
    assert (low, high) == pytest.approx((-1 - 1.96 * 2, -1 + 1.96 * 2))
    assert math.isnan(ends_of_draws(1.0, []).low)
    assert math.isnan(ends_of_draws(1.0, [1.0, 1.0]).low)  # a value over itself
    _, high, _ = ends_of_draws(1.0, [0.5, 2.0], [2.0, 2.0])  # and two shapes' own errors
    assert math.log(high) == pytest.approx(1.96 * math.sqrt(3) * math.log(2))
    assert ends_of_draws(1.0, [1.0, 1.0], [2.0]).high == pytest.approx(2**1.96)


def test_seeds_and_draws_widen_an_interval_together():
    seeds = Ends(0.7, 1.4, 0.97)
    both = wider(1.0, seeds, Ends(0.6, 1.3, math.nan))
    assert both == pytest.approx((0.5, 1.5, 0.97))
    unknown = Ends(math.nan, math.nan, math.nan)
    assert wider(1.0, seeds, unknown) == seeds
    assert wider(1.0, unknown, seeds)[:2] == seeds[:2]


def test_what_is_on_a_grid_or_counted_is_known_no_better_than_that():
    assert Steps(0.05).widened(2.1, 2.1) == pytest.approx((2.0, 2.205))
    assert Choices((256, 512, 1024)).widened(512, 512) == (256, 1024)
    assert Choices((256, 512, 1024)).widened(256, 1024) == (256, 1024)
    assert TRIED.widened(0.0, 0.0) == (0.0, 0.5)
    assert TRIED.widened(1.0, 2.0) == (0.8, 2.5)
    assert TRIED.widened(1.0, 4.0) == (0.8, math.inf)
    _, unseen = Trials(100).widened(0.0, 0.0)
    assert (1 - unseen) ** 100 == pytest.approx(1 - LEVEL)
    assert Trials(100).widened(1.0, 1.0) == pytest.approx((1 - unseen, 1.0))
    assert Trials(100).widened(0.0, 0.1) == (0.0, 0.1)


@pytest.mark.parametrize(
    ("samples", "bound"),
    [
        ([0.0, 0.0, 1.0], "< 0.5"),
        ([0.0, 0.0, 1.0, 1.5], "< 0.75"),  # half of what is between 0.5 and 1
        ([4.0, 4.0, 1.0], "> 4"),
        ([0.0, 1.0, 4.0], None),  # neither bound is the median
    ],
)
def test_the_median_of_rates_that_are_bounds_is_a_bound(samples, bound):
    assert TRIED.bound_of(samples) == bound


def test_a_bound_is_recorded_as_one():
    texts = [TRIED.text_of(value) for value in (0.0, 1.25, 4.0)]
    assert texts == ["<0.5", "1.25", ">4"]
    assert [number_in(text) for text in texts] == [0.0, 1.25, math.inf]


def test_the_interval_of_a_share_is_never_of_width_zero():
    assert ends_of_share(1.0, 10)[:2] == pytest.approx((0.025**0.1, 1.0))
    assert ends_of_share(0.0, 10)[:2] == pytest.approx((0.0, 1 - 0.025**0.1))
    low, high, _ = ends_of_share(0.5, 10)
    assert low == pytest.approx(1 - high)


def test_a_share_lies_between_none_and_all_whatever_its_error():
    assert within_range(Ends(-0.1, 1.2, 0.95), "share") == (0.0, 1.0, 0.95)
    assert within_range(Ends(-0.1, 1.2, 0.95), "ratio") == (-0.1, 1.2, 0.95)
    assert math.isnan(within_range(Ends(math.nan, math.nan, math.nan), "share").low)


def test_a_draw_of_a_median_counts_no_seed_twice():
    seeds = [1.0, 2.0, 9.0]
    assert draws_of_median(seeds, [[1.1, 2.2, 9.9]]) == pytest.approx((2.2,))
    assert draws_of_median([0.0, 1.0, 2.0], [[1.0, 2.0, 3.0]]) == (2.0,)


@pytest.mark.parametrize(
    ("low", "high", "shown"),
    [
        (1.03, 1.2, "gain"),
        (1.01, 1.2, "undecided"),
        (0.99, 1.01, "neutral"),
        (0.9, 0.99, "undecided"),
        (0.9, 0.97, "loss"),
        (math.nan, math.nan, "undecided"),
    ],
)
def test_a_ratio_has_an_effect_that_its_whole_interval_shows(low, high, shown):
    assert effect(low, high) == shown
