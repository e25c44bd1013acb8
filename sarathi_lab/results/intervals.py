"""Medians of repeated, paired measurements with intervals of known confidence.

A sample comes from one pair, such as the ratio of two policies' times on the same requests, run one
after the other, so that slow phases of the machine affect both. The interval of the median is
between two order statistics, for any distribution: of n independent samples the k-th smallest and
k-th largest enclose it with probability 1 - 2 P(X < k), X binomial of n and 1/2 (Thompson, 1936),
which is 75 % for the ends of 3 and 97 % for those of 6. Successive rounds may be correlated: with r
the autocorrelation of neighbours' ranks, n samples count as n (1 - r) / (1 + r).

A simulated value has draws instead: what it is with the cost model's constants drawn anew. They are
drawn once for all values of a table, so that the ratio of two values has the ratios of their draws,
in which shared errors cancel. What each of its shapes errs by alone moves it by itself. All squares
are added; where seeds were drawn, their spread is in the interval, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import pandas as pd
from numpy.typing import NDArray

T = TypeVar("T")
Floats = NDArray[np.float64]
LowAndHigh = tuple[float, float]  # ends of an interval, or what is below and above a value
LEVEL = 0.95
FEWEST_PAIRS = 6  # below, no interval of the median reaches LEVEL
DEVIATIONS = 1.96  # standard deviations of a normal error on either side within LEVEL
BAND = 0.02  # share up to which a ratio is neither a gain nor a loss
GAIN = "gain"
NEUTRAL = "neutral"
UNDECIDED = "undecided"
LOSS = "loss"
EFFECTS = (GAIN, NEUTRAL, UNDECIDED, LOSS)


class Ends(NamedTuple):
    """An interval and the probability that it encloses the median (`confidence`)."""

    low: float
    high: float
    confidence: float


@dataclass(frozen=True)
class Interval:
    """The median of samples with its interval.

    Attributes:
        median: of the samples.
        low: lower end of the interval of the median.
        high: upper end.
        confidence: probability that the interval encloses the median.
        q20: quantile of 20 % of the samples.
        q80: quantile of 80 %.
        num_pairs: number of samples, each of a pair.
        reason: not to use the median, None if there is none.
    """

    median: float
    low: float
    high: float
    confidence: float
    q20: float
    q80: float
    num_pairs: int
    reason: str | None = None


NOT_MEASURED = Interval(
    median=math.nan,
    low=math.nan,
    high=math.nan,
    confidence=math.nan,
    q20=math.nan,
    q80=math.nan,
    num_pairs=0,
    reason="could not be measured",
)


# By unit, what any value lies between, whatever its errors; values of other units have no bounds.
RANGES = {"share": (0.0, 1.0), "index": (0.0, 1.0)}


def effect(low: float, high: float) -> str:
    """Return what the whole interval of a ratio shows: `GAIN`, `LOSS`, or within `BAND` of one
    `NEUTRAL`; else, and where no interval is known, `UNDECIDED`.
    """
    least_neutral = 1 - BAND
    most_neutral = 1 + BAND
    if low > most_neutral:
        return GAIN
    if high < least_neutral:
        return LOSS
    if low >= least_neutral and high <= most_neutral:
        return NEUTRAL
    return UNDECIDED


def within_range(ends: Ends, unit: str) -> Ends:
    """Return the part of an interval in which a quantity of the unit can lie."""
    if unit not in RANGES:
        return ends
    lower_bound, upper_bound = RANGES[unit]
    low = max(ends.low, lower_bound)  # NaN stays, as the first of the two
    high = min(ends.high, upper_bound)
    return ends._replace(low=low, high=high)


class Resolution(Protocol):
    """What a value cannot be told from, as few values are possible or few cases were counted."""

    def widened(self, low: float, high: float) -> LowAndHigh:
        """Return an interval of such values with all that its ends cannot be told from."""

    def text_of(self, value: float) -> str:
        """Return a sample as it is recorded, with "<" or ">" before a bound."""

    def bound_of(self, samples: Sequence[float]) -> str | None:
        """Return what is known of the median of samples some of which are bounds, such as "< 4.5";
        None where the median is none.
        """


@dataclass(frozen=True)
class WithoutBounds:
    """A resolution of values none of which is a bound."""

    def widened(self, low: float, high: float) -> LowAndHigh:
        return low, high

    def text_of(self, value: float) -> str:
        return _six_digits(value)

    def bound_of(self, samples: Sequence[float]) -> str | None:
        return None


ANY_VALUE = WithoutBounds()  # known as finely as its samples show


@dataclass(frozen=True)
class Steps(WithoutBounds):
    """A search on a grid, each value of which is 1 + `precision` times the one before: what it
    finds, or a ratio of two such values, is known to a step.
    """

    precision: float

    def widened(self, low: float, high: float) -> LowAndHigh:
        step = 1 + self.precision
        a_step_below = low / step
        a_step_above = high * step
        return a_step_below, a_step_above


@dataclass(frozen=True)
class Choices(WithoutBounds):
    """The best of some `values`, which may as well lie at the next one."""

    values: tuple[float, ...]

    def widened(self, low: float, high: float) -> LowAndHigh:
        # Beyond the first and the last one nothing was tried: the interval ends there.
        below = [value for value in self.values if value < low]
        above = [value for value in self.values if value > high]
        next_below = max(below, default=low)
        next_above = min(above, default=high)
        return next_below, next_above


@dataclass(frozen=True)
class Tried:
    """A rate that is zero where the `lowest` one that was tried is too high, and the `highest` one
    where that is not: then it may be any higher one. Both are bounds. What lies between them was
    searched on a grid of `Steps`.
    """

    lowest: float
    highest: float
    precision: float

    def widened(self, low: float, high: float) -> LowAndHigh:
        grid = Steps(self.precision)
        a_step_below, a_step_above = grid.widened(low, high)
        if high == 0:
            return low, self.lowest
        if high >= self.highest:
            return a_step_below, math.inf
        return a_step_below, a_step_above

    def text_of(self, value: float) -> str:
        if value == 0:
            return f"<{_six_digits(self.lowest)}"
        if value >= self.highest:
            return f">{_six_digits(self.highest)}"
        return _six_digits(value)

    def bound_of(self, samples: Sequence[float]) -> str | None:
        at_most = []
        for value in samples:
            _, most = self._limits(value)
            at_most.append(most)
        least = float(np.median(samples))
        most = float(np.median(at_most))
        if math.isinf(most):
            return f"> {least:.3g}"
        if most > least:
            return f"< {most:.3g}"
        return None

    def _limits(self, value: float) -> LowAndHigh:
        """Return the least and the most that a sample may be."""
        if value == 0:
            return 0.0, self.lowest
        if value >= self.highest:
            return value, math.inf
        return value, value


@dataclass(frozen=True)
class Trials(WithoutBounds):
    """A share of so many cases: where none, or all, was counted, the share may differ by as much as
    leaves that a probability of 1 - `LEVEL` (Clopper and Pearson, 1934; about 3 / n).
    """

    number: int

    def widened(self, low: float, high: float) -> LowAndHigh:
        # None of n cases shows a share p with the probability (1 - p)^n, here 1 - LEVEL.
        share_of_others = (1 - LEVEL) ** (1 / self.number)
        unseen = 1 - share_of_others
        if high == 0:
            return low, unseen
        if low == 1:
            return 1 - unseen, high
        return low, high


def _six_digits(value: float) -> str:
    return f"{value:.6g}"


def number_in(sample: str) -> float:
    """Return the number of a recorded sample (`Resolution.text_of`): of a bound the end of what it
    leaves open, which is zero below and infinite above.
    """
    if sample.startswith("<"):
        return 0.0
    if sample.startswith(">"):
        return math.inf
    return float(sample)


def level_of(number: int) -> float:
    """Return the confidence that a page states of intervals from `number` samples.

    It is `LEVEL`, or what fewer samples than `FEWEST_PAIRS` allow: 75 % for 3.
    """
    # The range of all samples misses the median if all are below it, or all above.
    all_on_one_side = 2 / 2**number
    widest = max(0.0, 1 - all_on_one_side)
    return min(LEVEL, widest)


def ends_of_share(share: float, number: int) -> Ends:
    """Return the exact binomial interval (Clopper and Pearson, 1934) of a share of `number`
    independent cases.
    """
    from scipy.stats import beta  # takes a second, and most tables have no such share

    right = share * number
    wrong = number - right
    tail = (1 - LEVEL) / 2
    low = 0.0
    if right > 0:
        quantile = beta.ppf(tail, right, wrong + 1)
        low = float(quantile)
    high = 1.0
    if wrong > 0:
        quantile = beta.ppf(1 - tail, right + 1, wrong)
        high = float(quantile)
    return Ends(low, high, LEVEL)


def samples_for(at_once: int) -> int:
    """Return how many samples give `at_once` intervals that together hold with `LEVEL`."""
    # Bonferroni's bound: their errors may add up, and each is 2 / 2^n.
    allowed_error = (1 - LEVEL) / at_once
    return math.ceil(math.log2(2 / allowed_error))


def ends_of_median(
    samples: Sequence[float],
    *,
    level: float = LEVEL,
    is_series: bool = True,
) -> Ends:
    """Return the narrowest interval of the median that reaches `level`, else the widest one.

    Samples are in the order of measurement if `is_series`, else independent (seeds). They may be
    positive infinity (a cost below the noise).
    """
    ordered = sorted(map(float, samples))
    number = len(samples)
    num_independent = number
    if is_series:
        num_independent = _num_independent(samples)
    # From the middle outwards: the first interval that is wide enough is the narrowest.
    k = max(number // 2, 1)
    confidence = _confidence(k, number, num_independent)
    while k > 1 and confidence < level:
        k -= 1
        confidence = _confidence(k, number, num_independent)
    low = ordered[k - 1]
    high = ordered[-k]
    return Ends(low, high, confidence)


def ends_of_draws(
    value: float,
    draws: Sequence[float],
    moved: Iterable[float] = (),
    mirrored: Iterable[float] | None = None,
) -> Ends:
    """Return the interval of a predicted value, `DEVIATIONS` of its errors on either side.

    Errors multiply: they are taken in the logarithm, where all values have one. Their confidence is
    NaN, as the cost model states the errors that were drawn. The ends are NaN for a value that is
    exact, without draws or equal in all of them.

    Args:
        value: The predicted value.
        draws: What it is in each draw of the errors that shapes share.
        moved: What it is where one shape alone has the error of its own.
        mirrored: What it is where each shape errs as much to the other side; None if that moves
            the value as far, as is so of all but a maximum, minimum or the like.
    """
    drawn = np.asarray(draws, dtype=float)
    of_shapes = np.fromiter(moved, dtype=float)
    sides = 1
    if mirrored is not None:
        of_other_side = np.fromiter(mirrored, dtype=float)
        of_shapes = np.append(of_shapes, of_other_side)
        sides = 2
    everywhere = np.append(drawn, of_shapes)
    has_nan = np.isnan(everywhere).any()
    is_exact = (everywhere == value).all()
    if has_nan or is_exact:
        return Ends(math.nan, math.nan, math.nan)
    if value > 0 and (everywhere > 0).all():
        errors = np.log(drawn / value)
        errors_of_shapes = np.log(of_shapes / value)
        deviation = _deviation(errors, errors_of_shapes, sides)
        factor = math.exp(DEVIATIONS * deviation)
        return Ends(
            low=value / factor,
            high=value * factor,
            confidence=math.nan,
        )
    # A value that is zero or negative, such as a difference, has no logarithm.
    errors = drawn - value
    errors_of_shapes = of_shapes - value
    half = DEVIATIONS * _deviation(errors, errors_of_shapes, sides)
    return Ends(
        low=value - half,
        high=value + half,
        confidence=math.nan,
    )


def draws_of_median(
    samples: Sequence[float],
    drawn: Sequence[Sequence[float]],
) -> tuple[float, ...]:
    """Return the median of `samples` in each draw, whose samples have the same seeds.

    It is moved by the median change of a sample, so that the spread over seeds does not count
    twice: as a factor where all samples are positive, else as a difference.
    """
    median = float(np.nanmedian(samples))
    undrawn = np.asarray(samples, dtype=float)
    medians = []
    for samples_of_draw in drawn:
        values = np.asarray(samples_of_draw, dtype=float)
        are_positive = (undrawn > 0) & (values > 0)
        if are_positive.all():
            factor = float(np.nanmedian(values / undrawn))
            medians.append(median * factor)
        else:
            difference = float(np.nanmedian(values - undrawn))
            medians.append(median + difference)
    return tuple(medians)


def wider(value: float, of_seeds: Interval | Ends, of_draws: Ends) -> Ends:
    """Return the interval of a value with two spreads that are independent: over seeds, and over
    draws. Its confidence is that over seeds; where one has no interval it is the other's.
    """
    if math.isnan(of_draws.low):
        return Ends(of_seeds.low, of_seeds.high, of_seeds.confidence)
    if math.isnan(of_seeds.low):
        return of_draws._replace(confidence=of_seeds.confidence)
    below_by_seeds, above_by_seeds = _distances(value, of_seeds)
    below_by_draws, above_by_draws = _distances(value, of_draws)
    # Independent errors: their squares add up.
    low = value - math.hypot(below_by_seeds, below_by_draws)
    high = value + math.hypot(above_by_seeds, above_by_draws)
    return Ends(low, high, of_seeds.confidence)


def without(value: float, of_both: Ends, of_draws: Ends) -> Ends:
    """Return the interval that `wider` had widened by `of_draws` to `of_both`: over seeds, with the
    resolution of the value.
    """
    if math.isnan(of_draws.low):
        return of_both
    below, above = _distances(value, of_both)
    below_by_draws, above_by_draws = _distances(value, of_draws)
    square_below = below**2 - below_by_draws**2
    square_above = above**2 - above_by_draws**2
    # Both ends were rounded when they were recorded: the difference may come out below zero.
    below_by_seeds = math.sqrt(max(square_below, 0.0))
    above_by_seeds = math.sqrt(max(square_above, 0.0))
    low = value - below_by_seeds
    high = value + above_by_seeds
    return Ends(low, high, of_both.confidence)


def _distances(value: float, ends: Interval | Ends) -> LowAndHigh:
    """Return how far the ends of an interval are below and above a value."""
    below = value - ends.low
    above = ends.high - value
    return below, above


def farther(value: float, end: float, times: float) -> float:
    """Return an end that is so many times as far from a value, of -1 on its other side: in the
    logarithm where both have one.
    """
    if value > 0 and end > 0:
        factor = end / value
        return value * factor**times
    difference = end - value
    return value + times * difference


def _deviation(of_draws: Floats, of_shapes: Floats, sides: int) -> float:
    """Return the standard deviation by the differences from a value that was not drawn: the mean
    square over draws, in each of which all constants err, and the square of each shape's, in the
    mean over the `sides` to which it was moved.
    """
    shared = 0.0
    if len(of_draws):
        shared = float(np.mean(of_draws**2))
    squares = float(np.sum(of_shapes**2))
    own = squares / sides
    variance = shared + own
    return math.sqrt(variance)


def _confidence(k: int, number: int, num_independent: int) -> float:
    """Return the confidence of the k-th smallest and largest of `number` correlated samples."""
    # Of fewer independent samples, as many lie beyond the ends as their share is.
    most_beyond = (k - 1) * num_independent // number
    num_outcomes = 0  # of a fair coin's tosses, with at most so many heads
    for num_beyond in range(most_beyond + 1):
        num_outcomes += math.comb(num_independent, num_beyond)
    error_on_a_side = num_outcomes / 2**num_independent
    return max(0.0, 1 - 2 * error_on_a_side)


def _num_independent(samples: Sequence[float]) -> int:
    """Return the effective number of samples by the autocorrelation of neighbours' ranks."""
    number = len(samples)
    ranks = pd.Series(samples).rank()  # equal samples share their mean rank
    mean_rank = (number + 1) / 2
    deviations = (ranks - mean_rank).to_numpy()
    later = deviations[1:]
    earlier = deviations[:-1]
    variance = float(deviations @ deviations) or 1.0  # 0 where all samples are equal
    covariance = float(later @ earlier)
    correlation = covariance / variance
    chance = 0.5 / math.sqrt(number)
    if correlation <= chance:
        correlation = 0.0
    effective = number * (1 - correlation) / (1 + correlation)
    rounded_down = math.floor(effective + 1e-9)  # a whole number may come out just below itself
    return max(1, rounded_down)


