"""Cases of experiments as data: a quantity over work or scenarios, at a place in a picture.

Cases can be printed, filtered and run alone: `group.points(clock)` evaluates them on a clock.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

from sarathi_lab.experiment.clock import EVERYTHING, THROUGHPUT, Clock, Estimate, LossSplit
from sarathi_lab.experiment.scenario import Scenario, Subject, WorkSum, chunked

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


class Quantity(ABC):
    """An expression over work and scenarios that a clock evaluates."""

    @abstractmethod
    def on(self, clock: Clock) -> Estimate | None:
        """Evaluate on a clock; None where the clock can't."""

    @property
    def subjects(self) -> Iterator[Subject]:
        """The batches and scenarios that a device runs for it."""
        for part in vars(self).values():
            if isinstance(part, Quantity | WorkSum):
                yield from part.subjects
            elif isinstance(part, Scenario):
                yield part

    def __truediv__(self, other: Quantity) -> Ratio:
        return Ratio(self, other)

    def __mul__(self, factor: float) -> Scaled:
        return Scaled(self, factor)


@dataclass(frozen=True)
class Constant(Quantity):
    """A number that needs no clock."""

    value: float

    def on(self, clock: Clock) -> Estimate:
        return Estimate(self.value)


@dataclass(frozen=True)
class Seconds(Quantity):
    """Seconds of work in the operations of some kinds, less and plus those of `minus` and `plus`,
    whose errors are not added.
    """

    work: WorkSum
    kinds: tuple[str, ...] = EVERYTHING
    minus: Seconds | None = None
    plus: Seconds | None = None

    def on(self, clock: Clock) -> Estimate:
        value, error = clock.seconds(self.work, self.kinds)
        value -= self.minus.on(clock).value if self.minus else 0.0
        return Estimate(value + (self.plus.on(clock).value if self.plus else 0.0), error)


@dataclass(frozen=True)
class Ratio(Quantity):
    """A quantity over another."""

    above: Quantity
    below: Quantity

    def on(self, clock: Clock) -> Estimate | None:
        above, below = self.above.on(clock), self.below.on(clock)
        return None if above is None or below is None else above.over(below)


@dataclass(frozen=True)
class Scaled(Quantity):
    """A quantity times a number, such as seconds in milliseconds."""

    quantity: Quantity
    factor: float

    def on(self, clock: Clock) -> Estimate | None:
        value = self.quantity.on(clock)
        return None if value is None else value.times(self.factor)


@dataclass(frozen=True)
class Saving(Quantity):
    """Seconds of `alone` over those that `both` takes beyond `without`."""

    alone: WorkSum
    both: WorkSum
    without: WorkSum

    def on(self, clock: Clock) -> Estimate:
        return clock.saving(self.alone, self.both, self.without)


@dataclass(frozen=True)
class KeysRead(Quantity):
    """Cached tokens that attention reads for `work`, where a kernel runs."""

    work: WorkSum

    def on(self, clock: Clock) -> Estimate | None:
        number = clock.keys_read(self.work)
        return None if number is None else Estimate(number)


@dataclass(frozen=True)
class ChunkingOverhead(Quantity):
    """`offset` and the extra time of a prompt in chunks by `cause` (a field of `LossSplit`), as a
    share of the whole prompt's.
    """

    prompt_len: int
    chunk: int
    cause: str = "total"
    offset: float = 0.0

    def on(self, clock: Clock) -> Estimate:
        whole, cut = (
            clock.times(chunked(self.prompt_len, tokens, emits=True))
            for tokens in (self.prompt_len, self.chunk)
        )
        loss = LossSplit.of(whole, cut)
        error = clock.seconds(chunked(self.prompt_len, self.prompt_len)).error
        return Estimate(self.offset + getattr(loss, self.cause) / loss.whole, error)

    @property
    def subjects(self) -> Iterator[Subject]:
        for tokens in (self.prompt_len, self.chunk):
            yield from chunked(self.prompt_len, tokens).subjects


@dataclass(frozen=True)
class Gain(Quantity):
    """Throughput of a scenario over that of request-level batching on the same requests."""

    scenario: Scenario

    def on(self, clock: Clock) -> Estimate:
        return clock.gain(self.scenario)

    @property
    def subjects(self) -> Iterator[Subject]:
        return iter((self.scenario, self.scenario.baseline))


@dataclass(frozen=True)
class ServedRatio(Quantity):
    """A quantity of `Served` (seconds) of a scenario over that of another one."""

    scenario: Scenario
    versus: Scenario
    name: str = THROUGHPUT

    def on(self, clock: Clock) -> Estimate:
        return clock.over(self.scenario, self.versus, self.name)


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
