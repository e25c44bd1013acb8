"""Times of iterations and operations, asked of the device: batches are run on the executor."""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch

from sarathi_lab.config.errors import RunError
from sarathi_lab.engine.block_manager import BlockManager
from sarathi_lab.engine.compositions import placed
from sarathi_lab.engine.request import Batch
from sarathi_lab.engine.single_iteration import SingleIteration, single_iteration
from sarathi_lab.executor.iteration_probe import REFERENCE, IterationProbe, Timing
from sarathi_lab.executor.simulated.cost_model import WHOLE
from sarathi_lab.executor.steal_corrected_clock import stolen
from sarathi_lab.executor.timeline import HostTimeline
from sarathi_lab.executor.torch.executor import TorchExecutor
from sarathi_lab.executor.torch.operation_probe import OperationProbe
from sarathi_lab.executor.vllm.executor import VllmExecutor
from sarathi_lab.executor.vllm.operation_probe import HookedProbe
from sarathi_lab.experiment.scenario import Times
from sarathi_lab.model.spec import ModelSpec
from sarathi_lab.results.intervals import summary

MOST = 8  # timings of a composition in a round
ENOUGH = 0.05  # seconds of them, after which one suffices: rather more rounds than longer ones
LOWER = 0.25  # the quantile that stands for an iteration: what disturbs one makes it longer
REFERENCES = 8  # before the first timing of a size
# Largest ratio of two references, and of both to usual ones, at which a timing between them counts.
AGREE = 1.25
PARTS = ("qkv_proj", "out_proj", "ffn", "elementwise", "prefill_attention", "others")
TOO_SMALL = "the cache is too small"
NO_OPERATIONS = "whole iterations are timed here; executor.eager=true times vLLM's operations, too"
ALTERNATED = 1.0  # seconds of iterations whose difference is asked for, in a round
FEWEST_TURNS, MOST_TURNS = 3, 32  # of them

Composition = tuple[tuple[int, int, bool, int], ...]  # start, tokens, is decode, how many of them


def composition(batch: Batch) -> Composition:
    """What a batch is made of, in the order of its chunks; equal for batches of equal cost."""
    counts = Counter((chunk.start, chunk.num_tokens, chunk.is_decode) for chunk in batch.chunks)
    return tuple((*key, count) for key, count in counts.items())


def _probe_of(executor: Any) -> OperationProbe | HookedProbe | IterationProbe:
    if isinstance(executor, TorchExecutor):
        # It fills the cache with random values: zeros run faster.
        return OperationProbe(executor)
    if isinstance(executor, VllmExecutor) and executor.workers.times_operations:
        return HookedProbe(executor)
    return IterationProbe(executor)


def describe(batch: Batch) -> str:
    """The composition in words, such as "239 at 512 + 17 decodes at 1024"."""
    return " + ".join(
        f"{count} decodes at {start + 1}"
        if is_decode
        else f"{f'{count} x ' if count > 1 else ''}{tokens} at {start}"
        for start, tokens, is_decode, count in composition(batch)
    )


