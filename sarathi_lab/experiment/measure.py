"""Measures experiments on a device: their parts in rounds, until a time is over."""

from __future__ import annotations

import gc
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pandas as pd
import torch

from sarathi_lab.config.console import progress_of
from sarathi_lab.config.errors import RunError
from sarathi_lab.engine.executor import Sizes
from sarathi_lab.executor.iteration_probe import REFERENCE
from sarathi_lab.executor.measured_backend import DeviceExecutor, MeasuredBackend
from sarathi_lab.executor.steal_corrected_clock import exclude_stolen_time
from sarathi_lab.executor.torch.backend import WARM_UP_TOKENS
from sarathi_lab.executor.torch.executor import TorchExecutor
from sarathi_lab.executor.torch.operation_probe import OperationProbe
from sarathi_lab.experiment.bench import COMPARED, NOTHING, Bench, PlanningBench
from sarathi_lab.experiment.measured_cost import TOO_SMALL, MeasuredCostModel
from sarathi_lab.experiment.points import Estimate, Part, Point, Samples, keep, table_of
from sarathi_lab.experiment.registry import COMPOSITIONS, SERVING, Measured, MeasuredJob
from sarathi_lab.experiment.scenario import (
    BLOCK_SIZE,
    Composition,
    Room,
    Scenario,
    Served,
    Times,
    Work,
    serve,
)
from sarathi_lab.model.spec import ModelSpec
from sarathi_lab.results import load
from sarathi_lab.results.intervals import FEWEST_PAIRS, LEVEL, coarse_to_fine, median_of, summary

WARM_UP_DECODES = 4


class DeviceBench(Bench):
    """A device's: every batch and scenario is measured once in a round, the first of each kind
    after a warm-up that does not count; what cache or memory are too small for is not a number.
    """

    def __init__(self, executor: DeviceExecutor, spec: ModelSpec | None = None) -> None:
        self.cost = MeasuredCostModel(executor, spec)
        self.has_operations = self.cost.has_operations
        self.executor = executor
        self.runs: defaultdict[Scenario, list[Served]] = defaultdict(list)
        self._of_this_round: dict[Scenario, Mapping[str, Estimate]] = {}
        self._too_large: set[Scenario] = set()
        self._prepared: dict[str, int] = {}
        self._is_warm = False
        self._round = 0

    def start(self, number: int) -> None:
        """Time batches again, and in another round serve again, what is asked for from now on."""
        self.cost.forget()
        if number != self._round:
            self._of_this_round.clear()
            self._round = number

    def times(self, work: Work) -> Times:
        if not self._is_warm:
            self._is_warm = True
            # The first batch compiles kernels and wakes cores, which later ones do not pay for.
            super().times(work)
            self.cost.forget()
        return super().times(work)

    def _times_of_batch(self, composition: Composition) -> Times:
        return self.cost.operation_times(composition.make())

    def saving(self, alone: Work, both: Work, without: Work) -> Estimate:
        """Return medians of turns on a CPU: of two times that were taken one after the other, the
        difference is what other processes did to one of them.
        """
        if not self.cost.is_shared:  # on a GPU nothing else runs in between
            return super().saving(alone, both, without)
        batches = [*alone.batches, *both.batches, *without.batches]
        turns = self.cost.alternated(batches)
        seconds_alone, seconds_both, seconds_without = turns.T
        typical_alone = np.median(seconds_alone)
        typical_added = np.median(seconds_both - seconds_without)
        return Estimate(float(typical_alone)) / Estimate(float(typical_added))

    def keys_read(self, work: Work) -> Estimate | None:
        if not isinstance(self.cost.probe, OperationProbe):
            return None  # other kernels have no cache that can be written
        total = 0.0
        for batch in work.batches:
            batch_with_cache = self.cost.placed(batch)
            if batch_with_cache is None:
                return NOTHING
            total += self.cost.probe.keys_read(batch_with_cache)
        return Estimate(total)

    def compared(self, scenario: Scenario) -> Mapping[str, Estimate]:
        if scenario not in self._of_this_round:
            is_first = not self.runs and not self._too_large
            if is_first:
                # A run of few decodes warms up, and is not recorded.
                self._run(replace(scenario, num_decodes=WARM_UP_DECODES))
            served = self._run(scenario)
            quantities = dict.fromkeys(COMPARED, NOTHING)
            if served is not None:
                self.runs[scenario].append(served)
                values = served._asdict()
                quantities = {name: Estimate(values[name]) for name in COMPARED}
            self._of_this_round[scenario] = quantities
        return self._of_this_round[scenario]

    def _run(self, scenario: Scenario) -> Served | None:
        if scenario in self._too_large:
            return None
        executor = self.executor
        served = None
        reason = TOO_SMALL
        try:
            self._warm_up(scenario)
            served = serve(
                executor,
                scenario,
                num_blocks=executor.num_blocks,
                block_size=executor.block_size,
                vocab_size=self.cost.spec.vocab_size,
            )
        except RunError as error:
            reason = str(error)
            while executor.num_in_flight:  # else the next run would collect them
                executor.collect()
        if served is None:
            self._too_large.add(scenario)
            self.cost.reason = reason
        return served

    def _warm_up(self, scenario: Scenario) -> None:
        """Record graphs, as the engine does before a run."""
        if not isinstance(self.executor, TorchExecutor):
            return
        sizes = {
            "batch_size": scenario.batch_size,
            "longest": scenario.longest,
            "chunk_tokens": scenario.chunk or WARM_UP_TOKENS,
            "max_tokens": scenario.chunk or scenario.longest + scenario.batch_size,
        }
        if sizes != self._prepared:
            self.executor.warm_up(**sizes)
            self._prepared = sizes

    def serving_rows(self, model: str) -> list[dict[str, object]]:
        """A row per scenario and quantity: milliseconds a request, shares of idle and replayed."""
        rows: list[dict[str, object]] = []
        for scenario, runs in self.runs.items():
            labels = {
                "model": model,
                "policy": scenario.policy,
                "chunk": scenario.chunk,
                "prompt_len": scenario.prompt_len,
                "num_decodes": scenario.num_decodes,
                "batch": scenario.batch_size,
                "iterations": runs[0].num_iterations,
            }
            milliseconds = [1e3 * run.seconds_per_request for run in runs]
            idle_shares = [run.idle_share for run in runs]
            replayed_shares = [run.replayed_share for run in runs]
            quantities = {
                "time per request": summary(milliseconds, "ms"),
                "idle share": summary(idle_shares, "ratio"),
                load.REPLAYED: summary(replayed_shares, "ratio"),
            }
            for quantity, values in quantities.items():
                rows.append({**labels, "quantity": quantity, **values})
        return rows


