"""What graph_cliff counts, worked out by hand."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from helpers import requests_of

from sarathi_lab.config.instantiate import load_option
from sarathi_lab.engine.compositions import make_batch, run_once
from sarathi_lab.engine.config import EngineConfig
from sarathi_lab.engine.loop import serve
from sarathi_lab.executor.simulated.backend import SimulatedBackend
from sarathi_lab.extensions.after_sarathi.graph_cliff import of_cost_model, of_steps
from sarathi_lab.policy import VllmV1

# A second a token on the device; launched in 12 seconds, or in 6 where it is captured in pieces.
STEPS = {"device": [[1, 1.0], [8, 8.0]], "eager": 12.0, "piecewise": 6.0}


@pytest.mark.parametrize(("largest", "mixed"), [(4, 12.0), (8, 8.0)])
def test_a_batch_with_a_prompt_falls_off_the_captured_sizes(largest, mixed):
    """4 tokens of a prompt are captured either way, as are decodes, whole; beside 6 tokens of the
    next prompt a decode makes a batch of 7, padded to 8 or launched eagerly.
    """
    requests = requests_of((4, 4), (6, 1), arrivals=[0.0, 0.5])
    engine = EngineConfig(VllmV1(max_num_batched_tokens=8), 2, 8, 4, 16)
    table = serve(requests, engine, of_steps(STEPS, largest)).requests()
    assert table.token_times[0] == [6.0, 6.0 + mixed, 7.0 + mixed, 8.0 + mixed]
    assert table.token_times[1] == [6.0 + mixed]


def test_the_cost_models_batches_wait_for_launches_unless_they_are_captured():
    engine = EngineConfig(VllmV1(), batch_size=8, num_blocks=99, block_size=16)
    backend = SimulatedBackend(load_option("hardware", "b200"))
    bench = SimpleNamespace(backend=backend, engine=engine, model="qwen3-8b")
    captured, eager = (
        run_once(of_cost_model(bench, "vllm_0_19", size), make_batch(prefill_tokens=256))
        for size in (256, 128)
    )
    assert eager.end - eager.start > captured.end - captured.start
