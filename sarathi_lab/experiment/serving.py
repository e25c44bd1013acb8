"""Sarathi-Serve's experiments under load (arXiv 2403.02310): stalls, ablation, capacity and the
token budget.

Each is a round: all policies serve the same requests, one after the other, on one engine. Every
round has a seed of its own, and its values are samples of the points. The paper's sizes are those
of section 5 and the artifact's scripts; a search takes as many requests as it needs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import numpy as np
import pandas as pd

from sarathi_lab.config.instantiate import load_option
from sarathi_lab.config.paths import CONF
from sarathi_lab.engine.request import Request
from sarathi_lab.engine.topology import Topology
from sarathi_lab.executor.simulated.backend import SimulatedBackend
from sarathi_lab.experiment.capacity import (
    Engine,
    Grid,
    at_rate,
    limits_around,
    run_lengths,
)
from sarathi_lab.experiment.clock import Estimate, Point
from sarathi_lab.experiment.registry import Platform, figure
from sarathi_lab.experiment.trials import Trials
from sarathi_lab.policy import Policy
from sarathi_lab.results.decode_cost import decode_iteration
from sarathi_lab.results.serving_metrics import gaps, latency
from sarathi_lab.results.slo import Slo
from sarathi_lab.workload.lognormal import Lognormal

# Table 1; the paper's ablation, stalls and budgets are of Yi-34B.
YI, MISTRAL = Platform("yi-34b", "a100", 2), Platform("mistral-7b", "a100", 1)
LOAD = 0.7  # of the rate at which a device serves all that is there at once, where none is stated
BOTH, HYBRID, CHUNKED = "hybrid and chunked", "hybrid only", "chunked only"  # the paper's Table 4
CHUNKING = "sarathi_serve"
SCHEDULERS = (CHUNKING, "prefill_first", "orca")  # in the paper's Fig 10: Sarathi-Serve, vLLM, Orca
STALL_BINS = 120
LONG, TBT, TTFT = ("longest_gap", "longest gap"), ("tbt_p99", "TBT P99"), ("ttft_p50", "TTFT P50")
ANY = "any"  # model, in `rates`
# By name and token budget; None where there is no such policy.
MakePolicy = Callable[[str, int], Policy | None]
Waits = Mapping[str, float]
LOADED: dict[str, Any] = {
    "kind": "rounds",
    "max_spread": 0.5,
    "papers": [YI],
    # What `ServingBench` reads of the sizes.
    "needs": ("datasets", "num_requests", "batch", "budget"),
    "takes": ("batches", "rates"),
}


@dataclass
class ServingBench:
    """One engine that serves `model` at `sizes`, without tokens if `vocab_size` is None; simulated,
    also the clusters of such engines.
    """

    sizes: Mapping[str, Any]
    model: str
    engine: Engine
    policy: MakePolicy
    vocab_size: int | None
    seed: int = 0
    clusters: Callable[[Topology], Engine] | None = None
    backend: SimulatedBackend | None = None  # of the executor, where it is simulated
    _saturation: dict[str, float] = field(default_factory=dict)
    _slos: dict[str, Slo] = field(default_factory=dict)
    # By data set and objective, where the last round's searches ended (steps of the grid).
    starts: dict[tuple[str, str], dict[str, int]] = field(default_factory=dict)

    def engine_of(self, policy: str) -> Engine:
        """The engine with the batch that the policy has at these sizes."""
        own = self.sizes.get("batches", {}).get(policy, self.sizes["batch"])
        return replace(self.engine, batch_size=own)

    def requests(self, dataset: str, number: int, seed: int) -> list[Request]:
        """`number` requests that arrive as a Poisson process of rate 1."""
        arriving = partial(replace, num_requests=number, arrivals="poisson", rate=1.0)
        own: Lognormal = arriving(datasets(self.sizes)[dataset], seed=self.seed + seed)
        return list(own.generate(self.vocab_size).requests)

    def rate(self, dataset: str) -> float:
        """The requests per second at which a data set is served."""
        rates = self.sizes.get("rates", {})
        stated = rates.get(self.model, rates.get(ANY, {})).get(dataset)
        return LOAD * self.saturation_rate(dataset) if stated is None else stated

    def saturation_rate(self, dataset: str) -> float:
        """Requests per second of the chunking policy, all there at once; served the first time."""
        if dataset not in self._saturation:
            requests = {0: self.requests(dataset, self.sizes["num_requests"], 0)}
            trials = Trials(self.engine, self.chunking(self.sizes["budget"]), requests, Grid(1.0))
            self._saturation[dataset] = trials.saturation_rate(self.sizes["num_requests"])
        return self._saturation[dataset]

    def chunking(self, budget: int) -> Policy:
        return self.named([CHUNKING], budget)[CHUNKING]

    def named(self, names: Sequence[str], budget: int) -> dict[str, Policy]:
        return {name: own for name in names if (own := self.policy(name, budget)) is not None}

    def slo(self, kind: str) -> Slo:
        """An objective of the sizes in this device's seconds: an option, maybe the model's own, or
        settings.
        """
        if kind not in self._slos:
            stated, seconds = self.sizes["slos"][kind], None
            if isinstance(stated, str):
                own = f"{self.model}-{stated}"
                is_own = (CONF / "slo" / f"{own}.yaml").is_file()
                slo = load_option("slo", own if is_own else stated)
            else:
                slo = Slo(name=kind, **stated)
            if slo.is_relative:
                batch = min(slo.decode_batch, self.sizes["batch"])
                context = min(slo.decode_context, longest(self.sizes))
                engine = self.engine
                room = {"num_blocks": engine.num_blocks, "block_size": engine.block_size}
                seconds = decode_iteration(engine.executor, batch, context, **room)
            self._slos[kind] = slo.resolved(seconds)
        return self._slos[kind]

    def serve(self, name: str, policy: Policy, dataset: str, seed: int) -> pd.DataFrame:
        """The requests of a round at the data set's rate under a policy: their table."""
        requests = self.requests(dataset, self.sizes["num_requests"], seed)
        arriving = at_rate(requests, self.rate(dataset))
        return self.engine_of(name).serve(arriving, policy).requests()


