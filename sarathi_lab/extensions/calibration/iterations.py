"""Whole iterations of an executor on the user's device, measured for the simulator."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from sarathi_lab.engine.block_manager import BlockManager
from sarathi_lab.engine.compositions import make_batch, make_sequence, placed, run_once
from sarathi_lab.engine.executor import Sizes
from sarathi_lab.engine.request import Batch
from sarathi_lab.engine.single_iteration import SingleIteration
from sarathi_lab.executor.iteration_probe import IterationProbe
from sarathi_lab.executor.simulated.cost_model import make_cost_model
from sarathi_lab.executor.simulated.hardware import Hardware
from sarathi_lab.executor.simulated.iteration_table import IterationTable
from sarathi_lab.executor.tables import COMPOSITION, MICROSECOND, TIME
from sarathi_lab.extensions.calibration.from_profile import (
    ATTENDED,
    START,
    STREAMED,
    Group,
    evenly,
    fit,
)
from sarathi_lab.model.spec import ModelSpec
from sarathi_lab.workload.base import random_prompt

BLOCK_SIZE = 32  # tokens; vLLM's attention on a CPU takes multiples of it
# Tokens of prompts; a tile of a GPU ends at 128, and the next token shows its step.
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 129, 256, 257, 384, 512, 513, 768, 1024, 2048, 4096, 8192)
BESIDE = (16, 64, 256, 1024, 4096)  # of a batch of both, within whose tile it ends
SEVERAL = 4  # prompts of an iteration, for what each adds
STARTS = (0.0, 0.125, 0.25, 0.5, 0.75)  # of the longest sequence, before a chunk
CONTEXTS = (0.0625, 0.25, 0.5, 1.0)  # of decodes
HELD_OUT = 16  # compositions of each kind
MIN_ROUNDS, MAX_ROUNDS = 3, 40  # of visits to all compositions
LOWER = 0.25  # the quantile of all that stands for one: what disturbs it makes it longer
VISIT, MAX_REPETITIONS = 0.03, 8  # seconds, and iterations, after which a visit ends
LAUNCHING = "launching_us"  # the column beside a time, of which it is the host's part
FILLING = 0.1  # of the seconds, to give cached tokens values


class Limits(NamedTuple):
    """Sequences of a batch, and tokens of the longest one."""

    batch_size: int
    longest: int

    @property
    def most_tokens(self) -> int:
        """Prompt tokens of an iteration."""
        return min(TOKENS[-1], self.batch_size * self.longest)

    @property
    def sizes(self) -> Sizes:
        """Sizes of an executor whose cache holds a full batch of the longest sequences."""
        return Sizes(
            num_blocks=self.batch_size * math.ceil(self.longest / BLOCK_SIZE),
            block_size=BLOCK_SIZE,
            batch_size=self.batch_size,
            max_model_len=self.longest + 1,  # with the token that the last one emits
            max_batch_tokens=self.most_tokens + self.batch_size,
        )


def grid_of(limits: Limits) -> list[dict[str, int]]:
    """List compositions by the columns of `iterations.csv`: prompts, decodes, and both."""
    names = [*COMPOSITION, "num_prefills"]
    return [dict(zip(names, row, strict=True)) for row in dict.fromkeys(_grid(limits))]


def _grid(limits: Limits) -> Iterator[tuple[int, ...]]:
    size, longest = limits
    several, starts = min(SEVERAL, size), [int(share * longest) for share in STARTS]
    for tokens in (one for one in TOKENS if one <= limits.most_tokens):
        number = math.ceil(tokens / longest)  # of prompts, where one is too short
        for start in (one for one in starts if not one or one + tokens <= longest):
            yield tokens // number, start, 0, 0, number
    for tokens in (one for one in BESIDE if several <= one <= several * longest // 2):
        yield from ((tokens // several, start, 0, 0, several) for start in (0, longest // 2))
    most = longest - MAX_REPETITIONS  # each visit decodes further
    contexts = [max(2, int(share * most)) for share in CONTEXTS]
    numbers = sorted({2**i for i in range(size.bit_length())} | {size})
    yield from ((0, 0, *both, 0) for both in product(numbers, contexts))
    beside = sorted({1, math.isqrt(size), size - 1}) if size > 1 else []
    chunks = sorted(
        {one - size if one > 2 * size else one for one in BESIDE if one <= longest // 2}
    )
    sizes = product(chunks, (0, longest // 2), beside, contexts[1::2])
    yield from ((*both, 1) for both in sizes)


def batch_of(row: Mapping[str, int]) -> Batch:
    """Make the batch of a row, without cache; its prompts end there."""
    return make_batch(
        prefill_tokens=row["prefill_chunk"],
        start=row["kv_prefill"],
        num_prefills=row["num_prefills"],
        num_decodes=row["n_decode"],
        context=row["kv_decode"],
        emits=True,
    )


def held_out_of(limits: Limits, seed: int) -> Iterator[tuple[str, Batch]]:
    """List random compositions by kind: sizes are log-uniform, contexts uniform and uneven."""
    random, (size, longest) = np.random.default_rng(seed), limits

    def prompts(batch: Batch, number: int) -> None:
        for _ in range(number):
            most = min(longest, limits.most_tokens // number)
            tokens = round(math.exp(random.uniform(0, math.log(most))))
            start = int(random.integers(0, longest - tokens + 1))
            batch.add(make_sequence(start, tokens, emits=True, order=len(batch)), tokens)

    def decodes(batch: Batch, most: int) -> None:
        for _ in range(round(math.exp(random.uniform(0, math.log(most))))):
            start = int(random.integers(1, longest - MAX_REPETITIONS))
            batch.add(make_sequence(start, is_decode=True, order=len(batch)), 1)

    for _ in range(HELD_OUT):
        kinds = {kind: Batch() for kind in ("prompt", "prompts", "decodes", "both")}
        prompts(kinds["prompt"], 1)
        decodes(kinds["decodes"], size)
        if size > 1:
            prompts(kinds["prompts"], int(random.integers(2, min(4, size) + 1)))
            prompts(kinds["both"], 1)
            decodes(kinds["both"], size - 1)
        yield from ((kind, batch) for kind, batch in kinds.items() if batch.chunks)


@dataclass(frozen=True)
class MeasuredIterations:
    """The table of iterations (`iterations.csv`), held-out compositions beside what it predicts for
    them, and how they were measured.
    """

    table: pd.DataFrame
    held_out: pd.DataFrame  # kind, composition, seconds, predicted, error
    num_rounds: int
    num_left_out: int  # compositions that the cache can't hold
    host_share: float  # the largest of a composition (`SingleIteration.host_share`)

    @property
    def errors(self) -> dict[str, float]:
        """Mean absolute error by kind of composition."""
        errors = self.held_out.error.abs().groupby(self.held_out.kind, sort=False).mean()
        return {str(kind): float(error) for kind, error in errors.items()}


def measure_iterations(
    executor: Any,
    spec: ModelSpec,
    limits: Limits,
    seconds: float,
    advance: Callable[[float], None],
    seed: int = 0,
) -> MeasuredIterations:
    """Measure a grid of compositions and held-out ones for about `seconds`, each once a round, in
    another order each time, so that a slow minute of the machine spreads over all; at least
    MIN_ROUNDS, behind one that warms up. `advance` takes the seconds that passed.
    """
    timer = _Timer(executor, spec, seed)
    rows, random = list(grid_of(limits)), list(held_out_of(limits, seed))
    every = [*(batch_of(row) for row in rows), *(batch for _, batch in random)]
    fitting = [i for i, batch in enumerate(every) if timer.placed(batch) is not None]
    begun, elapsed, num_rounds = time.perf_counter(), 0.0, -1
    timer.fill(limits.longest, FILLING * seconds)
    samples = defaultdict[int, list[SingleIteration]](list)
    order = np.random.default_rng(seed)
    while num_rounds < MIN_ROUNDS or (num_rounds < MAX_ROUNDS and elapsed < seconds):
        for i in order.permutation(fitting):
            samples[i] += timer.visit(every[i])
            before, elapsed = elapsed, time.perf_counter() - begun
            advance(elapsed - before)
        num_rounds += 1
        if not num_rounds:
            samples.clear()
    times: dict[int, float] = {}
    launching: dict[int, float] = {}
    host_shares = [0.0]
    for i, iterations in samples.items():
        times[i] = float(np.quantile([one.seconds for one in iterations], LOWER))
        launching[i] = float(np.median([one.launching for one in iterations]))
        host_shares.append(float(np.median([one.host_share for one in iterations])))
    measured = [
        {**rows[i], TIME: times[i] / MICROSECOND, LAUNCHING: launching[i] / MICROSECOND}
        for i in fitting
        if i < len(rows)
    ]
    table = pd.DataFrame(measured)
    model, found = IterationTable(table), []
    for i, (kind, batch) in enumerate(random, start=len(rows)):
        if i in times:
            predicted = model.seconds(batch)
            error = predicted / times[i] - 1
            found.append((kind, _sizes(batch), times[i], predicted, error))
    columns = ["kind", "composition", "seconds", "predicted", "error"]
    held_out = pd.DataFrame(found, columns=columns)
    num_left_out = len(every) - len(fitting)
    return MeasuredIterations(table, held_out, num_rounds, num_left_out, max(host_shares))


class _Timer:
    """Iterations of an executor with random tokens, behind cached ones."""

    def __init__(self, executor: Any, spec: ModelSpec, seed: int) -> None:
        self._executor, self._spec, self._random = executor, spec, np.random.default_rng(seed)
        self._probe = IterationProbe(executor)

    def placed(self, batch: Batch) -> Batch | None:
        executor = self._executor
        blocks = BlockManager(executor.num_blocks, executor.block_size)
        return placed(batch, blocks, self._random, self._spec.vocab_size, spare=MAX_REPETITIONS)

    def fill(self, longest: int, seconds: float) -> None:
        """Compute prompts over all blocks, but for `seconds` at most: attention to zeros may take
        another time.
        """
        executor, begun = self._executor, time.perf_counter()
        blocks = BlockManager(executor.num_blocks, executor.block_size)
        executor.start()
        tokens = min(longest, TOKENS[-1])
        while time.perf_counter() < begun + seconds and blocks.can_hold(tokens):
            prompt = random_prompt(0, tokens, self._spec.vocab_size, 0)
            batch = Batch()
            sequence = make_sequence(0, tokens, emits=True, token_ids=prompt, blocks=blocks)
            batch.add(sequence, tokens)
            run_once(executor, batch)

    def visit(self, batch: Batch) -> list[SingleIteration]:
        """Time iterations of `batch`; a long one once."""
        placed_batch = self.placed(batch)
        assert placed_batch is not None
        each = self._probe.iterations(placed_batch)
        end = time.perf_counter() + VISIT
        iterations = [next(each)]
        while len(iterations) < MAX_REPETITIONS - 1 and time.perf_counter() < end:
            iterations.append(next(each))
        return iterations


def _sizes(batch: Batch) -> str:
    """Describe a composition, such as "239 at 512 + 17 decodes of 900"."""
    prompts = [f"{one.num_tokens} at {one.start}" for one in batch.chunks if not one.is_decode]
    if number := batch.num_decodes:
        prompts.append(f"{number} decodes of {batch.decode_kv_tokens // number}")
    return " + ".join(prompts)


def fitted_hardware(table: pd.DataFrame, spec: ModelSpec, hardware: Hardware) -> Hardware:
    """Fit the analytic cost model to the iterations that are in every second row of `table`; the
    others give its uncertainty.
    """
    rows: Sequence[Any] = table.to_dict("records")
    measured = [(batch_of(row), row[TIME] * MICROSECOND) for row in rows]
    overhead = 0.3 * min(seconds for _, seconds in measured)
    hardware = replace(hardware, **START, iteration_overhead=overhead)
    names = (*STREAMED, *ATTENDED, "iteration_overhead")
    hardware = fit(hardware, names, partial(_errors, measured[::2], spec))
    ((errors, _),) = _errors(measured[1::2], spec, hardware)
    error = float(np.abs(errors).mean())
    return replace(hardware, uncertainty={"matmul": error, "attention": error})


def _errors(
    measured: Sequence[tuple[Batch, float]], spec: ModelSpec, hardware: Hardware
) -> list[Group]:
    cost = make_cost_model("analytic", spec, hardware, hardware.dtype_bytes)
    ratios = [cost.iteration_time(batch) / seconds for batch, seconds in measured]
    return [evenly(np.array(ratios) - 1)]
