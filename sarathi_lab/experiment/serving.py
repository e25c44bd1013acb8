"""Sarathi-Serve's experiments under load (arXiv 2403.02310): stalls, ablation, capacity and the
token budget.

Each is a round: all policies serve the same requests, one after the other, on one engine. Every
round has a seed of its own, and its values are samples of the points.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pandas as pd

from sarathi_lab.engine.request import Request
from sarathi_lab.experiment.capacity import Engine, Grid, Trials, at_rate, limits_around
from sarathi_lab.experiment.serving_setups import LOAD, ServingSetup
from sarathi_lab.policy import Policy
from sarathi_lab.results.decode_cost import decode_iteration
from sarathi_lab.results.metrics import latency
from sarathi_lab.results.slo import Slo

BOTH, HYBRID, CHUNKED = "hybrid and chunked", "hybrid only", "chunked only"  # the paper's Table 4
CHUNKING = "sarathi_serve"
SCHEDULERS = (CHUNKING, "prefill_first", "orca")  # in the paper's Fig 10: Sarathi-Serve, vLLM, Orca
STALL_BINS = 120
Point = tuple[str, str, float, float]  # panel, series, x, y
MakePolicy = Callable[
    [str, int], Policy | None
]  # by name and token budget; None where there is no such policy


@dataclass
class ServingBench:
    """One engine under `setup`; `policy` makes policies by name, `vocab_size` is None where tokens
    are not computed.
    """

    setup: ServingSetup
    engine: Engine
    policy: MakePolicy
    vocab_size: int | None
    seed: int = 0
    _saturation: dict[str, float] = field(default_factory=dict)
    _slos: dict[str, Slo] = field(default_factory=dict)

    def engine_of(self, policy: str) -> Engine:
        """The engine with the batch that the policy has in this setup."""
        return replace(self.engine, batch_size=self.setup.batches.get(policy, self.setup.batch))

    def requests(self, dataset: str, number: int, seed: int) -> list[Request]:
        """`number` requests that arrive as a Poisson process of rate 1."""
        lengths = self.setup.datasets[dataset]
        own = replace(
            lengths, num_requests=number, seed=self.seed + seed, arrivals="poisson", rate=1.0
        )
        return list(own.generate(self.vocab_size).requests)

    def rate(self, dataset: str) -> float:
        """The requests per second at which a data set is served."""
        stated = self.setup.rates.get(dataset)
        return LOAD * self.saturation_rate(dataset) if stated is None else stated

    def saturation_rate(self, dataset: str) -> float:
        """Requests per second of the chunking policy, all there at once; served for it the first
        time.
        """
        if dataset in self._saturation:
            return self._saturation[dataset]
        policy = self.policy(CHUNKING, self.setup.budget)
        assert policy is not None
        loads = {0: self.requests(dataset, self.setup.num_requests, 0)}
        self._saturation[dataset] = Trials(self.engine, policy, loads, Grid(1.0)).saturation_rate()
        return self._saturation[dataset]

    def slos(self) -> Mapping[str, Slo]:
        """The objectives, those that are relative to the device in seconds."""
        if not self._slos:
            for name, slo in self.setup.slos.items():
                size = (
                    min(slo.decode_batch, self.setup.batch),
                    min(slo.decode_context, self.setup.longest),
                )
                cache = {"num_blocks": self.engine.num_blocks, "block_size": self.engine.block_size}
                seconds = (
                    decode_iteration(self.engine.executor, *size, **cache)
                    if slo.is_relative
                    else None
                )
                self._slos[name] = slo.resolved(seconds)
        return self._slos

    def serve(self, name: str, policy: Policy, dataset: str, seed: int) -> pd.DataFrame:
        """The requests of a round at the data set's rate under a policy: their table."""
        requests = at_rate(
            self.requests(dataset, self.setup.num_requests, seed), self.rate(dataset)
        )
        return self.engine_of(name).serve(requests, policy).requests()


Round = Callable[[ServingBench, int], Iterator[Point]]


def stalls(bench: ServingBench, seed: int) -> Iterator[Point]:
    """The longest gaps between tokens by the time at which they ended (Fig 1a), in the first round,
    and in all.
    """
    dataset = list(bench.setup.datasets)[-1]  # of the longest prompts
    found = {
        name: bench.serve(name, policy, dataset, seed) for name, policy in _named(bench, SCHEDULERS)
    }
    waits = {name: latency(requests) | _longest(requests) for name, requests in found.items()}
    for name, requests in found.items():
        if seed == 0:
            for time, gap in longest_gaps(requests, STALL_BINS):
                yield f"{dataset}: longest gap [ms]", name, time, 1e3 * gap
        for quantity, words in (
            ("tbt_p99", "TBT P99"),
            ("longest_gap", "longest gap"),
            ("ttft_p50", "TTFT P50"),
        ):
            yield f"{dataset}: {words} [s]", name, 0.0, waits[name][quantity]
            if name != CHUNKING:
                yield (
                    f"{dataset}: {words} / {CHUNKING}",
                    name,
                    0.0,
                    waits[name][quantity] / waits[CHUNKING][quantity],
                )


