"""Benches: seconds of batches and of served requests, by a cost model or measured."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from sarathi_lab.engine.request import Batch
from sarathi_lab.executor.simulated.cost_model import KINDS, CostModel
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


class Bench(ABC):
    """What parts of an experiment are evaluated on: it times work, and serves scenarios in its
    kind's way.

    Attributes:
        has_operations: Whether operations have times; else whole iterations alone (`WHOLE`).
    """

    has_operations: bool = True

    def times(self, work: Work) -> Times:
        """Return the seconds of `work` by operation."""
        return work.times(self._times)

    def _times(self, subject: Subject) -> Mapping[str, Any]:
        if isinstance(subject, Composition):
            return self._times_of_batch(subject)
        return self.request(subject)

    @abstractmethod
    def _times_of_batch(self, composition: Composition) -> Mapping[str, Any]:
        """Return the seconds of a batch by operation."""

    def seconds(self, work: Work, kinds: Iterable[str] = EVERYTHING) -> Estimate:
        """Return the seconds of the operations of some kinds.

        Of whole iterations only the total is known, output head and host included, whichever
        operations count for it; kinds alone are not a number.
        """
        kinds = tuple(kinds)
        operations: list[str] = []
        if self.has_operations:
            for kind in kinds:
                operations += KINDS[kind]
        elif kinds in TOTALS:
            operations += self.times(work)
        else:
            return NOTHING
        return self._sum_of(work, operations, str(kinds))

    def _sum_of(self, work: Work, operations: Sequence[str], name: str) -> Estimate:
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

    def losses(self, prompt_len: int, chunk: int) -> Mapping[str, Estimate]:
        """Return the extra seconds of a prompt, prefilled alone in chunks, by cause (section 4.2,
        Fig 13), as shares of the time of the whole one; a gain is below zero.

        Three causes sum up to the "total": "attention" is the cache read again by every chunk (and
        smaller kernels), "matmul" part-filled tiles and waves and weights read once per chunk (a
        product overlaps the two), "fixed" all else, the costs of an iteration of any size.
        "experts" is a mixture's part of "matmul". Of whole iterations only the "total" is known.
        """
        uncut = chunked(prompt_len, prompt_len, emits=True)
        cut = chunked(prompt_len, chunk, emits=True)
        seconds = self.seconds(uncut)
        attention = ("attn",)
        reread = self.seconds(cut, attention) - self.seconds(uncut, attention)
        losses = {
            "total": (self.seconds(cut) - seconds) / seconds,
            "attention": reread / seconds,
        }
        products = []
        others = []
        for operation in {**self.times(uncut), **self.times(cut)}:
            if operation in MATMUL:
                products.append(operation)
            elif operation not in ATTENTION:
                others.append(operation)
        by_cause = {"matmul": products, "fixed": others, "experts": [EXPERTS]}
        for cause, operations in by_cause.items():
            losses[cause] = NOTHING
            if self.has_operations:
                of_cut = self._sum_of(cut, operations, cause)
                of_uncut = self._sum_of(uncut, operations, cause)
                losses[cause] = (of_cut - of_uncut) / seconds
        return losses

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

    def served_ratios(self, scenario: Scenario, baseline: Scenario) -> Mapping[str, Estimate]:
        """Serve a scenario and a baseline on the engine, and return the quantities that are
        `COMPARED` (seconds) over those of the baseline.
        """
        served = self.compared(scenario)
        served_by_baseline = self.compared(baseline)
        ratios = {}
        for name in COMPARED:
            ratios[name] = served[name] / served_by_baseline[name]
        return ratios

    @abstractmethod
    def compared(self, scenario: Scenario) -> Mapping[str, Estimate]:
        """Serve a scenario, and return the quantities that are `COMPARED`: `NOTHING` where the
        device has no room for it.
        """


class CostBench(Bench):
    """A cost model's bench: requests in the steady state of the engine's loop, in virtual time.

    Args:
        cost: Seconds of a batch.
        is_counting: Count batches instead of serving, as the paper does: without remainders or
            part-filled tiles.
    """

    def __init__(self, cost: CostModel, *, is_counting: bool = False) -> None:
        self.cost = cost
        self.has_operations = cost.has_operations
        self.is_counting = is_counting
        self._drawn = DrawnTimes(cost)
        self._times_of: dict[Subject, Mapping[str, Values]] = {}
        self._served: dict[Scenario, Mapping[str, Estimate]] = {}

    def _times(self, subject: Subject) -> Mapping[str, Values]:
        """Return the seconds by operation, in every draw; each subject is timed once."""
        if subject not in self._times_of:
            self._times_of[subject] = super()._times(subject)
        return self._times_of[subject]

    def _times_of_batch(self, composition: Composition) -> Mapping[str, Values]:
        return self._drawn.operation_times(composition.make())

    def _sum_of(self, work: Work, operations: Sequence[str], name: str) -> Estimate:
        """Return the seconds of some operations, with two kinds of errors: in the draws those that
        all shapes of batches share, and one that a shape has alone. A served request has many
        shapes, over which the second kind averages out.
        """
        estimate = super()._sum_of(work, operations, name)
        is_run = any(isinstance(subject, Scenario) for _, subject in work.terms)
        if work.is_difference and not is_run:
            return self._with_errors_of_sizes(estimate, work, operations)
        num_shapes = 1
        if is_run:
            num_shapes = SHAPES_OF_RUN
        return Estimate.with_own_error(estimate.values, f"{name} {work.terms}", num_shapes)

    def _with_errors_of_sizes(
        self, estimate: Estimate, work: Work, operations: Sequence[str]
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

    def _by_size(self, subject: Subject, operations: Sequence[str]) -> Mapping[str, Values]:
        """Return the seconds of a batch in every draw: of attention, and of all else."""
        assert isinstance(subject, Composition)
        attention = np.zeros(1)
        others = np.zeros(1)
        for name, seconds in self._times(subject).items():
            if name not in operations:
                continue
            if name in ATTENTION:
                attention = attention + seconds
            else:
                others = others + seconds
        size_of_others = f"others {subject.make().num_tokens}"
        if not self.has_operations:  # attention is part of the whole
            size_of_others = f"iteration {subject}"
        return {f"attention {subject}": attention, size_of_others: others}

    def request(self, scenario: Scenario) -> Times:
        if self.is_counting:
            return super().request(scenario)
        return request_times(self._drawn.operation_times, scenario)

    def gain(self, scenario: Scenario, baseline: Scenario | None = None) -> Estimate:
        reference = self.seconds(request(baseline or scenario.baseline))
        return reference / self.seconds(request(scenario))

    def compared(self, scenario: Scenario) -> Mapping[str, Estimate]:
        """Serve a scenario in every variant, and return the quantities that are `COMPARED`."""
        if scenario not in self._served:
            runs = [_served(scenario, self.cost.iteration_time)]
            # Each variant serves all requests: other times may admit requests in other iterations.
            for variant in VARIANTS:
                iteration_time = self._drawn.iteration_time_of(variant)
                runs.append(_served(scenario, iteration_time))
            estimates = {}
            table = pd.DataFrame(runs)
            for name in COMPARED:
                estimates[name] = Estimate.of(table[name].to_numpy(), SHAPES_OF_BATCHES)
            self._served[scenario] = estimates
        return self._served[scenario]


def _served(scenario: Scenario, iteration_time: Callable[[Batch], float]) -> Served:
    """Serve a scenario in virtual time, with room for it."""
    executor = SimulatedExecutor(iteration_time)
    num_blocks = scenario.blocks(BLOCK_SIZE)
    served = serve(executor, scenario, num_blocks=num_blocks, block_size=BLOCK_SIZE)
    assert served is not None
    return served


class PlanningBench(Bench):
    """Runs nothing: it lists the batches and scenarios that a device would run for a part."""

    def __init__(self) -> None:
        self.subjects: list[Subject] = []

    def _times_of_batch(self, composition: Composition) -> Mapping[str, float]:
        self.subjects.append(composition)
        return {"ffn": 1.0}

    def keys_read(self, work: Work) -> Estimate:
        return self.seconds(work)

    def compared(self, scenario: Scenario) -> Mapping[str, Estimate]:
        self.subjects.append(scenario)
        return dict.fromkeys(COMPARED, Estimate(1.0))


def room_of(part: Part) -> Room:
    """Return the room that a part needs of a device."""
    bench = PlanningBench()
    part.points(bench)
    return Room.largest(subject.room for subject in bench.subjects)
