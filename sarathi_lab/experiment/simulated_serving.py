"""Fills an experiment of serving on a virtual clock: rounds of requests under all its policies."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import pandas as pd

from sarathi_lab.config.console import progress_of
from sarathi_lab.config.crew import Crew
from sarathi_lab.config.instantiate import load_option
from sarathi_lab.engine.executor import Sizes
from sarathi_lab.engine.topology import SINGLE, Topology
from sarathi_lab.executor.simulated.backend import SimulatedBackend
from sarathi_lab.experiment.capacity import Engine
from sarathi_lab.experiment.clock import BLOCK_SIZE, Point
from sarathi_lab.experiment.registry import FIGURES, Figure
from sarathi_lab.experiment.samples import Samples, keep, table_of
from sarathi_lab.experiment.serving import MakePolicy, ServingBench, longest
from sarathi_lab.experiment.simulate import by_folder, labelled
from sarathi_lab.policy import Policy
from sarathi_lab.results.intervals import FEWEST_PAIRS


def served(
    figure: Figure,
    backends: Sequence[tuple[str, SimulatedBackend]],
    make_policy: MakePolicy,
    seed: int,
    sizes: Mapping[str, Any],
    processes: int | None = None,
) -> dict[str, pd.DataFrame]:
    """The tables of an experiment of serving by the devices' folders, for models on backends.

    An interval is that of the median over the rounds: it says how far the seeds are apart.
    """
    number = FEWEST_PAIRS
    benches = [_Bench(model, on, make_policy, seed, sizes) for model, on in backends]
    crew = Crew(partial(_Rounds, figure.name, benches), 1 if figure.is_chained else processes)
    items = [(bench, round) for bench in range(len(benches)) for round in range(number)]
    what = f"computing {figure.name} with {' and '.join(model for model, _ in backends)}"
    with progress_of(what, len(items), "rounds") as advance:
        found = crew.map(_Rounds.points, items, advance)
    tables = []
    for place, (model, backend) in enumerate(backends):
        samples: Samples = {}
        for points in found[place * number : (place + 1) * number]:
            keep(samples, points)
        table = table_of(figure.name, samples, math.inf, is_series=False)
        tables.append(labelled(table, backend, model))
    return by_folder(tables)


@dataclass(frozen=True)
class _Bench:
    """A model on a backend that serves at `sizes`."""

    model: str
    backend: SimulatedBackend
    make_policy: MakePolicy
    seed: int
    sizes: Mapping[str, Any]

    def make(self) -> ServingBench:
        backend, sizes, spec = self.backend, self.sizes, load_option("model", self.model)
        batch, longest_one = sizes["batch"], longest(sizes)
        blocks = (backend.kv_blocks(spec, BLOCK_SIZE), BLOCK_SIZE)
        predictor = cache(partial(backend.predictor, spec))

        @cache  # a cost model with tables takes a second to make
        def engine(cluster: Topology) -> Engine:
            build = partial(backend.build, spec, None, Sizes(*blocks, batch))
            executor = cluster.executor(build, backend.link(spec, cluster))
            return Engine(executor, batch, longest_one, *blocks, backend.num_stages, cluster)

        @cache
        def on_device(name: str, budget: int) -> Policy | None:
            policy = self.make_policy(name, budget)
            return policy and policy.on_device(predictor, batch, longest_one)

        bench = ServingBench(sizes, self.model, engine(SINGLE), on_device, None, self.seed, engine)
        bench.backend = backend
        return bench


class _Rounds:
    """The benches of a process, each made when its first round is asked for."""

    def __init__(self, name: str, benches: Sequence[_Bench]) -> None:
        self._figure = FIGURES[name]
        self._benches, self._made = benches, cache(lambda place: benches[place].make())

    def points(self, place: tuple[int, int]) -> list[Point]:
        """Those of a round on a bench, by their numbers."""
        bench, number = self._made(place[0]), place[1]
        return list(self._figure.make(bench, number, **self._benches[place[0]].sizes))
