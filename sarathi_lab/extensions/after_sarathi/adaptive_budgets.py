"""Budgets that follow an objective beside fixed ones, and P-PAS on the arrivals of its measurement.

Two series bound what a policy could reach. "hindsight" is an oracle: of some
fixed budgets the best for the very requests and rate, chosen once their outcome is known. "bound"
is a rate that no policy passes: there even the prompts alone, without decodes, are too many tokens.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Unpack

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from sarathi_lab.config.errors import UserError
from sarathi_lab.engine.request import Request
from sarathi_lab.experiment.points import Point
from sarathi_lab.experiment.registry import PROFILED, Platform, experiment
from sarathi_lab.extensions.under_load.bench import (
    LoadExperiment,
    LoadSizes,
    ServingBench,
    compared,
    point,
)
from sarathi_lab.extensions.under_load.search import RateGrid, at_rate, highest_passing
from sarathi_lab.policy import Policy
from sarathi_lab.policy.zoo import Lprs, SloBudget
from sarathi_lab.policy.zoo.budgets import Since
from sarathi_lab.results.intervals import Steps
from sarathi_lab.results.plots.spec import by_device
from sarathi_lab.results.serving_metrics import Slo, is_good, waits

HINDSIGHT = "hindsight"
BOUND = "bound"
FCFS = "first come"
# What an objective's time between tokens bounds: each gap, or how late a token is, whose deadline
# counts from the arrival, so that what came early leaves time for what comes later.
SINCE: Mapping[str, Since] = {"gaps": "last_token", "deadlines": "arrival"}
# Of the rate at which requests that are all there at once are served, those that are tried.
LOWEST = 1 / 4
HIGHEST = 4.0


@dataclass
class Search:
    """The rates, of a grid, at which the requests of a round are served within an objective."""

    bench: ServingBench
    dataset: str
    requests: Sequence[Request]
    grid: RateGrid
    attained: float  # share of the requests
    tokens_per_second: float  # of prompts, where there is nothing else to do
    served: dict[tuple[Policy, int], pd.DataFrame] = field(default_factory=dict)

    def table(self, policy: Policy, step: int) -> pd.DataFrame:
        """The requests that `policy` served at a step of the grid."""
        key = (policy, step)
        if key not in self.served:  # searches of other objectives come to the same rates
            arriving = at_rate(self.requests, self.grid.rate(step))
            ledger = self.bench.run(arriving, policy)
            self.served[key] = ledger.requests()
        return self.served[key]

    def is_met(self, policies: Sequence[Policy], kind: str, step: int) -> bool:
        """Whether one of `policies` serves enough of the requests within the objective."""
        slo = self.bench.slo(kind)
        for policy in policies:
            is_within = within(self.table(policy, step), slo, kind)
            if is_within.mean() >= self.attained:
                return True
        return False

    def could_be_met(self, kind: str, step: int) -> bool:
        """Whether the device has time for the prompts alone."""
        rate = self.grid.rate(step)
        requests = at_rate(self.requests, rate)
        ttft, _ = times_of(self.bench.slo(kind))
        share_missed = 1 - self.attained
        queue = longest_queue(requests, self.tokens_per_second, share_missed)
        return queue <= ttft

    def capacities(
        self, kind: str, policies: Mapping[str, Policy], fixed: Sequence[Policy]
    ) -> dict[str, float]:
        """Each policy's, hindsight's of the `fixed` ones and the bound, in requests a second;
        searches begin where the ones before ended.
        """
        tests: dict[str, Callable[[int], bool]] = {}
        for name, policy in policies.items():
            tests[name] = partial(self.is_met, [policy], kind)
        tests[HINDSIGHT] = partial(self.is_met, fixed, kind)
        tests[BOUND] = partial(self.could_be_met, kind)
        saturation = self.bench.saturation_rate(self.dataset)
        lowest = self.grid.step(LOWEST * saturation)
        highest = self.grid.step(HIGHEST * saturation)
        step = self.grid.step(saturation)
        key = (self.dataset, kind)
        starts = self.bench.starts.setdefault(key, {})
        rates = {}
        for name, passes in tests.items():
            start = starts.get(name, step)
            step = highest_passing(passes, start, lowest, highest)
            starts[name] = step
            rates[name] = math.nan
            if step >= lowest:
                rates[name] = self.grid.rate(step)
        return rates

    def overloaded(
        self, kind: str, policies: Mapping[str, Policy], usual: str, step: int
    ) -> Iterator[Point]:
        """The goodput of each policy; who misses the objective, and what ageing does to whole
        waits.
        """
        slo = self.bench.slo(kind)
        misses = {}
        labelled = partial(point, self.dataset, slo=kind)
        for name, policy in policies.items():
            requests = self.table(policy, step)
            is_in_time = within(requests, slo, kind)
            misses[name] = 1 - is_in_time.mean()
            seconds = requests.finish_time.max()
            goodput = is_in_time.sum() / seconds
            yield labelled("goodput", "1/s", name, goodput, kind="share")
        of_usual = misses[usual]
        if "niyama" in misses and of_usual:
            ratio = misses["niyama"] / of_usual
            yield labelled(f"misses / {usual}", "ratio", "niyama", ratio, kind="share")
        if "lprs" in policies:
            aged = policies["lprs"]
            first_come = aged.with_fields(prompt_weight=0.0)
            by_age = self.mean_latency(aged, step)
            in_order = self.mean_latency(first_come, step)
            yield labelled(f"mean latency / {FCFS}", "ratio", "lprs", by_age / in_order)

    def mean_latency(self, policy: Policy, step: int) -> float:
        """Seconds of a request that `policy` served at a step of the grid."""
        times = waits(self.table(policy, step))
        return float(times["latency"].mean())


@experiment(
    LoadExperiment,
    question="Does a budget that follows the objective serve more within it?",
    seconds=120,
    papers=[Platform("llama3-8b", "h100")],
    is_chained=True,
    simulated=PROFILED,
    look=by_device("bar", "capacity"),
)
def adaptive_budgets(
    bench: ServingBench,
    seed: int,
    *,
    num_searched: Mapping[str, int],
    objectives: Mapping[str, Sequence[str]],
    slos: Mapping[str, object],
    adaptive: Sequence[str],
    hindsight: Mapping[str, Sequence[int]],
    largest: int,
    attained: float,
    precision: float,
    overload: float,
    **sizes: Unpack[LoadSizes],
) -> Iterator[Point]:
    """By data set and objective each policy's capacity, the highest rate of a grid at which a share
    `attained` of the requests is within the objective, also over that of the `hindsight` that has
    some fixed budgets; and the goodput at `overload` times that rate. Adaptive policies take up to
    `largest` tokens.
    """
    grid = RateGrid(precision)
    for dataset, kinds in objectives.items():
        requests = bench.requests(dataset, num_searched[dataset], seed)
        speed = prompt_speed(bench, requests, largest)
        search = Search(bench, dataset, requests, grid, attained, speed)
        for kind in kinds:
            fixed = {f"fixed {budget}": bench.chunking(budget) for budget in hindsight[kind]}
            policies = dict(fixed)
            for name, policy in bench.named(adaptive, largest).items():
                policies[name] = aimed(policy, bench.slo(kind), kind)
            capacities = search.capacities(kind, policies, list(fixed.values()))
            of_hindsight = capacities[HINDSIGHT]
            point_of_kind = partial(point, dataset, slo=kind, resolution=Steps(precision))
            for name, capacity in capacities.items():
                yield point_of_kind("capacity", "1/s", name, capacity)
            for name in (*policies, BOUND):
                ratio = capacities[name] / of_hindsight
                yield point_of_kind(f"capacity / {HINDSIGHT}", "ratio", name, ratio)
            if math.isnan(of_hindsight):
                continue
            step = grid.step(overload * of_hindsight)
            usual = f"fixed {sizes['budget']}"
            yield from search.overloaded(kind, policies, usual, step)


@experiment(
    LoadExperiment,
    question="Does the simulator have P-PAS's measured gain?",
    seconds=60,
    papers=[Platform("llama3.2-3b", "a100")],
    simulated=PROFILED,
    look=by_device("bar", "mean latency, low load", "mean latency, high load"),
)
def p_pas_gain(
    bench: ServingBench,
    seed: int,
    *,
    phases: Mapping[str, Sequence[Sequence[float]]],
    large: int,
    **sizes: Unpack[LoadSizes],
) -> Iterator[Point]:
    """Mean latency by load with vLLM's budgets of `budget` and `large` tokens, and with P-PAS, also
    over the former two. `phases` are pairs of seconds and requests a second by load.
    """
    dataset = next(iter(sizes["datasets"]))
    policies: dict[str, Policy] = {}
    small = sizes["budget"]
    named = [("vllm_v1", small), ("vllm_v1", large), ("p_pas", large)]
    for name, budget in named:
        policies[f"{name} {budget}"] = bench.policy(name, budget)
    for load, stated in phases.items():
        arriving = in_phases(bench, dataset, stated, seed)
        quantity = f"mean latency, {load}"
        values: dict[str, dict[str, float]] = {}
        for name, policy in policies.items():
            ledger = bench.run(arriving, policy)
            of_requests = waits(ledger.requests())
            values[name] = {quantity: of_requests["latency"].mean()}
        p_pas, of_p_pas = values.popitem()  # the last, over the others
        yield from compared(dataset, values, {})
        yield from compared(dataset, {p_pas: of_p_pas}, values)


def in_phases(
    bench: ServingBench, dataset: str, phases: Sequence[Sequence[float]], seed: int
) -> list[Request]:
    """Requests of a data set that come as `phased` has them."""
    times = phased(phases, bench.seed + seed)
    requests = bench.requests(dataset, len(times), seed)
    arriving = []
    for request, time in zip(requests, times, strict=True):
        arriving.append(replace(request, arrival_time=time))
    return arriving


def phased(phases: Sequence[Sequence[float]], seed: int) -> list[float]:
    """Arrivals in seconds of a Poisson process whose rate changes, as `benchmark.py` of
    TimoSaemann/ppas-vllm draws them: those of a phase begin again with it.
    """
    dice = random.Random(seed)  # as there: NumPy's draws differ
    start = 0.0
    times = []
    for seconds, rate in phases:
        end = start + seconds
        time = start + dice.expovariate(rate)
        while time < end:
            times.append(time)
            time += dice.expovariate(rate)
        start = end
    return times


def aimed(policy: Policy, slo: Slo, kind: str) -> Policy:
    """`policy` aimed at the objective, if it follows one."""
    ttft, tbt = times_of(slo)
    if isinstance(policy, SloBudget):
        return replace(policy, ttft=ttft, tbt=tbt, since=SINCE[kind])
    if isinstance(policy, Lprs):
        return replace(policy, target_time=tbt)
    return policy


def times_of(slo: Slo) -> tuple[float, float]:
    """Seconds to the first token and between tokens. Raises UserError without one of them."""
    if slo.ttft is None or slo.tbt is None:
        raise UserError(f"objective {slo.name} lacks ttft or tbt; add the seconds to its slos")
    return slo.ttft, slo.tbt


def within(requests: pd.DataFrame, slo: Slo, kind: str) -> NDArray[np.bool_]:
    """Which requests [R] meet the objective: first token and, by `kind`, gaps (P99 of each request)
    or deadlines, `ttft` after the arrival for the first token and `tbt` later for each next.
    """
    if kind == "gaps":
        return is_good(requests, slo)["all"]
    ttft, tbt = times_of(slo)
    latest = []  # of each request the most seconds of a token after the arrival, less the `tbt`
    for times, arrival in zip(requests.token_times, requests.arrival_time, strict=True):
        allowed = tbt * np.arange(len(times))
        after_arrival = np.subtract(times, arrival)
        late = after_arrival - allowed
        latest.append(late.max())
    return np.asarray(latest) <= ttft


def prompt_speed(bench: ServingBench, requests: Sequence[Request], budget: int) -> float:
    """Prompt tokens a second where there is nothing else to do."""
    prompts = []
    for request in requests:
        # One token ends a request with its prompt.
        prompt = replace(request, arrival_time=0.0, output_len=1)
        prompts.append(prompt)
    ledger = bench.run(prompts, bench.chunking(budget))
    duration = float(ledger.iterations().end.max())
    num_tokens = sum(request.prompt_len for request in requests)
    return num_tokens / duration


def longest_queue(requests: Sequence[Request], tokens_per_second: float, missed: float) -> float:
    """Seconds of prompts that wait at most, right after an arrival, where a share `missed` of the
    requests, those of the longest prompts, costs nothing.
    """
    lengths = np.array([request.prompt_len for request in requests])
    seconds = lengths / tokens_per_second
    # How late each would end if the device had never idled; idling shifts what comes after it.
    arrivals = [request.arrival_time for request in requests]
    behind = np.cumsum(seconds) - arrivals
    idled = np.minimum.accumulate(behind - seconds)
    longest = np.max(behind - idled)
    # A product may be just below its number.
    num_missed = math.floor(missed * len(requests) + 1e-9)
    num_met = len(requests) - num_missed
    ascending = np.sort(seconds)
    of_missed = ascending[num_met:]
    return float(longest - of_missed.sum())
