"""Points of experiments, the parts that make them on a bench, and the tables that they leave."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Concatenate, Literal, NamedTuple, ParamSpec, TypeVar

import numpy as np
import pandas as pd

from sarathi_lab.executor.simulated.drawn_times import Values
from sarathi_lab.results.intervals import draws_of_median, ends_of_draws, median_of, wider
from sarathi_lab.results.load import POINT

Kind = Literal["value", "share", "curve"]
OF_SAMPLES = ["confidence", "q20", "q80", "samples"]


@dataclass(frozen=True)
class Estimate:
    """A value, and what it is in each draw of the cost model's constants (`DrawnTimes`).

    Draws have the same order everywhere, so that errors which two values share cancel in their
    ratio. A value that was measured, or is exact, has none.
    """

    value: float
    draws: tuple[float, ...] = ()

    @classmethod
    def of(cls, values: float | Values) -> Estimate:
        """Return the estimate of a value followed by its draws, or of a value alone."""
        value, *draws = np.atleast_1d(values).tolist()
        return cls(value, tuple(draws))

    @property
    def values(self) -> Values:
        """The value and its draws."""
        return np.array([self.value, *self.draws])

    def __truediv__(self, other: Estimate) -> Estimate:
        """Return the ratio of two estimates; infinite over zero."""
        with np.errstate(divide="ignore", invalid="ignore"):
            ratios = self.values / other.values
        if other.value == 0:
            ratios = np.full_like(ratios, math.inf)
        return Estimate.of(ratios)

    def __add__(self, other: Estimate) -> Estimate:
        return Estimate.of(self.values + other.values)

    def __sub__(self, other: Estimate) -> Estimate:
        return Estimate.of(self.values - other.values)

    def __mul__(self, factor: float) -> Estimate:
        return Estimate.of(self.values * factor)


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
        draw: Of the cost model's constants, in a simulation under load (`executor.draw`).
    """

    make: Callable[..., Iterable[Point]]
    arguments: Sequence[object] = ()
    sizes: Mapping[str, object] = field(default_factory=dict)
    seed: int | None = None
    draw: int = 0

    def points(self, bench: object, number: int = 0) -> list[Point]:
        """Return the points of the round of a `number`, of the kind of bench that `make` takes."""
        if self.seed is None:
            points = self.make(bench, *self.arguments, **self.sizes)
        else:
            points = self.make(bench, self.seed + number, **self.sizes)
        return list(points)


Parts = Iterator[Part]
Samples = dict[Point, list[float]]  # by `Point.position`
Arguments = ParamSpec("Arguments")
AnyBench = TypeVar("AnyBench")


def part(
    make: Callable[Concatenate[AnyBench, Arguments], Iterable[Point]],
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
            value = math.inf  # which no finite median hides
        samples.setdefault(point.position, []).append(value)


def table_of(
    figure: str,
    samples: Samples,
    max_spread: float,
    *,
    is_series: bool = True,
    drawn: Sequence[Samples] = (),
) -> pd.DataFrame:
    """Return the points in the columns of `load`: medians and intervals, or the reason why there is
    no number. Of a curve over time the first round is kept, which has no interval.

    Args:
        figure: The experiment's name.
        samples: Of each point, a value a round.
        max_spread: See `median_of`.
        is_series: See `ends_of_median`.
        drawn: The same rounds in draws of the cost model's constants.
    """
    rows = []
    columns = dict.fromkeys([*POINT, *OF_SAMPLES])
    if drawn:
        columns["draws"] = None
    for point, values in samples.items():
        interval = median_of(values, max_spread, of=point.total, is_series=is_series)
        row = {**point._asdict(), **vars(interval), "figure": figure}
        if drawn:
            draws = _draws_of(point, values, drawn)
            ends = wider(interval.median, interval, ends_of_draws(interval.median, draws))
            row |= {"low": ends.low, "high": ends.high, "draws": in_text(draws)}
        row["y"] = math.nan if interval.reason else interval.median
        if point.kind == "curve":
            # Rounds differ in their x, too: no median has a meaning.
            row |= {"y": values[0], "reason": None, "low": math.nan, "high": math.nan}
        row["samples"] = " ".join(f"{value:.6g}" for value in values)
        labels = dict(point.labels)
        rows.append(row | labels)
        columns |= dict.fromkeys(labels)
    return pd.DataFrame(rows, columns=list(columns))


def _draws_of(point: Point, values: Sequence[float], drawn: Sequence[Samples]) -> tuple[float, ...]:
    """Return what the median of `values` is in each draw; none of a point that is not in all."""
    if point.kind == "curve":
        return ()  # its x is a time, which every draw changes
    values_by_draw = [of_draw.get(point, []) for of_draw in drawn]
    if any(len(of_draw) != len(values) for of_draw in values_by_draw):
        return ()
    return draws_of_median(values, values_by_draw)


def predicted_table(figure: str, points_of_parts: Iterable[Sequence[Point]]) -> pd.DataFrame:
    """Return predicted points as they are recorded, with the interval of their draws and these."""
    rows = []
    for point in chain.from_iterable(points_of_parts):
        value = point.y.value
        ends = ends_of_draws(value, point.y.draws)
        row = point._asdict()
        row["x"] = float(point.x)
        row["y"] = value
        row["low"] = ends.low
        row["high"] = ends.high
        row["draws"] = in_text(point.y.draws)
        rows.append(row)
    columns = [*Point._fields, "low", "high", "draws"]
    table = pd.DataFrame(rows, columns=columns)
    return table.assign(figure=figure, num_pairs=0, reason=None)[[*POINT, "draws"]]


def in_text(draws: Iterable[float]) -> str:
    """Return draws as a table records them."""
    return " ".join(f"{draw:.5g}" for draw in draws)
