"""Several engines: agents' sessions by router, with and without prefix caching; and the goodput of
as many GPUs as replicas that chunk, and as prefill and decode instances (DistServe, Splitwise); and
replicas that wait for each other's prompts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import combinations, product
from typing import Any, Required, TypedDict, Unpack

import numpy as np
import pandas as pd

from sarathi_lab.engine.config import SINGLE, Topology
from sarathi_lab.engine.request import Request
from sarathi_lab.experiment.points import Point
from sarathi_lab.experiment.registry import PROFILED, Platform, experiment
from sarathi_lab.extensions.cluster.lockstep import Lockstep
from sarathi_lab.extensions.cluster.topologies import Disaggregated, Replicas, Several
from sarathi_lab.extensions.under_load.bench import (
    EngineSettings,
    LoadExperiment,
    NeededSizes,
    ServingBench,
    Values,
    compared,
    datasets,
    longest,
    point,
    ratios,
    waited,
)
from sarathi_lab.extensions.under_load.search import RateGrid, at_rate, bisected
from sarathi_lab.policy import Policy, VllmV1
from sarathi_lab.results.intervals import Steps, Tried
from sarathi_lab.results.plots.spec import by_device
from sarathi_lab.results.serving_metrics import Slo, gaps, is_good
from sarathi_lab.workload.synthetic import Agentic

KINDS: Mapping[str, Callable[..., Several]] = {
    "replicas": Replicas,
    "disaggregated": Disaggregated,
}
GOODPUT = "goodput per GPU"
HITS = "hit share, later turns"
EVERY = "every iteration"
CADENCES = ("mean TPOT", "P50 between tokens", "mean TTFT")
# By name, the policy of a run and what its engine has otherwise than the bench's.
Runs = dict[str, tuple[Policy, EngineSettings]]


class Bounds(TypedDict, total=False):
    """Seconds of an objective, as in `Slo`."""

    ttft: float
    tbt: float
    tpot: float


class Arrangement(TypedDict, total=False):
    """A kind of cluster (`KINDS`) with its number of engines, and the policy's tokens."""

    kind: Required[str]
    chunk: Required[int]
    num: int
    prefill: int
    decode: int
    prefill_chunk: int


@experiment(
    LoadExperiment,
    question="What do chunks, prefix caching and the router do to each turn's first token?",
    papers=[Platform("llama3.1-8b", "h100")],
    simulated=PROFILED,
    look=by_device("bar", "TTFT P50, later turns", "hit share, later turns"),
)
def agentic(
    bench: ServingBench,
    seed: int,
    *,
    session: Mapping[str, Any],
    sessions: int,
    rate: float,
    budget: int,
    budgets: Sequence[int],
    replicas: int,
    replica_rate: float,
    replica_sessions: int,
    routers: Sequence[str],
    **sizes: Unpack[NeededSizes],
) -> Iterator[Point]:
    """Yield first tokens by turn, gaps and hit shares, and their ratios on the same sessions.

    One engine is served by token budget, with and without a prefix cache; ratios are to no cache
    and to whole prompts. Several engines are served by router; ratios are to the first router.

    Args:
        bench: Serves and measures.
        seed: Of the sessions.
        session: Settings of the workload.
        sessions: Number of them on one engine.
        rate: Sessions a second on one engine.
        budget: Tokens of an iteration on several engines.
        budgets: Tokens of an iteration on one engine, one run each.
        replicas: Number of engines behind a router.
        replica_rate: Sessions a second for each of them.
        replica_sessions: Number of sessions on all of them.
        routers: Names, the one that others are compared with first.
        sizes: Those of every experiment under load.
    """
    policies = {str(tokens): bench.chunking(tokens) for tokens in budgets}
    # A budget that cuts no prompt, beside the decodes of a full batch.
    policies["whole"] = bench.chunking(longest(bench.sizes) + sizes["batch"])
    runs: Runs = {}
    for name, policy in policies.items():
        runs[name] = (policy, {"shares_prefixes": True})
    for name, policy in policies.items():
        runs[f"{name}, no cache"] = (policy, {})
    runs_by_router: Runs = {}
    for router in routers:
        cluster = Replicas(num=replicas, router=router)
        settings: EngineSettings = {"shares_prefixes": True, "cluster": cluster}
        runs_by_router[router] = (bench.chunking(budget), settings)
    for dataset, workload in datasets(bench.sizes).items():
        assert isinstance(workload, Agentic), "the sizes name a workload of sessions"
        work = replace(workload, **session, seed=bench.seed + seed)
        panel = f"{dataset}, one engine"
        values = yield from _served(bench, work, panel, sessions, rate, runs)
        ratios_to = partial(ratios, dataset, kind="share")
        for name in policies:
            yield from ratios_to("no cache", name, values[name], values[f"{name}, no cache"])
            if name != "whole":
                yield from ratios_to("whole prompts", name, values[name], values["whole"])
        panel = f"{dataset}, {replicas} engines"
        rate_of_all = replicas * replica_rate
        values = yield from _served(
            bench, work, panel, replica_sessions, rate_of_all, runs_by_router
        )
        first, *others = routers
        for router in others:
            yield from ratios_to(first, router, values[router], values[first])