def median_of(
    samples: Sequence[float],
    max_spread: float,
    *,
    of: float | None = None,
    is_series: bool = True,
) -> Interval:
    """Return the median of paired samples with its interval.

    Args:
        samples: One of each pair; NaN where it could not be measured.
        max_spread: Most half of the interval over the median (or over `of`) that is accepted.
        of: What the spread is related to, for differences that may be zero.
        is_series: See `ends_of_median`.

    Returns:
        The interval, with a reason if pairs are too few or differ too much.
    """
    measured = [sample for sample in samples if not math.isnan(sample)]
    if not measured:
        return NOT_MEASURED
    ends = ends_of_median(measured, is_series=is_series)
    median = float(np.median(measured))
    # A sample each, not a mean of two: a bound (infinity) would spoil that.
    q20, q80 = np.quantile(measured, (0.2, 0.8), method="inverted_cdf")
    base = of
    if base is None:
        base = abs(median)
    spread = math.inf  # of a difference that is zero
    if base:
        half_width = (ends.high - ends.low) / 2
        spread = half_width / base
    num_pairs = len(measured)
    reason = None
    if num_pairs < FEWEST_PAIRS:
        reason = f"{num_pairs} of {FEWEST_PAIRS} pairs"
    elif not math.isfinite(ends.high):
        reason = "below the noise"
    elif spread > max_spread:
        reason = f"spread {100 * spread:.3g}%, more than {max_spread:.0%}"
    return Interval(
        median=median,
        low=ends.low,
        high=ends.high,
        confidence=ends.confidence,
        q20=float(q20),
        q80=float(q80),
        num_pairs=num_pairs,
        reason=reason,
    )


def coarse_to_fine(items: Sequence[T]) -> list[T]:
    """Order items by ends and middles first, so that a cut list covers the whole range."""
    if not items:
        return []
    number = len(items)
    order: dict[int, None] = {}  # indices, each once
    step = 2 ** number.bit_length()
    while step >= 1:
        order |= dict.fromkeys(range(0, number, step))
        order[number - 1] = None
        step //= 2
    return [items[index] for index in order]


def summary(samples: Sequence[float], unit: str) -> dict[str, object]:
    """Return the columns of a measured value: median, unit, quantiles, number of repetitions."""
    return {
        "value": float(np.quantile(samples, 0.5)),
        "unit": unit,
        "q20": float(np.quantile(samples, 0.2)),
        "q80": float(np.quantile(samples, 0.8)),
        "repetitions": len(samples),
    }
