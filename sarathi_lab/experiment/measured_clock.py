"""A clock that asks the device: batches are run on the real executor a few times, requests are
served.
"""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch

from sarathi_lab.config.errors import RunError
from sarathi_lab.engine.block_manager import BlockManager
from sarathi_lab.engine.request import Batch, Request, SequenceState
from sarathi_lab.executor.torch.backend import WARM_UP_TOKENS
from sarathi_lab.executor.torch.executor import TorchExecutor
from sarathi_lab.executor.torch.operation_probe import LONG, OperationProbe
from sarathi_lab.experiment.clock import THROUGHPUT, Clock, Estimate, Times, counted
from sarathi_lab.experiment.scenario import Scenario, Served, serve
from sarathi_lab.model.spec import ModelSpec
from sarathi_lab.results.intervals import spread, summary

FEWEST, FEWEST_LONG, MOST = 3, 2, 5  # timed iterations of a composition
ENOUGH = 0.05  # seconds of timed iterations, after which FEWEST suffice
WARM_UP_DECODES = 4

PARTS = ("qkv_proj", "out_proj", "ffn", "elementwise", "prefill_attention")
Composition = tuple[tuple[int, int, bool, int], ...]  # start, tokens, is decode, how many of them


def composition(batch: Batch) -> Composition:
    """What a batch is made of, in the order of its chunks; equal for batches of equal cost."""
    counts = Counter((chunk.start, chunk.num_tokens, chunk.is_decode) for chunk in batch.chunks)
    return tuple((*key, count) for key, count in counts.items())


def describe(batch: Batch) -> str:
    """The composition in words, such as "239 at 512 + 17 decodes at 1024"."""
    parts = []
    for start, tokens, is_decode, count in composition(batch):
        times = f"{count} x " if count > 1 else ""
        parts.append(
            f"{count} decodes at {start + 1}" if is_decode else f"{times}{tokens} at {start}"
        )
    return " + ".join(parts)


@dataclass(frozen=True)
class Measurement:
    """One composition: seconds of its iterations, and of its operations each alone."""

    batch: Batch
    seconds: list[float]
    operations: dict[str, float]


