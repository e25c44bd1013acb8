"""Switches of today's servers that people argue about, each beside what it is argued against."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Unpack

from sarathi_lab.config.instantiate import load_option
from sarathi_lab.engine.executor import Sizes as BuildSizes
from sarathi_lab.engine.request import Request
from sarathi_lab.experiment.points import Point
from sarathi_lab.experiment.registry import PROFILED, Platform, experiment
from sarathi_lab.experiment.scenario import BLOCK_SIZE
from sarathi_lab.extensions.after_sarathi.long_prompts import policies_of
from sarathi_lab.extensions.under_load.bench import (
    LoadExperiment,
    LoadSizes,
    ServingBench,
    Values,
    compared,
    longest,
    waited,
)
from sarathi_lab.extensions.under_load.search import at_rate
from sarathi_lab.model.spec import ModelSpec
from sarathi_lab.policy import Policy, VllmV1
from sarathi_lab.policy.systems import setup_of
from sarathi_lab.results.plots.spec import by_device

QUANTITIES = ("P99 between tokens", "P50 TTFT", "P99 TTFT", "mean latency")
Variants = Mapping[str, Mapping[str, object]]


@experiment(
    LoadExperiment,
    question="What do the switches that people argue about change?",
    papers=[Platform("llama3.1-8b", "h100")],
    simulated=PROFILED,
    look=by_device("bar", "P99 between tokens", "P50 TTFT"),
)
def server_switches(
    bench: ServingBench, seed: int, *, switches: Mapping[str, Variants], **sizes: Unpack[LoadSizes]
) -> Iterator[Point]:
    """Waits by switch under its variants, options of conf/policy as `policy` with what differs from
    them, also over those of the first; a switch is a data set's name.
    """
    for dataset, variants in switches.items():
        values = {}
        for name, policy in policies_of(bench, (), variants, sizes["budget"]).items():
            values[name] = waited(bench.serve(name, policy, dataset, seed), *QUANTITIES)
        first = next(iter(values))
        yield from compared(dataset, values, {first: values[first]})


@experiment(
    LoadExperiment,
    question="Pipeline stages with chunks, or tensor parallelism?",
    papers=[Platform("llama3.1-70b", "h100", 4)],
    simulated=PROFILED,
    look=by_device("bar", "P99 between tokens", "P50 TTFT"),
)
def pipeline_or_tensor(
    bench: ServingBench,
    seed: int,
    *,
    arrangements: Mapping[str, Sequence[int]],
    **sizes: Unpack[LoadSizes],
) -> Iterator[Point]:
    """Waits by arrangement of the same devices, [tensor, pipeline] parallel, also over those of the
    first, of requests that come at the rate of the data set. A stage has a micro-batch of the
    budget, and the cache what an arrangement leaves to it.
    """
    policy = VllmV1(max_num_batched_tokens=sizes["budget"])
    for dataset in sizes["datasets"]:
        requests = bench.requests(dataset, sizes["num_requests"], seed)
        arriving = at_rate(requests, bench.rate(dataset))
        values = {}
        for name, (tensor, pipeline) in arrangements.items():
            values[name] = arranged(bench, policy, arriving, tensor, pipeline)
        first = next(iter(values))
        yield from compared(dataset, values, {first: values[first]})


def arranged(
    bench: ServingBench, policy: Policy, requests: Sequence[Request], tensor: int, pipeline: int
) -> Values:
    """Serve `requests` on devices of which `tensor` share a layer and `pipeline` are stages."""
    assert bench.backend is not None, "it is only simulated"
    backend = replace(bench.backend, tensor_parallel=tensor, pipeline_parallel=pipeline)
    spec: ModelSpec = load_option("model", bench.model)
    setup = setup_of(policy, bench.engine.batch_size, longest(bench.sizes))
    # Weights are spread otherwise, and leave another cache.
    num_blocks = backend.kv_blocks(spec, BLOCK_SIZE, setup)
    sizes = BuildSizes(num_blocks, BLOCK_SIZE, bench.engine.batch_size)
    on_devices = replace(bench, executor=backend.build(spec, None, sizes))
    ledger = on_devices.run(requests, policy, num_blocks=num_blocks, num_micro_batches=pipeline)
    return waited(ledger.requests(), *QUANTITIES)
