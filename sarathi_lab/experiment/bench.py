"""Benches: seconds of batches and of served requests, by a cost model or measured."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Protocol

import numpy as np

from sarathi_lab.engine.request import Batch
from sarathi_lab.executor.simulated.cost_model import KINDS
from sarathi_lab.executor.simulated.executor import SimulatedExecutor
from sarathi_lab.executor.simulated.hardware import EXPERTS
from sarathi_lab.experiment.points import Estimate, Part
from sarathi_lab.experiment.scenario import (
    BLOCK_SIZE,
    Composition,
    Room,
    Scenario,
    Served,
    Subject,
    Times,
    Work,
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
MATMUL = (*KINDS["preproj"], *KINDS["postproj"], *KINDS["ffn"], "lm_head")
ATTENTION = KINDS["attn"]
THROUGHPUT = "seconds_per_request"
COMPARED = (THROUGHPUT, "ttft_p50", "tbt_p99")  # quantities of `Served` whose ratios are asked for
NOTHING = Estimate(math.nan)


class IterationTimes(Protocol):
    """Seconds of a batch, predicted by a `CostModel` or measured."""

    @property
    def has_operations(self) -> bool:
        """Whether operations have times; else whole iterations alone (`WHOLE`)."""

    @property
    def uncertainty(self) -> Mapping[str, float]: ...

    def iteration_time(self, batch: Batch) -> float: ...

    def operation_times(self, batch: Batch) -> dict[str, float]: ...


class Bench(ABC):
    """What parts of an experiment are evaluated on: it times work by `cost`, and serves scenarios
    in its kind's way.
    """

    def __init__(self, cost: IterationTimes) -> None:
        self.cost = cost

    def start(self, number: int) -> None:  # noqa: B027
        """Begin a part in a round: what is measured is measured again."""

    def times(self, work: Work) -> Times:
        """Return the seconds of `work` by operation."""
        return work.times(self._times)

    def _times(self, subject: Subject) -> Mapping[str, float]:
        if isinstance(subject, Composition):
            return self.cost.operation_times(subject.make())
        return self.request(subject)

    def seconds(self, work: Work, kinds: Iterable[str] = EVERYTHING) -> Estimate:
        """Return the seconds of the operations of some kinds.

        Matrix products and attention have separate errors; streaming kernels and fixed costs are
        fitted with the products; communication was compared with nothing. Experts have a separate
        error where one is stated. Of whole iterations only the total is known, output head and
        host included, whichever operations count for it; kinds alone are not a number.
        """
        kinds = tuple(kinds)
        times = self.times(work)
        uncertainty = self.cost.uncertainty
        if not self.cost.has_operations:
            seconds = sum(times.values()) if kinds in TOTALS else math.nan
            return Estimate(seconds, self._largest_error(uncertainty))
        of_products = uncertainty["matmul"]
        attention = [kind for kind in uncertainty if "attention" in kind]  # also linear
        errors = {"attn": self._largest_error(attention), "communication": 1.0}
        total = 0.0
        off = 0.0
        for kind in kinds:
            seconds = sum(times.get(name, 0.0) for name in KINDS[kind])
            total += seconds
            off += abs(seconds) * errors.get(kind, of_products)
        if "ffn" in kinds and EXPERTS in times:
            of_experts = uncertainty.get(EXPERTS, of_products)
            off += abs(times[EXPERTS]) * (of_experts - of_products)
        return Estimate(total, off / abs(total) if total else 0.0)

    def _largest_error(self, kinds: Iterable[str]) -> float:
        """Return the largest error of some kinds, NaN if one is."""
        return float(np.max([self.cost.uncertainty[kind] for kind in kinds]))

    def saving(
        self, alone: Work, both: Work, without: Work, kinds: tuple[str, ...] = EVERYTHING
    ) -> Estimate:
        """Return the seconds of `alone` over those that `both` takes beyond `without`."""
        return self.seconds(alone, kinds) / self.seconds(both - without, kinds)

    def chunking_losses(self, prompt_len: int, chunk: int) -> Mapping[str, Estimate]:
        """Return the `losses` of a prompt in chunks as shares of the time of the whole one. Of
        whole iterations only the "total" is known.
        """
        uncut = sum(self.times(chunked(prompt_len, prompt_len, emits=True)).values())
        error = self.seconds(chunked(prompt_len, prompt_len)).error
        shares = {}
        for cause, seconds in self.losses(prompt_len, chunk).items():
            is_known = cause == "total" or self.cost.has_operations
            shares[cause] = Estimate(seconds / uncut, error) if is_known else NOTHING
        return shares

    def losses(self, prompt_len: int, chunk: int) -> Mapping[str, float]:
        """Return the extra seconds of a prompt, prefilled alone in chunks, by cause (section 4.2,
        Fig 13); a gain is below zero.

        Three causes sum up to the "total": "attention" is the cache read again by every chunk (and
        smaller kernels), "matmul" part-filled tiles and waves and weights read once per chunk (a
        product overlaps the two), "fixed" all else, the costs of an iteration of any size.
        "experts" is a mixture's part of "matmul".
        """
        uncut = self.times(chunked(prompt_len, prompt_len, emits=True))
        cut = self.times(chunked(prompt_len, chunk, emits=True))
        causes = dict.fromkeys(("attention", "matmul", "fixed", "experts"), 0.0)
        for name in {**uncut, **cut}:
            extra = cut.get(name, 0.0) - uncut.get(name, 0.0)
            causes[_cause_of(name)] += extra
            if name == EXPERTS:
                causes["experts"] += extra
        total = causes["attention"] + causes["matmul"] + causes["fixed"]
        return {**causes, "total": total}

    def keys_read(self, work: Work) -> Estimate | None:
        """Count the cached tokens that attention reads for `work`; None where nothing is read."""
        return None

    def request(self, scenario: Scenario) -> Times:
        """Return the seconds by operation and request; serving has no times of operations."""
        return self.times(counted(scenario))

    def holds(self, scenario: Scenario) -> bool:
        """Whether the device has room for the batch of a scenario."""
        return True

    def gain(self, scenario: Scenario, baseline: Scenario | None = None) -> Estimate:
        """Return the throughput over that of a baseline on the same requests; None: request-level
        batching.
        """
        return self.served_ratios(baseline or scenario.baseline, scenario)[THROUGHPUT]

    @abstractmethod
    def served(self, scenario: Scenario) -> Served | None:
        """Serve the scenario on the engine; returns None if it does not fit."""

    def served_ratios(self, scenario: Scenario, baseline: Scenario) -> Mapping[str, Estimate]:
        """Return the quantities that are `COMPARED` (seconds) over those of another scenario."""
        served = self.served(scenario)
        served_by_baseline = self.served(baseline)
        if served is None or served_by_baseline is None:
            return dict.fromkeys(COMPARED, NOTHING)
        error = self._largest_error(self.cost.uncertainty)
        values = served._asdict()
        references = served_by_baseline._asdict()
        ratios = {}
        for name in COMPARED:
            ratios[name] = Estimate(values[name], error) / Estimate(references[name], error)
        return ratios


class CostBench(Bench):
    """A cost model's bench: requests in the steady state of the engine's loop, in virtual time.

    Args:
        cost: Seconds of a batch.
        is_counting: Count batches instead of serving, as the paper does: without remainders or
            part-filled tiles.
    """

    def __init__(self, cost: IterationTimes, *, is_counting: bool = False) -> None:
        super().__init__(cost)
        self.is_counting = is_counting
        self._times_of: dict[Subject, Mapping[str, float]] = {}
        self._served: dict[Scenario, Served] = {}

    def _times(self, subject: Subject) -> Mapping[str, float]:
        if subject not in self._times_of:
            self._times_of[subject] = super()._times(subject)
        return self._times_of[subject]

    def request(self, scenario: Scenario) -> Times:
        if self.is_counting:
            return super().request(scenario)
        return request_times(self.cost.operation_times, scenario)

    def gain(self, scenario: Scenario, baseline: Scenario | None = None) -> Estimate:
        reference = self.seconds(request(baseline or scenario.baseline))
        return reference / self.seconds(request(scenario))

    def served(self, scenario: Scenario) -> Served:
        if scenario not in self._served:
            executor = SimulatedExecutor(self.cost.iteration_time)
            num_blocks = scenario.blocks(BLOCK_SIZE)
            served = serve(executor, scenario, num_blocks=num_blocks, block_size=BLOCK_SIZE)
            assert served is not None
            self._served[scenario] = served
        return self._served[scenario]


class Second:
    """Every batch takes a second."""

    has_operations = True
    uncertainty: Mapping[str, float] = {"matmul": 0.0, "attention": 0.0}

    def iteration_time(self, batch: Batch) -> float:
        return 1.0

    def operation_times(self, batch: Batch) -> dict[str, float]:
        return {"ffn": self.iteration_time(batch)}


class PlanningBench(Bench):
    """Runs nothing: it lists the batches and scenarios that a device would run for a part."""

    def __init__(self) -> None:
        super().__init__(Second())
        self.subjects: list[Subject] = []

    def _times(self, subject: Subject) -> Mapping[str, float]:
        if isinstance(subject, Scenario):
            return self.request(subject)
        self.subjects.append(subject)
        return {"ffn": 1.0}

    def keys_read(self, work: Work) -> Estimate:
        return self.seconds(work)

    def served(self, scenario: Scenario) -> Served:
        self.subjects.append(scenario)
        return Served(1.0, 0.0, 1, 1.0, 1.0)


def room_of(part: Part) -> Room:
    """Return the room that a part needs of a device."""
    bench = PlanningBench()
    part.points(bench)
    return Room.largest(subject.room for subject in bench.subjects)


def _cause_of(operation: str) -> str:
    if operation in ATTENTION:
        return "attention"
    return "matmul" if operation in MATMUL else "fixed"
