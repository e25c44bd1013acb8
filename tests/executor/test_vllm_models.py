"""Models that vLLM loads and the lab does not compute: tokens, and what tables leave blank."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import greedy_tokens
from quantised_checkpoints import make_quantised
from vllm_engine import SIZES, TINY, backend_of, requests_of_tokens, served, tokens_of

from sarathi_lab.config.errors import UserError
from sarathi_lab.model.checkpoint import AutoModel
from sarathi_lab.model.roofline import Peaks
from sarathi_lab.policy import Orca, RequestLevel, Sarathi, SarathiServe
from sarathi_lab.results.metrics import add_costs, summarise

pytestmark = pytest.mark.vllm

SHARED = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": TINY.vocab_size,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {"num_key_value_heads": 1, "intermediate_size": 96}
# Layers whose windows differ: vLLM keeps one list of blocks for both, as the lab asks it to.
ALTERNATING = {
    "head_dim": 32,
    "sliding_window": 64,
    "layer_types": ["sliding_attention", "full_attention"],
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 128,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "Phi3": {**GROUPED, "original_max_position_embeddings": 512},
    "Gemma2": {
        **GROUPED,
        "head_dim": 32,
        "sliding_window": 64,  # of every second layer
        "query_pre_attn_scalar": 32,
    },
    "OPT": {"ffn_dim": 96, "word_embed_proj_dim": 64, "do_layer_norm_before": True},
    "Gemma3": {**GROUPED, **ALTERNATING, "query_pre_attn_scalar": 32},
    "GptOss": {**GROUPED, **ALTERNATING, "num_local_experts": 4, "num_experts_per_tok": 2},
    "DeepseekV2": {
        "intermediate_size": 96,
        "num_key_value_heads": 2,
        "first_k_dense_replace": 2,  # no experts
        "q_lora_rank": None,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
        # The latent of 512 + 64 values that vLLM's attention on a CPU computes.
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "rope_parameters": YARN,
    },
}
LATENT = ("DeepseekV2",)
POLICIES = (
    (RequestLevel(), 48),
    (Orca(), 48),
    (Sarathi(chunk=48), 48),
    (SarathiServe(chunk=48, reserve="chunk"), 9),
)


def saved(family: str, folder: Path, settings: dict[str, Any]) -> Any:
    """Save random weights of a family of transformers, and return its model."""
    import transformers

    torch.manual_seed(0)
    name = "Gemma3Text" if family == "Gemma3" else family
    config = getattr(transformers, f"{name}Config")(**SHARED, **settings)
    model = getattr(transformers, f"{family}ForCausalLM")(config).float().eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:  # else tokens are all alike
            is_embedding = parameter.shape[0] == TINY.vocab_size
            torch.nn.init.normal_(parameter, std=1.0 if is_embedding else 0.3)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("family", SETTINGS)
def test_tokens_are_those_of_transformers(family, tmp_path):
    theirs = saved(family, tmp_path / family, SETTINGS[family])
    requests = requests_of_tokens(6)
    greedy = greedy_tokens(theirs, requests)
    # By itself vLLM takes AMX for latents where the CPU has it, which computes no float32.
    attention = {"attention_backend": "CPU_MLA"} if family in LATENT else {}
    backend = backend_of(options=attention)
    spec, folder = AutoModel(str(tmp_path / family)).resolve("tiny", backend.read_model)
    assert not spec.has_formulas
    head_size = 512 + 64 if family in LATENT else 32
    assert (spec.num_layers, spec.hidden_size, spec.head_size) == (2, 64, head_size)
    backend.check(spec, 1000)
    assert folder is not None
    sizes = SIZES
    if family in LATENT:
        with pytest.raises(UserError, match=r"of 16 tokens on a cpu; use cache.block_size=16"):
            backend.expect(spec, folder, SIZES)
        sizes = replace(SIZES, block_size=16, num_blocks=2 * SIZES.num_blocks)
    executor = backend.build(spec, folder, sizes)
    for policy, num_blocks in POLICIES:
        num_blocks *= SIZES.block_size // sizes.block_size
        ledger = served(executor, policy, requests, num_blocks, block_size=sizes.block_size)
        assert tokens_of(ledger) == [greedy[request.request_id] for request in requests], policy
    table = add_costs(ledger.iterations(), spec, 4, Peaks(1e12, 1e11, "given"))
    assert table[["flops", "roofline", "mfu", "mbu"]].isna().all(axis=None)
    summary = summarise(table, ledger.requests(), Peaks(1e12, 1e11, "given"), None)
    assert not summary.keys() & {"roofline", "time_over_roofline", "mfu", "mbu"}
    assert all(map(math.isfinite, summary.values()))
    assert summary["kv_read_bytes"] > 0
    executor.close()


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_tokens_of_quantised_weights_are_the_same_under_all_policies(method, tmp_path):
    theirs = make_quantised(method, tmp_path / method, vocab_size=TINY.vocab_size)
    requests = requests_of_tokens(6)
    greedy = greedy_tokens(theirs, requests)
    backend = backend_of(dtype="float16")
    spec, folder = AutoModel(str(tmp_path / method)).resolve("tiny", backend.read_model)
    backend.check(spec, 1000)
    executor = backend.build(spec, folder, SIZES)
    expected = None
    for policy, num_blocks in POLICIES:
        ledger = served(executor, policy, requests, num_blocks)
        tokens = tokens_of(ledger)
        expected = expected or tokens
        assert tokens == expected, policy
    # Of float16 and float32 the first ones are equal, before roundings add up.
    for request, generated in zip(requests, tokens, strict=True):
        assert generated[:2] == greedy[request.request_id][:2]
    table = add_costs(ledger.iterations(), spec, 2, Peaks(1e12, 1e11, "given"))
    assert (table[["roofline", "mfu", "mbu"]] > 0).all(axis=None)
    executor.close()


def test_weights_are_quantised_when_they_are_loaded():
    """By the one way to fp8 of which vLLM's build for CPUs has the operators."""
    backend = backend_of(dtype="bfloat16", options={"quantization": "fp8_per_channel"})
    spec = backend.with_weights(TINY, None)
    backend.check(spec, 1000)
    executor = backend.build(spec, None, SIZES)
    expected = None
    for policy, num_blocks in POLICIES:
        tokens = tokens_of(served(executor, policy, requests_of_tokens(4), num_blocks))
        expected = expected or tokens
        assert tokens == expected, policy
    executor.close()


