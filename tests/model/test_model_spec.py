"""What a model can't be: settings by hand and those of a checkpoint's config.json, refused where a
spec is made.
"""

from __future__ import annotations

import json
from dataclasses import fields, replace
from typing import Any

import pytest
from checkpoints import LLAMA3_ROPE, SIZES

from sarathi_lab.config.errors import UserError
from sarathi_lab.config.instantiate import load_option
from sarathi_lab.model.huggingface import read_spec
from sarathi_lab.model.spec import ModelSpec, RopeScaling

TINY = load_option("model", "tiny")


def refusal(make: Any, **settings: Any) -> str:
    with pytest.raises(UserError) as caught:
        make(**settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def model(**settings: Any) -> ModelSpec:
    return replace(TINY, **settings)


def scaling(**settings: Any) -> RopeScaling:
    return RopeScaling(**{"kind": "llama3", "factor": 2.0, **settings})


@pytest.mark.parametrize("value", [[5], {"a": 1}, -4, 10**400, float("nan"), ""], ids=repr)
def test_every_field_refuses_what_is_not_of_its_kind(value):
    for make in (model, scaling):
        for field in fields(make()):
            assert f"{field.name}=" in refusal(make, **{field.name: value})


@pytest.mark.parametrize(
    "settings",
    [
        {"rotary_fraction": 2},
        {"rotary_fraction": 0.01},
        {"head_size": 15},  # the last entry has no partner
        {"sliding_window": 0},
        {"max_position": None},
        {"rope_theta": 1e-300},
        {"rope_scaling": {"kind": "linear", "factor": 2.0}},
        {"gated_ffn": 1},
        {"num_layers": True},
        {"num_layers": 10**9},
        {"num_kv_heads": 3},
        {"experts_per_token": 1},
        {"num_experts": 2, "experts_per_token": 3},
        {"shared_expert_size": 4},  # beside no others
        {"name": None},
    ],
    ids=str,
)
def test_impossible_models(settings):
    assert f"{next(iter(settings))}=" in refusal(model, **settings)
    assert "parameters" in refusal(model, ffn_size=2**31 - 1, hidden_size=2**31 - 1)


def test_impossible_scaling_of_rotary_frequencies():
    for name, value in {"kind": "yarn", "factor": 1e-320, "low_freq_factor": 4.0}.items():
        assert f"{name}=" in refusal(scaling, **{name: value})


def spec_of(tmp_path, family: str, **settings: Any) -> ModelSpec:
    config = {"model_type": family, **SIZES, **settings}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return read_spec(tmp_path)


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {"max_position_embeddings": None}),
        ("llama", {"partial_rotary_factor": 0.5}),
        ("llama", {"tie_word_embeddings": "no"}),
        ("llama", {"num_key_value_heads": 3}),
        *(("llama", {"num_attention_heads": value}) for value in (0, -4, None, "4", 10**30)),
        ("llama", {"rope_scaling": "yarn"}),
        ("llama", {"rope_scaling": {**LLAMA3_ROPE, "factor": "2"}}),
        ("llama", {"rope_scaling": {**LLAMA3_ROPE, "high_freq_factor": 1.0}}),
        ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}),
        ("llama", {"rope_parameters": {"full_attention": {"rope_type": "default"}}}),
        ("llama", {"rms_norm_eps": 10**400}),
        ("llama", {"hidden_act": ["silu"]}),
        ("llama", {"layer_types": 5}),
        ("qwen2", {"layer_types": ["full_attention", "sliding_attention"]}),
        ("qwen2", {"use_sliding_window": "no"}),
        ("mistral", {"sliding_window": True}),
        ("gpt_neox", {"use_parallel_residual": False, "rotary_pct": 5}),
        (["llama"], {}),
    ],
    ids=str,
)
def test_configs_that_are_refused(tmp_path, family, settings):
    assert "config.json: " in refusal(spec_of, tmp_path=tmp_path, family=family, **settings)


@pytest.mark.parametrize("text", ["[" * 200_000, "[]", "\0"])
def test_configs_that_are_no_object(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    assert "is not" in refusal(read_spec, directory=tmp_path)
