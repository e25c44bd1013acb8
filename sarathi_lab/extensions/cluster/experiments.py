"""Several engines: agents' sessions by router, with and without prefix caching; and the goodput of
as many GPUs as replicas that chunk, as prefill and decode instances (DistServe, Splitwise), and as
TaiChi's, which do both.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from sarathi_lab.engine.config import SINGLE, Topology
from sarathi_lab.engine.request import Request
from sarathi_lab.experiment.cases import Point
from sarathi_lab.experiment.registry import Platform
from sarathi_lab.extensions.capacity.search import at_rate
from sarathi_lab.extensions.cluster import Disaggregated, PrefillAndDecodeHeavy, Replicas, Several
from sarathi_lab.extensions.under_load import (
    ServingBench,
    Values,
    compared,
    datasets,
    longest,
    only_simulated,
    point,
    ratios,
)
from sarathi_lab.results.plots.spec import by_device
from sarathi_lab.results.serving_metrics import Slo, gaps, is_good
from sarathi_lab.workload.synthetic import Agentic

KINDS: Mapping[str, type[Several]] = {
    "replicas": Replicas,
    "disaggregated": Disaggregated,
    "taichi": PrefillAndDecodeHeavy,
}
GOODPUT = "goodput per GPU"
Run = Callable[[float], pd.DataFrame]  # by rate the table of requests
HITS = "hit share, later turns"


class Setting(NamedTuple):
    """What serves the sessions."""

    budget: int
    is_cached: bool = True
    cluster: Topology = SINGLE


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
    own = {f"{tokens}": Setting(tokens) for tokens in budgets} | {"whole": Setting(whole)}
    own |= {f"{name}, no cache": each._replace(is_cached=False) for name, each in own.items()}
    clusters = {n: Setting(budget, True, Replicas(num=replicas, router=n)) for n in routers}
    for dataset, workload in datasets(bench.sizes).items():
        assert isinstance(workload, Agentic), "the sizes name a workload of sessions"
        work = replace(workload, **session, seed=bench.seed + seed)
        values = yield from _served(bench, dataset + ", one engine", work, sessions, rate, own)
        for name in own:
            others = {}
            if not name.endswith("no cache"):
                others["no cache"] = values[f"{name}, no cache"]
            if name.isdecimal():
                others["whole prompts"] = values["whole"]
            for called, other in others.items():
                yield from ratios(dataset, called, name, values[name], other, kind="share")
        where, at = f"{dataset}, {replicas} engines", replicas * replica_rate
        values = yield from _served(bench, where, work, replica_sessions, at, clusters)
        for name in routers[1:]:
            other = values[routers[0]]
            yield from ratios(dataset, routers[0], name, values[name], other, kind="share")


def _served(
    bench: ServingBench,
    where: str,
    workload: Agentic,
    num_sessions: int,
    rate: float,
    settings: Mapping[str, Setting],
) -> Generator[Point, None, dict[str, Values]]:
    """The points of the same sessions under every setting; returns the values."""
    number = num_sessions * workload.turns
    work = replace(workload, num_requests=number, arrivals="poisson", rate=rate)
    found = {}
    for name, setting in settings.items():
        turns = _turns(bench, work, setting)
        found[name] = _values(turns)
        for turn, rows in turns.groupby("turn"):
            x, median = float(str(turn)), float(rows.ttft.median())
            yield point(where, "TTFT P50 by turn", "s", name, median, x, kind="share")
    yield from compared(where, found, {}, {HITS: "share"}, kind="share")
    return found


def _turns(bench: ServingBench, workload: Agentic, setting: Setting) -> pd.DataFrame:
    """The turns' waits, gaps and hits, and the number of each from 1."""
    load = workload.generate(bench.vocab_size)
    own = {"cluster": setting.cluster, "shares_prefixes": setting.is_cached}
    requests = bench.run(load.arrivals(), bench.chunking(setting.budget), **own).requests()
    turns = {t.request.request_id: k for own in load.sessions for k, t in enumerate(own, start=1)}
    ttft = requests.first_token_time - requests.arrival_time
    return requests.assign(turn=requests.request_id.map(turns), ttft=ttft)


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
    "At equal GPUs, does it pay to chunk, to disaggregate, or to do both?",
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
    within both bounds, by GPU (DistServe's goodput), and what the kinds gain over each other.

    An arrangement names its `kind`, the policy's `chunk`, and settings of the cluster.
    """
    for dataset, bounds in objectives.items():
        requests = bench.requests(dataset, num_requests[dataset], seed)
        found: dict[str, dict[str, float]] = {objective: {} for objective in bounds}
        for name, settings in arrangements.items():
            run: Run | None = None
            for objective, stated in bounds.items():
                slo = Slo(name=objective, **stated)
                cluster = _cluster(settings, slo)
                # Only TaiChi's run depends on the objective.
                if run is None or settings["kind"] == "taichi":
                    run = _runs(bench, requests, cluster, settings["chunk"])
                rate = _goodput(run, slo, rates[dataset], attainment)
                found[objective][name] = rate / cluster.num_instances
        for objective, own in found.items():
            gains = _gains(arrangements, own)
            values = [("1/s", GOODPUT, name, value) for name, value in own.items()]
            for unit, quantity, name, value in (*values, *gains):
                yield point(dataset, quantity, unit, name, value, slo=objective, kind="share")


def _cluster(settings: Mapping[str, Any], slo: Slo) -> Several:
    own = {key: value for key, value in settings.items() if key not in ("kind", "chunk")}
    if settings["kind"] == "taichi":
        own |= {"ttft": slo.ttft, "tpot": slo.tpot}
    return KINDS[settings["kind"]](**own)


def _runs(bench: ServingBench, requests: Sequence[Request], cluster: Several, chunk: int) -> Run:
    """The tables of `requests` served at a rate, each once."""
    run = partial(bench.run, policy=bench.chunking(chunk), cluster=cluster)
    return cache(lambda rate: run(at_rate(requests, rate)).requests())


def _goodput(run: Run, slo: Slo, rates: Sequence[float], attainment: float) -> float:
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


def _gains(
    arrangements: Mapping[str, Mapping[str, Any]], found: Mapping[str, float]
) -> Iterator[tuple[str, str, str, float]]:
    """The best of each kind over the best of those before it, on the same requests."""
    best: dict[str, float] = {}
    for name, value in found.items():
        kind = arrangements[name]["kind"]
        best[kind] = max(best.get(kind, 0.0), value)
    kinds = list(best)
    for i, kind in enumerate(kinds):
        for other in kinds[:i]:
            gain = best[kind] / best[other] if best[other] else float("inf")
            yield "ratio", f"{GOODPUT} / best {other}", kind, gain
        if i > 1:
            gain = best[kind] / max(best[other] for other in kinds[:i])
            yield "ratio", f"{GOODPUT} / best of both", kind, gain
