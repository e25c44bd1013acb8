"""Benches: seconds of batches and of served requests, by a cost model or measured."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Protocol

import numpy as np

from sarathi_lab.engine.request import Batch
from sarathi_lab.executor.simulated.cost_model import KINDS
from sarathi_lab.executor.simulated.drawn_times import (
    SHAPES_OF_BATCHES,
    SHAPES_OF_RUN,
    VARIANTS,
    DrawnTimes,
    Values,
    own_deviation,
)
from sarathi_lab.executor.simulated.executor import SimulatedExecutor
from sarathi_lab.executor.simulated.hardware import EXPERTS
from sarathi_lab.experiment.points import Estimate, Part, name_of
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

    def times(self, work: Work) -> Times:
        """Return the seconds of `work` by operation."""
        return work.times(self._times)

    def _times(self, subject: Subject) -> Mapping[str, Any]:
        if isinstance(subject, Composition):
            return self.cost.operation_times(subject.make())
        return self.request(subject)

    def seconds(self, work: Work, kinds: Iterable[str] = EVERYTHING) -> Estimate:
        """Return the seconds of the operations of some kinds.

        Of whole iterations only the total is known, output head and host included, whichever
        operations count for it; kinds alone are not a number.
        """
        kinds = tuple(kinds)
        if not self.cost.has_operations:
            # Only sums that stand for a whole iteration are known.
            if kinds not in TOTALS:
                return NOTHING
            return self._sum_of(work, self.times(work), str(kinds))
        operations: list[str] = []
        for kind in kinds:
            operations += KINDS[kind]
        return self._sum_of(work, operations, str(kinds))

    def _sum_of(self, work: Work, operations: Iterable[str], name: str) -> Estimate:
        """Return the seconds of some operations, a quantity with a `name`."""
        times = self.times(work)
        seconds: float | Values = 0.0
        for operation in operations:
            seconds = seconds + times.get(operation, 0.0)
        return Estimate.of(seconds)

    def saving(self, alone: Work, both: Work, without: Work) -> Estimate:
        """Return the seconds of `alone` over those that `both` takes beyond `without`.

        Both should have as many tokens: then their products have one size, whose error cancels in
        the difference. Products of other sizes, and attention, err by themselves.
        """
        return self.seconds(alone) / self.seconds(both - without)

    def chunking_losses(self, prompt_len: int, chunk: int) -> Mapping[str, Estimate]:
        """Return the `losses` of a prompt in chunks as shares of the time of the whole one. Of
        whole iterations only the "total" is known.
        """
        uncut = self.seconds(_uncut(prompt_len))
        shares = {}
        for cause, seconds in self.losses(prompt_len, chunk).items():
            is_known = cause == "total" or self.cost.has_operations
            shares[cause] = seconds / uncut if is_known else NOTHING
        return shares

    def losses(self, prompt_len: int, chunk: int) -> Mapping[str, Estimate]:
        """Return the extra seconds of a prompt, prefilled alone in chunks, by cause (section 4.2,
        Fig 13); a gain is below zero.

        Three causes sum up to the "total": "attention" is the cache read again by every chunk (and
        smaller kernels), "matmul" part-filled tiles and waves and weights read once per chunk (a
        product overlaps the two), "fixed" all else, the costs of an iteration of any size.
        "experts" is a mixture's part of "matmul".
        """
        uncut = _uncut(prompt_len)
        cut = chunked(prompt_len, chunk, emits=True)
        extra = {
            "attention": self.seconds(cut, ("attn",)) - self.seconds(uncut, ("attn",)),
            "total": self.seconds(cut) - self.seconds(uncut),
        }
        by_cause: dict[str, list[str]] = {"matmul": [], "fixed": [], "experts": [EXPERTS]}
        for operation in {**self.times(uncut), **self.times(cut)}:
            cause = _cause_of(operation)
            if cause in by_cause:
                by_cause[cause].append(operation)
        for cause, operations in by_cause.items():
            of_cut = self._sum_of(cut, operations, cause)
            extra[cause] = of_cut - self._sum_of(uncut, operations, cause)
        return extra

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
        values = served._asdict()
        references = served_by_baseline._asdict()
        ratios = {}
        for name in COMPARED:
            reference = Estimate(references[name])
            ratios[name] = Estimate(values[name]) / reference
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
        self._drawn = DrawnTimes(cost)
        self._times_of: dict[Subject, Mapping[str, Values]] = {}
        self._served: dict[Scenario, Mapping[str, Estimate]] = {}

    def _times(self, subject: Subject) -> Mapping[str, Values]:
        """Return the seconds by operation, in every draw."""
        if subject not in self._times_of:
            if isinstance(subject, Composition):
                self._times_of[subject] = self._drawn.operation_times(subject.make())
            else:
                self._times_of[subject] = self.request(subject)
        return self._times_of[subject]

    def _sum_of(self, work: Work, operations: Iterable[str], name: str) -> Estimate:
        """Return the seconds of some operations, with two kinds of errors: in the draws those that
        all shapes of batches share, and one that a shape has alone. A served request has many
        shapes, over which the second kind averages out.
        """
        operations = tuple(operations)
        estimate = super()._sum_of(work, operations, name)
        is_run = any(isinstance(subject, Scenario) for _, subject in work.terms)
        if work.is_difference and not is_run:
            return self._with_errors_of_sizes(estimate, work, operations)
        num_shapes = 1
        if is_run:
            num_shapes = SHAPES_OF_RUN
        return Estimate.with_own_error(estimate.values, f"{name} {work.terms}", num_shapes)

    def _with_errors_of_sizes(
        self, estimate: Estimate, work: Work, operations: Collection[str]
    ) -> Estimate:
        """Return the seconds of a difference of batches, in which each size of operations errs by
        itself: attention by its sequences, all else by the number of tokens.
        """
        moved: dict[str, float] = {}  # by size
        for weight, subject in work.terms:
            seconds_by_size = self._by_size(subject, operations)
            for size, seconds in seconds_by_size.items():
                deviation = own_deviation(seconds)
                slower_by = seconds[0] * math.expm1(deviation)
                so_far = moved.get(size, estimate.value)
                moved[size] = so_far + weight * slower_by
        values = np.array([*estimate.values, *moved.values()])
        names = list(map(name_of, moved))
        return Estimate.of(values, names)

    def _by_size(self, subject: Subject, operations: Collection[str]) -> Mapping[str, Values]:
        """Return the seconds of a batch in every draw: of attention, and of all else."""
        assert isinstance(subject, Composition)
        of_others = f"others {subject.make().num_tokens}"
        if not self.cost.has_operations:  # attention is part of the whole
            of_others = f"iteration {subject}"
        of_attention = f"attention {subject}"
        seconds = {of_attention: np.zeros(1), of_others: np.zeros(1)}
        for name, of_operation in self._times(subject).items():
            if name in operations:
                size = of_attention if name in ATTENTION else of_others
                seconds[size] = seconds[size] + of_operation
        return seconds

    def request(self, scenario: Scenario) -> Times:
        if self.is_counting:
            return super().request(scenario)
        return request_times(self._drawn.operation_times, scenario)

    def gain(self, scenario: Scenario, baseline: Scenario | None = None) -> Estimate:
        reference = self.seconds(request(baseline or scenario.baseline))
        return reference / self.seconds(request(scenario))

    def served(self, scenario: Scenario) -> Served:
        return self._serve(scenario, self.cost.iteration_time)

    def _serve(self, scenario: Scenario, iteration_time: Callable[[Batch], float]) -> Served:
        executor = SimulatedExecutor(iteration_time)
        num_blocks = scenario.blocks(BLOCK_SIZE)
        served = serve(executor, scenario, num_blocks=num_blocks, block_size=BLOCK_SIZE)
        assert served is not None
        return served

    def served_ratios(self, scenario: Scenario, baseline: Scenario) -> Mapping[str, Estimate]:
        of_scenario = self._compared(scenario)
        of_baseline = self._compared(baseline)
        return {name: of_scenario[name] / of_baseline[name] for name in COMPARED}

    def _compared(self, scenario: Scenario) -> Mapping[str, Estimate]:
        """Serve a scenario in every variant, and return the quantities that are `COMPARED`."""
        if scenario not in self._served:
            # Each variant serves all requests: other times may admit requests in other iterations.
            runs = [self.served(scenario)]
            for variant in VARIANTS:
                runs.append(self._serve(scenario, self._drawn.iteration_time_of(variant)))
            estimates = {}
            for name in COMPARED:
                values = np.array([getattr(run, name) for run in runs])
                estimates[name] = Estimate.of(values, SHAPES_OF_BATCHES)
            self._served[scenario] = estimates
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
            # It is counted: of its batches each is a subject of its own.
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


def _uncut(prompt_len: int) -> Work:
    """Return the work of a prompt in one piece."""
    return chunked(prompt_len, prompt_len, emits=True)


def _cause_of(operation: str) -> str:
    if operation in ATTENTION:
        return "attention"
    return "matmul" if operation in MATMUL else "fixed"
