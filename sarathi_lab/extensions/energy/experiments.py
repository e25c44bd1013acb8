"""The energy of chunks, batches and policies: joules a token by a GPU's power model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd

from sarathi_lab.config.errors import UserError
from sarathi_lab.config.instantiate import load_option
from sarathi_lab.engine.executor import Power
from sarathi_lab.engine.ledger import Ledger
from sarathi_lab.engine.request import Request
from sarathi_lab.executor.simulated.backend import SimulatedBackend
from sarathi_lab.experiment.cases import Point
from sarathi_lab.experiment.registry import Ints, Platform
from sarathi_lab.extensions.capacity.search import at_rate
from sarathi_lab.extensions.under_load import (
    CHUNKING,
    ServingBench,
    Values,
    compared,
    longest,
    only_simulated,
    point,
    ratios,
)
from sarathi_lab.results import metrics
from sarathi_lab.results.plots.spec import by_device

PER_TOKEN, PER_OUTPUT, WATTS = "energy a token", "energy an output token", "power of a device"
OF_ITERATIONS = "power of iterations"
WHOLE = "whole prompts"  # Sarathi-Serve with a budget that no prompt exceeds
UNITS = {PER_TOKEN: "J"}


def powered(bench: ServingBench) -> tuple[SimulatedBackend, Power]:
    """Return the device and its power model. Raises UserError without one."""
    if bench.backend is None or bench.backend.power is None:
        raise UserError("energy needs a power model; use hardware=h100 or h200")
    return bench.backend, bench.backend.power


def energy_of(bench: ServingBench, ledger: Ledger) -> tuple[pd.DataFrame, dict[str, float]]:
    """Return the iterations with their costs, watts and joules, and the metrics of energy with the
    counts of tokens, on a device with a power model.
    """
    (backend, power), spec = powered(bench), load_option("model", bench.model)
    iterations, peaks = ledger.iterations(), backend.peaks()
    table = metrics.add_costs(iterations, spec, backend.dtype_bytes, peaks)
    table = power.add_energy(table, backend.num_devices)
    counts = metrics.throughput(ledger.requests(), table.end.max())
    return table, counts | power.metrics(table, counts, backend.num_devices)


@only_simulated(
    "Do chunks cost energy, and which policy saves it?",
    Platform("llama3-8b", "h100"),
    Platform("qwen3-30b-a3b", "h100"),
    Platform("llama3.1-70b", "a100", 4),
    look=by_device("bar", "energy a token", "power of a device"),
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
    powered(bench)
    for dataset in sizes["datasets"]:
        requests = bench.requests(dataset, num_requests, seed)
        arriving = at_rate(requests, load * bench.saturation_rate(dataset))
        at = {f"chunk {tokens}": tokens for tokens in budgets}
        served = {name: bench.chunking(max(tokens, sizes["batch"])) for name, tokens in at.items()}
        served |= {WHOLE: bench.chunking(longest(bench.sizes) + sizes["batch"])}
        served |= bench.named(policies, budget)
        ledgers = {name: bench.run(arriving, policy) for name, policy in served.items()}
        found = {name: energy_of(bench, ledger)[1] for name, ledger in ledgers.items()}
        joules = {name: {PER_TOKEN: values["joules_per_token"]} for name, values in found.items()}
        for name, values in found.items():
            x, whole = float(at.get(name, 0)), {WHOLE: joules[WHOLE]}
            yield from compared(dataset, {name: joules[name]}, whole, UNITS, x)
            yield point(dataset, WATTS, "W", name, values["mean_watts"], x)
        watts = _watts(bench, ledgers[WHOLE])
        yield from compared(dataset, watts, {}, {OF_ITERATIONS: "W"})
        yield from ratios(dataset, "prompts", "decodes", watts["decodes"], watts["prompts"])
        yield from _by_batch(bench, dataset, requests, budget, batches)


def _by_batch(
    bench: ServingBench, dataset: str, requests: Sequence[Request], budget: int, batches: Ints
) -> Iterator[Point]:
    """The same requests at once, of as many as two batches, one by one to many together."""
    found = {}
    for batch in batches:
        chosen = [replace(one, arrival_time=0.0) for one in requests[: max(4, 2 * batch)]]
        ledger = bench.run(chosen, bench.chunking(max(budget, batch)), batch_size=batch)
        found[batch] = energy_of(bench, ledger)[1]["joules_per_output_token"]
        yield point(dataset, f"{PER_OUTPUT} by batch", "J", CHUNKING, found[batch], batch)
    least, most = min(batches), max(batches)
    quantity = f"{PER_OUTPUT}, batch {least} / {most}"
    yield point(dataset, quantity, "ratio", CHUNKING, found[least] / found[most])


def _watts(bench: ServingBench, ledger: Ledger) -> dict[str, Values]:
    """The mean of a device in iterations of prompts alone, and of decodes alone."""
    table, _ = energy_of(bench, ledger)
    kinds = {"prompts": table.num_decode_tokens == 0, "decodes": table.num_prefills == 0}
    backend, _ = powered(bench)
    totals = {kind: table.loc[is_kind, ["energy", "busy"]].sum() for kind, is_kind in kinds.items()}
    return {
        kind: {OF_ITERATIONS: float(total.energy / total.busy / backend.num_devices)}
        for kind, total in totals.items()
    }
