"""Models that vLLM loads and the lab has no formulas for: tokens, and what tables leave blank."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import greedy_tokens
from vllm_engine import SIZES, TINY, backend_of, requests_of_tokens, served, tokens_of

from sarathi_lab.config.errors import UserError
from sarathi_lab.model.checkpoint import AutoModel
from sarathi_lab.model.roofline import Peaks
from sarathi_lab.policy import Orca, Sarathi, SarathiServe
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
SETTINGS: dict[str, dict[str, Any]] = {
    "Phi3": {**GROUPED, "original_max_position_embeddings": 512},
    "Gemma2": {
        **GROUPED,
        "head_dim": 32,
        "sliding_window": 64,  # of every second layer
        "query_pre_attn_scalar": 32,
    },
    "OPT": {"ffn_dim": 96, "word_embed_proj_dim": 64, "do_layer_norm_before": True},
}
POLICIES = (
    (Orca(), 48),
    (Sarathi(chunk=48), 48),
    (SarathiServe(chunk=48, reserve="chunk"), 9),
)


def saved(family: str, folder: Path, settings: dict[str, Any]) -> Any:
    """Save random weights of a family of transformers, and return its model."""
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SHARED, **settings)
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
    backend = backend_of()
    spec, folder = AutoModel(str(tmp_path / family)).resolve("tiny", backend.read_model)
    assert not spec.has_formulas
    assert (spec.num_layers, spec.hidden_size, spec.head_size) == (2, 64, 32)
    backend.check(spec, 1000)
    assert folder is not None
    executor = backend.build(spec, folder, SIZES)
    for policy, num_blocks in POLICIES:
        ledger = served(executor, policy, requests, num_blocks)
        assert tokens_of(ledger) == [greedy[request.request_id] for request in requests], policy
    table = add_costs(ledger.iterations(), spec, 4, Peaks(1e12, 1e11, "given"))
    assert table[["flops", "roofline", "mfu", "mbu"]].isna().all(axis=None)
    summary = summarise(table, ledger.requests(), Peaks(1e12, 1e11, "given"), None)
    assert not summary.keys() & {"roofline", "time_over_roofline", "mfu", "mbu"}
    assert all(map(math.isfinite, summary.values()))
    assert summary["kv_read_bytes"] > 0
    executor.close()


def test_what_vllm_or_the_lab_does_not_run_is_refused(tmp_path):
    saved("OPT", tmp_path / "opt", SETTINGS["OPT"])
    config = tmp_path / "opt" / "config.json"
    config.write_text(config.read_text().replace("OPTForCausalLM", "NoSuchModel"))
    with pytest.raises(UserError, match=r"opt: vLLM can't load it \(.*; take another"):
        backend_of().read_model(tmp_path / "opt")
    assert backend_of().read_model(tmp_path) is None
