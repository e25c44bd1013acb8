"""Several engines: agents' sessions by router, with and without prefix caching; and the goodput of
as many GPUs as replicas that chunk, and as prefill and decode instances (DistServe, Splitwise); and
replicas that wait for each other's prompts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import product
from typing import Any

import numpy as np
import pandas as pd

from sarathi_lab.engine.config import SINGLE
from sarathi_lab.engine.request import Request
from sarathi_lab.experiment.points import Point
from sarathi_lab.experiment.registry import Platform
from sarathi_lab.extensions.cluster.lockstep import Lockstep
from sarathi_lab.extensions.cluster.topologies import Disaggregated, Replicas, Several
from sarathi_lab.extensions.under_load import (
    ServingBench,
    Values,
    compared,
    datasets,
    longest,
    only_simulated,
    point,
    ratios,
    waited,
)
from sarathi_lab.extensions.under_load.search import at_rate
from sarathi_lab.policy import VllmV1
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


@only_simulated(
    "What do chunks, prefix caching and the router do to each turn's first token?",
    Platform("llama3.1-8b", "h100"),
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
    **sizes: Any,
) -> Iterator[Point]:
    """First tokens by turn, gaps and hit shares: on one engine by token budget with and without a
    prefix cache, at `rate` sessions a second; and on `replicas` engines by router, `replica_rate`
    sessions a second for each. `session` are settings of the workload. Ratios are to no cache,
    whole prompts and round robin, of the same sessions.
    """
    whole = longest(bench.sizes) + sizes["batch"]
    policies = {f"{n}": bench.chunking(n) for n in budgets} | {"whole": bench.chunking(whole)}
    runs: dict[str, dict[str, Any]]
    runs = {name: {"policy": one, "shares_prefixes": True} for name, one in policies.items()}
    runs |= {f"{name}, no cache": {"policy": one} for name, one in policies.items()}
    each = {"policy": bench.chunking(budget), "shares_prefixes": True}
    clusters = {n: each | {"cluster": Replicas(num=replicas, router=n)} for n in routers}
    for dataset, workload in datasets(bench.sizes).items():
        assert isinstance(workload, Agentic), "the sizes name a workload of sessions"
        work = replace(workload, **session, seed=bench.seed + seed)
        served = partial(_served, bench, work)
        values = yield from served(f"{dataset}, one engine", sessions, rate, runs)
        for name in policies:
            others = {"no cache": values[f"{name}, no cache"]}
            if name != "whole":
                others["whole prompts"] = values["whole"]
            for called, other in others.items():
                yield from ratios(dataset, called, name, values[name], other, kind="share")
        where, at = f"{dataset}, {replicas} engines", replicas * replica_rate
        values = yield from served(where, replica_sessions, at, clusters)
        for name in routers[1:]:
            other = values[routers[0]]
            yield from ratios(dataset, routers[0], name, values[name], other, kind="share")


def _served(
    bench: ServingBench,
    workload: Agentic,
    where: str,
    num_sessions: int,
    rate: float,
    settings: Mapping[str, Mapping[str, Any]],
) -> Generator[Point, None, dict[str, Values]]:
    """The points of the same sessions under the settings of every run; returns the values."""
    number = num_sessions * workload.turns
    work = replace(workload, num_requests=number, arrivals="poisson", rate=rate)
    found = {}
    for name, engine in settings.items():
        turns = _turns(bench, work, engine)
        found[name] = _values(turns)
        for turn, median in turns.groupby("turn").ttft.median().items():
            yield point(
                where, "TTFT P50 by turn", "s", name, median, float(str(turn)), kind="share"
            )
    yield from compared(where, found, {}, {HITS: "share"}, kind="share")
    return found


def _turns(bench: ServingBench, workload: Agentic, engine: Mapping[str, Any]) -> pd.DataFrame:
    """The turns' waits, gaps and hits, and the number of each from 1."""
    load = workload.generate(bench.vocab_size)
    table = bench.run(load.arrivals(), **engine).requests()
    turns = {t.request.request_id: k for each in load.sessions for k, t in enumerate(each, start=1)}
    ttft = table.first_token_time - table.arrival_time
    return table.assign(turn=table.request_id.map(turns), ttft=ttft)


def _values(table: pd.DataFrame) -> Values:
    """Of first turns and later ones; of these the share of hits, too, if there are any: a first
    turn has the system prompt at most.
    """
    found = {}
    later = table[table.turn > 1]
    for which, rows in (("first turns", table[table.turn == 1]), ("later turns", later)):
        found[f"TTFT P50, {which}"], found[f"TTFT P90, {which}"] = rows.ttft.quantile([0.5, 0.9])
        found[f"TBT P99, {which}"] = float(np.quantile(gaps(rows), 0.99))
    share = later.prefix_hit_tokens.sum() / later.prompt_len.sum()
    return found | ({HITS: float(share)} if share else {})


