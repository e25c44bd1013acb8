"""Rounds of samples until a time is over, and the table of medians and intervals that they make."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import NamedTuple

import pandas as pd

from sarathi_lab.experiment.clock import Point
from sarathi_lab.results.intervals import FEWEST_PAIRS, median_of
from sarathi_lab.results.load import POINT

MOST_ROUNDS = 15
QUANTILES = ["q20", "q80"]


class Key(NamedTuple):
    """What tells a point from others, and how its samples are judged."""

    panel: str
    series: str
    x: float
    unit: str = "ratio"
    kind: str = "value"
    labels: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, point: Point) -> Key:
        """The point's own."""
        return cls(point.panel, point.series, float(point.x), point.unit, point.kind, point.labels)


Samples = dict[Key, list[float]]


def rounds(
    make: Callable[[int], Iterable[Point]],
    *,
    seconds: float = math.inf,
    fewest: int = FEWEST_PAIRS,
    most: int = MOST_ROUNDS,
    advance: Callable[[float], None] = lambda seconds: None,
) -> Samples:
    """Samples of every point, one a round: for `seconds`, but at least `fewest` and at most `most`
    rounds.

    `make` takes the number of the round; `advance` is called with the seconds that a point or a
    round took.
    """
    samples: defaultdict[Key, list[float]] = defaultdict(list)
    began, longest = time.monotonic(), 0.0
    for number in range(most):
        start = time.monotonic()
        if number >= fewest and start - began + longest > seconds:
            break
        for point in make(number):
            samples[Key.of(point)].append(_price(point))
        took = time.monotonic() - start
        longest = max(longest, took)
        advance(took)
    return dict(samples)


def _price(point: Point) -> float:
    """A time that comes out at or below zero is below the noise: a ratio to it is infinite."""
    is_noise = point.y.value <= 0 and point.kind != "share"
    return math.inf if is_noise else point.y.value


def table_of(figure: str, samples: Samples, max_spread: float, seed: int) -> pd.DataFrame:
    """The points in the columns of `load`: medians and intervals, or the reason why there is no
    number. A curve over time is the first round's own.
    """
    rows: list[dict[str, object]] = []
    for key, values in samples.items():
        found = median_of(values, max_spread, of=1.0 if key.kind == "share" else None, seed=seed)
        y, reason = (found.median if found.reason is None else math.nan), found.reason
        if key.kind == "curve":
            y, reason = values[0], None
        interval = {"low": found.low, "high": found.high, "num_pairs": found.num_pairs}
        point = {"figure": figure, "panel": key.panel, "series": key.series, "x": key.x, "y": y}
        ends = {"unit": key.unit, "reason": reason, "q20": found.q20, "q80": found.q80}
        rows.append({**point, **interval, **ends, **dict(key.labels)})
    return pd.DataFrame(rows, columns=[*POINT, *QUANTILES, *_labels(samples)])


def _labels(samples: Samples) -> list[str]:
    return list(dict.fromkeys(name for key in samples for name, _ in key.labels))