LEFT_OUT = "the time was over"
MAX_ROUNDS = 15  # of requests
MAX_ROUNDS_OF_PART = 40  # of batches and scenarios
Advance = Callable[..., None]  # called with the seconds that passed, and those expected in all


def expect(job: MeasuredJob) -> None:
    """Announce the room, so that one engine is made for all experiments of a sweep, where the
    backend shares it.
    """
    sizes = engine_sizes(job.backend, job.room)
    job.backend.expect(job.spec, None, sizes)


@contextmanager
def loaded(job: MeasuredJob) -> Iterator[tuple[DeviceExecutor, Advance]]:
    """Load the model with a cache of the experiment's room, or of what the memory holds."""
    executor = load_executor(job.backend, job.spec, job.room)
    title = f"measuring {job.experiment.name} with {job.spec.name}"
    with (
        progress_of(title, job.seconds, "s") as advance,
        exclude_stolen_time(executor),
    ):
        yield executor, advance


def measured_table(job: MeasuredJob, samples: Samples, *, is_series: bool = True) -> pd.DataFrame:
    """Return the recorded points of an experiment. `is_series`: see `ends_of_median`."""
    table = table_of(job.experiment.name, samples, job.max_spread, is_series=is_series)
    return table.assign(
        model=job.spec.name,
        dtype=job.backend.dtype_name,
        device_name=job.backend.device_name,
    )


def engine_sizes(backend: MeasuredBackend, room: Room) -> Sizes:
    """Return the sizes of an engine with `room`, in blocks that the device reads."""
    block_size = math.lcm(BLOCK_SIZE, backend.block_multiple)
    num_blocks = math.ceil(room.kv_tokens / block_size)
    if block_size > BLOCK_SIZE:
        num_blocks += room.batch_size  # the last block of each sequence may be part-filled
    return Sizes(
        num_blocks=num_blocks,
        block_size=block_size,
        batch_size=room.batch_size,
        max_model_len=max(room.longest, REFERENCE + 1),
        max_batch_tokens=room.batch_tokens or room.kv_tokens,
    )


