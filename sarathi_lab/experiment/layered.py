"""Prompts that advance by groups of layers beside prompts in chunks (arXiv 2510.08055)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sarathi_lab.config.errors import UserError
from sarathi_lab.config.instantiate import load_option
from sarathi_lab.engine.ledger import Ledger
from sarathi_lab.engine.request import Request
from sarathi_lab.experiment.capacity import at_rate
from sarathi_lab.experiment.clock import Point
from sarathi_lab.experiment.registry import PROFILED, Platform, figure
from sarathi_lab.experiment.serving import CHUNKING, ServingBench, point
from sarathi_lab.policy import Policy
from sarathi_lab.results import metrics
from sarathi_lab.results.serving_metrics import latency, waits

LAYERED = "layered_prefill"
SAME = "layered, same TBT"
TTFT, TBT, LATENCY, ENERGY = "TTFT mean", "TBT P99", "latency mean", "energy a token"
EXPERTS = "expert bytes a token"
UNITS = {TTFT: "s", TBT: "s", LATENCY: "s", ENERGY: "J", EXPERTS: "MB"}
Found = Mapping[str, float]


@figure(
    question="What does it gain to cut prompts by layers, not by tokens?",
    kind="rounds",
    is_simulated=True,
    seconds=0,
    simulated=PROFILED,
    papers=[
        Platform("qwen3-30b-a3b", "h100", 2),
        Platform("qwen3-30b-a3b", "h200"),
        Platform("qwen3-8b", "h100"),
    ],
    needs=("datasets", "batch"),
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
    if bench.backend is None or bench.backend.power is None:
        raise UserError("experiment=layered_prefill needs a power model; use hardware=h100 or h200")
    for dataset, own_loads in loads.items():
        requests = bench.requests(dataset, num_requests, seed)
        for load in own_loads:
            arriving = at_rate(requests, load * bench.saturation_rate(dataset))
            chunks = _served(bench, arriving, bench.chunking(budget))
            layered = {
                own: _served(bench, arriving, policy)
                for own in budgets
                for policy in bench.named([LAYERED], own).values()
            }
            within = [found for found in layered.values() if found[TBT] <= chunks[TBT]]
            none = dict.fromkeys(chunks, math.nan)
            best = min(within, key=lambda found: found[TTFT], default=none)
            both = {LAYERED: layered[budget], SAME: best}
            yield from _points(dataset, load, chunks, both)


def _served(bench: ServingBench, requests: Sequence[Request], policy: Policy) -> Found:
    ledger = bench.engine.serve(requests, policy)
    times, quantiles = waits(ledger.requests()), latency(ledger.requests())
    return {
        TTFT: float(times["ttft"].mean()),
        TBT: quantiles["tbt_p99"],
        LATENCY: float(times["latency"].mean()),
        **_read(bench, ledger),
    }


def _read(bench: ServingBench, ledger: Ledger) -> Found:
    """What a token takes, of prompts and outputs: joules, and megabytes of experts' weights."""
    backend, spec = bench.backend, load_option("model", bench.model)
    assert backend is not None, "checked before"
    assert backend.power is not None, "checked before"
    devices, costs = backend.parallel.num_devices, (spec, backend.dtype_bytes, backend.peaks())
    table = metrics.add_costs(ledger.iterations(), *costs)
    table = metrics.add_energy(table, backend.power, devices)
    counts: Mapping[str, float] = metrics.throughput(ledger.requests(), table.end.max())
    energy = metrics.energy_metrics(table, counts, backend.power, devices)
    found = {ENERGY: energy["joules_per_token"]}
    if spec.num_experts:
        num_bytes = spec.expert_read_bytes(table, backend.dtype_bytes).sum()
        num_tokens = counts["num_prompt_tokens"] + counts["num_output_tokens"]
        found[EXPERTS] = float(num_bytes / num_tokens / 1e6)
    return found


def _points(
    dataset: str, load: float, chunks: Found, layered: Mapping[str, Found]
) -> Iterator[Point]:
    for name, values in {CHUNKING: chunks, **layered}.items():
        for quantity, value in values.items():
            yield point(dataset, quantity, UNITS[quantity], name, value, load)
            if name != CHUNKING:
                ratio, words = value / chunks[quantity], f"{quantity} / {CHUNKING}"
                yield point(dataset, words, "ratio", name, ratio, load)
    if EXPERTS in chunks:
        ratio = chunks[EXPERTS] / layered[LAYERED][EXPERTS]
        yield point(dataset, f"{EXPERTS} / {LAYERED}", "ratio", CHUNKING, ratio, load)