def ablation(bench: ServingBench, seed: int) -> Iterator[Point]:
    """Whole prompts beside decodes, chunks apart from decodes, and chunks beside decodes
    (Table 4).
    """
    whole = {
        BOTH: (CHUNKING, bench.setup.budget),
        HYBRID: (CHUNKING, bench.setup.longest + bench.setup.batch),
    }
    kinds = {**whole, CHUNKED: ("chunked_only", bench.setup.budget)}
    policies = {
        kind: policy for kind, own in kinds.items() if (policy := bench.policy(*own)) is not None
    }
    for dataset in bench.setup.datasets:
        waits = {
            kind: latency(bench.serve(CHUNKING, own, dataset, seed))
            for kind, own in policies.items()
        }
        for quantity, words in (("ttft_p50", "TTFT P50"), ("tbt_p99", "TBT P99")):
            for kind, wait in waits.items():
                yield f"{dataset}: {words} [s]", kind, 0.0, wait[quantity]
                if kind != BOTH:
                    yield (
                        f"{dataset}: {words} / both",
                        kind,
                        0.0,
                        wait[quantity] / waits[BOTH][quantity],
                    )


def capacities(bench: ServingBench, seed: int) -> Iterator[Point]:
    """The highest rate of each policy within the strict and the relaxed objective (Fig 10a), and
    Sarathi-Serve's gain.

    Of the first data set, whose gains the paper states.
    """
    for dataset in list(bench.setup.datasets)[:1]:
        requests = {seed: bench.requests(dataset, bench.setup.num_searched, seed)}
        known: dict[tuple[str, Policy], Trials] = {}
        for kind, slo in bench.slos().items():
            found, saturation = {}, bench.saturation_rate(dataset)
            start = LOAD * saturation
            for name, policy in _named(bench, bench.setup.searched, bench.setup.slo_budgets[kind]):
                trials = Trials(
                    bench.engine_of(name), policy, requests, Grid(bench.setup.precision)
                )
                trials = known.setdefault(
                    (name, policy), trials
                )  # has served some rates for another objective
                (found[name],) = trials.capacity(
                    slo, start, limits_around(saturation, None, None)
                ).values
                yield f"{dataset}, {kind}: capacity [1/s]", name, 0.0, found[name]
                start = found[name] or start
            for name, value in found.items():
                if name != CHUNKING:
                    gain = found[CHUNKING] / value if value else float("inf")
                    yield f"{dataset}, {kind}: capacity of {CHUNKING} / own", name, 0.0, gain


def budgets(bench: ServingBench, seed: int) -> Iterator[Point]:
    """Time to the first token and between tokens by token budget, and over those of the largest
    budget.
    """
    for dataset in bench.setup.datasets:
        waits = {}
        for budget in bench.setup.budgets:
            policy = bench.policy(CHUNKING, max(budget, bench.setup.batch))
            assert policy is not None
            waits[budget] = latency(bench.serve(CHUNKING, policy, dataset, seed))
        largest = waits[max(waits)]
        for budget, wait in waits.items():
            for quantity, words in (("tbt_p99", "TBT P99"), ("ttft_p50", "TTFT P50")):
                yield f"{dataset}: {words} [s]", CHUNKING, float(budget), wait[quantity]
                if budget != max(waits):
                    yield (
                        f"{dataset}: {words} / largest budget",
                        CHUNKING,
                        float(budget),
                        wait[quantity] / largest[quantity],
                    )


ROUNDS: Mapping[str, Round] = {
    "sarathi_serve_stalls": stalls,
    "sarathi_serve_ablation": ablation,
    "sarathi_serve_capacity": capacities,
    "sarathi_serve_budget": budgets,
}


def longest_gaps(requests: pd.DataFrame, num_bins: int) -> list[tuple[float, float]]:
    """(end of the bin, longest gap that ended in it), seconds, for those of `num_bins` bins of time
    that have one.
    """
    ends = np.concatenate([np.empty(0), *(np.asarray(times)[1:] for times in requests.token_times)])
    gaps = np.concatenate([np.empty(0), *(np.diff(times) for times in requests.token_times)])
    edges = np.linspace(0.0, float(requests.finish_time.max()), num_bins + 1)
    places = np.clip(np.searchsorted(edges, ends) - 1, 0, num_bins - 1)
    return [(float(edges[i + 1]), float(gaps[places == i].max())) for i in np.unique(places)]


def _longest(requests: pd.DataFrame) -> dict[str, float]:
    return {"longest_gap": max(gap for _, gap in longest_gaps(requests, 1))}


def _named(
    bench: ServingBench, names: Sequence[str], budget: int | None = None
) -> Iterator[tuple[str, Policy]]:
    """The policies that there are."""
    for name in names:
        if (policy := bench.policy(name, budget or bench.setup.budget)) is not None:
            yield name, policy
