"""Measurement of operations and iterations by shape (`task=calibrate`)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import pandas as pd

from sarathi_lab.engine.block_manager import BlockManager
from sarathi_lab.engine.compositions import make_batch
from sarathi_lab.engine.request import Batch
from sarathi_lab.executor.tables import OperationTables, frames_of
from sarathi_lab.executor.torch.executor import TorchExecutor
from sarathi_lab.executor.torch.operation_probe import PRODUCTS, OperationProbe, Timing
from sarathi_lab.model.spec import ModelSpec

# Tokens of one iteration. A tile of tokens ends at a multiple of 128: its step is what two
# neighbours show.
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 129, 256, 257, 384, 512, 513, 768, 1024, 1025, 1536, 2048)
CHUNKS = (16, 64, 128, 256, 512, 1024)  # that attention is measured for at offsets into a prompt
CONTEXT_SHARES = (16, 4, 2, 1)  # decodes see the longest context divided by these
MIN_ROUNDS, MAX_ROUNDS = 3, 40  # of visits to every shape; times are medians over all
VISIT, MAX_REPETITIONS = 0.03, 10  # seconds, and measurements, after which a visit ends
COLUMNS = ("operation", "num_tokens", "kv_tokens", "seconds")
INCLUDED = ("kv_write", "norms")  # in `others`, beside the fixed cost
MAX_EMITS = 128  # rows of logits: a batch emits one token a sequence
LEAST_OTHERS = 1e-6  # seconds, where the parts alone take longer than the whole


@dataclass(frozen=True)
class Shape:
    """Iteration of `count` sequences with `num_tokens` new tokens each behind `start` cached ones;
    all its operations are measured if it `is_whole`, else attention only.
    """

    count: int
    num_tokens: int
    start: int
    is_whole: bool = False

    @property
    def total_tokens(self) -> int:
        return self.count * self.num_tokens

    @property
    def kv_tokens(self) -> int:
        """Cached tokens that attention reads, the new ones included."""
        return self.count * (self.start + self.num_tokens)

    @property
    def attention(self) -> str:
        return "decode_attention" if self.num_tokens == 1 and self.start else "prefill_attention"


@dataclass(frozen=True)
class Measured:
    """Measured seconds over all layers (rows of `COLUMNS` and `timing`: "calls" if any was), and
    how many shapes and rounds they are from.
    """

    table: pd.DataFrame
    num_rounds: int
    num_shapes: int

    def tables(self, spec: ModelSpec, **about: Any) -> OperationTables:
        """Return the operation tables of `spec`, with `about` in their meta.yaml."""
        meta = {"model": spec.name, **about, "layers": spec.num_layers, "included": [*INCLUDED]}
        return OperationTables("measured", frames_of(self.table), meta)


def calibration_shapes(batch_size: int, longest: int) -> list[Shape]:
    """Return the shapes to measure for batches and contexts of up to such sizes, cheap ones first.
    Iterations of up to `batch_size` tokens are decodes, larger ones a prompt, as in the engine.
    """
    decodes = sorted({2**i for i in range(batch_size.bit_length())} | {batch_size})
    contexts = sorted({max(2, longest // share) for share in CONTEXT_SHARES})
    middle = contexts[len(contexts) // 2] - 1
    shapes = [Shape(count, 1, context - 1) for count in decodes for context in contexts]
    for chunk in CHUNKS:
        doubling = [chunk * 2**i for i in range(longest.bit_length())]
        starts = {0, max(0, longest - chunk), *(n for n in doubling if n + chunk <= longest)}
        shapes += [Shape(1, chunk, start) for start in starts]
    for tokens in {*TOKENS, *decodes}:
        count, each, start = (tokens, 1, middle) if tokens in decodes else (1, tokens, 0)
        whole = Shape(count, each, start, is_whole=True)
        shapes = [whole, *(one for one in shapes if one != Shape(count, each, start))]
    return sorted(shapes, key=attrgetter("total_tokens", "kv_tokens", "num_tokens"))


def blocks_needed(shapes: Sequence[Shape], block_size: int) -> int:
    return max(
        shape.count * math.ceil((shape.start + shape.num_tokens) / block_size) for shape in shapes
    )


def measure_profile(
    executor: TorchExecutor,
    shapes: Sequence[Shape],
    seconds: float,
    advance: Callable[[float], None],
) -> Measured:
    """Measure `shapes` for about `seconds`, every shape once a round, so that a slow minute of the
    machine spreads over all; at least MIN_ROUNDS, behind one that warms up. `advance` takes the
    seconds that passed.
    """
    probe = OperationProbe(executor)
    samples: list[tuple[str, int, int, float, Timing]] = []
    begun, elapsed, num_rounds = time.perf_counter(), 0.0, -1
    while num_rounds < MIN_ROUNDS or (num_rounds < MAX_ROUNDS and elapsed < seconds):
        for shape in shapes:
            # A long shape once, a short one several times, as interruptions hurt it more.
            visit, repetitions = time.perf_counter(), 0
            while not repetitions or (
                repetitions < MAX_REPETITIONS and time.perf_counter() < visit + VISIT
            ):
                repetitions += 1
                for operation, timed in _measure(probe, shape).items():
                    kv_tokens = shape.kv_tokens if operation == shape.attention else 0
                    samples.append((operation, shape.total_tokens, kv_tokens, *timed))
            before, elapsed = elapsed, time.perf_counter() - begun
            advance(elapsed - before)
        num_rounds += 1
        if not num_rounds:
            samples.clear()
    rows = pd.DataFrame(samples, columns=[*COLUMNS, "timing"]).groupby(list(COLUMNS[:-1]))
    table = rows.agg({"seconds": "median", "timing": "min"}).reset_index()
    table["seconds"] = table.seconds.clip(lower=LEAST_OTHERS)
    return Measured(table, num_rounds, len(shapes))


def _measure(probe: OperationProbe, shape: Shape) -> dict[str, tuple[float, Timing]]:
    """Return the seconds by operation over all layers, and how they were timed; `others` is the
    iteration without its parts.
    """
    batch = batch_of(probe.executor, shape)
    times = {shape.attention: (probe.attention(batch), probe.timing)}
    if not shape.is_whole:
        return times
    if native := probe.operation_times(batch):  # behind an iteration of the same shape
        times = {name: (native[name], probe.timing) for name in (*PRODUCTS, "others")}
        times[shape.attention] = native["attention"], probe.timing
    else:
        products = probe.products(batch)
        times |= {name: (seconds, probe.timing) for name, seconds in products.items()}
        parts = sum(seconds for seconds, _ in times.values()) + probe.logits(batch.num_emits)
        times["others"] = (probe.iteration(batch).seconds - parts, probe.timing)
    if shape.total_tokens <= MAX_EMITS:
        times["logits"] = (probe.logits(shape.total_tokens), probe.timing)
    return times


def batch_of(executor: TorchExecutor, shape: Shape) -> Batch:
    """Make a batch of `shape` over the first blocks of the executor's cache."""
    blocks = BlockManager(executor.num_blocks, executor.block_size)
    if shape.attention == "decode_attention":
        return make_batch(num_decodes=shape.count, context=shape.start + 1, blocks=blocks)
    return make_batch(
        prefill_tokens=shape.num_tokens,
        start=shape.start,
        num_prefills=shape.count,
        emits=True,
        blocks=blocks,
    )
