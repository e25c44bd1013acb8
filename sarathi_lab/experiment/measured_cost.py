"""Times of iterations and operations, asked of the device: batches are run on the executor."""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch

from sarathi_lab.config.errors import RunError
from sarathi_lab.engine.block_manager import BlockManager
from sarathi_lab.engine.compositions import placed
from sarathi_lab.engine.request import Batch
from sarathi_lab.engine.single_iteration import SingleIteration, single_iteration
from sarathi_lab.executor.iteration_probe import REFERENCE, DeviceProbe, Timing
from sarathi_lab.executor.measured_backend import DeviceExecutor
from sarathi_lab.executor.simulated.cost_model import WHOLE
from sarathi_lab.executor.steal_corrected_clock import stolen
from sarathi_lab.executor.torch.executor import TorchExecutor
from sarathi_lab.executor.torch.operation_probe import OperationProbe
from sarathi_lab.executor.vllm.executor import VllmExecutor
from sarathi_lab.executor.vllm.operation_probe import HookedProbe
from sarathi_lab.experiment.scenario import Times
from sarathi_lab.model.spec import ModelSpec
from sarathi_lab.results.intervals import summary

MAX_TIMINGS = 8  # of a composition in a round
ENOUGH = 0.05  # seconds of them, after which one suffices: rather more rounds than longer ones
LOWER = 0.25  # the quantile that stands for an iteration: what disturbs one makes it longer
REFERENCES = 8  # before the first timing of a size
# Largest ratio of two references, and of both to usual ones, at which a timing between them counts.
AGREE = 1.25
OPERATIONS = ("qkv_proj", "out_proj", "ffn", "elementwise", "prefill_attention", "others")
TOO_SMALL = "the cache is too small"
NO_OPERATIONS = "whole iterations are timed here; executor.eager=true times vLLM's operations, too"
ALTERNATED = 1.0  # seconds of iterations whose difference is asked for, in a round
FEWEST_TURNS = 3  # of them
MAX_TURNS = 32


class EqualChunks(NamedTuple):
    """Chunks of a batch that are equal, and how many they are."""

    start: int
    num_tokens: int
    is_decode: bool
    number: int


BatchShape = tuple[EqualChunks, ...]


def composition(batch: Batch) -> BatchShape:
    """What a batch is made of, in the order of its chunks; equal for batches of equal cost."""
    kinds = [(chunk.start, chunk.num_tokens, chunk.is_decode) for chunk in batch.chunks]
    counts = Counter(kinds)
    equal_chunks = []
    for kind, number in counts.items():
        equal_chunks.append(EqualChunks(*kind, number))
    return tuple(equal_chunks)


def _probe_of(executor: DeviceExecutor) -> OperationProbe | DeviceProbe:
    if isinstance(executor, TorchExecutor):
        # It fills the cache with random values: zeros run faster.
        return OperationProbe(executor)
    if isinstance(executor, VllmExecutor) and executor.workers.times_operations:
        return HookedProbe(executor)
    return DeviceProbe(executor)


def describe(batch: Batch) -> str:
    """The composition in words, such as "239 at 512 + 17 decodes at 1024"."""
    terms = []
    for chunks in composition(batch):
        if chunks.is_decode:
            terms.append(f"{chunks.number} decodes at {chunks.start + 1}")
        elif chunks.number > 1:
            terms.append(f"{chunks.number} x {chunks.num_tokens} at {chunks.start}")
        else:
            terms.append(f"{chunks.num_tokens} at {chunks.start}")
    return " + ".join(terms)


def _lower_times(timings: Sequence[Times]) -> Times:
    """Return the `LOWER` quantile of the seconds of each operation."""
    quantiles = pd.DataFrame(timings).quantile(LOWER)
    return {str(name): float(seconds) for name, seconds in quantiles.items()}


