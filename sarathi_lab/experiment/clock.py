"""Clocks: seconds of batches and of served requests, by a cost model or measured."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from sarathi_lab.engine.request import Batch
from sarathi_lab.executor.simulated.cost_model import KINDS, OperationTimes
from sarathi_lab.executor.simulated.executor import SimulatedExecutor
from sarathi_lab.executor.simulated.hardware import EXPERTS
from sarathi_lab.experiment.scenario import (
    BLOCK_SIZE,
    Composition,
    Scenario,
    Served,
    Subject,
    Times,
    WorkSum,
    chunked,
    counted,
    request_times,
    serve,
)

EVERYTHING = tuple(KINDS)
COMPUTE = tuple(kind for kind in KINDS if kind != "others")  # what Fig 7 and Table 2 time
FOUR = ("preproj", "attn", "postproj", "ffn")  # whose sum Fig 10 calls the total
THROUGHPUT = "seconds_per_request"


class Estimate(NamedTuple):
    """A value, and the share by which it may be off (from shapes held out of a model's fits; NaN
    without such shapes).
    """

    value: float
    error: float = 0.0

    def over(self, other: Estimate) -> Estimate:
        """Return the ratio of two estimates with independent errors; infinite over zero."""
        ratio = self.value / other.value if other.value else math.inf
        return Estimate(ratio, math.hypot(self.error, other.error))

    def times(self, factor: float) -> Estimate:
        return Estimate(self.value * factor, self.error)


class IterationTimes(Protocol):
    """Seconds of a batch, predicted by a `CostModel` or measured."""

    @property
    def uncertainty(self) -> Mapping[str, float]: ...

    def iteration_time(self, batch: Batch) -> float: ...

    def operation_times(self, batch: Batch) -> dict[str, float]: ...


class Clock(ABC):
    """Times work by `cost`, and serves scenarios in its kind's way."""

    def __init__(self, cost: IterationTimes) -> None:
        self.cost = cost

    def start(self, number: int) -> None:  # noqa: B027
        """Begin a group of cases in a round: what is measured is measured again."""

    def times(self, work: WorkSum) -> Times:
        """Return the seconds of `work` by operation."""
        total: Times = defaultdict(float)
        for weight, subject in work.parts:
            for name, seconds in self._times(subject).items():
                total[name] += weight * seconds
        return total

    def _times(self, subject: Subject) -> Mapping[str, float]:
        if isinstance(subject, Composition):
            return self.cost.operation_times(subject.make())
        return self.request(subject)

    def seconds(self, work: WorkSum, kinds: Iterable[str] = EVERYTHING) -> Estimate:
        """Return the seconds of the operations of some kinds.

        Matrix products and attention have separate errors; streaming kernels and fixed costs are
        fitted with the products; communication was compared with nothing. Experts have a separate
        error where one is stated.
        """
        times = self.times(work)
        products = self.cost.uncertainty["matmul"]
        errors = {"attn": self.cost.uncertainty["attention"], "communication": 1.0}
        by_kind = {kind: sum(times.get(name, 0.0) for name in KINDS[kind]) for kind in kinds}
        total = sum(by_kind.values())
        off = sum(abs(value) * errors.get(kind, products) for kind, value in by_kind.items())
        if "ffn" in by_kind and (experts := times.get(EXPERTS, 0.0)):
            off += abs(experts) * (self.cost.uncertainty.get(EXPERTS, products) - products)
        return Estimate(total, off / abs(total) if total else 0.0)

    def saving(self, alone: WorkSum, both: WorkSum, without: WorkSum) -> Estimate:
        """Return the seconds of `alone` over those that `both` takes beyond `without`."""
        return self.seconds(alone).over(self.seconds(both - without))

    def keys_read(self, work: WorkSum) -> float | None:
        """Count the cached tokens that attention reads for `work`; None where nothing is read."""
        return None

    def request(self, scenario: Scenario) -> Times:
        """Return the seconds by operation and request; serving has no times of operations."""
        return self.times(counted(scenario))

    def gain(self, scenario: Scenario) -> Estimate:
        """Return the throughput over that of request-level batching on the same requests."""
        return self.over(scenario.baseline, scenario, THROUGHPUT)

    @abstractmethod
    def served(self, scenario: Scenario) -> Served | None:
        """Serve the scenario on the engine; returns None if it does not fit."""

    def over(self, scenario: Scenario, versus: Scenario, quantity: str) -> Estimate:
        """Return a quantity of `Served` (seconds) over that of another scenario."""
        found, other = self.served(scenario), self.served(versus)
        if found is None or other is None:
            return Estimate(math.nan)
        error = float(np.max([*self.cost.uncertainty.values()]))  # NaN if one is
        ratio = getattr(found, quantity) / getattr(other, quantity)
        return Estimate(ratio, math.hypot(error, error))