def _served(
    bench: ServingBench,
    workload: Agentic,
    panel: str,
    num_sessions: int,
    rate: float,
    runs: Runs,
) -> Generator[Point, None, dict[str, Values]]:
    """The points of the same sessions under the settings of every run; returns the values."""
    number = num_sessions * workload.turns
    work = replace(workload, num_requests=number, arrivals="poisson", rate=rate)
    values = {}
    for name, (policy, settings) in runs.items():
        turns = _turns(bench, work, policy, settings)
        values[name] = _values(turns)
        # By the turn's number, with which the context grows.
        for turn, median in turns.groupby("turn").ttft.median().items():
            x = float(str(turn))
            yield point(panel, "TTFT P50 by turn", "s", name, median, x, kind="share")
    yield from compared(panel, values, {}, {HITS: "share"}, kind="share")
    return values


def _turns(
    bench: ServingBench, workload: Agentic, policy: Policy, settings: EngineSettings
) -> pd.DataFrame:
    """The turns' waits, gaps and hits, and the number of each from 1."""
    load = workload.generate(bench.vocab_size)
    table = bench.run(load.arrivals(), policy, **settings).requests()
    numbers = {}
    for session in load.sessions:
        for number, turn in enumerate(session, start=1):
            numbers[turn.request.request_id] = number
    ttft = table.first_token_time - table.arrival_time
    return table.assign(turn=table.request_id.map(numbers), ttft=ttft)


def _values(table: pd.DataFrame) -> Values:
    """Of first turns and later ones; of these the share of hits, too, if there are any: a first
    turn has the system prompt at most.
    """
    values: dict[str, float] = {}
    first = table[table.turn == 1]
    later = table[table.turn > 1]
    by_turns = {"first turns": first, "later turns": later}
    for turns, rows in by_turns.items():
        ttft = rows.ttft
        values[f"TTFT P50, {turns}"] = float(ttft.quantile(0.5))
        values[f"TTFT P90, {turns}"] = float(ttft.quantile(0.9))
        values[f"TBT P99, {turns}"] = float(np.quantile(gaps(rows), 0.99))
    num_hits = later.prefix_hit_tokens.sum()
    share = num_hits / later.prompt_len.sum()
    if share:
        values[HITS] = float(share)
    return values


@dataclass(frozen=True)
class GoodputSearch:
    """The highest rate (1/s) from `lowest` to `highest`, on a grid of steps of `precision`, at
    which a share of `attainment` of the requests is within an objective.
    """

    lowest: float
    highest: float
    precision: float
    attainment: float

    def rate(self, run: Callable[[float], pd.DataFrame], slo: Slo) -> float:
        """Return the rate; 0 if the lowest is too high, the highest if that is not (`Tried`)."""
        grid = RateGrid(self.precision)
        lowest, highest = self._steps

        def passes(step: int) -> bool:
            rate = grid.rate(step)
            are_within = is_good(run(rate), slo)["all"]
            share = are_within.mean()
            return bool(share >= self.attainment)

        if not passes(lowest):
            return 0.0
        # Halves of one range have the same rates for all objectives, so that few are served.
        highest_passed = bisected(passes, lowest, highest + 1)
        return grid.rate(highest_passed)

    def resolution(self, num_engines: int) -> Tried:
        """Return how finely a rate is known, for each of the engines."""
        grid = RateGrid(self.precision)
        first, last = self._steps
        lowest = grid.rate(first) / num_engines
        highest = grid.rate(last) / num_engines
        return Tried(lowest, highest, self.precision)

    @property
    def _steps(self) -> tuple[int, int]:
        grid = RateGrid(self.precision)
        return grid.step(self.lowest), grid.step(self.highest)


