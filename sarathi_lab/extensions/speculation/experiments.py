"""What drafts in decodes give and take: by their number, their acceptance and the token budget that
they share with the chunk.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, Unpack

import numpy as np

from sarathi_lab.engine.ledger import Ledger
from sarathi_lab.engine.request import Request
from sarathi_lab.engine.speculation import NO_SPECULATION, Speculation
from sarathi_lab.experiment.points import Point
from sarathi_lab.experiment.registry import PROFILED, Ints, Platform, experiment
from sarathi_lab.extensions.speculation.settings import Assumed, PromptLookup
from sarathi_lab.extensions.under_load.bench import (
    LoadExperiment,
    LoadSizes,
    ServingBench,
    Values,
    compared,
    point,
)
from sarathi_lab.extensions.under_load.search import at_rate
from sarathi_lab.results.intervals import Choices
from sarathi_lab.results.metrics import drafts
from sarathi_lab.results.plots.spec import by_device
from sarathi_lab.results.serving_metrics import latency

NONE = "no drafts"
WAITS = {"ttft_p50": "TTFT P50", "tpot_p50": "TPOT P50", "latency_p50": "latency P50"}
RATE = "throughput, all at once"
BEST = "best budget"
FEW = "TTFT P50, few requests"
FOR_ALL = "reserved for all"
FOR_THESE = "reserved for these"
UNITS = {RATE: "tokens/s", "acceptance_rate": "share", "tokens_per_decode": "tokens"}


@experiment(
    LoadExperiment,
    question="What do drafts in hybrid batches give, and what do they take of the budget?",
    seconds=90,
    papers=[
        Platform("llama3-8b", "h100"),
        Platform("qwen3-30b-a3b", "h100"),
        Platform("llama3-8b", "a100"),
    ],
    simulated=PROFILED,
    look=by_device(
        "line",
        "latency P50 / no drafts",
        "throughput, all at once / no drafts",
        x="chunk [tokens]",
        log_x=True,
    ),
)
def speculation(
    bench: ServingBench,
    seed: int,
    *,
    drafts: Ints,
    acceptances: Sequence[float],
    budgets: Ints,
    load: float,
    pattern: int,
    reserved: Mapping[str, Any] | None,
    **sizes: Unpack[LoadSizes],
) -> Iterator[Point]:
    """Waits at `load` of the saturation rate without drafts, and tokens a second where all requests
    are there at once, by token budget and number of drafts, over those without drafts on the same
    requests; and the budget of the least median latency.

    Simulated, drafts are right with each of the `acceptances`; on a device they are looked up in
    prompts that repeat `pattern` tokens. `reserved` serves a few requests with a budget from which
    the drafts of a full batch are taken in advance, and with one from which only theirs are.
    """
    speculations = _speculations(bench, seed, drafts, acceptances)
    for dataset in sizes["datasets"]:
        requests = []
        for request in bench.requests(dataset, sizes["num_requests"], seed):
            requests.append(repeated(request, pattern))
        rate = load * bench.saturation_rate(dataset)
        arriving = at_rate(requests, rate)
        at_once = [replace(request, arrival_time=0.0) for request in requests]
        without_drafts: dict[int, Values] = {}
        for name, drafting in speculations.items():
            waits = {}
            for budget in budgets:
                under_load = _served(bench, arriving, drafting, budget)
                saturated = _served(bench, at_once, drafting, budget)
                values = _values(under_load, saturated)
                none = without_drafts.setdefault(budget, values)  # the first has no drafts
                waits[budget] = values[WAITS["latency_p50"]]
                yield from compared(dataset, {name: values}, {NONE: none}, UNITS, budget)
            best = min(waits, key=waits.__getitem__)
            resolution = Choices(tuple(budgets))
            yield point(dataset, BEST, "tokens", name, best, resolution=resolution)
    if reserved is not None:
        yield from _reserved(bench, seed, **reserved)


def repeated(request: Request, pattern: int) -> Request:
    """`request` with a prompt of its first `pattern` tokens, again and again."""
    prompt = request.prompt_token_ids
    if prompt is None:
        return request
    return replace(request, prompt_token_ids=np.resize(prompt[:pattern], len(prompt)))


def _speculations(
    bench: ServingBench, seed: int, drafts: Ints, acceptances: Sequence[float]
) -> dict[str, Speculation]:
    speculations: dict[str, Speculation] = {NONE: NO_SPECULATION}
    if bench.vocab_size is not None:
        for number in drafts:
            speculations[f"{number} looked up"] = PromptLookup(tokens=number)
        return speculations
    for number, rate in product(drafts, acceptances):
        assumed = Assumed(tokens=number, acceptance=rate, seed=bench.seed + seed)
        speculations[f"{number} drafts, {rate:g} right"] = assumed
    return speculations


def _served(
    bench: ServingBench, requests: Sequence[Request], drafting: Speculation, budget: int
) -> Ledger:
    # A smaller budget would leave decodes of a full batch without their token.
    policy = bench.chunking(max(budget, bench.engine.batch_size))
    return bench.run(requests, policy, speculation=drafting)


def _values(under_load: Ledger, saturated: Ledger) -> Values:
    """By quantity: seconds, tokens a second, and what was accepted if there were drafts."""
    waits = latency(under_load.requests())
    values = {heading: waits[key] for key, heading in WAITS.items()}
    table = saturated.requests()
    num_tokens = table.prompt_len.sum() + table.output_len.sum()
    duration = table.finish_time.max()  # seconds; all arrive at 0
    values[RATE] = float(num_tokens / duration)
    of_drafts = drafts(under_load.iterations())
    for name, value in of_drafts.items():
        if name in UNITS:
            values[name] = value
    return values


def _reserved(
    bench: ServingBench,
    seed: int,
    *,
    dataset: str,
    num_requests: int,
    rate: float,
    drafts: int,
    acceptance: float,
    budget: int,
    most: int,
) -> Iterator[Point]:
    """Serve `num_requests` of `dataset` at `rate` a second with a budget of `budget` tokens, and
    with what remains of it if all drafts but one are reserved for each of `most` sequences.
    """
    requests = at_rate(bench.requests(dataset, num_requests, seed), rate)
    drafting = Assumed(tokens=drafts, acceptance=acceptance, seed=bench.seed + seed)
    values = {}
    # Until its pull request 51725, vLLM took the drafts of a full batch from the budget.
    num_reserved = most * (drafts - 1)
    budgets = {FOR_ALL: budget - num_reserved, FOR_THESE: budget}
    for name, num_tokens in budgets.items():
        ledger = _served(bench, requests, drafting, num_tokens)
        waits = latency(ledger.requests())
        values[name] = {FEW: waits["ttft_p50"]}
    yield from compared(dataset, values, {FOR_ALL: values[FOR_ALL]})
