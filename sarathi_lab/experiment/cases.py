"""Cases of experiments as data: a quantity over work or scenarios, at a place in a picture.

Cases can be printed, filtered and run alone: `group.points(clock)` evaluates them on a clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Literal, NamedTuple, Protocol

import pandas as pd

from sarathi_lab.experiment.clock import EVERYTHING, THROUGHPUT, Clock, Estimate
from sarathi_lab.experiment.scenario import Scenario, Subject, WorkSum
from sarathi_lab.results.intervals import median_of
from sarathi_lab.results.load import POINT

Kind = Literal["value", "share", "curve"]
OF_SAMPLES = ["confidence", "q20", "q80", "samples"]


class Point(NamedTuple):
    """A point of a figure: its line, its panel and where it is.

    A "share" of a whole may be zero, other values are above zero unless noise exceeds them; of a
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
    def place(self) -> Point:
        """The point without its value."""
        return self._replace(x=float(self.x), y=Estimate(0.0))

    @property
    def whole(self) -> float | None:
        """What the spread of its value is a share of, if not of the value."""
        return 1.0 if self.kind == "share" else None


@dataclass(frozen=True)
class Quantity:
    """A call of a clock's `method`, times `factor`, over the quantity `below` if there is one."""

    method: str
    arguments: tuple[Any, ...]
    factor: float = 1.0
    below: Quantity | None = None

    def on(self, clock: Clock) -> Estimate | None:
        """Evaluate on a clock; None where the clock can't."""
        value: Estimate | None = getattr(clock, self.method)(*self.arguments)
        below = None if self.below is None else self.below.on(clock)
        if value is None or (below is None and self.below is not None):
            return None
        value = value.times(self.factor)
        return value if below is None else value.over(below)

    @property
    def subjects(self) -> Iterator[Subject]:
        """The batches and scenarios that a device runs for it."""
        for part in (*self.arguments, self.below):
            if isinstance(part, Quantity | WorkSum):
                yield from part.subjects
            elif isinstance(part, Scenario):
                yield part

    def __truediv__(self, other: Quantity) -> Quantity:
        assert self.below is None
        return replace(self, below=other)

    def __mul__(self, factor: float) -> Quantity:
        return replace(self, factor=factor * self.factor)


def constant(value: float) -> Quantity:
    """Return a number that needs no clock."""
    return Quantity("constant", (value,))


def seconds(work: WorkSum, kinds: tuple[str, ...] = EVERYTHING) -> Quantity:
    """Return the seconds of work in the operations of some kinds."""
    return Quantity("seconds", (work, kinds))


def gain(scenario: Scenario, versus: Scenario | None = None) -> Quantity:
    """Return the throughput over that of request-level batching, or of `versus`, on the same
    requests.
    """
    return Quantity("gain", (scenario, versus or scenario.baseline))


def served_ratio(scenario: Scenario, versus: Scenario, name: str = THROUGHPUT) -> Quantity:
    """Return a quantity of `Served` (seconds) over that of another scenario."""
    return Quantity("served_ratio", (scenario, versus, name))


@dataclass(frozen=True)
class Case:
    """A point to compute: its place in the picture and its quantity."""

    panel: str
    series: str
    x: float
    quantity: Quantity
    unit: str = "ratio"
    kind: Kind = "value"

    @property
    def place(self) -> Point:
        return Point(self.panel, self.series, float(self.x), Estimate(0.0), self.unit, self.kind)


Cases = Iterator[Case | Iterable[Case]]  # alone, or several that are measured together


class Part(Protocol):
    """Points of an experiment that are computed together, once a round."""

    @property
    def places(self) -> Sequence[Point]:
        """The points without their values, as far as they are known before."""

    def points(self, bench: Any, number: int = 0) -> list[Point]:
        """Evaluate them on a bench, in the round of a number."""


@dataclass(frozen=True)
class Group:
    """Cases that are measured together: a batch that several of them need is timed once a round."""

    cases: tuple[Case, ...]

    @property
    def places(self) -> Sequence[Point]:
        return [case.place for case in self.cases]

    def points(self, bench: Clock, number: int = 0) -> list[Point]:
        """Evaluate the cases on a clock; those that it can't are left out."""
        bench.start(number)
        values = [(case.place, case.quantity.on(bench)) for case in self.cases]
        return [place._replace(y=y) for place, y in values if y is not None]

    @property
    def subjects(self) -> Iterator[Subject]:
        for case in self.cases:
            yield from case.quantity.subjects


@dataclass(frozen=True)
class Round:
    """Requests that all policies of an experiment serve, drawn with another seed in each round."""

    make: Callable[..., Iterable[Point]]  # of a bench and a seed, with sizes
    sizes: Mapping[str, Any]
    seed: int = 0
    places: Sequence[Point] = ()

    def points(self, bench: Any, number: int = 0) -> list[Point]:
        return list(self.make(bench, self.seed + number, **self.sizes))


Samples = dict[Point, list[float]]  # by `Point.place`


def keep(samples: Samples, points: Iterable[Point]) -> None:
    """Add a round's values. A time that comes out at or below zero is below the noise: a ratio to
    it is infinite.
    """
    for point in points:
        is_noise = point.y.value <= 0 and point.kind != "share"
        samples.setdefault(point.place, []).append(math.inf if is_noise else point.y.value)


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
    points = chain.from_iterable(parts)
    table = pd.DataFrame([{**point._asdict(), **point.y._asdict()} for point in points])
    off = table.value.abs() * table.error
    table = table.assign(low=table.value - off, high=table.value + off, figure=figure)
    return table.assign(y=table.value, num_pairs=0, reason=None).astype({"x": float})[POINT]
