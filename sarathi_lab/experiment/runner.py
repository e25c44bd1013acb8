"""Measures cases in rounds until a time is over, and makes tables of points."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

import pandas as pd

from sarathi_lab.experiment.cases import Part, Point
from sarathi_lab.results.intervals import FEWEST_PAIRS, LEVEL, coarse_to_fine, median_of
from sarathi_lab.results.load import POINT

MOST_ROUNDS = 15
OF_SAMPLES = ["confidence", "q20", "q80", "samples"]

Samples = dict[Point, list[float]]  # by `Point.place`


def measure(
    parts: Sequence[Part],
    bench: Any,
    *,
    seconds: float = math.inf,
    most: int = MOST_ROUNDS,
    narrow: float | None = None,
    is_cut: bool = False,
    advance: Callable[[float], None] = lambda seconds: None,
) -> Samples:
    """Return samples of the points of all parts, one a round: for `seconds` and `most` rounds, but
    `FEWEST_PAIRS` rounds of them at least. `advance` is called with the seconds that a part took.

    After the fewest rounds a part is left alone once the intervals of all its points are within
    `narrow` of the median, so that the time that is left goes to the others. With `is_cut` ends and
    middles come first, and parts for whose fewest rounds the time is too short have no samples.
    """
    chosen = coarse_to_fine(parts) if is_cut else list(parts)
    samples: Samples = {}
    left, began, longest = list[Part](), time.monotonic(), dict.fromkeys(map(id, parts), 0.0)
    for number in range(most):
        for place, part in enumerate(list(chosen)):
            start = time.monotonic()
            if is_cut and number == 0 and place and start - began > seconds / FEWEST_PAIRS:
                left = chosen[place:]
                del chosen[place:]
                break
            if number >= FEWEST_PAIRS and start - began + longest[id(part)] > seconds:
                chosen.clear()
                break
            points = part.points(bench, number)
            keep(samples, points)
            took = time.monotonic() - start
            longest[id(part)] = max(longest[id(part)], took)
            advance(took)
            if number + 1 >= FEWEST_PAIRS and narrow and _are_narrow(samples, points, narrow):
                chosen.remove(part)
    return samples | {place: [] for part in left for place in part.places}


def keep(samples: Samples, points: Iterable[Point]) -> None:
    """Add a round's values. A time that comes out at or below zero is below the noise: a ratio to
    it is infinite.
    """
    for point in points:
        is_noise = point.y.value <= 0 and point.kind != "share"
        samples.setdefault(point.place, []).append(math.inf if is_noise else point.y.value)


def _are_narrow(samples: Samples, points: Iterable[Point], max_spread: float) -> bool:
    """Whether the intervals of all points reach `LEVEL` within `max_spread`, or never will."""
    intervals = [
        median_of(samples[point.place], max_spread, of=point.whole)
        for point in points
        if point.kind != "curve"
    ]
    return all(
        not one.num_pairs or (one.reason is None and one.confidence >= LEVEL) for one in intervals
    )


def table_of(
    figure: str, samples: Samples, max_spread: float, *, is_series: bool = True
) -> pd.DataFrame:
    """Return the points in the columns of `load`: medians and intervals, or the reason why there is
    no number. Of a curve over time the first round is kept. `is_series`: see `ends_of_median`.
    """
    rows, columns = [], dict.fromkeys([*POINT, *OF_SAMPLES])
    for point, values in samples.items():
        interval = median_of(values, max_spread, of=point.whole, is_series=is_series)
        y, reason = (math.nan if interval.reason else interval.median), interval.reason
        if point.kind == "curve":
            y, reason = values[0], None
        kept = " ".join(f"{value:.6g}" for value in values)
        labels = dict(point.labels)
        row = {**point._asdict(), **vars(interval), "figure": figure, "y": y, "reason": reason}
        rows.append({**row, "samples": kept, **labels})
        columns |= dict.fromkeys(labels)
    return pd.DataFrame(rows, columns=list(columns))


def predicted_table(figure: str, parts: Iterable[Sequence[Point]]) -> pd.DataFrame:
    """Return predicted points as they are recorded, with the cost model's stated error."""
    rows = [
        (figure, p.panel, p.series, float(p.x), p.y.value, p.unit, abs(p.y.value) * p.y.error)
        for p in chain.from_iterable(parts)
    ]
    columns = ["figure", "panel", "series", "x", "y", "unit", "off"]
    table = pd.DataFrame(rows, columns=columns)
    table = table.assign(low=table.y - table.off, high=table.y + table.off, num_pairs=0)
    return table.assign(reason=None)[POINT]
