"""What rules proposed for vLLM's scheduler gain over it, on loads like those of their threads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Unpack

import numpy as np

from sarathi_lab.engine.request import Request
from sarathi_lab.experiment.points import Point
from sarathi_lab.experiment.registry import PROFILED, Platform, experiment
from sarathi_lab.extensions.after_sarathi.adaptive_budgets import in_phases
from sarathi_lab.extensions.after_sarathi.long_prompts import policies_of
from sarathi_lab.extensions.under_load.bench import (
    LoadExperiment,
    LoadSizes,
    ServingBench,
    compared,
    waited,
)
from sarathi_lab.extensions.under_load.search import at_rate
from sarathi_lab.results.plots.spec import by_device

QUANTITIES = (
    "mean latency",
    "mean TTFT",
    "P50 TTFT",
    "P99 TTFT",
    "mean TPOT",
    "P50 between tokens",
)
STREAM_OF_SHAPES = 6  # of random numbers, so that lengths do not follow the arrivals
Phases = Mapping[str, Sequence[Sequence[float]]]
Grids = Mapping[str, Mapping[str, Sequence[int]]]


@experiment(
    LoadExperiment,
    question="Do rules proposed for vLLM's scheduler gain what their threads claim?",
    seconds=60,
    papers=[Platform("llama3.1-8b", "h100")],
    simulated=PROFILED,
    look=by_device("bar", "mean latency", "mean TTFT"),
)
def proposed_gains(
    bench: ServingBench,
    seed: int,
    *,
    proposals: Mapping[str, Mapping[str, Mapping[str, object]]],
    phases: Phases,
    grids: Grids,
    **sizes: Unpack[LoadSizes],
) -> Iterator[Point]:
    """Waits by data set under its `proposals`, options of conf/policy as `policy` with what differs
    from them, also over those of the first.

    Requests come in `phases`, pairs of seconds and requests a second, or at the data set's rate;
    those of `grids` have prompts and outputs of equally likely lengths. Prefixes are shared.
    """
    for dataset, variants in proposals.items():
        requests = arriving(bench, dataset, seed, phases, grids)
        values = {}
        for name, policy in policies_of(bench, (), variants, sizes["budget"]).items():
            ledger = bench.run(requests, policy, shares_prefixes=True)
            values[name] = waited(ledger.requests(), *QUANTITIES)
        first = next(iter(values))
        yield from compared(dataset, values, {first: values[first]})


def arriving(
    bench: ServingBench, dataset: str, seed: int, phases: Phases, grids: Grids
) -> list[Request]:
    """Make the requests of a round: at the rates of the data set's `phases` or else at the bench's,
    and of the data set's own lengths or else of random ones of its `grids`.
    """
    if dataset in phases:
        requests = in_phases(bench, dataset, phases[dataset], seed)
    else:
        number = bench.sizes["num_requests"]
        requests = list(at_rate(bench.requests(dataset, number, seed), bench.rate(dataset)))
    if dataset not in grids:
        return requests
    grid = grids[dataset]
    # Each pair of lengths is as likely.
    shapes = list(product(grid["prompts"], grid["outputs"]))
    generator = np.random.default_rng([bench.seed, seed, STREAM_OF_SHAPES])
    indices = generator.integers(0, len(shapes), len(requests)).tolist()
    shaped = []
    for request, index in zip(requests, indices, strict=True):
        prompt_len, output_len = shapes[index]
        shaped.append(replace(request, prompt_len=prompt_len, output_len=output_len))
    return shaped
