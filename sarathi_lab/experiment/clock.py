"""Clocks that fill a figure's points: seconds of batches and of served requests."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Literal, NamedTuple, Protocol

import numpy as np

from sarathi_lab.engine.compositions import chunks_of, make_batch
from sarathi_lab.engine.request import Batch
from sarathi_lab.executor.simulated.cost_model import KINDS
from sarathi_lab.executor.simulated.executor import SimulatedExecutor
from sarathi_lab.executor.simulated.hardware import EXPERTS
from sarathi_lab.experiment.scenario import Scenario, Served, Times, request_times, serve

EVERYTHING = tuple(KINDS)
COMPUTE = tuple(kind for kind in KINDS if kind != "others")  # what Fig 7 and Table 2 time
FOUR = ("preproj", "attn", "postproj", "ffn")  # whose sum Fig 10 calls the total
BLOCK_SIZE = 16  # tokens
THROUGHPUT = "seconds_per_request"


class Estimate(NamedTuple):
    """A value, and the share by which it may be off (of shapes held out of a model's fits; NaN:
    none were).
    """

    value: float
    error: float = 0.0

    def over(self, other: Estimate) -> Estimate:
        """The ratio of two estimates, their errors taken as independent; infinite over nothing."""
        ratio = self.value / other.value if other.value else math.inf
        return Estimate(ratio, math.hypot(self.error, other.error))

    def times(self, factor: float) -> Estimate:
        return Estimate(self.value * factor, self.error)


class Point(NamedTuple):
    """A point of a figure: which line of which panel it is on, and where.

    A "share" of a whole may be nothing, other values are above zero unless noise swallowed them; of
    a "curve" over time each round has its own. `labels` are further columns.
    """

    panel: str
    series: str
    x: float
    y: Estimate = Estimate(0.0)
    unit: str = "ratio"
    kind: Literal["value", "share", "curve"] = "value"
    labels: tuple[tuple[str, str], ...] = ()

    @property
    def place(self) -> Point:
        """What tells it from others: all but the value."""
        return self._replace(x=float(self.x), y=Estimate(0.0))


class IterationTimes(Protocol):
    """Seconds of a batch, predicted by a `CostModel` or measured."""

    @property
    def uncertainty(self) -> Mapping[str, float]: ...

    def iteration_time(self, batch: Batch) -> float: ...

    def operation_times(self, batch: Batch) -> dict[str, float]: ...


class Clock(ABC):
    """Times batches by `cost`, and scenarios in the way of its kind."""

    def __init__(self, cost: IterationTimes) -> None:
        self.cost = cost

    def batch(self, *batches: Batch) -> Times:
        """Seconds by operation of `batches`, one after the other."""
        return weighted(*((1.0, self.cost.operation_times(batch)) for batch in batches))

    def seconds(self, times: Mapping[str, float], kinds: Iterable[str] = EVERYTHING) -> Estimate:
        """The sum of the operations of some kinds.

        Matrix products and attention err in their own ways; streaming kernels and fixed costs are
        fitted with the products; communication was compared with nothing. Experts have their own
        error where one is stated.
        """
        products = self.cost.uncertainty["matmul"]
        errors = {"attn": self.cost.uncertainty["attention"], "communication": 1.0}
        by_kind = {kind: sum(times.get(name, 0.0) for name in KINDS[kind]) for kind in kinds}
        total = sum(by_kind.values())
        off = sum(abs(value) * errors.get(kind, products) for kind, value in by_kind.items())
        if "ffn" in by_kind and (experts := times.get(EXPERTS, 0.0)):
            off += abs(experts) * (self.cost.uncertainty.get(EXPERTS, products) - products)
        return Estimate(total, off / abs(total) if total else 0.0)

    def duration(self, *batches: Batch, kinds: Iterable[str] = EVERYTHING) -> Estimate:
        """Seconds of `batches`, one after the other, in the operations of some kinds."""
        return self.seconds(self.batch(*batches), kinds)

    def saving(self, alone: Batch, both: Batch, without: Batch) -> Estimate:
        """Seconds of `alone` over those that `both` takes beyond `without`."""
        added = weighted((1.0, self.batch(both)), (-1.0, self.batch(without)))
        return self.duration(alone).over(self.seconds(added))

    def keys_read(self, *batches: Batch) -> float | None:
        """Cached tokens that attention read for `batches`, counted; None where nothing is read."""
        return None

    def request(self, scenario: Scenario) -> Times:
        """Seconds by operation and request; serving does not tell operations apart."""
        return counted(self, scenario)

    def gain(self, scenario: Scenario) -> Estimate:
        """Throughput over that of request-level batching on the same requests."""
        return self.over(scenario.baseline, scenario, THROUGHPUT)

    @abstractmethod
    def served(self, scenario: Scenario) -> Served | None:
        """What serving the scenario on the engine gives; None if it does not fit."""

    def over(self, scenario: Scenario, versus: Scenario, quantity: str) -> Estimate:
        """A quantity of `Served` (seconds) over that of another scenario."""
        found, other = self.served(scenario), self.served(versus)
        if found is None or other is None:
            return Estimate(math.nan)
        error = float(np.max([*self.cost.uncertainty.values()]))  # NaN if one is
        ratio = getattr(found, quantity) / getattr(other, quantity)
        return Estimate(ratio, math.hypot(error, error))


class CostClock(Clock):
    """A cost model's: requests in the steady state of the engine's own loop on a virtual clock."""

    def __init__(self, cost: IterationTimes) -> None:
        super().__init__(cost)
        self._requests: dict[Scenario, Times] = {}
        self._served: dict[Scenario, Served] = {}

    def request(self, scenario: Scenario) -> Times:
        if scenario not in self._requests:
            self._requests[scenario] = request_times(self.cost.operation_times, scenario)
        return self._requests[scenario]

    def gain(self, scenario: Scenario) -> Estimate:
        baseline = self.seconds(self.request(scenario.baseline))
        return baseline.over(self.seconds(self.request(scenario)))

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


Unit = Callable[[Clock], Iterable[Point]]  # some points that are made together


def one(
    panel: str, series: str, x: float, y: Callable[[Clock], Estimate], unit: str = "ratio"
) -> Unit:
    """The unit of a single point."""
    return lambda clock: [Point(panel, series, x, y(clock), unit)]


def counted(clock: Clock, scenario: Scenario) -> Times:
    """Seconds by operation and request from single batches, decodes at their mean context.

    Under SARATHI P / (C - (B-1)) chunks each carry B-1 decodes. Left over are decodes in full
    batches of B, or else prompt tokens at the price of whole prompts.
    """
    prompt_len, num_decodes = scenario.prompt_len, scenario.num_decodes
    batch, riders = scenario.batch_size, scenario.batch_size - 1
    context = prompt_len + num_decodes // 2
    prompts = clock.batch(make_batch(prefill_tokens=prompt_len, num_prefills=batch))
    decodes = clock.batch(make_batch(num_decodes=batch, context=context))
    if scenario.policy == "request_level":
        return weighted((1 / batch, prompts), (num_decodes / batch, decodes))
    if scenario.policy != "sarathi" or scenario.chunk is None:
        raise ValueError(f"{scenario.policy} is not counted")
    chunks = chunks_of(prompt_len, scenario.chunk - riders, num_decodes=riders, context=context)
    # Of a batch of requests, the share of chunks that finds decodes to carry; what is left over of
    # either.
    share = min(1.0, num_decodes / riders / len(chunks))
    left = num_decodes - share * len(chunks) * riders
    return weighted(
        (share, clock.batch(*chunks)), ((1 - share) / batch, prompts), (left / batch, decodes)
    )


def best_pd_ratio(chunk: int, batch_size: int) -> float:
    """The P:D at which chunks and decodes run out together, C / (B - 1) (section 4.3.3)."""
    return chunk / (batch_size - 1)


def weighted(*parts: tuple[float, Mapping[str, float]]) -> Times:
    """The sum of times, each as often as its weight says; what cancels does so with its error."""
    total: Times = defaultdict(float)
    for weight, times in parts:
        for name, seconds in times.items():
            total[name] += weight * seconds
    return total
