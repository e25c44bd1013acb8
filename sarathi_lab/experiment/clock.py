"""Clocks: seconds of batches and of served requests, by a cost model or measured."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
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
    request,
    request_times,
    serve,
)

EVERYTHING = tuple(KINDS)
COMPUTE = tuple(kind for kind in KINDS if kind != "others")  # what Fig 7 and Table 2 time
FOUR = ("preproj", "attn", "postproj", "ffn")  # whose sum Fig 10 calls the total
TOTALS = (EVERYTHING, COMPUTE, FOUR)
THROUGHPUT = "seconds_per_request"
TimesOf = Callable[[WorkSum], Times]


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
    def has_operations(self) -> bool:
        """Whether operations have times; else whole iterations alone (`WHOLE`)."""

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

    def constant(self, value: float) -> Estimate:
        return Estimate(value)

    def times(self, work: WorkSum) -> Times:
        """Return the seconds of `work` by operation."""
        return work.times(self._times)

    def _times(self, subject: Subject) -> Mapping[str, float]:
        if isinstance(subject, Composition):
            return self.cost.operation_times(subject.make())
        return self.request(subject)

    def seconds(self, work: WorkSum, kinds: Iterable[str] = EVERYTHING) -> Estimate:
        """Return the seconds of the operations of some kinds.

        Matrix products and attention have separate errors; streaming kernels and fixed costs are
        fitted with the products; communication was compared with nothing. Experts have a separate
        error where one is stated. Of whole iterations only the total is known, output head and
        host included, whichever operations count for it; kinds alone are not a number.
        """
        times, kinds = self.times(work), tuple(kinds)
        if not self.cost.has_operations:
            seconds = sum(times.values()) if kinds in TOTALS else math.nan
            return Estimate(seconds, self._largest_error(self.cost.uncertainty))
        products = self.cost.uncertainty["matmul"]
        attention = [kind for kind in self.cost.uncertainty if "attention" in kind]  # also linear
        errors = {"attn": self._largest_error(attention), "communication": 1.0}
        by_kind = {kind: sum(times.get(name, 0.0) for name in KINDS[kind]) for kind in kinds}
        total = sum(by_kind.values())
        off = sum(abs(value) * errors.get(kind, products) for kind, value in by_kind.items())
        if "ffn" in by_kind and (experts := times.get(EXPERTS, 0.0)):
            off += abs(experts) * (self.cost.uncertainty.get(EXPERTS, products) - products)
        return Estimate(total, off / abs(total) if total else 0.0)

    def _largest_error(self, kinds: Iterable[str]) -> float:
        """Return the largest error of some kinds, NaN if one is."""
        return float(np.max([self.cost.uncertainty[kind] for kind in kinds]))

    def saving(
        self,
        alone: WorkSum,
        both: WorkSum,
        without: WorkSum,
        kinds: tuple[str, ...] = EVERYTHING,
    ) -> Estimate:
        """Return the seconds of `alone` over those that `both` takes beyond `without`."""
        return self.seconds(alone, kinds).over(self.seconds(both - without, kinds))

    def with_attention_of(self, work: WorkSum, separate: WorkSum, together: WorkSum) -> Estimate:
        """Return the seconds of `work` with the attention of `separate` batches in place of that of
        `together`, whose errors are not added.
        """
        value, error = self.seconds(work)
        less, more = (self.seconds(one, ("attn",)).value for one in (together, separate))
        return Estimate(value - less + more, error)

    def riding_apart(
        self, together: WorkSum, separate: WorkSum, kinds: tuple[str, ...]
    ) -> Estimate:
        """Return the seconds of `together`, with the attention of `separate` batches as its calls,
        over those of these batches. Attention is the same in both, so its errors cancel.
        """
        others = tuple(kind for kind in kinds if kind != "attn")
        products, error = self.seconds(together, others)
        products_apart, error_apart = self.seconds(separate, others)
        attention = self.seconds(separate, ("attn",)).value
        total = products + attention
        off = abs(products) * error + abs(products_apart) * error_apart
        return Estimate(total / (products_apart + attention), off / total if total else 0.0)

    def riding_saves(
        self, decodes: WorkSum, together: WorkSum, prompt: WorkSum, kinds: tuple[str, ...]
    ) -> Estimate:
        """Return the seconds of `decodes` over what they add to a `prompt`, each in an attention
        call of its own.
        """
        others = tuple(kind for kind in kinds if kind != "attn")
        products = self.seconds(together - prompt, others)
        attention = self.seconds(decodes, ("attn",))
        added = Estimate(products.value + attention.value, max(products.error, attention.error))
        return self.seconds(decodes, kinds).over(added)

    def chunking_overhead(
        self, prompt_len: int, chunk: int, cause: str = "total", offset: float = 0.0
    ) -> Estimate:
        """Return `offset` and the extra time of a prompt in chunks by `cause` (a field of
        `LossSplit`), as a share of the whole prompt's.
        """
        if cause != "total" and not self.cost.has_operations:
            return Estimate(math.nan)
        loss = LossSplit.of(self.times, prompt_len, chunk)
        error = self.seconds(chunked(prompt_len, prompt_len)).error
        return Estimate(offset + getattr(loss, cause) / loss.whole, error)

    def keys_read(self, work: WorkSum) -> Estimate | None:
        """Count the cached tokens that attention reads for `work`; None where nothing is read."""
        return None

    def request(self, scenario: Scenario) -> Times:
        """Return the seconds by operation and request; serving has no times of operations."""
        return self.times(counted(scenario))

    def gain(self, scenario: Scenario, baseline: Scenario) -> Estimate | None:
        """Return the throughput over that of the baseline; None where the device can't run it."""
        return self.served_ratio(baseline, scenario, THROUGHPUT)

    @abstractmethod
    def served(self, scenario: Scenario) -> Served | None:
        """Serve the scenario on the engine; returns None if it does not fit."""

    def served_ratio(self, scenario: Scenario, versus: Scenario, quantity: str) -> Estimate:
        """Return a quantity of `Served` (seconds) over that of another scenario."""
        found, other = self.served(scenario), self.served(versus)
        if found is None or other is None:
            return Estimate(math.nan)
        error = self._largest_error(self.cost.uncertainty)
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

    def gain(self, scenario: Scenario, baseline: Scenario) -> Estimate | None:
        return self.seconds(request(baseline)).over(self.seconds(request(scenario)))

    def served(self, scenario: Scenario) -> Served:
        if scenario not in self._served:
            executor = SimulatedExecutor(self.cost.iteration_time)
            num_blocks = scenario.blocks(BLOCK_SIZE)
            found = serve(executor, scenario, num_blocks=num_blocks, block_size=BLOCK_SIZE)
            assert found is not None
            self._served[scenario] = found
        return self._served[scenario]


