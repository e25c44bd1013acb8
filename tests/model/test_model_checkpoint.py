"""Checkpoints: what is read, what is refused before anything is loaded, and random weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from checkpoints import SIZES, make_checkpoint
from hydra.utils import instantiate
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file

import sarathi_lab as lab
from sarathi_lab.config.errors import UserError
from sarathi_lab.config.paths import CONF
from sarathi_lab.model.checkpoint import AutoModel
from sarathi_lab.model.huggingface import FAMILIES, read_spec
from sarathi_lab.model.spec import ModelSpec
from sarathi_lab.model.transformer import Transformer
from sarathi_lab.model.weights import fillers, load_model
from sarathi_lab.run import main

CPU = torch.device("cpu")


def named(name: str) -> ModelSpec:
    return instantiate(OmegaConf.load(CONF / "model" / f"{name}.yaml"))


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> Path:
    """A sharded checkpoint without defects."""
    directory = tmp_path_factory.mktemp("sound")
    make_checkpoint("llama", directory, max_shard_size="60KB")
    assert len(list(directory.glob("*.safetensors"))) > 2
    return directory


@pytest.fixture
def whole(sound, tmp_path) -> Path:
    """A copy of it in one file, to break."""
    tensors = {
        name: one for file in sound.glob("*.safetensors") for name, one in load_file(file).items()
    }
    save_file(tensors, tmp_path / "model.safetensors")
    shutil.copy(sound / "config.json", tmp_path)
    return tmp_path


def test_a_run_serves_prompts_of_a_file_on_a_checkpoint(sound, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt_token_ids": [5, 7, 9], "output_len": 4}\n' * 2)
    model = [f"model.path={sound}", "device=cpu", "dtype=float32", "baselines=[]"]
    work = ["workload=prompts", f"workload.path={prompts}", "policy=sarathi_serve", "chunk=8"]
    assert main([*model, *work, "tracking=none", f"output={tmp_path}/out"]) == 0
    (tokens,) = set(map(tuple, lab.load(tmp_path / "out").requests.output_token_ids))
    assert len(tokens) == 4


@pytest.fixture
def copy(sound, tmp_path) -> Path:
    """A copy of it to break."""
    return Path(shutil.copytree(sound, tmp_path / "copy"))


def edit_config(directory: Path, **changes: object) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def refusal(directory: Path) -> str:
    with pytest.raises(UserError) as caught:
        AutoModel(str(directory)).resolve("unused")
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_sharded_equals_whole(sound, tmp_path):
    theirs = make_checkpoint("llama", tmp_path)
    ours = load_model(*AutoModel(str(sound)).resolve("unused"), CPU, torch.float32, 0)
    weights = dict(theirs.named_parameters())
    assert torch.equal(
        ours.layers[1].ffn_down.weight, weights["model.layers.1.mlp.down_proj.weight"]
    )
    qkv = torch.cat([weights[f"model.layers.0.self_attn.{name}_proj.weight"] for name in "qkv"])
    assert torch.equal(ours.layers[0].qkv_proj.weight, qkv)


def test_every_parameter_is_filled(sound):
    """Loaded over poison: none may stay as it was made."""
    spec, found = AutoModel(str(sound)).resolve("unused")
    parameters = dict(Transformer(spec, CPU, torch.float32).named_parameters())
    for name, fill in fillers(spec, found, parameters, 0, CPU):
        parameters[name].fill_(float("nan"))
        fill(parameters[name])
        assert torch.isfinite(parameters.pop(name)).all()
    assert not parameters


def test_missing_things_are_named(copy):
    assert "missing" in refusal(copy / "nothing")
    shard = sorted(copy.glob("*.safetensors"))[1]
    assert "is a file" in refusal(shard)
    shard.unlink()
    assert shard.name in refusal(copy)
    for file in copy.glob("*.safetensors*"):
        file.unlink()
    assert "has no weights" in refusal(copy)
    (copy / "config.json").write_text("{")
    assert "is not JSON" in refusal(copy)
    (copy / "config.json").unlink()
    assert "no config.json" in refusal(copy)


def test_truncated_weights_are_named(copy):
    shard = max(copy.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    content = shard.read_bytes()
    for keep in (0, 5, len(content) // 2, len(content) - 1):
        shard.write_bytes(content[:keep])
        assert f"{shard.name} is missing, truncated or corrupt" in refusal(copy)


def test_tensors_that_do_not_fit_the_config(copy):
    edit_config(copy, num_hidden_layers=3)
    assert "lacks model.layers.2" in refusal(copy)
    edit_config(copy, num_hidden_layers=2, intermediate_size=96)
    assert "by config.json, [96, 48]" in refusal(copy)
    config = json.loads((copy / "config.json").read_text())
    del config["hidden_size"]
    (copy / "config.json").write_text(json.dumps(config))
    assert "hidden_size is missing" in refusal(copy)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "mamba"}, ["model_type='mamba'", "llama, mistral"]),
        ({"hidden_act": "relu"}, ["hidden_act='relu'", "silu"]),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, ["rope_type='yarn'", "llama3"]),
        ({"quantization_config": {"bits": 4}}, ["quantization_config={'bits': 4}"]),
        ({"model_type": "gpt_neox", "use_parallel_residual": True}, ["use_parallel_residual"]),
        ({"model_type": "qwen2", "use_sliding_window": True}, ["use_sliding_window"]),
    ],
)
def test_unsupported_architectures_are_named(copy, changes, words):
    edit_config(copy, **changes)
    message = refusal(copy)
    for word in words:
        assert word in message


def test_a_broken_index(copy):
    for text in ("[]", "[" * 200_000, '{"weight_map": {"a": 1, "b": "c"}}'):
        (copy / "model.safetensors.index.json").write_text(text)
        assert "model.safetensors.index.json is" in refusal(copy)


def test_a_leftover_file_is_told_from_the_checkpoints_own(copy):
    shard = sorted(copy.glob("*.safetensors"))[0]
    shutil.copy(shard, copy / "leftover.safetensors")
    AutoModel(str(copy)).resolve("unused")  # the index does not name it
    (copy / "model.safetensors.index.json").unlink()
    assert " twice, the second in " in refusal(copy)


def rewrite(directory: Path, **tensors: torch.Tensor) -> None:
    """Put `tensors` in the place of those of the file that holds all."""
    file = directory / "model.safetensors"
    save_file({**load_file(file), **tensors}, file)


def test_weights_that_are_no_floats_are_refused(whole):
    for kind in (torch.int8, torch.bool, torch.float8_e4m3fn):
        rewrite(whole, **{"model.layers.0.mlp.down_proj.weight": torch.ones(48, 80).to(kind)})
        assert "has to be one of F64, F32, BF16, F16" in refusal(whole)


def test_a_tensor_that_the_config_has_no_place_for(whole):
    rewrite(whole, **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(6)})
    AutoModel(str(whole)).resolve("unused")  # follows from the settings
    edit_config(whole, num_hidden_layers=1)
    assert "9 tensors that its config.json has no place for" in refusal(whole)


def test_an_output_head_beside_a_tied_embedding_has_to_equal_it(whole):
    edit_config(whole, tie_word_embeddings=True)
    spec, found = AutoModel(str(whole)).resolve("unused")
    with pytest.raises(UserError, match=r"lm_head.weight .* differs from the embedding"):
        load_model(spec, found, CPU, torch.float32, 0)
    embedding = load_file(whole / "model.safetensors")["model.embed_tokens.weight"]
    rewrite(whole, **{"lm_head.weight": embedding.clone()})
    assert load_model(spec, found, CPU, torch.float32, 0).spec.tie_embeddings


def test_old_style_rope_settings_are_read_like_the_new(copy):
    new, _ = AutoModel(str(copy)).resolve("unused")
    config = json.loads((copy / "config.json").read_text())
    del config["rope_parameters"]
    config |= {"rope_theta": 1234.0, "rope_scaling": {"type": "linear", "factor": 3.0}}
    (copy / "config.json").write_text(json.dumps(config))
    old, _ = AutoModel(str(copy)).resolve("unused")
    assert new.rope_scaling is None
    assert old.rope_theta == 1234.0
    assert (old.rope_scaling.kind, old.rope_scaling.factor) == ("linear", 3.0)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_what_a_config_leaves_out_is_as_transformers_takes_it(tmp_path, family):
    import transformers

    own = {"use_parallel_residual": False} if family == "gpt_neox" else {}
    sizes = {"num_attention_heads": 64, "hidden_size": 512}  # which all their defaults divide
    config = {"model_type": family, **SIZES, **own, **sizes}
    del config["max_position_embeddings"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = read_spec(tmp_path)
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    assert found.max_position == theirs.max_position_embeddings
    assert found.num_kv_heads == getattr(theirs, "num_key_value_heads", 64)
    assert found.head_size == (getattr(theirs, "head_dim", None) or 8)
    assert found.sliding_window == (getattr(theirs, "sliding_window", None) or None)
    assert found.tie_embeddings == theirs.tie_word_embeddings
    assert found.rope_theta == theirs.rope_parameters["rope_theta"]
    assert found.rotary_fraction == theirs.rope_parameters.get("partial_rotary_factor", 1.0)
    assert found.activation == theirs.hidden_act
    epsilon = "layer_norm_eps" if family == "gpt_neox" else "rms_norm_eps"
    assert found.norm_eps == getattr(theirs, epsilon)
    assert found.num_experts == getattr(theirs, "num_experts", 0)
    assert found.experts_per_token == getattr(theirs, "num_experts_per_tok", 0)
    assert found.shared_expert_size == getattr(theirs, "shared_expert_intermediate_size", 0)
    assert found.ffn_size == getattr(theirs, "moe_intermediate_size", 80)
    is_qwen = found.num_experts and family != "mixtral"
    assert found.normalise_experts == (theirs.norm_topk_prob if is_qwen else True)
    assert found.qkv_bias == bool(
        getattr(theirs, "qkv_bias", family == "qwen2" or getattr(theirs, "attention_bias", False))
    )


def test_a_hub_id_that_cannot_be_had_is_one_line():
    assert "some/model is neither a folder here nor to be had" in refusal(Path("some/model"))


def test_random_weights_follow_their_seed():
    spec = named("tiny")
    one, same, other = (load_model(spec, None, CPU, torch.float32, seed) for seed in (1, 1, 2))
    assert torch.equal(one.layers[0].qkv_proj.weight, same.layers[0].qkv_proj.weight)
    assert not torch.equal(one.layers[0].qkv_proj.weight, other.layers[0].qkv_proj.weight)


def test_simulation_only_shapes_are_not_loaded():
    with pytest.raises(UserError, match="executor=simulated"):
        load_model(named("gpt3-175b"), None, CPU, torch.float32, 0)


def test_published_sizes():
    """The paper's have 12 H^2 parameters a layer, and 2 L H bytes of 2-byte keys and values."""
    for name, layers, hidden in (("7b", 32, 4096), ("13b", 40, 5120), ("33b", 60, 6656)):
        spec = named(name)
        assert spec.num_linear_params == 12 * layers * hidden**2
        assert spec.kv_bytes_per_token(2) == 2 * layers * hidden * 2
    sizes = {"llama3-8b": 8.03e9, "qwen3-8b": 8.19e9, "gpt3-175b": 175e9, "30m": 28e6}
    for name, size in sizes.items():
        assert named(name).num_params == pytest.approx(size, rel=0.02)
