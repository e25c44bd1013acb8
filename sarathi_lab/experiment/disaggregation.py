"""Chunk, disaggregate, or both: the goodput of as many GPUs as replicas that chunk, as prefill and
decode instances (DistServe, Splitwise), and as TaiChi's, which do both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import pandas as pd

from sarathi_lab.config.errors import UserError
from sarathi_lab.engine.request import Request
from sarathi_lab.engine.topology import Disaggregated, PrefillAndDecodeHeavy, Replicas, Several
from sarathi_lab.experiment.capacity import at_rate
from sarathi_lab.experiment.clock import Estimate, Point
from sarathi_lab.experiment.registry import PROFILED, Platform, figure
from sarathi_lab.experiment.serving import ServingBench
from sarathi_lab.results.serving_metrics import is_good
from sarathi_lab.results.slo import Slo

KINDS: Mapping[str, type[Several]] = {
    "replicas": Replicas,
    "disaggregated": Disaggregated,
    "taichi": PrefillAndDecodeHeavy,
}
GOODPUT = "goodput per GPU"
Known = dict[float, pd.DataFrame]  # by rate the table of requests


@figure(
    question="At equal GPUs, does it pay to chunk, to disaggregate, or to do both?",
    kind="rounds",
    is_simulated=True,
    seconds=0,
    papers=[Platform("llama3-8b", "h100")],
    simulated=PROFILED,
    needs=("datasets", "batch"),
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
            known: Known = {}
            for objective, stated in bounds.items():
                slo = Slo(name=objective, **stated)
                if settings["kind"] == "taichi":  # the others run the same under any objective
                    known = {}
                run = partial(_served, bench, settings, slo, requests, known)
                rate = _goodput(run, slo, rates[dataset], attainment)
                found[objective][name] = rate / _cluster(settings, slo).num_instances
        for objective, own in found.items():
            for name, value in own.items():
                yield _point(dataset, objective, GOODPUT, "1/s", name, value)
            yield from _gains(dataset, objective, arrangements, own)


def _cluster(settings: Mapping[str, Any], slo: Slo) -> Several:
    own = {key: value for key, value in settings.items() if key not in ("kind", "chunk")}
    if settings["kind"] == "taichi":
        own |= {"ttft": slo.ttft, "tpot": slo.tpot}
    return KINDS[settings["kind"]](**own)


def _served(
    bench: ServingBench,
    settings: Mapping[str, Any],
    slo: Slo,
    requests: Sequence[Request],
    known: Known,
    rate: float,
) -> pd.DataFrame:
    """The table of `requests` served at `rate`, once."""
    if bench.clusters is None:
        raise UserError("several engines are simulated only; add executor=simulated")
    if rate not in known:
        engine = bench.clusters(_cluster(settings, slo))
        ledger = engine.serve(at_rate(requests, rate), bench.chunking(settings["chunk"]))
        known[rate] = ledger.requests()
    return known[rate]


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


def _gains(
    dataset: str,
    objective: str,
    arrangements: Mapping[str, Mapping[str, Any]],
    found: Mapping[str, float],
) -> Iterator[Point]:
    """The best of each kind over the best of those before it, on the same requests."""
    best: dict[str, float] = {}
    for name, value in found.items():
        kind = arrangements[name]["kind"]
        best[kind] = max(best.get(kind, 0.0), value)
    kinds = list(best)
    for i, kind in enumerate(kinds):
        for other in kinds[:i]:
            gain = best[kind] / best[other] if best[other] else float("inf")
            yield _point(dataset, objective, f"{GOODPUT} / best {other}", "ratio", kind, gain)
        if i > 1:
            gain = best[kind] / max(best[other] for other in kinds[:i])
            yield _point(dataset, objective, f"{GOODPUT} / best of both", "ratio", kind, gain)


def _point(dataset: str, slo: str, quantity: str, unit: str, series: str, y: float) -> Point:
    panel = f"{dataset}, {slo}: {quantity}" + ("" if unit == "ratio" else f" [{unit}]")
    labels = (("dataset", dataset), ("slo", slo), ("quantity", quantity))
    return Point(panel, series, 0.0, Estimate(y), unit, "share", labels)
