"""Points of experiments, the parts that make them on a bench, and the tables that they leave."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Concatenate, Literal, NamedTuple, ParamSpec, TypeVar
from zlib import crc32

import numpy as np
import pandas as pd

from sarathi_lab.executor.simulated.drawn_times import (
    AS_STATED,
    SHAPES_OF_BATCHES,
    CostVariant,
    Values,
    own_deviation,
)
from sarathi_lab.results.intervals import (
    ANY_VALUE,
    Ends,
    Interval,
    Resolution,
    draws_of_median,
    ends_of_draws,
    median_of,
    wider,
    within_range,
)
from sarathi_lab.results.load import POINT

Kind = Literal["value", "share", "curve"]
OF_SAMPLES = ["confidence", "q20", "q80", "samples"]


@dataclass(frozen=True)
class Estimate:
    """A value, what it is in each draw of the cost model's constants, and what it is where one of
    the shapes that it is made of is slower by the error of its own (`drawn_times`).

    Draws have the same order everywhere, and shapes their names, so that errors which two values
    share cancel in their ratio. A value that was measured, or is exact, has neither.

    Attributes:
        moved: By the name of the shape that is slower.
    """

    value: float
    draws: tuple[float, ...] = ()
    moved: tuple[tuple[str, float], ...] = ()

    @classmethod
    def of(cls, values: float | Values, shapes: Sequence[str] = ()) -> Estimate:
        """Return the estimate of a value, followed by its draws, and by what it is where each of
        the `shapes` is slower.
        """
        value, *others = np.atleast_1d(values).tolist()
        num_draws = len(others) - len(shapes)
        draws = others[:num_draws]
        moved = others[num_draws:]
        moved_by_shape = zip(shapes, moved, strict=True)
        return cls(value, tuple(draws), tuple(moved_by_shape))

    @classmethod
    def with_own_error(cls, values: Values, shape: str, num_shapes: int = 1) -> Estimate:
        """Return the estimate of a value, followed by its draws, of a shape that has half of its
        error alone. Over `num_shapes` of a run that half averages out.
        """
        deviation = own_deviation(values, num_shapes)
        if deviation == 0:
            return cls.of(values)
        # The deviation is one of logarithms, but where a value has none (`own_deviation`).
        slower = values[0] + deviation
        if values.min() > 0:
            slower = values[0] * math.exp(deviation)
        return cls.of(np.append(values, slower), [name_of(shape)])

    @property
    def values(self) -> Values:
        """The value and its draws."""
        return np.array([self.value, *self.draws])

    @property
    def ends(self) -> Ends:
        """The interval by the errors; NaN for an exact value."""
        return ends_of_draws(self.value, self.draws, dict(self.moved).values())

    def __truediv__(self, other: Estimate) -> Estimate:
        """Return the ratio of two estimates; infinite over zero."""
        if other.value == 0:
            return Estimate(math.inf)
        # A draw may be zero where the value is not.
        with np.errstate(divide="ignore", invalid="ignore"):
            return self._with(other, np.divide)

    def __add__(self, other: Estimate) -> Estimate:
        return self._with(other, np.add)

    def __sub__(self, other: Estimate) -> Estimate:
        return self._with(other, np.subtract)

    def __mul__(self, factor: float) -> Estimate:
        return self._with(Estimate(factor), np.multiply)

    def _with(self, other: Estimate, operation: np.ufunc) -> Estimate:
        """Return an operation of two estimates: in each draw, and for each shape of either."""
        # A shape that both have counts once: its error moves both at the same time.
        shapes = list(dict(self.moved) | dict(other.moved))
        num_draws = max(len(self.draws), len(other.draws))
        result = operation(
            self._everywhere(num_draws, shapes),
            other._everywhere(num_draws, shapes),
        )
        return Estimate.of(result, shapes)

    def _everywhere(self, num_draws: int, shapes: Sequence[str]) -> Values:
        """Return the value, its draws, and what it is where each of the `shapes` is slower."""
        draws = self.draws
        if not draws:  # measured or exact: the same in all of them
            draws = (self.value,) * num_draws
        by_shape = dict(self.moved)
        moved = [by_shape.get(shape, self.value) for shape in shapes]
        return np.array([self.value, *draws, *moved])


class Point(NamedTuple):
    """A point of a figure: its line, its panel, where it is, and its value.

    A "share" of a total may be zero, other values are above zero unless noise exceeds them; of a
    "curve" over time the first round is kept. `labels` are further columns, and the `resolution` is
    how finely the value can be known, whatever the seeds say.
    """

    panel: str
    series: str
    x: float
    y: Estimate = Estimate(0.0)
    unit: str = "ratio"
    kind: Kind = "value"
    labels: tuple[tuple[str, str], ...] = ()
    resolution: Resolution = ANY_VALUE

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
        variant: Of the cost model, in a simulation under load.
    """

    make: Callable[..., Iterable[Point]]
    arguments: Sequence[object] = ()
    sizes: Mapping[str, object] = field(default_factory=dict)
    seed: int | None = None
    variant: CostVariant = AS_STATED

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
        drawn: The same rounds in each of the `VARIANTS` of the cost model.
    """
    rows = []
    labels: dict[str, None] = {}
    for point, values in samples.items():
        interval = median_of(values, max_spread, of=point.total, is_series=is_series)
        row = {"figure": figure, **point._asdict(), **vars(interval)}
        row |= point.labels
        ends = _ends_over_rounds(point, interval)
        if drawn:
            median = _drawn_median(point, interval.median, values, drawn)
            ends = wider(interval.median, ends, median.ends)
            if np.isnan(median.draws).any():
                # An unknown error, which seeds alone do not show.
                ends = ends._replace(low=math.nan, high=math.nan)
            row |= _in_text(median)
        reason = interval.reason or point.resolution.bound_of(values)
        y = interval.median
        if point.kind == "curve":
            # Rounds differ in their x, too: no median has a meaning.
            y = values[0]
            ends = ends._replace(low=math.nan, high=math.nan)
            reason = None
        row["y"] = math.nan if reason else y
        row["reason"] = reason
        within = within_range(ends, point.unit)
        row["low"] = within.low
        row["high"] = within.high
        texts = map(point.resolution.text_of, values)
        row["samples"] = " ".join(texts)
        rows.append(row)
        names = [name for name, _ in point.labels]
        labels |= dict.fromkeys(names)
    columns = [*POINT, *OF_SAMPLES]
    if drawn:
        columns += ["draws", "moved"]
    return pd.DataFrame(rows, columns=[*columns, *labels])


def _ends_over_rounds(point: Point, interval: Interval) -> Ends:
    """Return the interval over rounds with all that the value cannot be told from. Rounds that all
    agree do not show how far off they are: without a resolution there is no interval.
    """
    low, high = point.resolution.widened(interval.low, interval.high)
    if low >= high:
        low = math.nan
        high = math.nan
    return Ends(low, high, interval.confidence)


def _drawn_median(
    point: Point, median: float, values: Sequence[float], drawn: Sequence[Samples]
) -> Estimate:
    """Return the median of `values` with its draws. They are unknown (NaN) of a point that a draw
    lacks, in any round: the rounds that are left would not be the same.
    """
    if point.kind == "curve":
        return Estimate(median)  # its x is a time, which every draw changes
    values_by_draw = [of_draw.get(point, []) for of_draw in drawn]
    num_rounds = set(map(len, values_by_draw))
    drawn_medians = (math.nan,) * len(drawn)
    if num_rounds == {len(values)}:
        drawn_medians = draws_of_median(values, values_by_draw)
    return Estimate.of(np.array([median, *drawn_medians]), SHAPES_OF_BATCHES)


def predicted_table(figure: str, points_of_parts: Iterable[Sequence[Point]]) -> pd.DataFrame:
    """Return predicted points as they are recorded, with their draws and the interval by these.
    What has no prediction is left out.
    """
    rows = []
    for point in chain.from_iterable(points_of_parts):
        value = point.y.value
        if math.isnan(value):
            continue
        ends = within_range(point.y.ends, point.unit)
        row = point._asdict()
        row["x"] = float(point.x)
        row["y"] = value
        row["low"] = ends.low
        row["high"] = ends.high
        row |= _in_text(point.y)
        rows.append(row)
    columns = [*Point._fields, "low", "high", "draws", "moved"]
    table = pd.DataFrame(rows, columns=columns)
    # A prediction has neither rounds nor a reason to be left out.
    table = table.assign(figure=figure, num_pairs=0, reason=None)
    return table[[*POINT, "draws", "moved"]]


def name_of(shape: str) -> str:
    """Return a short name of a shape, by which a table tells it from others."""
    return f"{crc32(shape.encode()):08x}"


def _in_text(estimate: Estimate) -> dict[str, str]:
    """Return the columns in which a table records draws, and what is moved by which shape."""
    # Five digits tell an error; of an exact value, fewer than `y` has would read as one.
    digits = 5
    is_exact = set(estimate.draws) == {estimate.value}
    if is_exact:
        digits = 6
    draws = [f"{draw:.{digits}g}" for draw in estimate.draws]
    moved = [f"{shape}={value:.6g}" for shape, value in estimate.moved]
    return {
        "draws": " ".join(draws),
        "moved": " ".join(moved),
    }
