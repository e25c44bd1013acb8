"""How served systems call attention, and how many decodes may ride on a chunk by that."""

from __future__ import annotations

import dataclasses
import re

import pytest

from sarathi_lab.config.instantiate import load_option
from sarathi_lab.executor.simulated.attention_calls import (
    MOST_DECODES,
    kernel_of,
    most_riding_decodes,
)
from sarathi_lab.executor.simulated.backend import SimulatedBackend
from sarathi_lab.executor.simulated.cost_model import make_cost_model


@pytest.mark.parametrize(
    ("gpu", "host", "kernel"),
    [
        ("rtx-4090", "vllm_0_19", "flash_attention_2"),
        ("a100", "vllm_0_19", "flash_attention_2"),
        ("h100", "vllm_0_19", "flash_attention_3"),
        ("h100", "trtllm_1_0", "tensorrt_llm"),
        ("mi300x", "vllm_0_19", None),
    ],
)
def test_the_kernel_is_the_hosts_or_the_hardware_files(gpu, host, kernel):
    assert kernel_of(load_option("hardware", gpu), load_option("host", host)) == kernel


@pytest.mark.parametrize(("context", "expected"), [(1024, range(36, 56)), (8192, range(5, 12))])
def test_fewer_decodes_ride_the_longer_they_are(context, expected):
    """About 48K tokens of all their caches on an A100 with one call; any number with two."""
    spec, a100 = load_option("model", "llama3.1-8b"), load_option("hardware", "a100")
    cost = make_cost_model("profiled", spec, a100, 2)
    assert most_riding_decodes(cost, 1024, context, start=1024) in expected
    apart = dataclasses.replace(a100, hybrid_call=False)
    cost = make_cost_model("profiled", spec, apart, 2)
    assert most_riding_decodes(cost, 1024, context, start=1024) == MOST_DECODES


@pytest.mark.parametrize(
    ("gpu", "host", "said"),
    [
        ("a100", "vllm_0_19", r"one call, by flash_attention_2 .+ more than \d+ decodes of 4,096"),
        ("h100", "vllm_0_19", r"two calls .+ are simulated; flash_attention_3 .+ makes one"),
        ("h100", "trtllm_1_0", None),
        ("mi300x", "vllm_0_19", None),
    ],
)
def test_a_simulated_server_says_what_its_one_call_means(gpu, host, said):
    hardware, server = load_option("hardware", gpu), load_option("host", host)
    spec = load_option("model", "llama3.1-8b")
    lines = SimulatedBackend(hardware, host=server).cautions(spec)
    attention = [line for line in lines if line.startswith("attention:")]
    assert len(attention) == int(said is not None)
    if said is not None:
        assert re.search(said, attention[0])


def test_what_the_hardware_states_comes_first():
    spec = load_option("model", "llama3.1-8b")
    hardware = dataclasses.replace(load_option("hardware", "rtx-4090"), hybrid_call=False)
    lines = SimulatedBackend(hardware).cautions(spec)
    assert not any(line.startswith("attention:") for line in lines)
