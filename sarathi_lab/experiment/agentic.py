"""Agents' sessions: what chunks, prefix caching and the router do to each turn's first token."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from sarathi_lab.config.errors import UserError
from sarathi_lab.engine.topology import SINGLE, Replicas, Topology
from sarathi_lab.experiment.clock import Estimate, Point
from sarathi_lab.experiment.registry import PROFILED, Platform, figure
from sarathi_lab.experiment.serving import ServingBench, datasets, longest
from sarathi_lab.results.serving_metrics import gaps
from sarathi_lab.workload.agentic import Agentic

FIRST, LATER = "first turns", "later turns"
TTFT, TTFT_P90, TBT, HITS = "TTFT P50", "TTFT P90", "TBT P99", "hit share"
BY_TURN = "TTFT P50 by turn"
QUANTITIES = ((TTFT, "s"), (TTFT_P90, "s"), (TBT, "s"), (HITS, "share"))


class Setting(NamedTuple):
    """What serves the sessions."""

    budget: int
    is_cached: bool = True
    cluster: Topology = SINGLE


@figure(
    question="What do chunks, prefix caching and the router do to each turn's first token?",
    kind="rounds",
    is_simulated=True,
    seconds=0,
    papers=[Platform("llama3.1-8b", "h100")],
    simulated=PROFILED,
    needs=("datasets", "batch"),
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
    if bench.clusters is None:
        raise UserError("several engines are simulated only; add executor=simulated")
    whole = longest(bench.sizes) + sizes["batch"]
    for dataset, workload in datasets(bench.sizes).items():
        assert isinstance(workload, Agentic), "the sizes name a workload of sessions"
        own = {f"{tokens}": Setting(tokens) for tokens in budgets} | {"whole": Setting(whole)}
        own |= {
            f"{name}, no cache": setting._replace(is_cached=False) for name, setting in own.items()
        }
        work = replace(workload, **session)
        work = replace(work, num_requests=sessions * work.turns)
        found = {name: _served(bench, work, seed, rate, setting) for name, setting in own.items()}
        yield from _points(f"{dataset}, one engine", found)
        for name in found:
            if not name.endswith("no cache"):
                yield from _over(dataset, "no cache", name, found[name], found[f"{name}, no cache"])
            if name.isdecimal():
                yield from _over(dataset, "whole prompts", name, found[name], found["whole"])
        chosen = {
            name: Setting(budget, True, Replicas(num=replicas, router=name)) for name in routers
        }
        work = replace(work, num_requests=replica_sessions * work.turns)
        at = replicas * replica_rate
        found = {name: _served(bench, work, seed, at, setting) for name, setting in chosen.items()}
        yield from _points(f"{dataset}, {replicas} engines", found)
        for name in routers[1:]:
            yield from _over(dataset, routers[0], name, found[name], found[routers[0]])


def _served(
    bench: ServingBench, workload: Agentic, seed: int, rate: float, setting: Setting
) -> pd.DataFrame:
    """The turns of the round's sessions: waits, gaps, hits, and the number of the turn from 1."""
    assert bench.clusters is not None, "checked before"
    own = replace(workload, seed=bench.seed + seed, arrivals="poisson", rate=rate)
    load = own.generate(bench.vocab_size)
    engine = bench.engine if setting.cluster is SINGLE else bench.clusters(setting.cluster)
    engine = replace(engine, shares_prefixes=setting.is_cached)
    requests = engine.serve(load.arrivals(), bench.chunking(setting.budget)).requests()
    turns = {t.request.request_id: k for own in load.sessions for k, t in enumerate(own, start=1)}
    return requests.assign(
        turn=requests.request_id.map(turns), ttft=requests.first_token_time - requests.arrival_time
    )


def _values(table: pd.DataFrame) -> Mapping[tuple[str, str], float]:
    """By turns, first and later ones, and quantity."""
    found = {}
    for which, rows in ((FIRST, table[table.turn == 1]), (LATER, table[table.turn > 1])):
        found[which, TTFT], found[which, TTFT_P90] = rows.ttft.quantile([0.5, 0.9])
        found[which, TBT] = float(np.quantile(gaps(rows), 0.99))
        found[which, HITS] = rows.prefix_hit_tokens.sum() / rows.prompt_len.sum()
    return found


def _points(dataset: str, found: Mapping[str, pd.DataFrame]) -> Iterator[Point]:
    for name, table in found.items():
        values = _values(table)
        for which in (FIRST, LATER):
            for quantity, unit in QUANTITIES:
                if quantity == HITS and (which == FIRST or not values[which, HITS]):
                    continue  # a first turn has the system prompt at most, and without a cache none
                yield _point(dataset, f"{quantity}, {which}", unit, name, values[which, quantity])
        for turn, rows in table.groupby("turn"):
            yield _point(dataset, BY_TURN, "s", name, rows.ttft.median(), float(str(turn)))


def _over(
    dataset: str, called: str, name: str, table: pd.DataFrame, other: pd.DataFrame
) -> Iterator[Point]:
    """Times of a setting over those of another, on the same sessions."""
    values, others = _values(table), _values(other)
    for which in (FIRST, LATER):
        for quantity in (TTFT, TTFT_P90, TBT):
            ratio = values[which, quantity] / others[which, quantity]
            yield _point(dataset, f"{quantity}, {which} / {called}", "ratio", name, ratio)
        if which == LATER and others[which, HITS]:
            ratio = values[which, HITS] / others[which, HITS]
            yield _point(dataset, f"{HITS}, {which} / {called}", "ratio", name, ratio)


def _point(dataset: str, quantity: str, unit: str, series: str, y: float, x: float = 0.0) -> Point:
    panel = f"{dataset}: {quantity}" + ("" if unit == "ratio" else f" [{unit}]")
    labels = (("dataset", dataset), ("slo", ""), ("quantity", quantity))
    return Point(panel, series, float(x), Estimate(float(y)), unit, "share", labels)
