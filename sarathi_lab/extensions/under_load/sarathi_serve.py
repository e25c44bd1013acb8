"""Sarathi-Serve's experiments under load (arXiv 2403.02310): stalls, ablation, capacity and the
token budget.

The paper's sizes are those of section 5 and the artifact's scripts; a search takes as many requests
as it needs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Unpack

import numpy as np
import pandas as pd

from sarathi_lab.experiment.points import Point
from sarathi_lab.experiment.registry import experiment
from sarathi_lab.extensions.under_load.bench import (
    CHUNKING,
    LOAD,
    MISTRAL,
    YI,
    LoadExperiment,
    LoadSizes,
    ServingBench,
    Values,
    compared,
    longest,
    point,
)
from sarathi_lab.extensions.under_load.search import RateGrid, RateSearch, run_lengths
from sarathi_lab.policy import Policy
from sarathi_lab.results.intervals import Steps
from sarathi_lab.results.plots.spec import by_device
from sarathi_lab.results.serving_metrics import gaps, latency

BOTH, HYBRID, CHUNKED = "hybrid and chunked", "hybrid only", "chunked only"  # the paper's Table 4
SCHEDULERS = (CHUNKING, "prefill_first", "orca")  # in the paper's Fig 10: Sarathi-Serve, vLLM, Orca
STALL_BINS = 120
LONG, TBT, TTFT = "longest gap", "TBT P99", "TTFT P50"


@experiment(
    LoadExperiment,
    question="Do whole prompts stop the tokens of others?",
    seconds=40,
    look=by_device(
        "point", "longest gap", x="time [s]", y="longest gap [ms]", log_y=True, unit="ms"
    ),
)
def sarathi_serve_stalls(
    bench: ServingBench, seed: int, **sizes: Unpack[LoadSizes]
) -> Iterator[Point]:
    """The longest gaps between tokens, over time in the first round (Fig 1a), and of all."""
    dataset = list(sizes["datasets"])[-1]  # of the longest prompts
    policies = bench.named(SCHEDULERS, sizes["budget"])
    served = {}
    for name, policy in policies.items():
        served[name] = bench.serve(name, policy, dataset, seed)
    # A curve over time has no median over rounds.
    if seed == 0:
        for name, requests in served.items():
            for time, gap in longest_gaps(requests, STALL_BINS):
                yield point(dataset, LONG, "ms", name, 1e3 * gap, time, kind="curve")
    waits = {}
    for name, requests in served.items():
        waits[name] = _waits(requests, TBT, LONG, TTFT)
    yield from compared(dataset, waits, {CHUNKING: waits[CHUNKING]})


@experiment(
    LoadExperiment,
    question="Which half of Sarathi-Serve does what?",
    seconds=40,
    look=by_device("bar", TTFT, TBT),
)
def sarathi_serve_ablation(
    bench: ServingBench, seed: int, **sizes: Unpack[LoadSizes]
) -> Iterator[Point]:
    """Whole prompts beside decodes, chunks apart from decodes, and beside them (Table 4)."""
    budget = sizes["budget"]
    whole_prompts = longest(sizes) + sizes["batch"]
    policies = {
        BOTH: bench.policy(CHUNKING, budget),
        HYBRID: bench.policy(CHUNKING, whole_prompts),
        CHUNKED: bench.policy("chunked_only", budget),
    }
    for dataset in sizes["datasets"]:
        waits = {}
        for kind, policy in policies.items():
            requests = bench.serve(CHUNKING, policy, dataset, seed)
            waits[kind] = _waits(requests, TTFT, TBT)
        yield from compared(dataset, waits, {"both": waits[BOTH]})


@experiment(
    LoadExperiment,
    question="How much more load does Sarathi-Serve sustain?",
    seconds=120,
    papers=[MISTRAL, YI],
    look=by_device("bar", "capacity"),
)
def sarathi_serve_capacity(
    bench: ServingBench,
    seed: int,
    *,
    num_searched: int,
    doublings: int,
    slos: Mapping[str, object],
    slo_budgets: Mapping[str, int],
    precision: float,
    searched: Sequence[str],
    **sizes: Unpack[LoadSizes],
) -> Iterator[Point]:
    """The highest rate of each policy within the objectives (Fig 10a), and Sarathi-Serve's gain, of
    the first data set, whose gains the paper states. Runs have `num_searched` requests, doubled
    until the capacity stands still but at most `doublings` times; then it is not a number.
    """
    dataset = next(iter(sizes["datasets"]))
    num_requests = num_searched * 2**doublings
    requests = bench.requests(dataset, num_requests, seed)
    lengths = run_lengths(num_requests, doublings)
    saturation = bench.saturation_rate(dataset)
    # A policy's search has served some rates for another objective.
    searches: dict[tuple[str, Policy], RateSearch] = {}
    for kind in slos:
        slo = bench.slo(kind)
        start = LOAD * saturation
        on_grid = partial(point, dataset, slo=kind, resolution=Steps(precision))
        rates = {}
        for name, policy in bench.named(searched, slo_budgets[kind]).items():
            if (name, policy) not in searches:
                server = bench.server(policy, batch_size=bench.batch_of(name))
                searches[name, policy] = RateSearch(server, requests, RateGrid(precision))
            capacity = searches[name, policy].capacity(slo, start, saturation, lengths)
            # The next policy's search begins where this one ended.
            start = capacity.rate or start
            rates[name] = capacity.rate if capacity.is_settled else math.nan
            yield on_grid("capacity", "1/s", name, rates[name])
        for name, rate in rates.items():
            if name != CHUNKING:
                gain = rates[CHUNKING] / rate if rate else math.inf
                quantity = f"capacity of {CHUNKING} / own"
                yield on_grid(quantity, "ratio", name, gain)


@experiment(
    LoadExperiment,
    question="Which token budget, when requests arrive over time?",
    seconds=60,
    look=by_device("line", TBT, TTFT, x="budget [tokens]", log_x=True, log_y=True),
)
def sarathi_serve_budget(
    bench: ServingBench, seed: int, *, budgets: Sequence[int], **sizes: Unpack[LoadSizes]
) -> Iterator[Point]:
    """Times to the first token and between tokens by budget, also over the largest's."""
    for dataset in sizes["datasets"]:
        waits = {}
        for budget in budgets:
            policy = bench.chunking(max(budget, sizes["batch"]))
            requests = bench.serve(CHUNKING, policy, dataset, seed)
            waits[budget] = _waits(requests, TBT, TTFT)
        largest = {"largest budget": waits[max(budgets)]}
        for budget, of_budget in waits.items():
            yield from compared(dataset, {CHUNKING: of_budget}, largest, x=budget)


def _waits(requests: pd.DataFrame, *quantities: str) -> Values:
    """Return the seconds of `quantities`."""
    latencies = latency(requests)
    waits = {
        TBT: latencies["tbt_p99"],
        TTFT: latencies["ttft_p50"],
        LONG: max(gap for _, gap in longest_gaps(requests, num_bins=1)),
    }
    return {name: waits[name] for name in quantities}


def longest_gaps(requests: pd.DataFrame, num_bins: int) -> list[tuple[float, float]]:
    """Return the end and the longest gap that ended in it (seconds), of each of `num_bins` parts of
    the run that has one.
    """
    times = [np.asarray(tokens)[1:] for tokens in requests.token_times]
    ends = np.concatenate([np.empty(0), *times])
    between = gaps(requests)
    last = float(requests.finish_time.max())
    edges = np.linspace(0.0, last, num_bins + 1)
    bins = np.searchsorted(edges, ends) - 1
    bins = np.clip(bins, 0, num_bins - 1)
    longest_by_end = []
    for number in np.unique(bins):
        longest_gap = between[bins == number].max()
        end = edges[number + 1]
        longest_by_end.append((float(end), float(longest_gap)))
    return longest_by_end
