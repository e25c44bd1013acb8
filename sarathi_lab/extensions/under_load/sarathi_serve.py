"""Sarathi-Serve's experiments under load (arXiv 2403.02310): stalls, ablation, capacity and the
token budget.

The paper's sizes are those of section 5 and the artifact's scripts; a search takes as many requests
as it needs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from sarathi_lab.experiment.cases import Point
from sarathi_lab.extensions.capacity.search import Grid, Trials, run_lengths
from sarathi_lab.extensions.under_load import (
    CHUNKING,
    LOAD,
    MISTRAL,
    YI,
    ServingBench,
    Values,
    compared,
    longest,
    point,
    under_load,
)
from sarathi_lab.policy import Policy
from sarathi_lab.results.plots.spec import by_device
from sarathi_lab.results.serving_metrics import gaps, latency

BOTH, HYBRID, CHUNKED = "hybrid and chunked", "hybrid only", "chunked only"  # the paper's Table 4
SCHEDULERS = (CHUNKING, "prefill_first", "orca")  # in the paper's Fig 10: Sarathi-Serve, vLLM, Orca
STALL_BINS = 120
LONG, TBT, TTFT = "longest gap", "TBT P99", "TTFT P50"


@under_load(
    "Do whole prompts stop the tokens of others?",
    40,
    look=by_device(
        "point", "longest gap", x="time [s]", y="longest gap [ms]", log_y=True, unit="ms"
    ),
)
def sarathi_serve_stalls(bench: ServingBench, seed: int, **sizes: Any) -> Iterator[Point]:
    """The longest gaps between tokens, over time in the first round (Fig 1a), and of all."""
    dataset = list(sizes["datasets"])[-1]  # of the longest prompts
    policies = bench.named(SCHEDULERS, sizes["budget"])
    found = {name: bench.serve(name, policy, dataset, seed) for name, policy in policies.items()}
    if seed == 0:
        for name, requests in found.items():
            for time, gap in longest_gaps(requests, STALL_BINS):
                yield point(dataset, "longest gap", "ms", name, 1e3 * gap, time, kind="curve")
    waits = {name: _waits(requests, TBT, LONG, TTFT) for name, requests in found.items()}
    yield from compared(dataset, waits, {CHUNKING: waits[CHUNKING]})


@under_load("Which half of Sarathi-Serve does what?", 40, look=by_device("bar", TTFT, TBT))
def sarathi_serve_ablation(bench: ServingBench, seed: int, **sizes: Any) -> Iterator[Point]:
    """Whole prompts beside decodes, chunks apart from decodes, and beside them (Table 4)."""
    whole, budget = longest(sizes) + sizes["batch"], sizes["budget"]
    kinds = {BOTH: (CHUNKING, budget), HYBRID: (CHUNKING, whole), CHUNKED: ("chunked_only", budget)}
    made = {kind: policy for kind, named in kinds.items() if (policy := bench.policy(*named))}
    for dataset in sizes["datasets"]:
        served = {kind: bench.serve(CHUNKING, one, dataset, seed) for kind, one in made.items()}
        waits = {kind: _waits(requests, TTFT, TBT) for kind, requests in served.items()}
        yield from compared(dataset, waits, {"both": waits[BOTH]})


@under_load(
    "How much more load does Sarathi-Serve sustain?",
    120,
    MISTRAL,
    YI,
    look=by_device("bar", "capacity"),
)
def sarathi_serve_capacity(
    bench: ServingBench,
    seed: int,
    *,
    num_searched: int,
    doublings: int,
    slos: Mapping[str, Any],
    slo_budgets: Mapping[str, int],
    precision: float,
    searched: Sequence[str],
    **sizes: Any,
) -> Iterator[Point]:
    """The highest rate of each policy within the objectives (Fig 10a), and Sarathi-Serve's gain, of
    the first data set, whose gains the paper states. Runs have `num_searched` requests, doubled
    until the capacity stands still but at most `doublings` times; then it is not a number.
    """
    dataset = next(iter(sizes["datasets"]))
    requests = {seed: bench.requests(dataset, num_searched << doublings, seed)}
    lengths = run_lengths(num_searched << doublings, doublings)
    known: dict[tuple[str, Policy], Trials] = {}  # has served some rates for another objective
    saturation = bench.saturation_rate(dataset)
    for kind in slos:
        slo, found, start = bench.slo(kind), {}, LOAD * saturation
        for name, policy in bench.named(searched, slo_budgets[kind]).items():
            engine = replace(bench.engine, policy=policy, batch_size=bench.batch_of(name))
            trials = Trials(engine, bench.executor, requests, Grid(precision))
            trials = known.setdefault((name, policy), trials)
            capacity = trials.capacity(slo, start, saturation, lengths)
            start = capacity.median or start
            found[name] = capacity.median if capacity.is_settled else math.nan
            yield point(dataset, "capacity", "1/s", name, found[name], slo=kind)
        for name, value in found.items():
            if name != CHUNKING:
                gain = found[CHUNKING] / value if value else math.inf
                quantity = f"capacity of {CHUNKING} / own"
                yield point(dataset, quantity, "ratio", name, gain, slo=kind)


@under_load(
    "Which token budget, when requests arrive over time?",
    60,
    look=by_device("pair", TBT, TTFT, hue="x", legend="budget [tokens]"),
)
def sarathi_serve_budget(
    bench: ServingBench, seed: int, *, budgets: Sequence[int], **sizes: Any
) -> Iterator[Point]:
    """Times to the first token and between tokens by budget, also over the largest's."""
    for dataset in sizes["datasets"]:
        waits = {}
        for budget in budgets:
            policy = bench.chunking(max(budget, sizes["batch"]))
            waits[budget] = _waits(bench.serve(CHUNKING, policy, dataset, seed), TBT, TTFT)
        largest = {"largest budget": waits[max(budgets)]}
        for budget, found in waits.items():
            yield from compared(dataset, {CHUNKING: found}, largest, x=budget)


def _waits(requests: pd.DataFrame, *quantities: str) -> Values:
    known = latency(requests)
    found = {TBT: known["tbt_p99"], TTFT: known["ttft_p50"]}
    found[LONG] = max(gap for _, gap in longest_gaps(requests, 1))
    return {name: found[name] for name in quantities}


def longest_gaps(requests: pd.DataFrame, num_bins: int) -> list[tuple[float, float]]:
    """(end, longest gap that ended in it) in seconds of those of `num_bins` that have one."""
    ends = np.concatenate([np.empty(0), *(np.asarray(times)[1:] for times in requests.token_times)])
    between = gaps(requests)
    edges = np.linspace(0.0, float(requests.finish_time.max()), num_bins + 1)
    places = np.clip(np.searchsorted(edges, ends) - 1, 0, num_bins - 1)
    return [(float(edges[i + 1]), float(between[places == i].max())) for i in np.unique(places)]