class CostClock(Clock):
    """A cost model's clock: requests in the steady state of the engine's loop, in virtual time."""

    def __init__(self, cost: IterationTimes) -> None:
        super().__init__(cost)
        self._known: dict[Subject, Mapping[str, float]] = {}
        self._served: dict[Scenario, Served] = {}

    def _times(self, subject: Subject) -> Mapping[str, float]:
        if subject not in self._known:
            self._known[subject] = super()._times(subject)
        return self._known[subject]

    def request(self, scenario: Scenario) -> Times:
        return request_times(self.cost.operation_times, scenario)

    def gain(self, scenario: Scenario) -> Estimate:
        baseline, own = (WorkSum(((1.0, one),)) for one in (scenario.baseline, scenario))
        return self.seconds(baseline).over(self.seconds(own))

    def served(self, scenario: Scenario) -> Served:
        if scenario not in self._served:
            blocks = scenario.batch_size * math.ceil(scenario.longest / BLOCK_SIZE)
            executor = SimulatedExecutor(self.cost.iteration_time)
            room = {"num_blocks": math.ceil(1.1 * blocks) + 1, "block_size": BLOCK_SIZE}
            found = serve(executor, scenario, **room)
            assert found is not None, "there is room for more"
            self._served[scenario] = found
        return self._served[scenario]


class CountingClock(CostClock):
    """Counts batches instead of serving, as the paper does: no remainders or part-filled tiles."""

    request = Clock.request


MATMUL = (*KINDS["preproj"], *KINDS["postproj"], *KINDS["ffn"], "lm_head")
ATTENTION = KINDS["attn"]


@dataclass(frozen=True)
class LossSplit:
    """Extra seconds of a prompt in chunks over `whole`, by cause; a gain is below zero.

    `attention` is the cache read again by every chunk (and smaller kernels), `matmul` part-filled
    tiles and waves and weights read once per chunk (a product overlaps the two), `fixed` the costs
    of an iteration of any size. Of `matmul`, `experts` is a mixture's.
    """

    whole: float
    attention: float
    matmul: float
    fixed: float
    experts: float = 0.0

    @classmethod
    def of(cls, whole: Mapping[str, float], cut: Mapping[str, float]) -> LossSplit:
        """Split the difference of seconds by operation. The causes sum up to it: all but matrix
        products and attention is `fixed`.
        """
        extra = {name: cut.get(name, 0.0) - whole.get(name, 0.0) for name in {**whole, **cut}}
        attention = sum(extra.get(name, 0.0) for name in ATTENTION)
        matmul = sum(extra.get(name, 0.0) for name in MATMUL)
        fixed = sum(s for name, s in extra.items() if name not in (*ATTENTION, *MATMUL))
        return cls(sum(whole.values()), attention, matmul, fixed, extra.get(EXPERTS, 0.0))

    @property
    def total(self) -> float:
        return self.attention + self.matmul + self.fixed


def chunking_loss(prompt_len: int, chunk: int, operation_times: OperationTimes) -> LossSplit:
    """Return the extra time of a prompt, prefilled alone in chunks (section 4.2, Fig 13)."""

    def seconds_in(tokens: int) -> dict[str, float]:
        total: defaultdict[str, float] = defaultdict(float)
        for batch in chunked(prompt_len, tokens, emits=True).batches:
            for name, seconds in operation_times(batch).items():
                total[name] += seconds
        return total

    return LossSplit.of(seconds_in(prompt_len), seconds_in(chunk))
