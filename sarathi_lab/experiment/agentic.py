"""Agents' sessions: what chunks, prefix caching and the router do to each turn's first token."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from sarathi_lab.engine.topology import SINGLE, Replicas, Topology
from sarathi_lab.experiment.clock import Point
from sarathi_lab.experiment.registry import Platform
from sarathi_lab.experiment.serving import (
    ServingBench,
    Values,
    compared,
    datasets,
    longest,
    only_simulated,
    point,
    ratios,
)
from sarathi_lab.results.serving_metrics import gaps
from sarathi_lab.workload.agentic import Agentic

HITS = "hit share, later turns"


class Setting(NamedTuple):
    """What serves the sessions."""

    budget: int
    is_cached: bool = True
    cluster: Topology = SINGLE


@only_simulated(
    "What do chunks, prefix caching and the router do to each turn's first token?",
    Platform("llama3.1-8b", "h100"),
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
    engine = bench.engine if setting.cluster is SINGLE else bench.cluster(setting.cluster)
    engine = replace(engine, shares_prefixes=setting.is_cached)
    requests = engine.serve(load.arrivals(), bench.chunking(setting.budget)).requests()
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
