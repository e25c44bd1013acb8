"""Fills a figure by measuring it on a device: in rounds of pairs, until a time is over."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd
import torch

from sarathi_lab.config.console import progress_of
from sarathi_lab.config.errors import RunError
from sarathi_lab.engine.executor import Sizes
from sarathi_lab.engine.request import Batch
from sarathi_lab.executor.simulated.profile import Profile, ProfiledCostModel
from sarathi_lab.executor.torch.backend import TorchBackend
from sarathi_lab.executor.torch.executor import TorchExecutor
from sarathi_lab.executor.torch.profiling import (
    Shape,
    blocks_needed,
    calibration_shapes,
    measure_profile,
)
from sarathi_lab.experiment import serving
from sarathi_lab.experiment.capacity import Engine
from sarathi_lab.experiment.clock import BLOCK_SIZE, Clock, Estimate, Point, Times
from sarathi_lab.experiment.measured_clock import DeviceClock
from sarathi_lab.experiment.registry import Figure, Unit
from sarathi_lab.experiment.samples import Key, Samples, rounds, table_of
from sarathi_lab.experiment.scenario import Scenario, Served
from sarathi_lab.model.spec import ModelSpec
from sarathi_lab.results.intervals import FEWEST_PAIRS, coarse_to_fine

LEFT_OUT = "the time was over"


@dataclass(frozen=True)
class Room:
    """What a figure asks of the device, in tokens, sequences and tokens of the longest one."""

    kv_tokens: int
    batch_size: int
    longest: int


@dataclass(frozen=True)
class Measured:
    """A figure's `table`, and what it was made from: rows of `compositions` and of `serving`."""

    table: pd.DataFrame
    compositions: pd.DataFrame
    serving: pd.DataFrame


