"""Arrangements of the same devices, by hand."""

from __future__ import annotations

import pytest

from sarathi_lab.config.instantiate import load_option
from sarathi_lab.engine.config import EngineConfig
from sarathi_lab.engine.request import Request
from sarathi_lab.executor.simulated.backend import SimulatedBackend
from sarathi_lab.extensions.after_sarathi.server_switches import arranged
from sarathi_lab.extensions.under_load.bench import ServingBench
from sarathi_lab.policy import Orca, VllmV1


def test_a_lone_request_passes_the_stages_one_after_the_other() -> None:
    """Two stages of half the layers take as long as one device, and the sends between them."""
    backend = SimulatedBackend(load_option("hardware", "h100"))
    spec = load_option("model", "llama3.1-8b")
    sizes = {"batch": 4, "datasets": {"tiny": {"prompt_p50": 20, "prompt_p90": 40}}}
    sizes["datasets"]["tiny"] |= {"output_p50": 4, "output_p90": 8, "max_len": 64}
    engine = EngineConfig(Orca(), 4, 100, 16, 2048)
    bench = ServingBench(sizes, spec.name, engine, backend, lambda *_: None, None, backend=backend)
    requests = [Request(0, 0.0, 1000, 20)]
    policy = VllmV1(max_num_batched_tokens=2048)
    alone = arranged(bench, policy, requests, 1, 1)
    staged = arranged(bench, policy, requests, 1, 2)
    shared = arranged(bench, policy, requests, 2, 1)
    assert staged["P50 TTFT"] == pytest.approx(alone["P50 TTFT"], rel=0.1)
    assert shared["P50 TTFT"] < 0.7 * alone["P50 TTFT"]
    assert shared["P99 between tokens"] < 0.7 * staged["P99 between tokens"]