class MeasuredCostModel:
    """A `CostModel` whose times are measured when they are first asked for.

    Operations are timed alone, over all layers; `others` is the rest of the whole iteration, so
    that their sum is what the iteration took. Where the operations alone take longer than the whole
    they are scaled to it. A batch that the device can't hold has the time "not a number".
    """

    def __init__(
        self,
        executor: TorchExecutor,
        *,
        seed: int = 0,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.executor = executor
        self._say = say
        self.measurements: dict[Composition, Measurement] = {}
        self._kept: dict[Composition, Measurement] = {}
        self._spreads: list[float] = []
        self._probe = OperationProbe(
            executor
        )  # fills the cache with random values: zeros run faster
        self._products: dict[int, dict[str, float]] = {}
        self._random = np.random.default_rng(seed)

    @property
    def spec(self) -> ModelSpec:
        return self.executor.model.spec

    @property
    def uncertainty(self) -> Mapping[str, float]:
        """The spread of repeated iterations, in the median over what was measured so far."""
        typical = float(np.median(self._spreads)) if self._spreads else math.nan
        return {"matmul": typical, "attention": typical}

    def iteration_time(self, batch: Batch) -> float:
        """Median seconds of the whole iteration."""
        return sum(self.operation_times(batch).values())

    def operation_times(self, batch: Batch) -> dict[str, float]:
        """Seconds by operation, summed over layers."""
        key = composition(batch)
        if key not in self.measurements:
            placed = self.placed(batch)
            try:
                found = None if placed is None else self._measure(placed)
            except (torch.OutOfMemoryError, RunError) as error:
                self._say(f"left out: {describe(batch)}: {error}")
                found = None
            if found is None:
                return dict.fromkeys((*PARTS, "others"), math.nan)
            self.measurements[key] = found
            self._spreads.append(spread(found.seconds))
        return self.measurements[key].operations

    def forget(self) -> None:
        """Measure anew whatever is asked for from now on; `rows` keeps what was measured."""
        self._kept |= self.measurements
        self.measurements.clear()
        self._products.clear()

    def placed(self, batch: Batch) -> Batch | None:
        """The same composition on sequences that hold cache blocks and tokens; None if the cache is
        too small.
        """
        blocks = BlockManager(self.executor.num_blocks, self.executor.block_size)
        placed = Batch()
        for order, chunk in enumerate(batch.chunks):
            end = chunk.start + chunk.num_tokens
            prompt_len = chunk.start if chunk.is_decode else end + (not chunk.emits_token)
            tokens = self._random.integers(0, self.spec.vocab_size, prompt_len, dtype=np.int32)
            sequence = SequenceState(Request(order, 0.0, prompt_len, 2, tokens), order)
            sequence.num_computed = chunk.start
            if chunk.is_decode:
                sequence.output_token_ids.append(0)  # the pending token
            if not blocks.grow(sequence, end):
                return None
            placed.add(sequence, chunk.num_tokens)
        return placed

    def iterate(self, batch: Batch) -> float:
        """Seconds of one iteration of a `placed` batch."""
        self.executor.submit(batch)
        busy = self.executor.collect().busy
        for chunk in batch.chunks:
            chunk.sequence.in_flight = False
        return busy

    def attention(self, batch: Batch) -> float:
        """Seconds of the attention of a `placed` batch, over all layers."""
        return self._probe.attention(batch)

    def _measure(self, batch: Batch) -> Measurement:
        """Operations first, then the whole: whatever is compiled, chosen or allocated at first use
        is so by then.
        """
        is_long = batch.num_tokens >= LONG
        operations = {**self._products_of(batch.num_tokens)}
        name = "prefill_attention" if batch.num_prefills else "decode_attention"
        operations[name] = self.attention(batch)
        if is_long:  # the device works longer than the host launches
            seconds = self._iterations(batch, FEWEST_LONG)
        else:
            with self.executor.recorded(batch):
                self.iterate(batch)
                seconds = self._iterations(batch, FEWEST)
        return Measurement(batch, seconds, _completed(operations, float(np.median(seconds))))

    def _iterations(self, batch: Batch, fewest: int) -> list[float]:
        seconds: list[float] = []
        start = time.perf_counter()
        while len(seconds) < fewest or (
            len(seconds) < MOST and time.perf_counter() - start < ENOUGH
        ):
            seconds.append(self.iterate(batch))
        return seconds

    def _products_of(self, num_tokens: int) -> dict[str, float]:
        if num_tokens not in self._products:
            self._products[num_tokens] = self._probe.products(num_tokens)
        return self._products[num_tokens]

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
            rows.append({**shape, "operation": "iteration", **whole})
            rows += [
                {**shape, "operation": name, "value": 1e3 * seconds, "unit": "ms"}
                for name, seconds in found.operations.items()
            ]
        return rows


def _completed(operations: dict[str, float], whole: float) -> dict[str, float]:
    """Operations and the rest of the iteration, which sum to the whole."""
    parts = sum(operations.values())
    if parts > whole:
        return {name: seconds * whole / parts for name, seconds in operations.items()} | {
            "others": 0.0
        }
    return {**operations, "others": whole - parts}


class DeviceClock(Clock):
    """A device's: every batch and scenario is measured once in a round, the first of each kind
    after a warm-up that does not count.

    What cache or memory are too small for is not a number; `reason` says why.
    """

    cost: MeasuredCostModel

    def __init__(self, executor: TorchExecutor, seed: int = 0) -> None:
        super().__init__(MeasuredCostModel(executor, seed=seed, say=self._leave_out))
        self.executor = executor
        self.reason: str | None = None
        self.runs: defaultdict[Scenario, list[Served]] = defaultdict(list)
        self._now: dict[Scenario, Served | None] = {}
        self._too_large: set[Scenario] = set()
        self._prepared: tuple[int, int | None, int] | None = None
        self._is_warm = False

    def start_round(self) -> None:
        """Serve anew whatever is asked for from now on."""
        self._now.clear()

    def start_unit(self) -> None:
        """Time batches anew whatever is asked for from now on."""
        self.cost.forget()

    def batch(self, *batches: Batch) -> Times:
        if not self._is_warm:
            self._is_warm = True
            super().batch(*batches)
            self.cost.forget()
        return super().batch(*batches)

    def request(self, scenario: Scenario) -> Times:
        """By counting batches: operations can't be told apart while requests are served."""
        return counted(self, scenario)

    def gain(self, scenario: Scenario) -> Estimate:
        return self.over(scenario.baseline, scenario, THROUGHPUT)

    def served(self, scenario: Scenario) -> Served | None:
        if scenario not in self._now:
            if not self.runs and not self._too_large:
                self._run(replace(scenario, num_decodes=WARM_UP_DECODES))
            self._now[scenario] = self._run(scenario)
            if (found := self._now[scenario]) is not None:
                self.runs[scenario].append(found)
        return self._now[scenario]

    def _run(self, scenario: Scenario) -> Served | None:
        if scenario in self._too_large:
            return None
        executor, reason = self.executor, "the cache is too small"
        sizes = {"num_blocks": executor.num_blocks, "block_size": executor.block_size}
        try:
            self._prepare(scenario)
            vocab_size = executor.model.spec.vocab_size
            if (found := serve(executor, scenario, **sizes, vocab_size=vocab_size)) is not None:
                return found
        except RunError as error:
            reason = str(error)
            while executor.num_in_flight:
                executor.collect()
        self._too_large.add(scenario)
        self._leave_out(f"{scenario}: {reason}")
        return None

    def _leave_out(self, text: str) -> None:
        self.reason = text.partition(": ")[2]

    def _prepare(self, scenario: Scenario) -> None:
        """Warm up for the scenario's batch, chunk and lengths, as the engine does before a run:
        graphs are recorded.
        """
        wanted = (scenario.batch_size, scenario.chunk, scenario.longest)
        if wanted != self._prepared:
            self.executor.warm_up(
                batch_size=scenario.batch_size,
                chunk_tokens=scenario.chunk or WARM_UP_TOKENS,
                longest=scenario.longest,
                is_fixed=scenario.chunk is not None,
            )
            self._prepared = wanted

    def serving_rows(self, model: str) -> list[dict[str, object]]:
        """One row per scenario and quantity: milliseconds a request, and the share of time that the
        device was idle.
        """
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
            times = summary([1e3 * run.seconds_per_request for run in runs], "ms")
            idle = summary([run.idle_share for run in runs], "ratio")
            rows.append({**labels, "quantity": "time per request", **times})
            rows.append({**labels, "quantity": "idle share", **idle})
        return rows


WARM_UPS = 2


def sample(
    work: Callable[[], object], device: torch.device, seconds: float, most: int = 200
) -> list[float]:
    """Seconds of each repetition of `work`, for about `seconds` (at least 3, at most `most`
    repetitions).

    On a GPU they are launched without waits in between and timed by events on the device.
    """
    for _ in range(WARM_UPS):
        work()
    start = time.perf_counter()
    _once(work, device)
    first = time.perf_counter() - start
    repetitions = max(3, min(most, int(seconds / max(first, 1e-7))))
    if device.type != "cuda":
        return [_once(work, device) for _ in range(repetitions)]
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repetitions + 1)]
    marks[0].record()
    for mark in marks[1:]:
        work()
        mark.record()
    torch.cuda.synchronize(device)
    return [a.elapsed_time(b) / 1e3 for a, b in pairwise(marks)]


def _once(work: Callable[[], object], device: torch.device) -> float:
    start = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start
