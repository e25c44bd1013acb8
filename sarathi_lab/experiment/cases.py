"""Cases of experiments as data: a quantity over work or scenarios, at a place in a picture.

Cases can be printed, filtered and run alone: `group.points(clock)` evaluates them on a clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, Protocol

from sarathi_lab.experiment.clock import EVERYTHING, THROUGHPUT, Clock, Estimate
from sarathi_lab.experiment.scenario import Scenario, Subject, WorkSum

Kind = Literal["value", "share", "curve"]


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


def gain(scenario: Scenario) -> Quantity:
    """Return the throughput over that of request-level batching on the same requests."""
    return Quantity("gain", (scenario, scenario.baseline))


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


def one(
    panel: str, series: str, x: float, quantity: Quantity, unit: str = "ratio", kind: Kind = "value"
) -> Group:
    """Return a group of a single case."""
    return Group((Case(panel, series, x, quantity, unit, kind),))