def test_latent_attention_with_plain_rotations_is_refused_on_a_cpu(tmp_path):
    plain = {**SETTINGS["DeepseekV2"], "rope_parameters": {"rope_type": "default"}}
    saved("DeepseekV2", tmp_path / "plain", plain)
    with pytest.raises(UserError, match="latent attention with plain rotary embeddings on a CPU"):
        backend_of().read_model(tmp_path / "plain")


def test_bytes_of_weights_are_those_of_vllms_configuration():
    def bytes_by(quantisation: str) -> float:
        backend = backend_of(dtype="bfloat16", options={"quantization": quantisation})
        return backend.with_weights(TINY, None).linear_bytes(2)

    assert bytes_by("fp8_per_channel") == 1
    assert bytes_by("mxfp8") == 1 + 1 / 32
    assert bytes_by("mxfp4") == 1 / 2 + 1 / 32
    with pytest.raises(UserError, match="quantises experts, which model tiny-vllm has not"):
        bytes_by("int8_per_channel_weight_only")
    with pytest.raises(UserError, match=r"quantization=awq: vLLM refuses it \(.*config file"):
        bytes_by("awq")
    with pytest.raises(UserError, match="lacks the operator static_scaled_fp8_quant, as on a CPU"):
        bytes_by("fp8_per_tensor")


def test_what_vllm_or_the_lab_does_not_run_is_refused(tmp_path):
    saved("OPT", tmp_path / "opt", SETTINGS["OPT"])
    config = tmp_path / "opt" / "config.json"
    config.write_text(config.read_text().replace("OPTForCausalLM", "NoSuchModel"))
    with pytest.raises(UserError, match=r"opt: vLLM can't load it \(.*; take another"):
        backend_of().read_model(tmp_path / "opt")
    assert backend_of().read_model(tmp_path) is None
