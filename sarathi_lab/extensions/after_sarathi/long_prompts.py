"""Long prompts: among many short ones, who waits for whom under which policy; and one at a time
through a pipeline, in chunks that are alike or shrink.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Unpack

import numpy as np
import pandas as pd

from sarathi_lab.config.errors import UserError
from sarathi_lab.engine.ledger import Ledger
from sarathi_lab.engine.request import Request
from sarathi_lab.experiment.points import Point
from sarathi_lab.experiment.registry import PROFILED, Ints, Platform, experiment
from sarathi_lab.extensions.under_load.bench import (
    CHUNKING,
    LoadExperiment,
    LoadSizes,
    ServingBench,
    compared,
    point,
)
from sarathi_lab.extensions.under_load.search import at_rate
from sarathi_lab.policy import Policy
from sarathi_lab.results.intervals import Trials
from sarathi_lab.results.plots.spec import by_device
from sarathi_lab.results.serving_metrics import jain_index
from sarathi_lab.workload.base import random_prompt

NO_LONG = "no long prompts"  # the series of the short ones alone, under fixed chunks
P50 = "TTFT P50, short"
P99 = "TTFT P99, short"
LONG = "TTFT, long"
SHARE = "over the bound, short"
FAIRNESS = "fairness"
ALIKE = "chunks alike"
TTFT = "TTFT"
SPEED = "throughput / one stage's"


@experiment(
    LoadExperiment,
    question="Who waits for a long prompt, and what does sparing them cost it?",
    seconds=60,
    papers=[Platform("llama3.1-8b", "h100")],
    simulated=PROFILED,
    look=by_device("bar", "TTFT P99, short", "TTFT, long"),
)
def long_prompts(
    bench: ServingBench,
    seed: int,
    *,
    long_lens: Ints,
    bound: float,
    policies: Sequence[str],
    variants: Mapping[str, Mapping[str, object]],
    **sizes: Unpack[LoadSizes],
) -> Iterator[Point]:
    """Times to the first token of the first data set's requests (P50 and P99), the share of them
    that wait longer than `bound` seconds, and the time of prompts of `long_lens` tokens (mean).
    Fairness is Jain's index of the slowdowns of all: that time over the one on an idle engine.
    `variants` are further policies by name: an option as `policy`, and what differs from it.
    """
    dataset = next(iter(sizes["datasets"]))
    budget = sizes["budget"]
    short, long = _requests(bench, seed, dataset, long_lens)
    fixed = bench.chunking(budget)
    tables = {NO_LONG: bench.run(short, fixed).requests()}
    for name, policy in policies_of(bench, policies, variants, budget).items():
        tables[name] = bench.run([*short, *long], policy).requests()

    @cache
    def time_alone(length: int) -> float:
        prompt = prompt_of(bench, 0, int(length))
        ledger = bench.run([prompt], fixed)
        return ttft(ledger)

    values: dict[str, dict[str, float]] = {}
    for name, table in tables.items():
        waits = table.first_token_time - table.arrival_time
        is_short = table.request_id < len(short)
        of_short = waits[is_short]
        values[name] = {
            P50: float(of_short.quantile(0.5)),
            P99: float(of_short.quantile(0.99)),
        }
        is_above = of_short > bound
        counted = Trials(len(short))
        share = float(is_above.mean())
        yield point(dataset, SHARE, "share", name, share, kind="share", resolution=counted)
        if name != NO_LONG:
            of_long = waits[~is_short]
            values[name][LONG] = float(of_long.mean())
            alone = table.prompt_len.map(time_alone)
            slowdowns = waits / alone
            fairness = jain_index(slowdowns.to_numpy())
            yield point(dataset, FAIRNESS, "index", name, fairness)
    # Of other requests, so that nothing is a ratio to it.
    yield from compared(dataset, {NO_LONG: values.pop(NO_LONG)}, {})
    references = {name: values[name] for name in (CHUNKING, "lars") if name in values}
    yield from compared(dataset, values, references)


def _requests(
    bench: ServingBench, seed: int, dataset: str, long_lens: Ints
) -> tuple[list[Request], list[Request]]:
    """The requests of a data set at its rate, and one of each length of `long_lens`, in an order
    and at times of the seed.
    """
    number = bench.sizes["num_requests"]
    count = len(long_lens)
    short = at_rate(bench.requests(dataset, number, seed), bench.rate(dataset))
    generator = np.random.default_rng([bench.seed, seed, 5])
    end = max(request.arrival_time for request in short)
    # One in each of as many stretches of time, at random in the first half of it.
    stretches = np.arange(count) + generator.uniform(0, 0.5, count)
    times = stretches * end / count
    output_len = short[0].output_len
    long = []
    for index, length in enumerate(generator.permutation(long_lens)):
        prompt = prompt_of(bench, number + index, int(length))
        time = float(times[index])
        long_request = replace(prompt, arrival_time=time, output_len=output_len)
        long.append(long_request)
    return short, long


def policies_of(
    bench: ServingBench,
    names: Sequence[str],
    variants: Mapping[str, Mapping[str, object]],
    budget: int,
) -> dict[str, Policy]:
    """Those that can run, in the order of `names` and then of `variants`."""
    policies = bench.named(names, budget)
    for name, variant in variants.items():
        fields = dict(variant)
        option = str(fields.pop("policy"))
        policies[name] = bench.policy(option, budget).with_fields(**fields)
    return {name: policy for name, policy in policies.items() if can_run(bench, policy)}


def can_run(bench: ServingBench, policy: Policy) -> bool:
    """Whether it has what it needs: a device that is measured has no cost model to rank by."""
    try:
        policy.validate(bench.engine.batch_size, bench.engine.max_model_len or 0)
    except UserError:
        return False
    return True


def prompt_of(bench: ServingBench, number: int, length: int) -> Request:
    """A prompt of `length` tokens, which a single output token follows."""
    tokens = random_prompt(number, length, bench.vocab_size, bench.seed)
    return Request(number, 0.0, length, 1, tokens)


def ttft(ledger: Ledger) -> float:
    """Seconds to the first token of the only request, which arrived at 0."""
    return float(ledger.requests().first_token_time.iloc[0])


@experiment(
    LoadExperiment,
    question="Do chunks that shrink with the context speed a pipeline's prefill?",
    seconds=30,
    papers=[Platform("llama3.1-70b", "h100", 8)],
    simulated=(*PROFILED, "executor.pipeline_parallel=4"),
    look=by_device("line", "throughput / one stage's", x="chunk [tokens]", log_x=True),
)
def dynamic_chunks(
    bench: ServingBench,
    seed: int,
    *,
    chunks: Ints,
    smooth_factors: Mapping[str, float],
    **sizes: Unpack[LoadSizes],
) -> Iterator[Point]:
    """Times to the first token of the first data set's prompts, each alone (mean), and their
    throughput over that of one stage with all layers, which has no bubbles and sends nothing, by
    first chunk. `smooth_factors` by series; Sarathi-Serve has one chunk of a prompt in flight.
    """
    dataset = next(iter(sizes["datasets"]))
    requests = bench.requests(dataset, sizes["num_requests"], seed)
    for chunk in chunks:
        policies = bench.named([CHUNKING], chunk)
        shrinking = bench.policy("dynamic_chunks", chunk)
        for name, factor in smooth_factors.items():
            policies[name] = shrinking.with_fields(smooth_factor=factor)
        values = {}
        for name, policy in policies.items():
            if not can_run(bench, policy):
                continue
            seconds, speed = one_by_one(bench, policy, requests)
            yield point(dataset, SPEED, "times", name, speed, chunk)
            values[name] = {TTFT: seconds}
        usual = {CHUNKING: values.pop(CHUNKING)}
        yield from compared(dataset, usual, {}, x=chunk)
        references = dict(usual)
        if ALIKE in values:
            references[ALIKE] = values[ALIKE]
        yield from compared(dataset, values, references, x=chunk)


def one_by_one(bench: ServingBench, policy: Policy, requests: list[Request]) -> tuple[float, float]:
    """Mean seconds to the first token, and how many times as fast as one stage with all layers."""
    waits = []
    stages = []
    for request in requests:
        prompt = prompt_of(bench, request.request_id, request.prompt_len)
        ledger = bench.run([prompt], policy)
        waits.append(ttft(ledger))
        stages.append(ledger.stages())
    table = pd.concat(stages)
    # What one device with all layers would take: the stages one after the other.
    alone = float((table.end - table.start).sum())
    return float(np.mean(waits)), alone / sum(waits)
