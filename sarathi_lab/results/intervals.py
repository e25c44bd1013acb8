"""Statistics of repeated, paired measurements: medians, quantiles, bootstrap intervals, and when
not to believe them.

A sample is what one pair gave, such as the ratio of two policies' times on the same requests, run
one after the other: what slows the machine for a while slows both. The interval is the percentile
bootstrap of the median (Efron, 1979).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

T = TypeVar("T")
LEVEL = 0.95
RESAMPLES = 2000
FEWEST_PAIRS = 3  # below, an interval says nothing


@dataclass(frozen=True)
class Interval:
    """The median of `num_pairs` samples, their 20 % and 80 % quantiles, and the `LEVEL` interval of
    the median.

    `reason` says why it is not to be used, None if it is.
    """

    median: float
    low: float
    high: float
    q20: float
    q80: float
    num_pairs: int
    reason: str | None = None

    def spread(self, of: float | None = None) -> float:
        """Half the interval over the median, or over `of`; infinite if an end is."""
        whole = abs(self.median) if of is None else of
        if not math.isfinite(self.high) or not whole:
            return math.inf
        return (self.high - self.low) / 2 / whole


def bootstrap(
    samples: Sequence[float], *, level: float = LEVEL, seed: int = 0
) -> tuple[float, float]:
    """Ends of the interval of the median, by `RESAMPLES` draws of as many samples with replacement.

    Samples may be positive infinity (a price below the noise); then an end may be, too.
    """
    values = np.asarray(samples, dtype=float)
    drawn = values[np.random.default_rng(seed).integers(0, len(values), (RESAMPLES, len(values)))]
    tail = (1 - level) / 2
    low, high = np.quantile(np.median(drawn, axis=1), (tail, 1 - tail), method="inverted_cdf")
    return float(low), float(high)


def median_of(
    samples: Sequence[float], max_spread: float, *, of: float | None = None, seed: int = 0
) -> Interval:
    """The median of paired samples with its interval; with a reason if the pairs are too few or too
    far apart.

    `max_spread` is the largest half interval over the median (or over `of`, for differences that
    may be nothing) that still counts as a measurement. Samples that are not a number are pairs that
    could not be measured.
    """
    known = [sample for sample in samples if not math.isnan(sample)]
    if not known:
        nan = math.nan
        return Interval(nan, nan, nan, nan, nan, 0, "could not be measured")
    low, high = bootstrap(known, seed=seed)
    q20, q80 = (float(end) for end in np.quantile(known, (0.2, 0.8), method="inverted_cdf"))
    found = Interval(float(np.median(known)), low, high, q20, q80, len(known))
    return replace(found, reason=_reason(found, max_spread, of))


def _reason(found: Interval, max_spread: float, of: float | None) -> str | None:
    if found.num_pairs < FEWEST_PAIRS:
        return f"{found.num_pairs} of {FEWEST_PAIRS} pairs"
    if not math.isfinite(found.high):
        return "below the noise"
    if (spread := found.spread(of)) > max_spread:
        return f"spread {spread:.0%}, more than {max_spread:.0%}"
    return None


def coarse_to_fine(items: Sequence[T]) -> list[T]:
    """The same items, ends and middles first, so that a cut list is spread over all."""
    steps = (2**i for i in range(len(items).bit_length(), -1, -1))
    indices = range(len(items))
    order = dict.fromkeys(index for step in steps for index in (*indices[::step], *indices[-1:]))
    return [items[index] for index in order]


def summary(samples: Sequence[float], unit: str) -> dict[str, object]:
    """The columns of every measured value: median, unit, quantiles, number of repetitions."""
    value, q20, q80 = (float(np.quantile(samples, share)) for share in (0.5, 0.2, 0.8))
    return {"value": value, "unit": unit, "q20": q20, "q80": q80, "repetitions": len(samples)}


def spread(samples: Sequence[float]) -> float:
    """Half the range of the samples over their median; not a number for one sample."""
    if len(samples) < 2:
        return float("nan")
    return (max(samples) - min(samples)) / 2 / float(np.median(samples))
