"""A Hugging Face config.json as a `ModelSpec`, without transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, get_args

import yaml

from sarathi_lab.config.errors import UserError, require_bool, require_int
from sarathi_lab.config.paths import read_object
from sarathi_lab.model.spec import ModelSpec, RopeKind, RopeScaling

Config = Mapping[str, Any]

AGAIN = "fetch the checkpoint again"
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


@cache
def known(what: str) -> Mapping[str, Any]:
    """Return a section of huggingface.yaml: "defaults", "own_defaults" or "tensors"."""
    found: Any = yaml.safe_load(Path(__file__).with_name("huggingface.yaml").read_text())
    return found[what]


def read_config(directory: Path) -> Config:
    """`directory`/config.json, what it leaves out as transformers takes it. Raises UserError if
    there is none, if it is no JSON object, or of an architecture that is not supported.
    """
    path = directory / "config.json"
    if not path.exists():
        raise UserError(
            f"model.path={directory} has no config.json; name a folder saved by transformers' "
            "save_pretrained"
        )
    config = read_object(path, AGAIN)
    family = _supported(f"{path}: model_type", config.get("model_type"), FAMILIES)
    return {**known("defaults"), **known("own_defaults").get(family, {}), **config}


def read_spec(directory: Path) -> ModelSpec:
    """The checkpoint's spec. Raises UserError, naming the setting, for what is not supported."""
    config = read_config(directory)
    try:
        if config.get("quantization_config"):
            raise UserError("quantized weights are not supported; take the unquantized model")
        fields = {**_shared(config), **FAMILIES[config["model_type"]](config)}
        return ModelSpec(name=directory.resolve().name, **fields)
    except KeyError as error:
        raise UserError(f"{directory}/config.json lacks {error}; {AGAIN}") from None
    except UserError as error:
        raise UserError(f"{directory}/config.json: {error}") from None


def _supported(name: str, value: Any, valid: Iterable[str]) -> str:
    """`value` if it is one of `valid`, else UserError."""
    if value not in (options := tuple(valid)):
        raise UserError(
            f"{name}={value!r} is not supported; take a model with one of {', '.join(options)}"
        )
    return str(value)


def _shared(config: Config) -> dict[str, Any]:
    """Return the fields that all families share."""
    hidden_size, num_heads = config["hidden_size"], config["num_attention_heads"]
    num_kv_heads, head_size = config.get("num_key_value_heads"), config.get("head_dim")
    kinds = config.get("layer_types") or []
    if not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds):
        raise UserError(f"layer_types={kinds!r} is not supported; take a model with full attention")
    if head_size is None:
        fix = "correct it, or name the size as head_dim"
        require_int("num_attention_heads", num_heads, 1, fix)
        head_size = require_int("hidden_size", hidden_size, 1, fix) // num_heads
    return {
        "num_layers": config["num_hidden_layers"],
        "hidden_size": hidden_size,
        "num_heads": num_heads,
        "num_kv_heads": num_heads if num_kv_heads is None else num_kv_heads,
        "head_size": head_size,
        "ffn_size": config["intermediate_size"],
        "vocab_size": config["vocab_size"],
        "max_position": config["max_position_embeddings"],
        "activation": ACTIVATIONS[_supported("hidden_act", config["hidden_act"], ACTIVATIONS)],
        "tie_embeddings": config["tie_word_embeddings"],
    }


def _rotary(config: Config, theta: str, fraction: str) -> dict[str, Any]:
    """Rotary settings, in an object by new or old names, or by the two names beside it."""
    rope: Config = {}
    for name in ("rope_parameters", "rope_scaling"):  # transformers, too, heeds the old name more
        given = {} if config.get(name) is None else config[name]
        if not isinstance(given, dict) or any(isinstance(value, dict) for value in given.values()):
            raise UserError(f"{name}={given!r} is not one set of rotary settings; {AGAIN}")
        rope = given or rope
    return {
        "rope_theta": rope.get("rope_theta", config[theta]),
        "rotary_fraction": rope.get("partial_rotary_factor", config[fraction]),
        "rope_scaling": _rope_scaling(rope, config),
    }


