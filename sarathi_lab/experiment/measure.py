"""Fills a figure by measuring it on a device: in rounds of pairs, until a time is over."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import pandas as pd
import torch

from sarathi_lab.config.console import progress_of
from sarathi_lab.config.errors import RunError
from sarathi_lab.engine.executor import Sizes
from sarathi_lab.engine.request import Batch
from sarathi_lab.executor.simulated.cost_model import CostModel
from sarathi_lab.executor.simulated.profiled import ProfiledOperations
from sarathi_lab.executor.torch.backend import TorchBackend
from sarathi_lab.executor.torch.executor import TorchExecutor
from sarathi_lab.executor.torch.profiling import (
    Shape,
    blocks_needed,
    calibration_shapes,
    measure_profile,
)
from sarathi_lab.executor.torch.steal_corrected_clock import exclude_stolen_time
from sarathi_lab.experiment import serving
from sarathi_lab.experiment.capacity import Engine
from sarathi_lab.experiment.clock import BLOCK_SIZE, Clock, Unit
from sarathi_lab.experiment.measured_clock import DeviceClock
from sarathi_lab.experiment.real_pipeline import measure_stages, stage_name
from sarathi_lab.experiment.registry import Figure
from sarathi_lab.experiment.samples import Samples, are_narrow, keep, rounds, table_of
from sarathi_lab.experiment.scenario import Scenario, Served
from sarathi_lab.model.spec import ModelSpec
from sarathi_lab.results import load
from sarathi_lab.results.intervals import FEWEST_PAIRS, coarse_to_fine, summary

LEFT_OUT = "the time was over"
MOST_OF_UNIT = 40  # rounds


class Room(NamedTuple):
    """What a figure asks of the device, in tokens, sequences and tokens of the longest one."""

    kv_tokens: int
    batch_size: int
    longest: int


class Measured(NamedTuple):
    """A figure's `table`, and what it was made from: rows of `compositions` and of `serving`."""

    table: pd.DataFrame
    compositions: pd.DataFrame
    serving: pd.DataFrame


