"""Rounds of samples until a time is over, and the table of medians and intervals that they make."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pandas as pd

from sarathi_lab.experiment.cases import Point, Round
from sarathi_lab.results.intervals import FEWEST_PAIRS, LEVEL, median_of
from sarathi_lab.results.load import POINT

MOST_ROUNDS = 15
OF_SAMPLES = ["confidence", "q20", "q80", "samples"]

Samples = dict[Point, list[float]]  # by `Point.place`


def rounds(
    cases: Sequence[Round],
    bench: Any,
    *,
    seconds: float = math.inf,
    advance: Callable[[float], None] = lambda seconds: None,
) -> Samples:
    """Return samples of every point, one a round: for `seconds`, but of `FEWEST_PAIRS` of `cases`
    at least. `advance` is called with the seconds that a round took.
    """
    samples: Samples = {}
    began, longest = time.monotonic(), 0.0
    for number, case in enumerate(cases):
        start = time.monotonic()
        if number >= FEWEST_PAIRS and start - began + longest > seconds:
            break
        keep(samples, case.points(bench))
        took = time.monotonic() - start
        longest = max(longest, took)
        advance(took)
    return samples


def keep(samples: Samples, points: Iterable[Point]) -> None:
    """Add a round's values. A time that comes out at or below zero is below the noise: a ratio to
    it is infinite.
    """
    for point in points:
        is_noise = point.y.value <= 0 and point.kind != "share"
        own = samples.setdefault(point.place, [])
        own.append(math.inf if is_noise else point.y.value)


def are_narrow(samples: Samples, points: Iterable[Point], max_spread: float) -> bool:
    """Whether the intervals of all points reach `LEVEL` within `max_spread`, or never will."""
    found = [
        median_of(samples[point.place], max_spread, of=_whole(point))
        for point in points
        if point.kind != "curve"
    ]
    return all(
        not own.num_pairs or (own.reason is None and own.confidence >= LEVEL) for own in found
    )


def table_of(
    figure: str, samples: Samples, max_spread: float, *, is_series: bool = True
) -> pd.DataFrame:
    """The points in the columns of `load`: medians and intervals, or the reason why there is no
    number. A curve over time is the first round's own. `is_series`: see `ends_of_median`.
    """
    rows, columns = [], dict.fromkeys([*POINT, *OF_SAMPLES])
    for point, values in samples.items():
        found = median_of(values, max_spread, of=_whole(point), is_series=is_series)
        y, reason = (found.median if found.reason is None else math.nan), found.reason
        if point.kind == "curve":
            y, reason = values[0], None
        kept = " ".join(f"{value:.6g}" for value in values)
        own, labels = {"figure": figure, "y": y, "reason": reason}, dict(point.labels)
        rows.append({**point._asdict(), **vars(found), **own, "samples": kept, **labels})
        columns |= dict.fromkeys(labels)
    return pd.DataFrame(rows, columns=list(columns))


def _whole(point: Point) -> float | None:
    """What the spread of a point is a share of, if not its own value."""
    return 1.0 if point.kind == "share" else None