def _rope_scaling(rope: Config, config: Config) -> RopeScaling | None:
    kinds = ("default", *get_args(RopeKind))
    kind: Any = _supported("rope_type", rope.get("rope_type", rope.get("type", "default")), kinds)
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling(kind, rope["factor"])
    original = "original_max_position_embeddings"
    length = config.get(original, rope.get(original, config["max_position_embeddings"]))
    return RopeScaling(
        kind, rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"], length
    )


def _rms(config: Config) -> dict[str, Any]:
    """Of all that descend from Llama. Raises UserError for heads that are rotated in part."""
    rotary = _rotary(config, "rope_theta", "partial_rotary_factor")
    if (fraction := rotary["rotary_fraction"]) != 1:
        raise UserError(
            f"partial_rotary_factor={fraction!r} is not supported: transformers rotates whole "
            f"heads of a {config['model_type']} all the same; take it out, or another model"
        )
    return {**rotary, "norm_eps": config["rms_norm_eps"]}


def _llama(config: Config) -> dict[str, Any]:
    bias = config["attention_bias"]
    return {**_rms(config), "qkv_bias": bias, "out_bias": bias, "ffn_bias": config["mlp_bias"]}


def _mistral(config: Config) -> dict[str, Any]:
    return {**_rms(config), "sliding_window": config["sliding_window"]}


def _qwen2(config: Config) -> dict[str, Any]:
    if require_bool("use_sliding_window", config["use_sliding_window"]):
        raise UserError(
            "use_sliding_window=true is not supported for Qwen models; use one with full attention"
        )
    return {**_rms(config), "qkv_bias": True}


def _qwen3(config: Config) -> dict[str, Any]:
    bias = config["attention_bias"]
    return {**_qwen2(config), "qkv_bias": bias, "out_bias": bias, "qk_norm": True}


def _mixtral(config: Config) -> dict[str, Any]:
    return {**_mistral(config), **_mixture(config, "intermediate_size")}


def _qwen_moe(config: Config) -> dict[str, Any]:
    """Return the fields that mixtures of Qwen share. Raises UserError for dense layers."""
    for name, kept in (("decoder_sparse_step", 1), ("mlp_only_layers", None)):
        if (value := config[name] or None) != kept:
            raise UserError(
                f"{name}={value!r} is not supported; take a model all of whose layers have experts"
            )
    return {
        **_mixture(config, "moe_intermediate_size"),
        "normalise_experts": config["norm_topk_prob"],
    }


def _qwen2_moe(config: Config) -> dict[str, Any]:
    return {
        **_qwen2(config),
        **_qwen_moe(config),
        "qkv_bias": config["qkv_bias"],
        "shared_expert_size": config["shared_expert_intermediate_size"],
    }


def _qwen3_moe(config: Config) -> dict[str, Any]:
    return {**_qwen3(config), **_qwen_moe(config)}


def _mixture(config: Config, size: str) -> dict[str, Any]:
    """`num_local_experts` is what today's transformers saves for both names."""
    number = config.get("num_local_experts", config["num_experts"])
    return {
        "num_experts": require_int("num_experts", number, 1, AGAIN),
        "experts_per_token": config["num_experts_per_tok"],
        "ffn_size": config[size],
    }


def _gpt_neox(config: Config) -> dict[str, Any]:
    if require_bool("use_parallel_residual", config["use_parallel_residual"]):
        raise UserError(
            "use_parallel_residual=true (GPT-NeoX) is not supported: attention and FFN run one "
            "after the other here; use a sequential model"
        )
    return {
        **_rotary(config, "rotary_emb_base", "rotary_pct"),
        "norm": "layer",
        "norm_eps": config["layer_norm_eps"],
        "gated_ffn": False,
        "qkv_bias": config["attention_bias"],
        "out_bias": config["attention_bias"],
        "ffn_bias": True,
    }


FAMILIES: Mapping[str, Callable[[Config], dict[str, Any]]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "mixtral": _mixtral,
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe,
    "gpt_neox": _gpt_neox,
}