def _lower(timings: Sequence[Times]) -> Times:
    """Their `LOWER` quantile by name."""
    return {
        name: float(np.quantile([times[name] for times in timings], LOWER)) for name in timings[0]
    }


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
    """`IterationTimes` that are measured when they are first asked for.

    The lab's executor has times of operations: an iteration in C++ reports them; else they are
    timed alone, over all layers, and `others` is the rest of the whole. vLLM's workers report them
    where they run eagerly; else iterations are timed as wholes (`WHOLE`). Each is the `LOWER`
    quantile of its timings; where these do not sum to what the iteration took they are scaled to
    it. A batch that the device can't hold has the time "not a number"; `reason` is why the last one
    was left out.
    """

    uncertainty: ClassVar[Mapping[str, float]] = {"matmul": math.nan, "attention": math.nan}

    def __init__(self, executor: Any, spec: ModelSpec | None = None, seed: int = 0) -> None:
        """Measure on an `executor` with the model `spec`; None: that of the lab's executor."""
        self.executor = executor
        self.spec: ModelSpec = spec or executor.model.spec
        self.is_shared = type(executor.timeline) is HostTimeline  # with other processes
        self.measurements: dict[Composition, Measurement] = {}
        self._kept: dict[Composition, Measurement] = {}
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
        key = composition(batch)
        if key not in self.measurements:
            try:
                if (placed := self.placed(batch)) is None:
                    raise RunError(TOO_SMALL)
                found = self._measure(placed)
            except (torch.OutOfMemoryError, RunError) as error:
                self.reason = f"{describe(batch)}: {error}"
                return dict.fromkeys(PARTS if self.has_operations else [WHOLE], math.nan)
            self.measurements[key] = found
        return self.measurements[key].operations

    def forget(self) -> None:
        """Measure again what is asked for from now on; `rows` keeps what was measured."""
        self._kept |= self.measurements
        self.measurements.clear()
        self._products.clear()

    def placed(self, batch: Batch) -> Batch | None:
        """The same on sequences with cache blocks and random tokens; None if it does not fit."""
        blocks = BlockManager(self.executor.num_blocks, self.executor.block_size)
        return placed(batch, blocks, self._random, self.spec.vocab_size)

    def _measure(self, batch: Batch) -> Measurement:
        """Time operations first, so that all is compiled before the whole is timed."""
        tokens = batch.num_tokens
        if not self.has_operations:
            return self._measure_whole(batch)
        name = "prefill_attention" if batch.num_prefills else "decode_attention"
        if self.probe.reports_operations:
            return self._measure_reported(batch, name)
        most = MOST if self.is_shared else 1
        if tokens not in self._products:
            products = _lower(self.timed(tokens, lambda: self.probe.products(batch), most))
            self._products[tokens] = products, self.probe.timing
        products, timing = self._products[tokens]
        attention = self.timed(tokens, lambda: {name: self.probe.attention(batch)}, most)
        timings = {**dict.fromkeys(products, timing), name: self.probe.timing}
        operations = products | _lower(attention)
        self.probe.iteration(batch)
        seconds, host_share = self._timed_wholes(tokens, lambda: self.probe.iteration(batch))
        timings["iteration"] = timings["others"] = self.probe.timing
        whole = float(np.quantile(seconds, LOWER))
        parts = sum(operations.values())
        if parts > whole:
            operations = {name: value * whole / parts for name, value in operations.items()}
        operations["others"] = max(0.0, whole - parts)
        return Measurement(batch, seconds, operations, timings, host_share)

    def _measure_whole(self, batch: Batch) -> Measurement:
        """Time iterations alone."""
        iterations = self.probe.iterations(batch)
        seconds, host_share = self._timed_wholes(batch.num_tokens, lambda: next(iterations))
        whole = {WHOLE: float(np.quantile(seconds, LOWER))}
        return Measurement(batch, seconds, whole, {WHOLE: self.probe.timing}, host_share)

    def _timed_wholes(
        self, tokens: int, iterate: Callable[[], SingleIteration]
    ) -> tuple[list[float], float]:
        """Return the seconds of iterations that count (`timed`), and the median `host_share`."""
        shares: list[float] = []

        def seconds_of_next() -> Times:
            iteration = iterate()
            shares.append(iteration.host_share)
            return {WHOLE: iteration.seconds}

        timings = self.timed(tokens, seconds_of_next)
        return [times[WHOLE] for times in timings], float(np.median(shares))

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
        seconds, operations = [sum(times.values()) for times in passes], _lower(passes)
        share = float(np.quantile(seconds, LOWER)) / sum(operations.values())
        operations = {name: share * value for name, value in operations.items()}
        timings = dict.fromkeys(("iteration", *operations), self.probe.timing)
        operation_share = float(np.median(operation_shares))
        return Measurement(batch, seconds, operations, timings, operation_share=operation_share)

    def timed(self, tokens: int, work: Callable[[], Times], most: int = MOST) -> list[Times]:
        """Time `work` repeatedly, each time between two references, and divide by how much slower
        than usual these were. Drop timings whose references differ or are far from usual, and those
        in which a core was stolen; if none is left, return all as they are.
        """
        raw: list[Times] = []
        kept: list[Times] = []
        start, before = time.perf_counter(), self.reference(tokens)
        while not raw or (len(raw) < most and time.perf_counter() - start < ENOUGH):
            lost = self.stolen()
            raw.append(work())
            is_whole = self.stolen() == lost and all(raw[-1].values())
            after = self.reference(tokens)
            slower = max(1.0, min(before, after))
            if is_whole and max(before, after) < AGREE * min(before, after) and slower < AGREE:
                kept.append({name: value / slower for name, value in raw[-1].items()})
            before = after
        return kept or raw

    def stolen(self) -> list[float]:
        """Seconds by core that went to other machines; a GPU is not shared like that."""
        return stolen() if self.is_shared else []

    def reference(self, tokens: int) -> float:
        """Seconds of a reference over its usual ones; 1 on a GPU, which is not shared."""
        if not self.is_shared:
            return 1.0
        seen, found = self._references[min(tokens, REFERENCE)], 0.0
        while not found or len(seen) <= REFERENCES:
            if found := self.probe.reference(tokens):  # else all of its time was another's
                seen.append(found)
        return seen[-1] / float(np.quantile(seen, LOWER))

    def alternated(self, batches: Sequence[Batch]) -> np.ndarray:
        """Measure iterations of `batches` in turn, forwards and backwards, so that a slow phase of
        the device affects all of them. Returns seconds [turns, batches] of the turns in which no
        core was stolen, if there are any; NaN if a batch does not fit the cache.
        """
        placed = list[Batch]()
        for batch in batches:
            if (one := self.placed(batch)) is None:
                self.reason = f"{describe(batch)}: {TOO_SMALL}"
                return np.full((1, len(batches)), math.nan)
            placed.append(one)
        turns: list[list[float]] = []
        whole: list[list[float]] = []
        start = time.perf_counter()
        while len(turns) < FEWEST_TURNS or (
            len(turns) < MOST_TURNS and time.perf_counter() - start < ALTERNATED
        ):
            step, lost = (1 if len(turns) % 2 else -1), self.stolen()
            seconds = [single_iteration(self.executor, one).seconds for one in placed[::step]]
            turns.append(seconds[::step])
            # The first warms up; of one that is nothing all of the time was another's.
            if len(turns) > 1 and self.stolen() == lost and all(turns[-1]):
                whole.append(turns[-1])
        return np.array(whole or turns[1:])

    def rows(self, model: str, dtype_bytes: int) -> list[dict[str, object]]:
        """One row per composition and operation, "iteration" for the whole, in milliseconds."""
        rows: list[dict[str, object]] = []
        for found in (self._kept | self.measurements).values():
            batch = found.batch
            shape = {
                "model": model,
                "composition": describe(batch),
                "prefill_tokens": batch.num_prefill_tokens,
                "decodes": batch.num_decode_tokens,
                "kv_tokens": batch.prefill_kv_tokens + batch.decode_kv_tokens,
                "flops": float(self.spec.flops(batch)),
                "bytes": float(self.spec.min_bytes(batch, dtype_bytes)),
            }
            whole = summary([1e3 * seconds for seconds in found.seconds], "ms")
            whole["value"] = 1e3 * sum(found.operations.values())
            whole["host_share"] = found.host_share
            whole["operation_share"] = found.operation_share
            values = {"iteration": whole}
            for name, seconds in found.operations.items() if self.has_operations else ():
                values[name] = {"value": 1e3 * seconds, "unit": "ms"}
            for name, value in values.items():
                rows.append({**shape, "operation": name, "timing": found.timings[name], **value})
        return rows