class CountingClock(CostClock):
    """Counts batches instead of serving, as the paper does: no remainders or part-filled tiles."""

    request = Clock.request


MATMUL = (*KINDS["preproj"], *KINDS["postproj"], *KINDS["ffn"], "lm_head")
ATTENTION = KINDS["attn"]


def times_by(operation_times: OperationTimes) -> TimesOf:
    """Return the function that sums up the times of batches."""
    return lambda work: work.times(lambda part: operation_times(part.make()))


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
    def of(cls, times: TimesOf, prompt_len: int, chunk: int) -> LossSplit:
        """Split the extra `times` of a prompt, prefilled alone in chunks (section 4.2, Fig 13). The
        causes sum up to it: all but matrix products and attention is `fixed`.
        """
        whole, cut = (times(chunked(prompt_len, n, emits=True)) for n in (prompt_len, chunk))
        extra = {name: cut.get(name, 0.0) - whole.get(name, 0.0) for name in {**whole, **cut}}
        attention = sum(extra.get(name, 0.0) for name in ATTENTION)
        matmul = sum(extra.get(name, 0.0) for name in MATMUL)
        fixed = sum(s for name, s in extra.items() if name not in (*ATTENTION, *MATMUL))
        return cls(sum(whole.values()), attention, matmul, fixed, extra.get(EXPERTS, 0.0))

    @property
    def total(self) -> float:
        return self.attention + self.matmul + self.fixed