class _Needs(Clock):
    """Measures nothing, and keeps what the batches and scenarios that it is asked for need."""

    def __init__(self) -> None:
        super().__init__(self)
        self.kv_tokens, self.batch_size, self.longest = BLOCK_SIZE, 1, 1
        self.uncertainty = {"matmul": 0.0, "attention": 0.0}

    def operation_times(self, batch: Batch) -> dict[str, float]:
        """One second, whatever the batch."""
        ends = [chunk.start + chunk.num_tokens for chunk in batch.chunks]
        self._note(sum(-(-end // BLOCK_SIZE) for end in ends), len(ends), max(ends))
        return {"qkv_proj": 1.0, "prefill_attention": 1.0}

    def iteration_time(self, batch: Batch) -> float:
        """Of all its operations."""
        return sum(self.operation_times(batch).values())

    def request(self, scenario: Scenario) -> Times:
        """As a device counts them."""
        self.served(scenario)
        return Times({"qkv_proj": 1.0})

    def gain(self, scenario: Scenario) -> Estimate:
        """One."""
        return self.over(scenario.baseline, scenario, "duration")

    def served(self, scenario: Scenario) -> Served:
        """One second, whatever the scenario."""
        blocks = scenario.blocks(BLOCK_SIZE)
        self._note(blocks, scenario.batch_size, scenario.longest)
        return Served(1.0, 0.0, 1, 1.0, 1.0, 1.0)

    def _note(self, blocks: int, batch_size: int, longest: int) -> None:
        self.kv_tokens = max(self.kv_tokens, (blocks + 1) * BLOCK_SIZE)
        self.batch_size = max(self.batch_size, batch_size)
        self.longest = max(self.longest, longest + 1)


def room_of(figure: Figure, spec: ModelSpec, sizes: Mapping[str, Any]) -> Room:
    """What measuring the figure needs at some sizes."""
    if figure.kind == "pipeline":
        shapes = _shapes(sizes)
        tokens = blocks_needed(shapes, BLOCK_SIZE) * BLOCK_SIZE
        return Room(tokens, max(shape.count for shape in shapes), sizes["longest"])
    if figure.kind == "rounds":
        return Room(serving.kv_tokens(sizes), sizes["batch"], serving.longest(sizes))
    needs = _Needs()
    for unit in figure.units(spec, sizes):
        list(unit(needs))
    return Room(needs.kv_tokens, needs.batch_size, needs.longest)


def least_room(figure: Figure, spec: ModelSpec, sizes: Mapping[str, Any]) -> int:
    """Tokens of cache without which nothing can be measured; requests under load may wait, so two
    of the longest suffice.
    """
    if figure.kind == "rounds":
        return 2 * serving.longest(sizes)
    return room_of(figure, spec, sizes).kv_tokens


def load_executor(
    backend: TorchBackend,
    spec: ModelSpec,
    room: Room,
    say: Callable[[str], None] = lambda text: None,
) -> TorchExecutor:
    """The executor of `spec` with random weights and a cache of `room`, or of what the memory
    holds. Iterations may have as many tokens as the cache.

    Raises UserError if the weights do not fit.
    """
    backend.check(spec, BLOCK_SIZE)
    sizes = Sizes(
        num_blocks=math.ceil(room.kv_tokens / BLOCK_SIZE),
        block_size=BLOCK_SIZE,
        batch_size=room.batch_size,
        max_model_len=room.longest,
        max_batch_tokens=room.kv_tokens,
    )
    try:
        return backend.build(spec, None, sizes)
    except RunError as error:
        say(f"{error}; trying with all the memory there is, what needs more is left out")
    # Outside the handler, whose traceback would keep the first model.
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return backend.build(
        spec, None, replace(sizes, max_batch_tokens=room.longest, fills_memory=True)
    )


def measure(
    figure: Figure,
    backend: TorchBackend,
    spec: ModelSpec,
    sizes: Mapping[str, Any],
    *,
    seconds: float,
    max_spread: float,
    make_policy: serving.MakePolicy,
    seed: int = 0,
    is_cut: bool = False,
) -> Measured:
    """Measure a figure for `seconds` (loading does not count), at least three rounds.

    With `is_cut` the units, ends and middles first, are as many as a third of the time allows.
    """
    room = room_of(figure, spec, sizes)
    if figure.kind == "rounds":
        held = BLOCK_SIZE * backend.kv_blocks(spec, BLOCK_SIZE)
        room = replace(room, kv_tokens=min(room.kv_tokens, held))
    executor = load_executor(backend, spec, room)
    compositions = scenarios = pd.DataFrame()
    with progress_of(f"measuring {figure.name} with {spec.name}", seconds, "s") as advance:
        if figure.kind == "pipeline":
            samples = _pipeline(figure, executor, sizes, seconds, advance, seed)
        elif figure.kind == "rounds":
            samples = _rounds(figure, executor, sizes, seconds, advance, make_policy, seed)
        else:
            clock, units = DeviceClock(executor), list(figure.units(spec, sizes))
            samples = measure_units(clock, units, seconds, advance, is_cut)
            compositions = pd.DataFrame(clock.cost.rows(spec.name, backend.dtype_bytes))
            scenarios = pd.DataFrame(clock.serving_rows(spec.name))
            reason = clock.reason
    table = table_of(figure.name, samples, max_spread, seed)
    if figure.kind == "units":
        table.loc[table.num_pairs == 0, "reason"] = reason or LEFT_OUT
        is_cut_short = [samples[key] == [] for key in samples]
        table.loc[is_cut_short, "reason"] = LEFT_OUT
    table = table.assign(model=spec.name, dtype=backend.dtype_name, device_name=backend.device_name)
    return Measured(table, compositions, scenarios)


def measure_units(
    clock: DeviceClock,
    units: Sequence[Unit],
    seconds: float,
    advance: Callable[[float], None] = lambda seconds: None,
    is_cut: bool = False,
) -> Samples:
    """Samples of the points of all units, one a round; none of those that the time cut."""
    chosen = coarse_to_fine(units) if is_cut else list(units)
    left: list[Unit] = []

    def one_round(number: int) -> Iterator[Point]:
        began = time.monotonic()
        clock.start_round()
        for place, unit in enumerate(list(chosen)):
            start = time.monotonic()
            is_over = start - began > seconds / FEWEST_PAIRS
            if is_cut and number == 0 and place and is_over:
                left.extend(chosen[place:])
                del chosen[place:]
                return
            clock.start_unit()
            yield from unit(clock)
            advance(time.monotonic() - start)

    samples = rounds(one_round, seconds=seconds)
    return samples | {Key.of(point): [] for point in _points(left)}


def _points(units: Iterable[Unit]) -> Iterator[Point]:
    needs = _Needs()
    for unit in units:
        yield from unit(needs)


def _shapes(sizes: Mapping[str, Any]) -> list[Shape]:
    """What has to be measured for the pipeline: iterations of up to its longest prompt."""
    longest = sizes["longest"]
    shapes = calibration_shapes(sizes["batch"], longest)
    return [shape for shape in shapes if shape.total_tokens <= longest]


def _pipeline(
    figure: Figure,
    executor: TorchExecutor,
    sizes: Mapping[str, Any],
    seconds: float,
    advance: Callable[[float], None],
    seed: int,
) -> Samples:
    """Ratios of a pipeline simulated with measured iterations, one sample a set of requests."""
    found = measure_profile(executor, _shapes(sizes), seconds, advance)
    cost = ProfiledCostModel(Profile(found.table, "of this run"))
    number = sizes["num_seeds"]
    return rounds(
        lambda round: figure.make(cost, seed + round, **sizes), fewest=number, most=number
    )


def _rounds(
    figure: Figure,
    executor: TorchExecutor,
    sizes: Mapping[str, Any],
    seconds: float,
    advance: Callable[[float], None],
    make_policy: serving.MakePolicy,
    seed: int,
) -> Samples:
    """Samples of an experiment of serving; a first service of each data set warms up."""
    cache = (executor.num_blocks, executor.block_size)
    engine = Engine(executor, sizes["batch"], serving.longest(sizes), *cache)
    spec = executor.model.spec
    bench = serving.ServingBench(sizes, spec.name, engine, make_policy, spec.vocab_size, seed)
    bench.warm_up()
    return rounds(
        lambda round: figure.make(bench, round, **sizes), seconds=seconds, advance=advance
    )