@only_simulated(
    "At equal GPUs, does it pay to chunk, or to disaggregate?",
    Platform("llama3-8b", "h100"),
    look=by_device("bar", "goodput per GPU"),
)
def disaggregation(
    bench: ServingBench,
    seed: int,
    *,
    num_requests: Mapping[str, int],
    rates: Mapping[str, Sequence[float]],
    attainment: float,
    objectives: Mapping[str, Mapping[str, Mapping[str, Any]]],
    arrangements: Mapping[str, Mapping[str, Any]],
    **sizes: Any,
) -> Iterator[Point]:
    """By data set and objective the rate up to which a share of `attainment` of the requests is
    within both bounds, by GPU (DistServe's goodput), and the best of each kind over the best of
    those before it.

    An arrangement names its `kind`, the policy's `chunk`, and settings of the cluster.
    """
    kinds = {name: settings["kind"] for name, settings in arrangements.items()}
    for dataset, bounds in objectives.items():
        requests = bench.requests(dataset, num_requests[dataset], seed)
        run = cache(partial(_run, bench, requests))  # the same for all objectives
        for objective, stated in bounds.items():
            slo, found = Slo(name=objective, **stated), {}
            for name, settings in arrangements.items():
                cluster = _cluster(**settings)
                served = partial(run, cluster, settings["chunk"])
                rate = _goodput(served, slo, rates[dataset], attainment)
                found[name] = rate / cluster.num_instances
                yield point(dataset, GOODPUT, "1/s", name, found[name], slo=objective, kind="share")
            best = pd.Series(found).groupby(pd.Series(kinds), sort=False).max()
            for i, kind in enumerate(best.index):
                for other, value in best[:i].items():
                    gain = best[kind] / value if value else math.inf
                    quantity = f"{GOODPUT} / best {other}"
                    yield point(dataset, quantity, "ratio", kind, gain, slo=objective, kind="share")


def _cluster(*, kind: str, chunk: int, **settings: Any) -> Several:
    """The cluster of an arrangement, whose policy has the `chunk`."""
    return KINDS[kind](**settings)


def _run(
    bench: ServingBench, requests: Sequence[Request], cluster: Several, chunk: int, rate: float
) -> pd.DataFrame:
    """The table of `requests` served at a rate."""
    return bench.run(at_rate(requests, rate), bench.chunking(chunk), cluster=cluster).requests()


def _goodput(
    run: Callable[[float], pd.DataFrame], slo: Slo, rates: Sequence[float], attainment: float
) -> float:
    """The rate at which the share of requests within `slo` falls below `attainment`, between two of
    `rates` by the line between them; 0 if it is below at the first, the last if it never falls.
    """
    before, share_before = 0.0, 0.0
    for rate in rates:
        share = float(is_good(run(rate), slo)["all"].mean())
        if share < attainment:
            if not before:
                return 0.0
            return before + (rate - before) * (share_before - attainment) / (share_before - share)
        before, share_before = rate, share
    return before


@only_simulated(
    "What do replicas that step together lose by waiting for each other's prompts?",
    Platform("qwen3-30b-a3b", "h100"),
    look=by_device("line", *(f"{one} / {EVERY}" for one in CADENCES), x="interval", columns=3),
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
    **sizes: Any,
) -> Iterator[Point]:
    """Waits where one iteration in `intervals` takes prompts (vLLM's `prefill_schedule_interval`),
    also over those where every one does, on as many `ranks` in lockstep, with `num_requests` each
    at `rank_rates` requests a second of each.
    """
    for (dataset, rate), number in product(rank_rates.items(), ranks):
        cluster = Lockstep(num=number) if number > 1 else SINGLE
        requests = at_rate(bench.requests(dataset, number * num_requests, seed), number * rate)
        found = {}
        for interval in intervals:
            policy = VllmV1(
                max_num_batched_tokens=budget,
                prefill_schedule_interval=interval,
                version="0.32",  # the pull request's rule, on one rank as on several
            )
            served = bench.run(requests, policy, cluster=cluster).requests()
            found[interval] = waited(served, *CADENCES)
            series = {f"{number} rank{'s' if number > 1 else ''}": found[interval]}
            yield from compared(dataset, series, {EVERY: found[1]}, x=interval)