class Measurement(NamedTuple):
    """Seconds of a composition's iterations, and of its operations alone; how they were timed.

    `host_share` is the median share of an iteration in which the host was at work on it.
    """

    batch: Batch
    seconds: list[float]
    operations: Times
    timings: Mapping[str, Timing]
    host_share: float = math.nan  # where operations report themselves
    operation_share: float = math.nan  # of an iteration, that hooks on its operations sum to


class MeasuredCostModel:
    """Seconds of iterations, which are measured when they are first asked for.

    The lab's executor has times of operations: an iteration in C++ reports them; else they are
    timed alone, over all layers, and `others` is the rest of the whole. vLLM's workers report them
    where they run eagerly; else iterations are timed as wholes (`WHOLE`). Each is the `LOWER`
    quantile of its timings; where these do not sum to what the iteration took they are scaled to
    it. A batch that the device can't hold has the time "not a number"; `reason` is why the last one
    was left out.
    """

    def __init__(
        self, executor: DeviceExecutor, spec: ModelSpec | None = None, seed: int = 0
    ) -> None:
        """Measure on an `executor` with the model `spec`; None: that of the lab's executor."""
        self.executor = executor
        if spec is None:
            assert isinstance(executor, TorchExecutor), "others do not tell their model"
            spec = executor.model.spec
        self.spec = spec
        self.is_shared = not executor.timeline.has_stream  # cores, with other processes
        self.measurements: dict[BatchShape, Measurement] = {}  # since all was forgotten
        self._newest: dict[BatchShape, Measurement] = {}  # of all that was ever measured
        self.probe: Any = _probe_of(executor)
        self.has_operations: bool = self.probe.has_operations
        self.reason = None if self.has_operations else NO_OPERATIONS
        self._products: dict[int, tuple[Times, Timing]] = {}
        self._references: defaultdict[int, list[float]] = defaultdict(list)
        self._random = np.random.default_rng(seed)

    def iteration_time(self, batch: Batch) -> float:
        """Seconds of the whole iteration, the `LOWER` quantile of its timings."""
        return sum(self.operation_times(batch).values())

    def operation_times(self, batch: Batch) -> Times:
        """Seconds by operation, summed over layers."""
        shape = composition(batch)
        if shape not in self.measurements:
            try:
                measurement = self._measure(batch)
            except (torch.OutOfMemoryError, RunError) as error:
                self.reason = f"{describe(batch)}: {error}"
                names = OPERATIONS if self.has_operations else [WHOLE]
                return dict.fromkeys(names, math.nan)
            self.measurements[shape] = measurement
            self._newest[shape] = measurement
        return self.measurements[shape].operations

    def forget(self) -> None:
        """Measure again what is asked for from now on; `rows` keeps what was measured."""
        self.measurements.clear()
        self._products.clear()

    def placed(self, batch: Batch) -> Batch | None:
        """The same on sequences with cache blocks and random tokens; None if it does not fit."""
        blocks = BlockManager(self.executor.num_blocks, self.executor.block_size)
        return placed(batch, blocks, self._random, self.spec.vocab_size)

    def _measure(self, batch: Batch) -> Measurement:
        """Time a batch. Raises RunError for one that does not fit the cache."""
        batch_with_cache = self.placed(batch)
        if batch_with_cache is None:
            raise RunError(TOO_SMALL)
        if not self.has_operations:
            return self._measure_whole(batch_with_cache)
        attention = "prefill_attention" if batch.num_prefills else "decode_attention"
        if self.probe.reports_operations:
            return self._measure_reported(batch_with_cache, attention)
        return self._measure_alone(batch_with_cache, attention)

    def _measure_alone(self, batch: Batch, attention: str) -> Measurement:
        """Time operations first, so that all is compiled before the whole is timed."""
        probe = self.probe
        tokens = batch.num_tokens
        repetitions = MAX_TIMINGS if self.is_shared else 1
        if tokens not in self._products:
            passes = self.timed(tokens, lambda: probe.products(batch), repetitions)
            times = _lower_times(passes)
            self._products[tokens] = (times, probe.timing)
        products, timing_of_products = self._products[tokens]
        passes = self.timed(tokens, lambda: {attention: probe.attention(batch)}, repetitions)
        operations = products | _lower_times(passes)
        timings = dict.fromkeys(products, timing_of_products)
        timings[attention] = probe.timing
        probe.iteration(batch)  # warms up
        iterations = self._timed_wholes(batch, lambda: probe.iteration(batch))
        timings["iteration"] = probe.timing
        timings["others"] = probe.timing
        of_iteration = iterations.operations[WHOLE]
        of_operations = sum(operations.values())
        if of_operations > of_iteration:
            operations = _scaled(operations, of_iteration)
        operations["others"] = max(0.0, of_iteration - of_operations)
        return iterations._replace(operations=operations, timings=timings)

    def _measure_whole(self, batch: Batch) -> Measurement:
        """Time iterations alone."""
        iterations = self.probe.iterations(batch)
        return self._timed_wholes(batch, lambda: next(iterations))

    def _timed_wholes(self, batch: Batch, iterate: Callable[[], SingleIteration]) -> Measurement:
        """Time iterations of a batch, those that count (`timed`)."""
        host_shares: list[float] = []

        def seconds_of_next() -> Times:
            iteration = iterate()
            host_shares.append(iteration.host_share)
            return {WHOLE: iteration.seconds}

        passes = self.timed(batch.num_tokens, seconds_of_next)
        return Measurement(
            batch,
            seconds=[times[WHOLE] for times in passes],
            operations=_lower_times(passes),
            timings={"iteration": self.probe.timing},
            host_share=float(np.median(host_shares)),
        )

    def _measure_reported(self, batch: Batch, attention: str) -> Measurement:
        """Take operations and the whole from the same iterations, so that what slows the machine
        in between does not count as `others`.
        """
        operation_shares: list[float] = []

        def reported() -> Times:
            times = self.probe.operation_times(batch)
            operation_shares.append(self.probe.operation_share)
            times["others"] += times.pop("logits")
            return {attention: times.pop("attention"), **times}

        self.timed(batch.num_tokens, reported)  # warms up caches, and cores that waited for work
        passes = self.timed(batch.num_tokens, reported)
        seconds = [float(sum(times.values())) for times in passes]
        of_iteration = float(np.quantile(seconds, LOWER))
        operations = _scaled(_lower_times(passes), of_iteration)
        return Measurement(
            batch,
            seconds,
            operations,
            timings=dict.fromkeys(("iteration", *operations), self.probe.timing),
            operation_share=float(np.median(operation_shares)),
        )

    def timed(
        self, tokens: int, work: Callable[[], Times], repetitions: int = MAX_TIMINGS
    ) -> list[Times]:
        """Time `work` repeatedly, each time between two references, and divide by how much slower
        than usual these were. Drop timings whose references differ or are far from usual, and those
        in which a core was stolen; if all are dropped, return all as they are.
        """
        raw: list[Times] = []
        undisturbed: list[Times] = []
        start = time.perf_counter()
        before = self.reference(tokens)
        while not raw or (len(raw) < repetitions and time.perf_counter() - start < ENOUGH):
            stolen_before = self.stolen_by_core()
            times = work()
            had_cores = self._had_cores(stolen_before, times.values())
            after = self.reference(tokens)
            raw.append(times)
            least = min(before, after)
            slower = max(1.0, least)
            is_even = max(before, after) < AGREE * least
            if had_cores and is_even and slower < AGREE:
                at_usual_speed = {name: seconds / slower for name, seconds in times.items()}
                undisturbed.append(at_usual_speed)
            before = after
        return undisturbed or raw

    def _had_cores(self, stolen_before: list[float], seconds: Iterable[float]) -> bool:
        """Return whether other machines had no core while something took `seconds`."""
        # A time of 0 is one in which other machines had the core throughout.
        return self.stolen_by_core() == stolen_before and all(seconds)

    def stolen_by_core(self) -> list[float]:
        """Seconds so far that other machines had each core; empty for a GPU, which is not shared
        like that.
        """
        if not self.is_shared:
            return []
        return stolen()

    def reference(self, tokens: int) -> float:
        """Seconds of a reference over its usual ones; 1 on a GPU, which is not shared."""
        if not self.is_shared:
            return 1.0
        so_far = self._references[min(tokens, REFERENCE)]
        newest = 0.0
        while newest == 0 or len(so_far) <= REFERENCES:
            newest = self.probe.reference(tokens)
            if newest > 0:  # else all of its time was another process's
                so_far.append(newest)
        return newest / float(np.quantile(so_far, LOWER))

    def alternated(self, batches: Sequence[Batch]) -> np.ndarray:
        """Measure iterations of `batches` in turn, forwards and backwards, so that a slow phase of
        the device affects all of them. Returns seconds [turns, batches] of the turns in which no
        core was stolen, if there are any; NaN if a batch does not fit the cache.
        """
        batches_with_cache = []
        for batch in batches:
            batch_with_cache = self.placed(batch)
            if batch_with_cache is None:
                self.reason = f"{describe(batch)}: {TOO_SMALL}"
                return np.full((1, len(batches)), math.nan)
            batches_with_cache.append(batch_with_cache)
        turns: list[list[float]] = []
        undisturbed: list[list[float]] = []
        start = time.perf_counter()
        for number in range(MAX_TURNS):
            is_over = time.perf_counter() - start >= ALTERNATED
            if is_over and number >= FEWEST_TURNS:
                break
            step = 1 if number % 2 else -1  # forwards or backwards
            stolen_before = self.stolen_by_core()
            seconds = []
            for batch_with_cache in batches_with_cache[::step]:
                iteration = single_iteration(self.executor, batch_with_cache)
                seconds.append(iteration.seconds)
            if number == 0:
                continue  # the first turn warms up
            turn = seconds[::step]  # in the order of `batches`
            turns.append(turn)
            if self._had_cores(stolen_before, seconds):
                undisturbed.append(turn)
        return np.array(undisturbed or turns)

    def rows(self, model: str, dtype_bytes: int) -> list[dict[str, object]]:
        """One row per composition and operation, "iteration" for the whole, in milliseconds."""
        rows: list[dict[str, object]] = []
        for measurement in self._newest.values():
            batch = measurement.batch
            batch.window = self.spec.attention_window
            shape = {
                "model": model,
                "composition": describe(batch),
                "prefill_tokens": batch.num_prefill_tokens,
                "decodes": batch.num_decode_tokens,
                "kv_tokens": batch.prefill_kv_tokens + batch.decode_kv_tokens,
                "flops": float(self.spec.flops(batch)),
                "bytes": float(self.spec.min_bytes(batch, dtype_bytes)),
            }
            milliseconds = [1e3 * seconds for seconds in measurement.seconds]
            of_operations = sum(measurement.operations.values())
            iteration = summary(milliseconds, "ms")
            iteration["value"] = 1e3 * of_operations
            iteration["host_share"] = measurement.host_share
            iteration["operation_share"] = measurement.operation_share
            values = {"iteration": iteration}
            if self.has_operations:
                for name, seconds in measurement.operations.items():
                    values[name] = {"value": 1e3 * seconds, "unit": "ms"}
            for name, value in values.items():
                timing = measurement.timings[name]
                row = {**shape, "operation": name, "timing": timing, **value}
                rows.append(row)
        return rows


def _scaled(times: Times, total: float) -> Times:
    """Scale times so that they sum up to a `total`."""
    scale = total / sum(times.values())
    return {name: scale * seconds for name, seconds in times.items()}
