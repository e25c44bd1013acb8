"""What chunks, batches and policies cost in energy, joules a token by a GPU's power model; and
prompts that advance by groups of layers beside prompts in chunks (arXiv 2510.08055).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from sarathi_lab.config.instantiate import load_option
from sarathi_lab.engine.ledger import Ledger
from sarathi_lab.engine.request import Request
from sarathi_lab.experiment.capacity import at_rate
from sarathi_lab.experiment.cases import Point
from sarathi_lab.experiment.registry import Ints, Platform
from sarathi_lab.experiment.serving import (
    CHUNKING,
    ServingBench,
    Values,
    compared,
    longest,
    only_simulated,
    point,
    ratios,
)
from sarathi_lab.policy import Policy
from sarathi_lab.results.serving_metrics import latency, waits

PER_TOKEN, PER_OUTPUT, WATTS = "energy a token", "energy an output token", "power of a device"
OF_ITERATIONS = "power of iterations"
WHOLE = "whole prompts"  # Sarathi-Serve with a budget that no prompt exceeds

LAYERED = "layered_prefill"
SAME = "layered, same TBT"
TTFT, TBT, LATENCY = "TTFT mean", "TBT P99", "latency mean"
EXPERTS = "expert bytes a token"
UNITS = {PER_TOKEN: "J", EXPERTS: "MB"}


@only_simulated(
    "Do chunks cost energy, and which policy saves it?",
    Platform("llama3-8b", "h100"),
    Platform("qwen3-30b-a3b", "h100"),
    Platform("llama3.1-70b", "a100", 4),
)
def energy(
    bench: ServingBench,
    seed: int,
    *,
    num_requests: int,
    budget: int,
    budgets: Ints,
    policies: Sequence[str],
    batches: Ints,
    load: float,
    **sizes: Any,
) -> Iterator[Point]:
    """Joules a token by token budget and by policy, over those of whole prompts on the same
    requests, at `load` of the saturation rate; joules an output token by batch,
    where all requests are there at once; and watts of iterations by what is in them.
    """
    bench.check_power("energy", "use hardware=a100, h100 or h200")
    for dataset in sizes["datasets"]:
        requests = bench.requests(dataset, num_requests, seed)
        arriving = at_rate(requests, load * bench.saturation_rate(dataset))
        at = {f"chunk {tokens}": tokens for tokens in budgets}
        own = {name: bench.chunking(max(tokens, sizes["batch"])) for name, tokens in at.items()}
        own |= {WHOLE: bench.chunking(longest(bench.sizes) + sizes["batch"])}
        own |= bench.named(policies, budget)
        ledgers = {name: bench.engine.serve(arriving, policy) for name, policy in own.items()}
        found = {name: bench.energy(ledger)[1] for name, ledger in ledgers.items()}
        joules = {name: {PER_TOKEN: values["joules_per_token"]} for name, values in found.items()}
        for name, values in found.items():
            x, whole = float(at.get(name, 0)), {WHOLE: joules[WHOLE]}
            yield from compared(dataset, {name: joules[name]}, whole, UNITS, x)
            yield point(dataset, WATTS, "W", name, values["mean_watts"], x)
        watts = _watts(bench, ledgers[WHOLE])
        prompts = {"prompts": {OF_ITERATIONS: watts["prompts"]}}
        decodes = {"decodes": {OF_ITERATIONS: watts["decodes"]}}
        yield from compared(dataset, prompts | decodes, {}, {OF_ITERATIONS: "W"})
        yield from ratios(dataset, "prompts", "decodes", decodes["decodes"], prompts["prompts"])
        yield from _by_batch(bench, dataset, requests, budget, batches)


def _by_batch(
    bench: ServingBench, dataset: str, requests: Sequence[Request], budget: int, batches: Ints
) -> Iterator[Point]:
    """The same requests at once, of as many as two batches, one by one to many together."""
    found = {}
    for batch in batches:
        chosen = [replace(one, arrival_time=0.0) for one in requests[: max(4, 2 * batch)]]
        engine = replace(bench.engine, batch_size=batch)
        ledger = engine.serve(chosen, bench.chunking(max(budget, batch)))
        found[batch] = bench.energy(ledger)[1]["joules_per_output_token"]
        yield point(dataset, f"{PER_OUTPUT} by batch", "J", CHUNKING, found[batch], batch)
    least, most = min(batches), max(batches)
    quantity = f"{PER_OUTPUT}, batch {least} / {most}"
    yield point(dataset, quantity, "ratio", CHUNKING, found[least] / found[most])


def _watts(bench: ServingBench, ledger: Ledger) -> dict[str, float]:
    """The mean of a device in iterations of prompts alone, and of decodes alone."""
    table, _ = bench.energy(ledger)
    kinds = {"prompts": table.num_decode_tokens == 0, "decodes": table.num_prefills == 0}
    sums = {kind: table.loc[own, ["energy", "busy"]].sum() for kind, own in kinds.items()}
    assert bench.backend is not None, "it was asked for the energy"
    devices = bench.backend.parallel.num_devices
    return {kind: float(own.energy / own.busy / devices) for kind, own in sums.items()}


@only_simulated(
    "What does it gain to cut prompts by layers, not by tokens?",
    Platform("qwen3-30b-a3b", "h100", 2),
    Platform("qwen3-30b-a3b", "h200"),
    Platform("qwen3-8b", "h100"),
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
    bench.check_power("layered_prefill", "use hardware=h100 or h200")
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
            both = {CHUNKING: chunks, LAYERED: layered[budget], SAME: best}
            yield from compared(dataset, both, {CHUNKING: chunks}, UNITS, load)
            experts = {name: own for name, own in chunks.items() if name == EXPERTS}
            yield from ratios(dataset, LAYERED, CHUNKING, experts, layered[budget], load)


def _served(bench: ServingBench, requests: Sequence[Request], policy: Policy) -> Values:
    """Seconds; and of a token, of prompts and outputs, joules and megabytes of experts' weights."""
    ledger = bench.engine.serve(requests, policy)
    times, quantiles = waits(ledger.requests()), latency(ledger.requests())
    iterations, energy = bench.energy(ledger)
    found = {
        TTFT: float(times["ttft"].mean()),
        TBT: quantiles["tbt_p99"],
        LATENCY: float(times["latency"].mean()),
        PER_TOKEN: energy["joules_per_token"],
    }
    if (spec := load_option("model", bench.model)).num_experts:
        assert bench.backend is not None, "it was asked for the energy"
        num_bytes = spec.expert_read_bytes(iterations, bench.backend.dtype_bytes).sum()
        num_tokens = energy["num_prompt_tokens"] + energy["num_output_tokens"]
        found[EXPERTS] = float(num_bytes / num_tokens / 1e6)
    return found
