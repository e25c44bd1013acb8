"""Preemption by swapping: blocks come back as they were, whoever computes, and the time that it
takes is charged.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from checkpoints import DEVICE
from helpers import requests_of, scheduler_for
from hypothesis import given, settings
from hypothesis import strategies as st
from native_library import needs_library
from simulated import LINKED, TOY
from toy_executors import BLOCK_SIZE, SPEC, executor_of, model_on

from sarathi_lab.config.errors import UserError
from sarathi_lab.engine.ledger import Ledger
from sarathi_lab.engine.loop import run_engine
from sarathi_lab.engine.request import Batch, Copy, Request, SequenceState
from sarathi_lab.executor.simulated.backend import SimulatedBackend
from sarathi_lab.executor.simulated.cost_model import make_cost_model
from sarathi_lab.executor.simulated.executor import SimulatedExecutor
from sarathi_lab.executor.torch import memory
from sarathi_lab.executor.torch.backend import TorchBackend
from sarathi_lab.model.roofline import Peaks
from sarathi_lab.model.spec import ModelSpec
from sarathi_lab.model.transformer import KVCache
from sarathi_lab.policy import Orca, PrefillFirst, Sarathi, SarathiServe
from sarathi_lab.results.metrics import add_costs, summarise

LENGTHS = [(30, 12), (29, 12), (31, 11), (5, 3)]
POLICIES = [
    Sarathi(chunk=16, min_decodes=0, reserve="prompt"),
    SarathiServe(chunk=16, watermark=0.0),
    SarathiServe(chunk=16, watermark=0.0, reserve="chunk"),
    PrefillFirst(watermark=0.0),
    Orca(reserve="prompt"),
]


def with_tokens() -> list[Request]:
    rng = np.random.default_rng(5)
    return [
        Request(i, 0.0, p, d, rng.integers(0, 97, p, dtype=np.int32))
        for i, (p, d) in enumerate(LENGTHS)
    ]


def served(model, kind, policy, num_blocks, num_host_blocks=0):
    scheduler = scheduler_for(
        policy,
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        num_host_blocks=num_host_blocks,
        preemption="swap" if num_host_blocks else "recompute",
        max_model_len=50,
    )
    ledger = Ledger()
    executor = executor_of(model, kind, num_blocks, num_host_blocks)
    executor.cache.keys.fill_(float("nan"))  # whoever reads what was not copied shows it
    executor.cache.values.fill_(float("nan"))
    run_engine(with_tokens(), scheduler, executor, ledger)
    return ledger.requests().output_token_ids.tolist(), ledger.iterations()


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("kind", ["torch", pytest.param("native", marks=needs_library)])
def test_swapping_changes_no_token(kind, policy):
    model = model_on(kind)
    expected, roomy = served(model, kind, policy, num_blocks=20)
    tokens, tight = served(model, kind, policy, num_blocks=5, num_host_blocks=6)
    assert tokens == expected
    assert roomy.num_preemptions.sum() == roomy.num_swapped_blocks.sum() == 0
    assert tight.num_swapped_blocks.sum() > 0  # and nothing was computed again
    assert tight.num_prefill_tokens.sum() == roomy.num_prefill_tokens.sum()


def filled_cache(num_blocks: int, spec: ModelSpec = SPEC) -> KVCache:
    cache = KVCache(spec, num_blocks, 4, DEVICE, torch.float32)
    for i, tensor in enumerate(cache.tensors):
        tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape) % 100 + i)
    return cache


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5), st.integers(0, 3)), max_size=24))
def test_copies_are_made_in_their_order(moves):
    """Block by block, with plain indexing; a block may go out and its place be taken within one
    batch.
    """
    copies = []
    for is_out, device_block, host_block in moves:
        same_way = [copy for copy in copies if copy.is_out == is_out]
        if any(
            copy.host_block == host_block or copy.device_block == device_block for copy in same_way
        ):
            continue  # a block manager gives no block twice
        copies.append(Copy(is_out, device_block, host_block))
    cache, expected = filled_cache(6), filled_cache(6)
    on_host = [torch.zeros(SPEC.num_layers, 4, *tensor.shape[2:]) for tensor in expected.tensors]
    memory.HostPool(cache, 4).make(copies)
    for is_out, device_block, host_block in copies:
        for tensor, host in zip(expected.tensors, on_host, strict=True):
            if is_out:
                host[:, host_block] = tensor[:, device_block].cpu()
            else:
                tensor[:, device_block] = host[:, host_block].to(DEVICE)
    assert torch.equal(cache.keys, expected.keys)
    assert torch.equal(cache.values, expected.values)


def test_a_cache_in_host_memory_must_fit_it():
    backend = TorchBackend(device="cpu", dtype="float32")
    with pytest.raises(UserError, match=r"cache\.num_host_blocks: .* host memory"):
        backend.check(SPEC, 16, host_kv_tokens=10**12)
    backend.check(SPEC, 16, host_kv_tokens=16)


# -- simulated -------------------------------------------------------------------------------------

HOSTED = replace(LINKED, host_bytes_per_second=1000.0)


def swapped_batch(num_blocks: int) -> Batch:
    batch = Batch()
    batch.add(SequenceState(Request(0, 0.0, 8, 2), order=0), 8)
    batch.copies = [Copy(True, i, i) for i in range(num_blocks)]
    batch.num_swapped_tokens = 4 * num_blocks
    return batch


def test_swapping_takes_the_bytes_over_the_hosts_link():
    cost = make_cost_model("analytic", SPEC, HOSTED, 2)
    seconds = 12 * SPEC.kv_bytes_per_token(2) / 1000
    with_swap, without = (cost.iteration_time(swapped_batch(num_blocks)) for num_blocks in (3, 0))
    assert with_swap - without == pytest.approx(seconds)
    times = cost.operation_times(swapped_batch(3))
    assert times["swap"] == pytest.approx(seconds)
    assert sum(times.values()) == pytest.approx(with_swap)
    assert "swap" not in cost.operation_times(swapped_batch(0))


def test_a_summary_counts_swapped_blocks_and_their_bytes():
    blocks = {"num_blocks": 5, "block_size": 2, "num_host_blocks": 5, "preemption": "swap"}
    ledger = Ledger()
    scheduler = scheduler_for(SarathiServe(chunk=100, watermark=0.0), **blocks)
    run_engine(requests_of((4, 4), (4, 4)), scheduler, SimulatedExecutor(lambda batch: 1.0), ledger)
    peaks = Peaks(1e12, 1e9, "by hand")
    iterations = add_costs(ledger.iterations(), SPEC, 2, peaks)
    summary = summarise(iterations, ledger.requests(), peaks, None)
    assert summary["num_swapped_blocks"] == 4  # two out, two in
    assert summary["swap_bytes"] == 4 * 2 * SPEC.kv_bytes_per_token(2)


def test_hardware_of_an_unknown_host_swaps_nothing():
    backend = SimulatedBackend(replace(TOY, memory_bytes=1e9))
    backend.check(SPEC, 16)
    with pytest.raises(UserError, match=r"host_bytes_per_second.* or set preemption=recompute"):
        backend.check(SPEC, 16, host_kv_tokens=16)
