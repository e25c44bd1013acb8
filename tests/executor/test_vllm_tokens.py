"""Greedy tokens on vLLM's workers under the lab's policies: transformers' and executor=torch's."""

from __future__ import annotations

import pytest
import torch
from checkpoints import greedy_tokens
from vllm_engine import (
    SIZES,
    TINY,
    requests_of_tokens,
    served,
    tiny_checkpoint,
    tokens_of,
)

from sarathi_lab.executor.torch.backend import TorchBackend
from sarathi_lab.policy import (
    TGI,
    ChunkedOnly,
    FastDeploy,
    LightLLM,
    LlamaCpp,
    NanoVllm,
    Orca,
    PrefillFirst,
    RequestLevel,
    Sarathi,
    SarathiServe,
    SGLang,
    TensorRTLLM,
    VllmV1,
)

pytestmark = pytest.mark.vllm

SCARCE, AMPLE = 9, 48  # blocks: four sequences have up to 32
POLICIES = {
    "request_level": (RequestLevel(), AMPLE),
    "orca": (Orca(), AMPLE),
    "prefill_first": (PrefillFirst(watermark=0.0), SCARCE),
    "sarathi": (Sarathi(chunk=48), AMPLE),
    "sarathi_serve": (SarathiServe(chunk=48, reserve="chunk"), SCARCE),
    "chunked_only": (ChunkedOnly(chunk_size=48), AMPLE),
    "vllm_v1": (VllmV1(max_num_batched_tokens=64), SCARCE),
    "vllm_v1_threshold": (VllmV1(64, 17, scheduler_reserve_full_isl=False), SCARCE),
    "sglang": (SGLang(chunked_prefill_size=48, init_new_token_ratio=0.0), SCARCE),
    "trtllm": (TensorRTLLM(max_num_tokens=64, chunk_unit_size=32), AMPLE),
    "tgi": (TGI(max_batch_prefill_tokens=64), AMPLE),
    "lightllm": (LightLLM(batch_max_tokens=64), AMPLE),
    "nano_vllm": (NanoVllm(max_num_batched_tokens=256), SCARCE),
    "llama_cpp": (LlamaCpp(n_ubatch=48, n_batch=64), AMPLE),
    "fastdeploy": (FastDeploy(max_num_batched_tokens=64), SCARCE),
}


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """The tokens of transformers, which are those of executor=torch."""
    import transformers

    requests = requests_of_tokens()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tiny_checkpoint(), dtype=torch.float32
    )
    greedy = greedy_tokens(model, requests)
    backend = TorchBackend(device="cpu", dtype="float32", kernels="torch")
    ours = served(backend.build(TINY, tiny_checkpoint(), SIZES), Sarathi(chunk=48), requests, AMPLE)
    expected = [greedy[request.request_id] for request in requests]
    assert tokens_of(ours) == expected
    return expected


@pytest.mark.parametrize("name", POLICIES)
def test_policies(name, vllm_executor, expected):
    policy, num_blocks = POLICIES[name]
    ledger = served(vllm_executor, policy, requests_of_tokens(), num_blocks)
    assert tokens_of(ledger) == expected


def test_policies_preempt(vllm_executor, expected):
    """What the test above counts on: with few blocks sequences are computed again."""
    policy, num_blocks = POLICIES["sarathi_serve"]
    ledger = served(vllm_executor, policy, requests_of_tokens(), num_blocks)
    assert ledger.iterations().num_preemptions.sum() > 3


def test_prefix_caching(vllm_executor):
    requests = requests_of_tokens(prefix=70)
    alone = served(vllm_executor, Sarathi(chunk=48), requests, AMPLE)
    for policy, num_blocks in (
        (Sarathi(chunk=48), AMPLE),
        (SarathiServe(chunk=48, reserve="chunk"), SCARCE),
    ):
        shared = served(vllm_executor, policy, requests, num_blocks, shares_prefixes=True)
        assert tokens_of(shared) == tokens_of(alone)
        assert shared.requests().prefix_hit_tokens.sum() > 64


def test_times_and_facts(vllm_executor):
    table = served(vllm_executor, Orca(), requests_of_tokens(4), AMPLE).iterations()
    assert (table.end > table.start).all()
    assert (table.start.iloc[1:].to_numpy() >= table.end.iloc[:-1].to_numpy()).all()
    assert (table.host_time > 0).all()
    facts = vllm_executor.workers.facts()
    assert facts["runner"] == "v1"
    assert facts["attention"] == "CPU_ATTN"
    assert facts["max_num_batched_tokens"] == SIZES.max_batch_tokens