@experiment(
    LoadExperiment,
    question="At equal GPUs, does it pay to chunk, or to disaggregate?",
    papers=[Platform("llama3-8b", "h100")],
    simulated=PROFILED,
    look=by_device("bar", "goodput per GPU"),
)
def disaggregation(
    bench: ServingBench,
    seed: int,
    *,
    num_requests: Mapping[str, int],
    rates: Mapping[str, tuple[float, float]],
    precision: float,
    attainment: float,
    objectives: Mapping[str, Mapping[str, Bounds]],
    arrangements: Mapping[str, Arrangement],
    **sizes: Unpack[NeededSizes],
) -> Iterator[Point]:
    """By data set and objective the highest rate, by GPU, at which a share of `attainment` of the
    requests is within both bounds (DistServe's goodput), and the best of each kind over the best
    of each kind before it. `rates` are the lowest and highest of all engines that are tried.

    An arrangement names its `kind`, the policy's `chunk`, and settings of the cluster.
    """
    for dataset, bounds in objectives.items():
        requests = bench.requests(dataset, num_requests[dataset], seed)
        run = cache(partial(_run, bench, requests))  # the same for all objectives
        search = GoodputSearch(*rates[dataset], precision, attainment)
        for objective, stated in bounds.items():
            slo = Slo(name=objective, **stated)
            best: dict[str, float] = {}  # by kind
            is_bound: dict[str, bool] = {}
            for name, settings in arrangements.items():
                cluster = _cluster(settings)
                served = partial(run, cluster, settings["chunk"])
                num_engines = cluster.num_instances
                goodput = search.rate(served, slo) / num_engines
                resolution = search.resolution(num_engines)
                yield point(
                    dataset,
                    GOODPUT,
                    "1/s",
                    name,
                    goodput,
                    slo=objective,
                    kind="share",
                    resolution=resolution,
                )
                kind = settings["kind"]
                if goodput >= best.get(kind, 0.0):
                    best[kind] = goodput
                    is_bound[kind] = resolution.bound_of([goodput]) is not None
            for earlier, kind in combinations(best, 2):
                gain = math.nan  # of a bound no ratio is known
                if not (is_bound[earlier] or is_bound[kind]):
                    gain = best[kind] / best[earlier]
                yield point(
                    dataset,
                    f"{GOODPUT} / best {earlier}",
                    "ratio",
                    kind,
                    gain,
                    slo=objective,
                    kind="share",
                    resolution=Steps(precision),
                )


def _cluster(arrangement: Arrangement) -> Several:
    """The cluster of an arrangement."""
    settings = dict(arrangement)
    del settings["chunk"]  # which the policy has
    kind = str(settings.pop("kind"))
    return KINDS[kind](**settings)


def _run(
    bench: ServingBench, requests: Sequence[Request], cluster: Several, chunk: int, rate: float
) -> pd.DataFrame:
    """The table of `requests` served at a rate."""
    arriving = at_rate(requests, rate)
    return bench.run(arriving, bench.chunking(chunk), cluster=cluster).requests()


@experiment(
    LoadExperiment,
    question="What do replicas that step together lose by waiting for each other's prompts?",
    papers=[Platform("qwen3-30b-a3b", "h100")],
    simulated=PROFILED,
    look=by_device(
        "line", *(f"{quantity} / {EVERY}" for quantity in CADENCES), x="interval", columns=3
    ),
)
def prefill_cadence(
    bench: ServingBench,
    seed: int,
    *,
    ranks: Sequence[int],
    intervals: Sequence[int],
    rank_rates: Mapping[str, float],
    budget: int,
    num_requests: int,
    **sizes: Unpack[NeededSizes],
) -> Iterator[Point]:
    """Waits where one iteration in `intervals` takes prompts (vLLM's `prefill_schedule_interval`),
    also over those where every one does, on as many `ranks` in lockstep, with `num_requests` each
    at `rank_rates` requests a second of each.
    """
    for (dataset, rate), number in product(rank_rates.items(), ranks):
        cluster: Topology = SINGLE
        name = "1 rank"
        if number > 1:
            cluster = Lockstep(num=number)
            name = f"{number} ranks"
        requests = bench.requests(dataset, number * num_requests, seed)
        arriving = at_rate(requests, number * rate)
        waits = {}  # by interval, 1 first
        for interval in intervals:
            policy = VllmV1(
                max_num_batched_tokens=budget,
                prefill_schedule_interval=interval,
                version="0.32",  # the pull request's rule, on one rank as on several
            )
            served = bench.run(arriving, policy, cluster=cluster).requests()
            waits[interval] = waited(served, *CADENCES)
            yield from compared(dataset, {name: waits[interval]}, {EVERY: waits[1]}, x=interval)
