"""A cost model that asks the device: batches are run on the real executor a few times."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from sarathi_lab.config.errors import RunError
from sarathi_lab.engine.block_manager import BlockManager
from sarathi_lab.engine.request import Batch, Request, SequenceState
from sarathi_lab.executor.torch.executor import TorchExecutor
from sarathi_lab.executor.torch.operation_probe import LONG, OperationProbe
from sarathi_lab.model.spec import ModelSpec
from sarathi_lab.results.intervals import spread, summary

FEWEST, FEWEST_LONG, MOST = 3, 2, 5  # timed iterations of a composition
ENOUGH = 0.05  # seconds of timed iterations, after which FEWEST suffice

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
