"""A few long prompts among many short ones: who waits for whom under which policy.

A round serves the same requests under every policy. Long prompts come at even distances over the
time of the short ones, so that mostly one is there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from sarathi_lab.config.errors import UserError
from sarathi_lab.engine.request import Request
from sarathi_lab.experiment.capacity import at_rate
from sarathi_lab.experiment.clock import Point
from sarathi_lab.experiment.registry import PROFILED, Ints, Platform, figure
from sarathi_lab.experiment.serving import CHUNKING, LOADED, ServingBench, point
from sarathi_lab.policy import Policy
from sarathi_lab.workload.base import random_prompt

NO_LONG = "no long prompts"  # the series of the short ones alone, under fixed chunks
REFERENCES = (CHUNKING, "lars")
P50, P99, LONG = "TTFT P50, short", "TTFT P99, short", "TTFT, long"
SHARE, FAIRNESS = "over the bound, short", "fairness"


@figure(
    question="Who waits for a long prompt, and what does sparing them cost it?",
    seconds=60,
    **{**LOADED, "papers": [Platform("llama3.1-8b", "h100")]},
    simulated=PROFILED,
)
def long_prompts(
    bench: ServingBench,
    seed: int,
    *,
    long_lens: Ints,
    bound: float,
    policies: Sequence[str],
    variants: Mapping[str, Mapping[str, Any]],
    **sizes: Any,
) -> Iterator[Point]:
    """Times to the first token of the first data set's requests (P50 and P99), the share of them
    that wait longer than `bound` seconds, and the time of prompts of `long_lens` tokens (mean).
    Fairness is Jain's index of the slowdowns of all: that time over the one on an idle engine.
    `variants` are further policies by name: an option as `policy`, and what differs from it.
    """
    dataset, short, long = _requests(bench, seed, long_lens)
    alone: dict[int, float] = {}
    tables = {NO_LONG: _serve(bench, bench.chunking(sizes["budget"]), short)}
    for name, policy in _policies(bench, policies, variants, sizes["budget"]).items():
        tables[name] = _serve(bench, policy, [*short, *long])
    found: dict[str, dict[tuple[str, str], float]] = {}
    for name, table in tables.items():
        waits = table.first_token_time - table.arrival_time
        is_short = table.request_id < len(short)
        found[name] = {
            (P50, "s"): float(waits[is_short].quantile(0.5)),
            (P99, "s"): float(waits[is_short].quantile(0.99)),
            (SHARE, "share"): float((waits[is_short] > bound).mean()),
        }
        if name != NO_LONG:
            found[name][LONG, "s"] = float(waits[~is_short].mean())
            ideal = np.array([_alone(bench, int(n), alone) for n in table.prompt_len])
            found[name][FAIRNESS, "index"] = jain(waits.to_numpy() / ideal)
    yield from _points(dataset, found)


def jain(values: NDArray[np.float64]) -> float:
    """Jain's index of fairness: 1 if all are equal, 1/n if one of n has everything."""
    return float(values.sum() ** 2 / (len(values) * (values**2).sum()))


def _requests(
    bench: ServingBench, seed: int, long_lens: Ints
) -> tuple[str, list[Request], list[Request]]:
    """The data set's name, its requests at its rate, and one of each length of `long_lens`, in an
    order and at times of the seed.
    """
    dataset, number = next(iter(bench.sizes["datasets"])), bench.sizes["num_requests"]
    short = at_rate(bench.requests(dataset, number, seed), bench.rate(dataset))
    generator = np.random.default_rng([bench.seed, seed, 5])
    end, count = max(one.arrival_time for one in short), len(long_lens)
    times = (np.arange(count) + generator.uniform(0, 0.5, count)) * end / count
    long = [
        replace(
            short[0],
            request_id=number + i,
            arrival_time=float(time),
            prompt_len=length,
            prompt_token_ids=random_prompt(number + i, length, bench.vocab_size, bench.seed),
        )
        for i, (time, length) in enumerate(
            zip(times, map(int, generator.permutation(long_lens)), strict=True)
        )
    ]
    return dataset, short, long


def _policies(
    bench: ServingBench, names: Sequence[str], variants: Mapping[str, Any], budget: int
) -> dict[str, Policy]:
    """Those that there are, in the order of `names` and then of `variants`."""
    found = bench.named(names, budget)
    for name, changes in variants.items():
        settings: dict[str, Any] = dict(changes)
        if (policy := bench.policy(settings.pop("policy"), budget)) is not None:
            found[name] = replace(policy, **settings)  # type: ignore[type-var]
    return {name: policy for name, policy in found.items() if can_run(bench, policy)}


def can_run(bench: ServingBench, policy: Policy) -> bool:
    """Whether it has what it needs: a device that is measured has no cost model to rank by."""
    try:
        policy.validate(bench.engine.batch_size, bench.engine.max_model_len)
    except UserError:
        return False
    return True


def _serve(bench: ServingBench, policy: Policy, requests: Sequence[Request]) -> pd.DataFrame:
    return bench.engine.serve(requests, policy).requests()


def _alone(bench: ServingBench, length: int, known: dict[int, float]) -> float:
    """Seconds to the first token of a prompt that is served in chunks by an idle engine."""
    if length not in known:
        tokens = random_prompt(0, length, bench.vocab_size, bench.seed)
        table = _serve(
            bench, bench.chunking(bench.sizes["budget"]), [Request(0, 0.0, length, 1, tokens)]
        )
        known[length] = float(table.first_token_time.iloc[0])
    return known[length]


def _points(dataset: str, found: Mapping[str, Mapping[tuple[str, str], float]]) -> Iterator[Point]:
    """Every value, and the times also over those of `REFERENCES`."""
    for name, values in found.items():
        for (quantity, unit), value in values.items():
            kind: Any = "share" if unit == "share" else "value"
            yield point(dataset, quantity, unit, name, value, kind=kind)
            for reference in REFERENCES if unit == "s" and name != NO_LONG else ():
                if name != reference in found:
                    ratio = value / found[reference][quantity, unit]
                    yield point(dataset, f"{quantity} / {reference}", "ratio", name, ratio)
