"""Prompts that advance by groups of layers beside prompts in chunks (arXiv 2510.08055)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sarathi_lab.config.instantiate import load_option
from sarathi_lab.engine.request import Request
from sarathi_lab.experiment.cases import Point
from sarathi_lab.experiment.registry import Platform
from sarathi_lab.extensions.capacity.search import at_rate
from sarathi_lab.extensions.under_load import (
    CHUNKING,
    ServingBench,
    Values,
    compared,
    only_simulated,
    ratios,
)
from sarathi_lab.policy import Policy
from sarathi_lab.results.plots.spec import by_device
from sarathi_lab.results.serving_metrics import latency, waits

LAYERED = "layered_prefill"
SAME = "layered, same TBT"
TTFT, TBT, LATENCY = "TTFT mean", "TBT P99", "latency mean"
EXPERTS = "expert bytes a token"
UNITS = {EXPERTS: "MB"}


@only_simulated(
    "What does it gain to cut prompts by layers, not by tokens?",
    Platform("qwen3-30b-a3b", "h100", 2),
    Platform("qwen3-30b-a3b", "h200"),
    Platform("qwen3-8b", "h100"),
    look=by_device("line", "TTFT mean", x="load [of saturation]"),
)
def layered_prefill(
    bench: ServingBench,
    seed: int,
    *,
    num_requests: int,
    loads: Mapping[str, Sequence[float]],
    budget: int,
    budgets: Sequence[int],
    **sizes: Any,
) -> Iterator[Point]:
    """By data set and load (of the rate at which chunks of `budget` tokens saturate) what these
    give, and groups of layers of as many tokens, also over the former.

    The series `SAME` is layered prefill with the one of `budgets` whose first tokens are the
    earliest of those with a P99 between tokens that is not above that of the chunks; not a number
    if none is.
    """
    for dataset, shares in loads.items():
        requests = bench.requests(dataset, num_requests, seed)
        for load in shares:
            arriving = at_rate(requests, load * bench.saturation_rate(dataset))
            chunks = _served(bench, arriving, bench.chunking(budget))
            policies = {tokens: bench.named([LAYERED], tokens)[LAYERED] for tokens in budgets}
            layered = {n: _served(bench, arriving, policy) for n, policy in policies.items()}
            within = [found for found in layered.values() if found[TBT] <= chunks[TBT]]
            none = dict.fromkeys(chunks, math.nan)
            best = min(within, key=lambda found: found[TTFT], default=none)
            both = {CHUNKING: chunks, LAYERED: layered[budget], SAME: best}
            yield from compared(dataset, both, {CHUNKING: chunks}, UNITS, load)
            experts = {name: value for name, value in chunks.items() if name == EXPERTS}
            yield from ratios(dataset, LAYERED, CHUNKING, experts, layered[budget], load)


def _served(bench: ServingBench, requests: Sequence[Request], policy: Policy) -> Values:
    """Seconds, and megabytes of experts' weights a token of prompts and outputs."""
    ledger = bench.run(requests, policy)
    table = ledger.requests()
    times = waits(table)
    found = {
        TTFT: float(times["ttft"].mean()),
        TBT: latency(table)["tbt_p99"],
        LATENCY: float(times["latency"].mean()),
    }
    if (spec := load_option("model", bench.model)).num_experts:
        assert bench.backend is not None  # the experiment is simulated
        num_bytes = spec.expert_read_bytes(ledger.iterations(), bench.backend.dtype_bytes).sum()
        num_tokens = table.prompt_len.sum() + table.output_len.sum()
        found[EXPERTS] = float(num_bytes / num_tokens / 1e6)
    return found
