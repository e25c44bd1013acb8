"""Seconds of whole iterations on any executor, over a grid of compositions: what a simulator is
calibrated by (`IterationTable`).
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import pandas as pd

from sarathi_lab.engine.block_manager import BlockManager
from sarathi_lab.engine.compositions import make_sequence, placed, run_once
from sarathi_lab.engine.executor import Executor, Sizes
from sarathi_lab.engine.request import Batch
from sarathi_lab.engine.single_iteration import SingleIteration
from sarathi_lab.executor.iteration_probe import IterationProbe
from sarathi_lab.executor.tables import MICROSECOND, TIME
from sarathi_lab.experiment.scenario import Composition
from sarathi_lab.workload.base import random_prompt

BLOCK_SIZE = 32  # tokens; vLLM's attention on a CPU takes multiples of it
# Tokens of prompts; a tile of a GPU ends at 128, and the next token shows its step.
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 129, 256, 257, 384, 512, 513, 768, 1024, 2048, 4096, 8192)
STARTS = (0.0, 0.125, 0.25, 0.5, 0.75)  # cached tokens before them, of the longest sequence
SEVERAL = 4  # prompts of an iteration, for what each adds
HYBRID_TOKENS = (16, 64, 256, 1024, 4096)  # of a batch of both, within whose tile it ends
CONTEXTS = (0.0625, 0.25, 0.5, 1.0)  # of decodes, of the longest sequence
MIN_ROUNDS, MAX_ROUNDS = 3, 40  # of visits to all compositions
VISIT, MAX_REPETITIONS = 0.03, 8  # seconds, and iterations, after which a visit ends
FILLING = 0.1  # of the seconds, to give cached tokens values
LOWER = 0.25  # the quantile that stands for an iteration: what disturbs one makes it longer
LAUNCHING = "launching_us"  # the column beside a time, of which it is the host's part


@dataclass(frozen=True)
class Limits:
    """Sequences of a batch, and tokens of the longest one."""

    batch_size: int
    longest: int

    @property
    def prompt_tokens(self) -> int:
        """The most prompt tokens of an iteration."""
        return min(TOKENS[-1], self.batch_size * self.longest)

    @property
    def longest_decode(self) -> int:
        """The longest context, from which each repetition decodes further."""
        return self.longest - MAX_REPETITIONS

    @property
    def sizes(self) -> Sizes:
        """Sizes of an executor whose cache holds a full batch of the longest sequences."""
        return Sizes(
            num_blocks=self.batch_size * math.ceil(self.longest / BLOCK_SIZE),
            block_size=BLOCK_SIZE,
            batch_size=self.batch_size,
            max_model_len=self.longest + 1,  # with the token that the last one emits
            max_batch_tokens=self.prompt_tokens + self.batch_size,
        )


def grid_of(limits: Limits) -> list[Composition]:
    """List the compositions that are measured: prompts, decodes, and both."""
    grid = [*_prompts(limits), *_decodes(limits), *_hybrids(limits)]
    return list(dict.fromkeys(grid))


def _prompts(limits: Limits) -> Iterator[Composition]:
    """Yield prompts of each number of tokens; several where one would be too long."""
    longest = limits.longest
    for tokens in TOKENS:
        if tokens > limits.prompt_tokens:
            continue
        number = math.ceil(tokens / longest)
        for share in STARTS:
            start = int(share * longest)
            # Behind cached tokens the prompt has to end within the longest sequence.
            if start == 0 or start + tokens <= longest:
                yield Composition(tokens // number, start, number, emits=True)
    half = longest // 2
    several = min(SEVERAL, limits.batch_size)
    for tokens in HYBRID_TOKENS:
        if several <= tokens <= several * longest // 2:
            for start in (0, half):
                yield Composition(tokens // several, start, several, emits=True)


def _decodes(limits: Limits) -> Iterator[Composition]:
    size = limits.batch_size
    powers_of_two = {2**power for power in range(size.bit_length())}
    numbers = sorted(powers_of_two | {size})
    for number, context in product(numbers, _contexts(limits)):
        yield Composition(num_decodes=number, context=context, emits=True)


def _hybrids(limits: Limits) -> Iterator[Composition]:
    """Yield chunks beside decodes."""
    size = limits.batch_size
    if size == 1:
        return
    half = limits.longest // 2
    chunks = []
    for tokens in HYBRID_TOKENS:
        chunk = tokens
        if tokens > 2 * size:
            # With its decodes the batch ends within the last tile of `tokens`.
            chunk = tokens - size
        if tokens <= half:
            chunks.append(chunk)
    numbers = sorted({1, math.isqrt(size), size - 1})
    # Every second context: with four sizes to vary, the grid would take too long.
    contexts = _contexts(limits)[1::2]
    for chunk, start, number, context in product(chunks, (0, half), numbers, contexts):
        yield Composition(chunk, start, num_decodes=number, context=context, emits=True)


def _contexts(limits: Limits) -> list[int]:
    longest = limits.longest_decode
    return [max(2, int(share * longest)) for share in CONTEXTS]


@dataclass(frozen=True)
class Timings:
    """Times of some of the batches that were asked for: `rows` by their number, with `seconds`, the
    host's part of it (`launching`) and `host_share` (`SingleIteration`). Others do not fit.
    """

    rows: pd.DataFrame
    num_rounds: int


def time_iterations(
    executor: Executor,
    batches: Sequence[Batch],
    limits: Limits,
    *,
    num_blocks: int,
    block_size: int,
    vocab_size: int,
    seconds: float,
    advance: Callable[[float], None] = lambda seconds: None,
    seed: int = 0,
) -> Timings:
    """Time iterations of `batches` for about `seconds`.

    Each is visited once a round, in another order each time, so that a slow minute of the machine
    spreads over all. A first round warms up; then there are MIN_ROUNDS at least.

    Args:
        num_blocks: blocks of the cache, each of `block_size` tokens.
        advance: called with the seconds that passed since the call before.
    """
    timer = _Timer(executor, num_blocks, block_size, vocab_size, seed)
    fitting = [number for number, batch in enumerate(batches) if timer.place(batch) is not None]
    begun = time.perf_counter()
    elapsed = 0.0
    timer.fill(min(limits.longest, limits.prompt_tokens), FILLING * seconds)
    samples = defaultdict[int, list[SingleIteration]](list)
    order = np.random.default_rng(seed)
    num_rounds = -1  # the round that warms up does not count
    while num_rounds < MIN_ROUNDS or (num_rounds < MAX_ROUNDS and elapsed < seconds):
        for number in order.permutation(fitting):
            samples[number] += timer.visit(batches[number])
            before = elapsed
            elapsed = time.perf_counter() - begun
            advance(elapsed - before)
        num_rounds += 1
        if num_rounds == 0:
            samples.clear()
    rows = [_row(samples[number]) for number in fitting]
    return Timings(pd.DataFrame(rows, index=fitting), num_rounds)


def _row(iterations: Sequence[SingleIteration]) -> dict[str, float]:
    seconds = [iteration.seconds for iteration in iterations]
    launching = [iteration.launching for iteration in iterations]
    host_shares = [iteration.host_share for iteration in iterations]
    typical = np.quantile(seconds, LOWER)
    return {
        "seconds": float(typical),
        "launching": float(np.median(launching)),
        "host_share": float(np.median(host_shares)),
    }


def table_of(grid: Sequence[Composition], rows: pd.DataFrame) -> pd.DataFrame:
    """Return the table `iterations.csv` (`executor.tables`) of `Timings.rows` of a grid."""
    table = []
    for number, row in rows.iterrows():
        composition = grid[int(str(number))]
        has_prompts = composition.prefill_tokens > 0
        has_decodes = composition.num_decodes > 0
        columns = {
            "prefill_chunk": composition.prefill_tokens,
            "kv_prefill": composition.start,
            "n_decode": composition.num_decodes,
            "kv_decode": composition.context if has_decodes else 0,
            "num_prefills": composition.num_prefills if has_prompts else 0,
            TIME: row.seconds / MICROSECOND,
            LAUNCHING: row.launching / MICROSECOND,
        }
        table.append(columns)
    return pd.DataFrame(table)


class _Timer:
    """Iterations of an executor with random tokens, behind cached ones."""

    def __init__(
        self, executor: Executor, num_blocks: int, block_size: int, vocab_size: int, seed: int
    ) -> None:
        self._executor = executor
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._vocab_size = vocab_size
        self._random = np.random.default_rng(seed)
        self._probe = IterationProbe(executor)

    def place(self, batch: Batch) -> Batch | None:
        """Return `batch` with blocks of an empty cache; None if it does not fit."""
        blocks = BlockManager(self._num_blocks, self._block_size)
        return placed(batch, blocks, self._random, self._vocab_size, spare=MAX_REPETITIONS)

    def fill(self, tokens: int, seconds: float) -> None:
        """Compute prompts of `tokens` over all blocks, but for `seconds` at most: attention to
        zeros may take another time.
        """
        begun = time.perf_counter()
        blocks = BlockManager(self._num_blocks, self._block_size)
        self._executor.start()
        while time.perf_counter() < begun + seconds and blocks.can_hold(tokens):
            prompt = random_prompt(0, tokens, self._vocab_size, 0)
            sequence = make_sequence(0, tokens, emits=True, token_ids=prompt, blocks=blocks)
            batch = Batch()
            batch.add(sequence, tokens)
            run_once(self._executor, batch)

    def visit(self, batch: Batch) -> list[SingleIteration]:
        """Time iterations of `batch`; a long one once."""
        batch_with_cache = self.place(batch)
        assert batch_with_cache is not None
        timed = self._probe.iterations(batch_with_cache)
        end = time.perf_counter() + VISIT
        iterations = [next(timed)]
        while len(iterations) < MAX_REPETITIONS - 1 and time.perf_counter() < end:
            iterations.append(next(timed))
        return iterations
