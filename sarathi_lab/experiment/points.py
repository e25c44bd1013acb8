"""Points of experiments, the parts that make them on a bench, and the tables that they leave."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Concatenate, Literal, NamedTuple, ParamSpec

import pandas as pd

from sarathi_lab.results.intervals import median_of
from sarathi_lab.results.load import POINT

Kind = Literal["value", "share", "curve"]
OF_SAMPLES = ["confidence", "q20", "q80", "samples"]


@dataclass(frozen=True)
class Estimate:
    """A value, and the share by which it may be off (from shapes held out of a model's fits; NaN
    without such shapes).
    """

    value: float
    error: float = 0.0

    def __truediv__(self, other: Estimate) -> Estimate:
        """Return the ratio of two estimates with independent errors; infinite over zero."""
        ratio = self.value / other.value if other.value else math.inf
        return Estimate(ratio, math.hypot(self.error, other.error))

    def __mul__(self, factor: float) -> Estimate:
        return Estimate(self.value * factor, self.error)


class Point(NamedTuple):
    """A point of a figure: its line, its panel, where it is, and its value.

    A "share" of a total may be zero, other values are above zero unless noise exceeds them; of a
    "curve" over time the first round is kept. `labels` are further columns.
    """

    panel: str
    series: str
    x: float
    y: Estimate = Estimate(0.0)
    unit: str = "ratio"
    kind: Kind = "value"
    labels: tuple[tuple[str, str], ...] = ()

    @property
    def position(self) -> Point:
        """The point without its value."""
        return self._replace(x=float(self.x), y=Estimate(0.0))

    @property
    def total(self) -> float | None:
        """What the spread of its value is a share of, if not of the value."""
        return 1.0 if self.kind == "share" else None


@dataclass(frozen=True)
class Part:
    """Points that are computed together, once a round: what several of them need is timed once.

    Attributes:
        make: Yields them; its arguments are a bench, and `arguments` and `sizes`.
        seed: Of the requests of the first round, after the bench; None where none are drawn.
    """

    make: Callable[..., Iterable[Point]]
    arguments: Sequence[Any] = ()
    sizes: Mapping[str, Any] = field(default_factory=dict)
    seed: int | None = None

    def points(self, bench: Any, number: int = 0) -> list[Point]:
        """Return the points of the round of a `number`."""
        if self.seed is not None:
            return list(self.make(bench, self.seed + number, **self.sizes))
        bench.start(number)
        return list(self.make(bench, *self.arguments, **self.sizes))


Parts = Iterator[Part]
Samples = dict[Point, list[float]]  # by `Point.position`
Arguments = ParamSpec("Arguments")


def part(
    make: Callable[Concatenate[Any, Arguments], Iterable[Point]],
    *arguments: Arguments.args,
    **sizes: Arguments.kwargs,
) -> Part:
    """Return the part whose points `make` yields, called with a bench and then the arguments."""
    return Part(make, arguments, sizes)


def keep(samples: Samples, points: Iterable[Point]) -> None:
    """Add a round's values. A time that comes out at or below zero is below the noise: a ratio to
    it is infinite.
    """
    for point in points:
        value = point.y.value
        if value <= 0 and point.kind != "share":
            value = math.inf
        samples.setdefault(point.position, []).append(value)


def table_of(
    figure: str, samples: Samples, max_spread: float, *, is_series: bool = True
) -> pd.DataFrame:
    """Return the points in the columns of `load`: medians and intervals, or the reason why there is
    no number. Of a curve over time the first round is kept. `is_series`: see `ends_of_median`.
    """
    rows = []
    columns = dict.fromkeys([*POINT, *OF_SAMPLES])
    for point, values in samples.items():
        interval = median_of(values, max_spread, of=point.total, is_series=is_series)
        row = {**point._asdict(), **vars(interval), "figure": figure}
        row["y"] = math.nan if interval.reason else interval.median
        if point.kind == "curve":
            row["y"] = values[0]
            row["reason"] = None
        row["samples"] = " ".join(f"{value:.6g}" for value in values)
        labels = dict(point.labels)
        rows.append(row | labels)
        columns |= dict.fromkeys(labels)
    return pd.DataFrame(rows, columns=list(columns))


def predicted_table(figure: str, points_of_parts: Iterable[Sequence[Point]]) -> pd.DataFrame:
    """Return predicted points as they are recorded, with the cost model's stated error."""
    rows = []
    for point in chain.from_iterable(points_of_parts):
        half = abs(point.y.value) * point.y.error
        row = point._asdict()
        row["x"] = float(point.x)
        row["y"] = point.y.value
        row["low"] = point.y.value - half
        row["high"] = point.y.value + half
        rows.append(row)
    table = pd.DataFrame(rows, columns=list({**dict.fromkeys(Point._fields), "low": 0, "high": 0}))
    return table.assign(figure=figure, num_pairs=0, reason=None)[POINT]