def datasets(sizes: Mapping[str, Any]) -> dict[str, Lognormal]:
    """The data sets of some sizes: options of the group workload, or settings of a `Lognormal`."""
    return {
        name: _option(stated)
        if isinstance(stated, str)
        else Lognormal(num_requests=1, seed=0, **stated)
        for name, stated in sizes["datasets"].items()
    }


@cache  # composing one takes a tenth of a second, and every point of a round asks
def _option(name: str) -> Lognormal:
    return load_option("workload", name)


def longest(sizes: Mapping[str, Any]) -> int:
    return max(dataset.max_len for dataset in datasets(sizes).values())


@figure(question="Do whole prompts stop the tokens of others?", seconds=40, **LOADED)
def sarathi_serve_stalls(bench: ServingBench, seed: int, **sizes: Any) -> Iterator[Point]:
    """The longest gaps between tokens, over time in the first round (Fig 1a), and of all."""
    dataset = list(sizes["datasets"])[-1]  # of the longest prompts
    policies = bench.named(SCHEDULERS, sizes["budget"])
    found = {name: bench.serve(name, own, dataset, seed) for name, own in policies.items()}
    if seed == 0:
        for name, requests in found.items():
            for time, gap in longest_gaps(requests, STALL_BINS):
                yield point(dataset, "longest gap", "ms", name, 1e3 * gap, time, kind="curve")
    waits = {name: _waits(requests) for name, requests in found.items()}
    yield from _compared(dataset, waits, (TBT, LONG, TTFT), CHUNKING, CHUNKING)


