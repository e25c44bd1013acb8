"""Fills a figure by measuring it on a device: in rounds of pairs, until a time is over."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import pandas as pd
import torch

from sarathi_lab.config.console import progress_of
from sarathi_lab.config.errors import RunError
from sarathi_lab.engine.executor import Sizes
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
from sarathi_lab.experiment.cases import Group
from sarathi_lab.experiment.measured_clock import DeviceClock
from sarathi_lab.experiment.real_pipeline import measure_stages, stage_name
from sarathi_lab.experiment.registry import Figure
from sarathi_lab.experiment.samples import Samples, are_narrow, keep, rounds, table_of
from sarathi_lab.experiment.work import BLOCK_SIZE, Room
from sarathi_lab.model.spec import ModelSpec
from sarathi_lab.results import load
from sarathi_lab.results.intervals import FEWEST_PAIRS, coarse_to_fine, summary

LEFT_OUT = "the time was over"
MOST_OF_GROUP = 40  # rounds


class Measured(NamedTuple):
    """A figure's `table`, and what it was made from: rows of `compositions` and of `serving`."""

    table: pd.DataFrame
    compositions: pd.DataFrame
    serving: pd.DataFrame


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
    return Room.of(subject for group in figure.cases(spec, sizes) for subject in group.subjects)


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

    With `is_cut` the groups, ends and middles first, are as many as the time allows so many of.
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
            clock, groups = DeviceClock(executor), figure.cases(spec, sizes)
            samples = measure_groups(clock, groups, seconds, max_spread, advance, is_cut)
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


def measure_groups(
    clock: DeviceClock,
    groups: Iterable[Group],
    seconds: float,
    max_spread: float,
    advance: Callable[[float], None] = lambda seconds: None,
    is_cut: bool = False,
) -> Samples:
    """Return samples of the points of all groups, one a round; none of those that the time cut.

    After the fewest rounds a group is left alone once the intervals of all its points are narrow
    enough, so that the time that is left goes to the others.
    """
    chosen = coarse_to_fine(list(groups)) if is_cut else list(groups)
    samples: Samples = {}
    left, began = list[Group](), time.monotonic()
    for number in range(MOST_OF_GROUP):
        clock.start_round()
        for place, group in enumerate(list(chosen)):
            start = time.monotonic()
            if is_cut and number == 0 and place and start - began > seconds / FEWEST_PAIRS:
                left = chosen[place:]
                del chosen[place:]
                break
            if number >= FEWEST_PAIRS and start - began > seconds:
                chosen.clear()
                break
            clock.cost.forget()
            points = group.points(clock)
            keep(samples, points)
            advance(time.monotonic() - start)
            if number + 1 >= FEWEST_PAIRS and are_narrow(samples, points, max_spread):
                chosen.remove(group)
    return samples | {case.place: [] for group in left for case in group.cases}


def _shapes(sizes: Mapping[str, Any]) -> list[Shape]:
    """What has to be measured for the pipeline: iterations of up to its longest prompt."""
    shapes = calibration_shapes(sizes["batch"], sizes["longest"])
    return [shape for shape in shapes if shape.total_tokens <= sizes["longest"]]
