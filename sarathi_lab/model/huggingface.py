"""A Hugging Face config.json as a `ModelSpec`, without transformers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sarathi_lab.config.errors import UserError
from sarathi_lab.model.spec import ModelSpec, RopeScaling

Config = Mapping[str, Any]

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


def read_config(directory: Path) -> dict[str, Any]:
    """`directory`/config.json. Raises UserError if there is none, or if it is no JSON object."""
    path = directory / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(
            f"model.path={directory} has no config.json; name a folder saved by transformers' "
            "save_pretrained"
        ) from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} can't be read ({error}); fetch the checkpoint again") from None
    if not isinstance(config, dict):
        raise UserError(f"{path} is not a JSON object; fetch the checkpoint again")
    return config


def read_spec(directory: Path) -> ModelSpec:
    """The checkpoint's spec. Raises UserError, naming the setting, for what is not supported."""
    config = read_config(directory)
    family = str(config.get("model_type"))
    if family not in FAMILIES:
        raise UserError(
            f"model_type={family} in {directory} is not supported; use one of {', '.join(FAMILIES)}"
        )
    if config.get("quantization_config"):
        raise UserError(
            f"{directory} holds quantized weights, which are not supported; take the "
            "unquantized model"
        )
    try:
        fields = {**_shared(config), **FAMILIES[family](config)}
    except KeyError as error:
        raise UserError(
            f"{directory}/config.json lacks {error}; fetch the checkpoint again"
        ) from None
    except (TypeError, ValueError) as error:
        raise UserError(
            f"{directory}/config.json is broken ({error}); fetch the checkpoint again"
        ) from None
    return ModelSpec(name=directory.resolve().name, **fields)


def _shared(config: Config) -> dict[str, Any]:
    """What all families call by the same names."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    num_heads = config["num_attention_heads"]

    def rotary(name: str, neox_name: str, default: float) -> float:
        return float(rope.get(name) or config.get(name) or config.get(neox_name, default))

    return {
        "num_layers": config["num_hidden_layers"],
        "hidden_size": config["hidden_size"],
        "num_heads": num_heads,
        "num_kv_heads": config.get("num_key_value_heads") or num_heads,
        "head_size": config.get("head_dim") or config["hidden_size"] // num_heads,
        "ffn_size": config["intermediate_size"],
        "vocab_size": config["vocab_size"],
        "max_position": config.get("max_position_embeddings", 2048),
        "activation": _activation(config.get("hidden_act", "silu")),
        "rope_theta": rotary("rope_theta", "rotary_emb_base", 10000),
        "rope_scaling": _rope_scaling(rope, config),
        "rotary_fraction": rotary("partial_rotary_factor", "rotary_pct", 1.0),
        "tie_embeddings": bool(config.get("tie_word_embeddings", False)),
    }


def _activation(name: str) -> str:
    if name not in ACTIVATIONS:
        raise UserError(
            f"hidden_act={name} is not supported; use a model with one of {', '.join(ACTIVATIONS)}"
        )
    return ACTIVATIONS[name]


def _rope_scaling(rope: Config, config: Config) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling("linear", float(rope["factor"]))
    if kind == "llama3":
        low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
        original = "original_max_position_embeddings"
        length = int(rope.get(original) or config[original])
        return RopeScaling("llama3", float(rope["factor"]), low, high, length)
    raise UserError(
        f"rope_type={kind} is not supported; use a model with default, linear or llama3"
    )


def _llama(config: Config) -> dict[str, Any]:
    bias = bool(config.get("attention_bias", False))
    ffn_bias = bool(config.get("mlp_bias", False))
    return {**_rms(config), "qkv_bias": bias, "out_bias": bias, "ffn_bias": ffn_bias}


def _rms(config: Config) -> dict[str, Any]:
    return {"norm_eps": config.get("rms_norm_eps", 1e-6)}


def _mistral(config: Config) -> dict[str, Any]:
    return {**_rms(config), "sliding_window": config.get("sliding_window")}


def _qwen2(config: Config) -> dict[str, Any]:
    if config.get("use_sliding_window"):
        raise UserError(
            "use_sliding_window=true is not supported for Qwen models; use one with full attention"
        )
    return {**_rms(config), "qkv_bias": True}


def _qwen3(config: Config) -> dict[str, Any]:
    bias = bool(config.get("attention_bias", False))
    # Qwen3's head size is not hidden_size / num_heads, so it has to be said.
    own = {"qkv_bias": bias, "out_bias": bias, "qk_norm": True, "head_size": config["head_dim"]}
    return {**_qwen2(config), **own}


def _gpt_neox(config: Config) -> dict[str, Any]:
    if config.get("use_parallel_residual", True):
        raise UserError(
            "use_parallel_residual=true (GPT-NeoX) is not supported: attention and FFN run one "
            "after the other here; use a sequential model"
        )
    bias = bool(config.get("attention_bias", True))
    return {
        "norm": "layer",
        "norm_eps": config.get("layer_norm_eps", 1e-5),
        "gated_ffn": False,
        "qkv_bias": bias,
        "out_bias": bias,
        "ffn_bias": True,
    }


FAMILIES: Mapping[str, Callable[[Config], dict[str, Any]]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gpt_neox": _gpt_neox,
}