@figure(question="Which half of Sarathi-Serve does what?", seconds=40, **LOADED)
def sarathi_serve_ablation(bench: ServingBench, seed: int, **sizes: Any) -> Iterator[Point]:
    """Whole prompts beside decodes, chunks apart from decodes, and beside them (Table 4)."""
    whole, budget = longest(sizes) + sizes["batch"], sizes["budget"]
    kinds = {BOTH: (CHUNKING, budget), HYBRID: (CHUNKING, whole), CHUNKED: ("chunked_only", budget)}
    made = {kind: bench.policy(*own) for kind, own in kinds.items()}
    for dataset in sizes["datasets"]:
        waits = {
            kind: _waits(bench.serve(CHUNKING, policy, dataset, seed))
            for kind, policy in made.items()
            if policy is not None
        }
        yield from _compared(dataset, waits, (TTFT, TBT), BOTH, "both")


@figure(
    question="How much more load does Sarathi-Serve sustain?",
    seconds=120,
    **{**LOADED, "papers": [MISTRAL, YI]},
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
            trials = Trials(bench.engine_of(name), policy, requests, Grid(precision))
            trials = known.setdefault((name, policy), trials)
            limits = limits_around(saturation, None, None)
            capacity = trials.capacity(slo, start, limits, lengths)
            start = capacity.median or start
            found[name] = capacity.median if capacity.is_settled else math.nan
            yield point(dataset, "capacity", "1/s", name, found[name], slo=kind)
        for name, value in found.items():
            if name != CHUNKING:
                gain = found[CHUNKING] / value if value else math.inf
                quantity = f"capacity of {CHUNKING} / own"
                yield point(dataset, quantity, "ratio", name, gain, slo=kind)


@figure(question="Which token budget, when requests arrive over time?", seconds=60, **LOADED)
def sarathi_serve_budget(
    bench: ServingBench, seed: int, *, budgets: Sequence[int], **sizes: Any
) -> Iterator[Point]:
    """Times to the first token and between tokens by budget, also over the largest's."""
    largest = max(budgets)
    for dataset in sizes["datasets"]:
        policies = {own: bench.chunking(max(own, sizes["batch"])) for own in budgets}
        waits = {
            own: _waits(bench.serve(CHUNKING, policy, dataset, seed))
            for own, policy in policies.items()
        }
        for own, wait in waits.items():
            for key, words in (TBT, TTFT):
                yield point(dataset, words, "s", CHUNKING, wait[key], own)
                if own != largest:
                    ratio, quantity = wait[key] / waits[largest][key], f"{words} / largest budget"
                    yield point(dataset, quantity, "ratio", CHUNKING, ratio, own)


def _waits(requests: pd.DataFrame) -> Waits:
    return {**latency(requests), "longest_gap": max(gap for _, gap in longest_gaps(requests, 1))}


def _compared(
    dataset: str,
    waits: Mapping[str, Waits],
    quantities: Sequence[tuple[str, str]],
    to: str,
    called: str,
) -> Iterator[Point]:
    """Seconds of every series, and over those of the series `to`."""
    for key, words in quantities:
        for series, wait in waits.items():
            yield point(dataset, words, "s", series, wait[key])
            if series != to:
                ratio = wait[key] / waits[to][key]
                yield point(dataset, f"{words} / {called}", "ratio", series, ratio)


def point(
    dataset: str,
    quantity: str,
    unit: str,
    series: str,
    y: float,
    x: float = 0.0,
    *,
    slo: str = "",
    kind: Any = "value",
) -> Point:
    """A point in the panel of its data set, objective and quantity."""
    place = f"{dataset}, {slo}" if slo else dataset
    panel = f"{place}: {quantity}" + ("" if unit == "ratio" else f" [{unit}]")
    labels = (("dataset", dataset), ("slo", slo), ("quantity", quantity))
    return Point(panel, series, float(x), Estimate(y), unit, kind, labels)


def longest_gaps(requests: pd.DataFrame, num_bins: int) -> list[tuple[float, float]]:
    """(end, longest gap that ended in it) in seconds of those of `num_bins` that have one."""
    ends = np.concatenate([np.empty(0), *(np.asarray(times)[1:] for times in requests.token_times)])
    between = gaps(requests)
    edges = np.linspace(0.0, float(requests.finish_time.max()), num_bins + 1)
    places = np.clip(np.searchsorted(edges, ends) - 1, 0, num_bins - 1)
    return [(float(edges[i + 1]), float(between[places == i].max())) for i in np.unique(places)]
