"""Prompts that pass the layers in groups give the tokens of whole ones: torch, C++ and kernels."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from checkpoints import DEVICE
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from native_library import needs_library
from toy_executors import BLOCK_SIZE, SPEC, executor_of, on_kernels, requests_with_tokens

from sarathi_lab.engine.config import EngineConfig
from sarathi_lab.engine.ledger import Ledger
from sarathi_lab.engine.loop import serve
from sarathi_lab.engine.request import Request
from sarathi_lab.executor.torch import backend
from sarathi_lab.executor.torch.executor import TorchExecutor
from sarathi_lab.extensions.layered import LayeredPrefill
from sarathi_lab.model.transformer import Transformer
from sarathi_lab.model.weights import load_model
from sarathi_lab.policy import Orca, Policy

SIZE = 4  # of a block
TIGHT = 9  # blocks, where the longest request takes eight


MIXTURE = {"num_experts": 8, "experts_per_token": 2, "ffn_size": 32}


def model_of(kind: str, num_layers: int = 5) -> Transformer:
    spec = replace(SPEC, num_layers=num_layers, **(MIXTURE if kind == "mixture" else {}))
    model = load_model(spec, None, DEVICE, torch.float32, seed=0)
    if kind == "native":
        backend.use_native(model)
    elif kind == "triton":
        backend.use_triton(model, "series")
    return model


@pytest.fixture(
    scope="module", params=["torch", "mixture", pytest.param("native", marks=needs_library)]
)
def model(request) -> Transformer:
    return model_of(request.param)


def served(
    model: Transformer, requests: list[Request], policy: Policy, num_blocks: int, **sizes
) -> Ledger:
    num_host_blocks = sizes.get("num_host_blocks", 0)
    executor = executor_of(model, "torch", num_blocks, num_host_blocks, SIZE)
    for tensor in executor.cache.tensors:
        tensor.fill_(float("nan"))  # whoever reads what was never written shows it
    engine = EngineConfig(policy, batch_size=3, num_blocks=num_blocks, block_size=SIZE, **sizes)
    return serve(requests, engine, executor)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    lengths=st.lists(st.tuples(st.integers(1, 22), st.integers(1, 9)), min_size=2, max_size=5),
    shared=st.sampled_from([0, 8, 21]),
    chunk=st.integers(1, 24),
    most=st.sampled_from([5, 17, 64]),
    groups=st.none() | st.integers(1, 5),
    num_host_blocks=st.sampled_from([0, 12]),
    shares_prefixes=st.booleans(),
)
def test_tokens_are_those_of_whole_prompts(
    model, lengths, shared, chunk, most, groups, num_host_blocks, shares_prefixes
):
    """Whoever gives way, to host memory or not, and whatever is shared."""
    requests = requests_with_tokens(lengths)
    for one in requests[1:]:  # equal beginnings
        one.prompt_token_ids[:shared] = np.resize(requests[0].prompt_token_ids, one.prompt_len)[
            :shared
        ]
    expected = served(model, requests, Orca(max_prefills=None, reserve="prompt"), 40)
    policy = LayeredPrefill(chunk, most, groups, watermark=0.0, reserve="chunk")
    ledger = served(
        model,
        requests,
        policy,
        TIGHT,
        num_host_blocks=num_host_blocks,
        preemption="swap" if num_host_blocks else "recompute",
        shares_prefixes=shares_prefixes,
    )
    tokens = [table.output_token_ids.tolist() for table in (ledger.requests(), expected.requests())]
    assert tokens[0] == tokens[1]


def test_kernels_give_them_with_two_batches_in_flight():
    """In Triton's interpreter: few tokens, as it takes its time."""
    requests = requests_with_tokens([(2, 4), (17, 2)])
    sizes = {"batch_size": 2, "num_blocks": 8, "block_size": BLOCK_SIZE}
    plain = TorchExecutor(model_of("torch", 3), num_blocks=8, block_size=BLOCK_SIZE)
    expected = serve(requests, EngineConfig(Orca(max_prefills=None), **sizes), plain).requests()
    ledger = serve(
        requests,
        EngineConfig(LayeredPrefill(chunk=4, max_num_batched_tokens=9), **sizes),
        on_kernels(model_of("triton", 3), num_blocks=8),
    )
    assert ledger.requests().output_token_ids.tolist() == expected.output_token_ids.tolist()
    iterations = ledger.iterations()
    assert ((iterations.layer_share < 1) & (iterations.num_decode_tokens > 0)).any()
    assert not iterations.is_replayed.any()