def load_executor(backend: MeasuredBackend, spec: ModelSpec, room: Room) -> DeviceExecutor:
    """Build the executor of `spec` with random weights and a cache of `room`, or of what the memory
    holds. Memory is not checked again here: an engine that earlier experiments left for this one
    holds it. Raises RunError if the weights do not fit.
    """
    sizes = engine_sizes(backend, room)
    try:
        return backend.build(spec, None, sizes)
    except RunError:
        longest_batch = room.longest + room.batch_size
        sizes = replace(sizes, max_batch_tokens=longest_batch, fills_memory=True)
    # Outside the handler, whose traceback would keep the first model.
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return backend.build(spec, None, sizes)


def measure_parts(parts: Sequence[Part], job: MeasuredJob) -> Measured:
    """Measure parts on one executor, which has room for each of them."""
    with loaded(job) as (executor, advance):
        bench = DeviceBench(executor, job.spec)
        samples = measure(
            parts,
            bench,
            seconds=job.seconds,
            max_rounds=MAX_ROUNDS_OF_PART,
            narrow=job.max_spread,
            is_cut=job.is_cut,
            advance=advance,
        )
    table = measured_table(job, samples)
    table.loc[table.num_pairs == 0, "reason"] = bench.cost.reason or LEFT_OUT
    table.loc[[not values for values in samples.values()], "reason"] = LEFT_OUT
    tables = {"": table}
    compositions = bench.cost.rows(job.spec.name, job.backend.dtype_bytes)
    if compositions:
        tables[COMPOSITIONS] = pd.DataFrame(compositions)
    serving = bench.serving_rows(job.spec.name)
    if serving:
        tables[SERVING] = pd.DataFrame(serving)
    return tables


def measure(
    parts: Sequence[Part],
    bench: object,
    *,
    seconds: float = math.inf,
    max_rounds: int = MAX_ROUNDS,
    narrow: float | None = None,
    is_cut: bool = False,
    advance: Advance = lambda *seconds: None,
) -> Samples:
    """Return samples of the points of all parts, one a round: for `seconds` and `max_rounds`, but
    `FEWEST_PAIRS` rounds of them at least. `advance` is called with the seconds that a part took,
    and after the first round with those that all rounds are expected to take.

    After the fewest rounds a part is left alone once the intervals of all its points are within
    `narrow` of the median, so that the rest of the time goes to the others. With `is_cut` ends and
    middles come first, and parts for whose fewest rounds the time is too short have no samples.
    """
    due = coarse_to_fine(parts) if is_cut else list(parts)
    samples: Samples = {}
    longest: dict[int, float] = {}  # seconds of a part so far, by its id
    begun = time.monotonic()
    for number in range(max_rounds):
        has_fewest = number >= FEWEST_PAIRS
        for part in list(due):
            start = time.monotonic()
            elapsed = start - begun
            has_no_time = has_fewest and elapsed + longest[id(part)] > seconds
            if is_cut and samples and number == 0:
                # Other parts would need `FEWEST_PAIRS` rounds, too.
                has_no_time = FEWEST_PAIRS * elapsed > seconds
            if has_no_time:
                del due[due.index(part) :]
                break
            if isinstance(bench, DeviceBench):
                bench.start(number)
            points = part.points(bench, number)
            keep(samples, points)
            took = time.monotonic() - start
            longest[id(part)] = max(longest.get(id(part), 0.0), took)
            advance(took)
            if narrow and number + 1 >= FEWEST_PAIRS and _are_narrow(samples, points, narrow):
                due.remove(part)
        if number == 0:
            of_a_round = time.monotonic() - begun
            advance(0.0, max(seconds, FEWEST_PAIRS * of_a_round))
    for part in parts:
        if id(part) not in longest:
            # Their points are in the table, with the reason why they have no number.
            for point in part.points(PlanningBench()):
                samples[point.position] = []
    return samples


def _are_narrow(samples: Samples, points: Iterable[Point], max_spread: float) -> bool:
    """Whether the intervals of all points reach `LEVEL` within `max_spread`, or never will."""
    for point in points:
        if point.kind == "curve":
            continue
        interval = median_of(samples[point.position], max_spread, of=point.total)
        is_narrow = interval.reason is None and interval.confidence >= LEVEL
        # A point that is not measured in any round never gets an interval.
        if interval.num_pairs and not is_narrow:
            return False
    return True
