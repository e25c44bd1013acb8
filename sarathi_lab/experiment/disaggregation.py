"""Chunk, disaggregate, or both: the goodput of as many GPUs as replicas that chunk, as prefill and
decode instances (DistServe, Splitwise), and as TaiChi's, which do both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import pandas as pd

from sarathi_lab.engine.request import Request
from sarathi_lab.engine.topology import Disaggregated, PrefillAndDecodeHeavy, Replicas, Several
from sarathi_lab.experiment.capacity import at_rate
from sarathi_lab.experiment.clock import Point
from sarathi_lab.experiment.registry import Platform
from sarathi_lab.experiment.serving import ServingBench, only_simulated, point
from sarathi_lab.results.serving_metrics import is_good
from sarathi_lab.results.slo import Slo

KINDS: Mapping[str, type[Several]] = {
    "replicas": Replicas,
    "disaggregated": Disaggregated,
    "taichi": PrefillAndDecodeHeavy,
}
GOODPUT = "goodput per GPU"
Run = Callable[[float], pd.DataFrame]  # by rate the table of requests


@only_simulated(
    "At equal GPUs, does it pay to chunk, to disaggregate, or to do both?",
    Platform("llama3-8b", "h100"),
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
    engine, policy = bench.cluster(cluster), bench.chunking(chunk)
    return cache(lambda rate: engine.serve(at_rate(requests, rate), policy).requests())


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