class _Needs(Clock):
    """Measures nothing, and keeps what the batches and scenarios that it is asked for need."""

    uncertainty: Mapping[str, float] = dict.fromkeys(("matmul", "attention"), 0.0)

    def __init__(self) -> None:
        super().__init__(self)
        self.room = Room(BLOCK_SIZE, 1, 1)

    def operation_times(self, batch: Batch) -> dict[str, float]:
        ends = [chunk.start + chunk.num_tokens for chunk in batch.chunks]
        self._note(sum(-(-end // BLOCK_SIZE) for end in ends), len(ends), max(ends))
        return {"qkv_proj": 1.0, "prefill_attention": 1.0}

    def iteration_time(self, batch: Batch) -> float:
        return sum(self.operation_times(batch).values())

    def served(self, scenario: Scenario) -> Served:
        self._note(scenario.blocks(BLOCK_SIZE), scenario.batch_size, scenario.longest)
        return Served(1.0, 0.0, 1, 1.0, 1.0)

    def keys_read(self, *batches: Batch) -> float:
        return 1.0

    def _note(self, blocks: int, batch_size: int, longest: int) -> None:
        wanted = ((blocks + 1) * BLOCK_SIZE, batch_size, longest + 1)
        self.room = Room(*map(max, self.room, wanted))


def room_of(figure: Figure, spec: ModelSpec, sizes: Mapping[str, Any]) -> Room:
    if figure.kind == "pipeline":
        shapes = _shapes(sizes)
        tokens = blocks_needed(shapes, BLOCK_SIZE) * BLOCK_SIZE
        return Room(tokens, max(shape.count for shape in shapes), sizes["longest"])
    if figure.kind == "rounds":
        batch, longest = sizes["batch"], serving.longest(sizes)
        num_blocks = math.ceil(1.05 * batch * math.ceil(longest / BLOCK_SIZE))  # with a watermark
        return Room(num_blocks * BLOCK_SIZE, batch, longest)
    if figure.kind == "stages":
        at_once = sizes["batch"] * max(sizes["stages"])
        return Room(at_once * (sizes["longest"] + BLOCK_SIZE), sizes["batch"], sizes["longest"])
    needs = _Needs()
    for unit in figure.units(spec, sizes):
        list(unit(needs))
    return needs.room


def least_room(figure: Figure, spec: ModelSpec, sizes: Mapping[str, Any]) -> int:
    """Tokens of cache without which nothing can be measured; requests under load may wait."""
    if figure.kind == "rounds":
        return 2 * serving.longest(sizes)
    return room_of(figure, spec, sizes).kv_tokens


def load_executor(backend: TorchBackend, spec: ModelSpec, room: Room) -> TorchExecutor:
    """The executor of `spec` with random weights and a cache of `room`, or of what the memory
    holds. Raises UserError if the weights do not fit.
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
    except RunError:
        sizes = replace(sizes, max_batch_tokens=room.longest, fills_memory=True)
    # Outside the handler, whose traceback would keep the first model.
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return backend.build(spec, None, sizes)


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
    """Measure a figure for up to `seconds` without loading, at least `FEWEST_PAIRS` rounds.

    With `is_cut` the units, ends and middles first, are as many as the time allows so many of.
    """
    if figure.kind == "stages":
        return _of_stages(figure, backend, sizes, seed, max_spread)
    room = room_of(figure, spec, sizes)
    if figure.kind == "rounds":
        held = BLOCK_SIZE * backend.kv_blocks(spec, BLOCK_SIZE)
        room = room._replace(kv_tokens=min(room.kv_tokens, held))
    executor = load_executor(backend, spec, room)
    compositions = scenarios = pd.DataFrame()
    what = f"measuring {figure.name} with {spec.name}"
    with progress_of(what, seconds, "s") as advance, exclude_stolen_time(executor):
        if figure.kind == "pipeline":
            found = measure_profile(executor, _shapes(sizes), seconds, advance)
            operations = ProfiledOperations(found.tables(spec), spec, backend.dtype_bytes)
            cost = CostModel(operations, spec, backend.dtype_bytes)
            # One sample a set of requests.
            samples = rounds(
                lambda round: figure.make(cost, seed + round, **sizes),
                fewest=sizes["num_seeds"],
                most=sizes["num_seeds"],
            )
        elif figure.kind == "rounds":
            cache = (executor.num_blocks, executor.block_size)
            engine = Engine(executor, sizes["batch"], serving.longest(sizes), *cache)
            vocab_size = spec.vocab_size
            bench = serving.ServingBench(sizes, spec.name, engine, make_policy, vocab_size, seed)
            for dataset in sizes["datasets"]:  # warms up
                bench.saturation_rate(dataset)
            make = partial(figure.make, bench, **sizes)
            samples = rounds(make, seconds=seconds, advance=advance)
            scenarios = _replayed(engine, spec.name)
        else:
            clock, units = DeviceClock(executor), list(figure.units(spec, sizes))
            samples = measure_units(clock, units, seconds, max_spread, advance, is_cut)
            compositions = pd.DataFrame(clock.cost.rows(spec.name, backend.dtype_bytes))
            scenarios = pd.DataFrame(clock.serving_rows(spec.name))
            reason = clock.cost.reason
    table = table_of(figure.name, samples, max_spread, is_series=figure.kind != "pipeline")
    if figure.kind == "units":
        table.loc[table.num_pairs == 0, "reason"] = reason or LEFT_OUT
        table.loc[[not values for values in samples.values()], "reason"] = LEFT_OUT
    table = table.assign(model=spec.name, dtype=backend.dtype_name, device_name=backend.device_name)
    return Measured(table, compositions, scenarios)


def _of_stages(
    figure: Figure, backend: TorchBackend, sizes: Mapping[str, Any], seed: int, max_spread: float
) -> Measured:
    """Of several processes, each set of requests being independent of the others."""
    with progress_of(f"measuring {figure.name}", figure.seconds, "s") as advance:
        samples = measure_stages(backend, figure.make, sizes, seed, advance)
    table = table_of(figure.name, samples, max_spread, is_series=False)
    about = {"dtype": backend.dtype_name, "device_name": f"{stage_name(backend)} a stage"}
    return Measured(table.assign(**about), pd.DataFrame(), pd.DataFrame())


def _replayed(engine: Engine, model: str) -> pd.DataFrame:
    """A row per policy: the share of its iterations that were replayed, if any were."""
    if not any(map(any, engine.replayed.values())):
        return pd.DataFrame()
    labels = {"model": model, "quantity": load.REPLAYED}
    rows = [{**labels, "policy": p, **summary(s, "ratio")} for p, s in engine.replayed.items()]
    return pd.DataFrame(rows)


def measure_units(
    clock: DeviceClock,
    units: Sequence[Unit],
    seconds: float,
    max_spread: float,
    advance: Callable[[float], None] = lambda seconds: None,
    is_cut: bool = False,
) -> Samples:
    """Samples of the points of all units, one a round; none of those that the time cut.

    After the fewest rounds a unit is left alone once the intervals of all its points are narrow
    enough, so that what time is left goes to the others.
    """
    chosen = coarse_to_fine(units) if is_cut else list(units)
    samples: Samples = {}
    left, began = list[Unit](), time.monotonic()
    for number in range(MOST_OF_UNIT):
        clock.start_round()
        for place, unit in enumerate(list(chosen)):
            start = time.monotonic()
            if is_cut and number == 0 and place and start - began > seconds / FEWEST_PAIRS:
                left = chosen[place:]
                del chosen[place:]
                break
            if number >= FEWEST_PAIRS and start - began > seconds:
                chosen.clear()
                break
            clock.cost.forget()
            points = list(unit(clock))
            keep(samples, points)
            advance(time.monotonic() - start)
            if number + 1 >= FEWEST_PAIRS and are_narrow(samples, points, max_spread):
                chosen.remove(unit)
    needs = _Needs()
    return samples | {point.place: [] for unit in left for point in unit(needs)}


def _shapes(sizes: Mapping[str, Any]) -> list[Shape]:
    """What has to be measured for the pipeline: iterations of up to its longest prompt."""
    shapes = calibration_shapes(sizes["batch"], sizes["longest"])
    return [shape for shape in shapes if shape.total_tokens <= sizes["longest"]]
