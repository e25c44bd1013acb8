"""What chunks, batches and policies cost in energy: joules a token by a GPU's power model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from sarathi_lab.config.errors import UserError
from sarathi_lab.config.instantiate import load_option
from sarathi_lab.engine.ledger import Ledger
from sarathi_lab.engine.request import Request
from sarathi_lab.experiment.capacity import at_rate
from sarathi_lab.experiment.clock import Estimate, Point
from sarathi_lab.experiment.registry import PROFILED, Platform, figure
from sarathi_lab.experiment.serving import CHUNKING, ServingBench, longest
from sarathi_lab.policy import Policy
from sarathi_lab.results import metrics

PER_TOKEN, PER_OUTPUT, WATTS = "energy a token", "energy an output token", "power of a device"
WHOLE = "whole prompts"  # Sarathi-Serve with a budget that no prompt exceeds


@figure(
    question="Do chunks cost energy, and which policy saves it?",
    kind="rounds",
    is_simulated=True,
    seconds=0,
    simulated=PROFILED,
    papers=[
        Platform("llama3-8b", "h100"),
        Platform("qwen3-30b-a3b", "h100"),
        Platform("llama3.1-70b", "a100", 4),
    ],
    needs=("datasets", "batch"),
)
def energy(
    bench: ServingBench,
    seed: int,
    *,
    num_requests: int,
    budget: int,
    budgets: Sequence[int],
    policies: Sequence[str],
    batches: Sequence[int],
    load: float,
    **sizes: Any,
) -> Iterator[Point]:
    """Joules a token by token budget and by policy, over those of whole prompts on the same
    requests, at `load` of the saturation rate; joules an output token by batch,
    where all requests are there at once; and watts of iterations by what is in them.
    """
    if bench.backend is None or bench.backend.power is None:
        raise UserError("experiment=energy needs a power model; use hardware=a100, h100 or h200")
    for dataset in sizes["datasets"]:
        requests = bench.requests(dataset, num_requests, seed)
        whole = bench.chunking(longest(bench.sizes) + sizes["batch"])
        arriving = at_rate(requests, load * bench.saturation_rate(dataset))
        at = {f"chunk {tokens}": tokens for tokens in budgets}
        own = {name: bench.chunking(max(tokens, sizes["batch"])) for name, tokens in at.items()}
        own |= {WHOLE: whole} | bench.named(policies, budget)
        found = {name: _energy(bench, arriving, policy) for name, policy in own.items()}
        for name, values in found.items():
            x = at.get(name, 0)
            yield _point(dataset, PER_TOKEN, "J", name, values["joules_per_token"], x)
            yield _point(dataset, WATTS, "W", name, values["mean_watts"], x)
            if name != WHOLE:
                ratio = values["joules_per_token"] / found[WHOLE]["joules_per_token"]
                yield _point(dataset, f"{PER_TOKEN} / {WHOLE}", "ratio", name, ratio, x)
        prompts, decodes = found[WHOLE]["prompts"], found[WHOLE]["decodes"]
        yield _point(dataset, "power of iterations", "W", "prompts", prompts)
        yield _point(dataset, "power of iterations", "W", "decodes", decodes)
        yield _point(
            dataset, "power of iterations / prompts", "ratio", "decodes", decodes / prompts
        )
        yield from _by_batch(bench, dataset, requests, budget, batches)


def _by_batch(
    bench: ServingBench,
    dataset: str,
    requests: Sequence[Request],
    budget: int,
    batches: Sequence[int],
) -> Iterator[Point]:
    """The same requests at once, of as many as two batches, one by one to many together."""
    found = {}
    for batch in batches:
        chosen = [replace(one, arrival_time=0.0) for one in requests[: max(4, 2 * batch)]]
        engine = replace(bench.engine, batch_size=batch)
        ledger = engine.serve(chosen, bench.chunking(max(budget, batch)))
        found[batch] = _summary(bench, ledger)["joules_per_output_token"]
    for batch, joules in found.items():
        yield _point(dataset, f"{PER_OUTPUT} by batch", "J", CHUNKING, joules, batch)
    ratio = found[min(batches)] / found[max(batches)]
    yield _point(
        dataset, f"{PER_OUTPUT}, batch {min(batches)} / {max(batches)}", "ratio", CHUNKING, ratio
    )


def _energy(bench: ServingBench, requests: Sequence[Request], policy: Policy) -> dict[str, float]:
    """The energy of a run, and the mean watts of its iterations with only prompts and decodes."""
    return _summary(bench, bench.engine.serve(requests, policy))


def _summary(bench: ServingBench, ledger: Ledger) -> dict[str, float]:
    backend, spec = bench.backend, load_option("model", bench.model)
    assert backend is not None, "checked before"
    assert backend.power is not None, "checked before"
    costs = (spec, backend.dtype_bytes, backend.peaks())
    devices = backend.parallel.num_devices
    table = metrics.add_costs(ledger.iterations(), *costs)
    iterations = metrics.add_energy(table, backend.power, devices)
    counts: Mapping[str, float] = metrics.throughput(ledger.requests(), iterations.end.max())
    found = metrics.energy_metrics(iterations, counts, backend.power, devices)
    kinds = {"prompts": iterations.num_decode_tokens == 0, "decodes": iterations.num_prefills == 0}
    for kind, own in kinds.items():
        rows = iterations[own]
        found[kind] = float(rows.energy.sum() / rows.busy.sum() / devices)
    return found


def _point(dataset: str, quantity: str, unit: str, series: str, y: float, x: float = 0.0) -> Point:
    panel = f"{dataset}: {quantity}" + ("" if unit == "ratio" else f" [{unit}]")
    labels = (("dataset", dataset), ("slo", ""), ("quantity", quantity))
    return Point(panel, series, float(x), Estimate(y), unit, "value", labels)
