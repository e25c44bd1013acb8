"""A Hugging Face config.json as a `ModelSpec`, without transformers, and how checkpoints name the
tensors that fill the decoder's parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import yaml

from sarathi_lab.config.errors import UserError
from sarathi_lab.config.paths import read_object
from sarathi_lab.model.spec import ModelSpec, RopeKind, RopeScaling

if TYPE_CHECKING:
    from torch import Tensor

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
def _known(what: str) -> Mapping[str, Any]:
    """Return a section of huggingface.yaml: "defaults", "own_defaults" or "tensors"."""
    sections: Any = yaml.safe_load(Path(__file__).with_name("huggingface.yaml").read_text())
    return sections[what]


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
    _supported(f"{path}: model_type", config.get("model_type"), FAMILIES)
    return with_defaults(config)


def with_defaults(config: Config) -> Config:
    """`config` of a supported `model_type`, what it leaves out as transformers takes it."""
    of_family = _known("own_defaults").get(config["model_type"], {})
    return {**_known("defaults"), **of_family, **config}


def read_spec(directory: Path) -> ModelSpec:
    """The checkpoint's spec. Raises UserError, naming the setting, for what is not supported."""
    config = read_config(directory)
    try:
        return spec_of(config, directory.resolve().name)
    except KeyError as error:
        raise UserError(f"{directory}/config.json lacks {error}; {AGAIN}") from None
    except UserError as error:
        raise UserError(f"{directory}/config.json: {error}") from None


def spec_of(config: Config, name: str) -> ModelSpec:
    """The spec that a config.json `with_defaults` describes. Raises KeyError for a setting that is
    missing, and UserError, naming the setting, for what is not supported.
    """
    if config.get("quantization_config"):
        raise UserError("quantized weights are not supported; take the unquantized model")
    fields = {**_shared(config), **FAMILIES[config["model_type"]](config)}
    return ModelSpec(name=name, **fields)


def _supported(name: str, value: Any, valid: Iterable[str]) -> str:
    """`value` if it is one of `valid`, else UserError."""
    options = tuple(valid)
    if value not in options:
        raise UserError(
            f"{name}={value!r} is not supported; take a model with one of {', '.join(options)}"
        )
    return str(value)


def _shared(config: Config) -> dict[str, Any]:
    """Return the fields that all families share."""
    hidden_size = config["hidden_size"]
    num_heads = config["num_attention_heads"]
    num_kv_heads = config.get("num_key_value_heads")
    head_size = config.get("head_dim")
    kinds = config.get("layer_types") or []
    if not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds):
        raise UserError(f"layer_types={kinds!r} is not supported; take a model with full attention")
    if head_size is None:
        try:
            head_size = hidden_size // num_heads
        except (TypeError, ZeroDivisionError):
            raise UserError(
                f"hidden_size={hidden_size!r} is not a multiple of num_attention_heads="
                f"{num_heads!r}; correct them, or name the size as head_dim"
            ) from None
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
    """Read the rotary settings.

    Args:
        config: It has them in one object, by a new name or an old one, or on its own level.
        theta: The setting of the base on that level.
        fraction: The setting of the share of a head that is rotated, on that level.
    """
    rope: Config = {}
    for name in ("rope_parameters", "rope_scaling"):  # the old one counts, as in transformers
        stated = config.get(name)
        if stated is None:
            continue
        is_one_set = isinstance(stated, dict) and not any(
            isinstance(value, dict) for value in stated.values()
        )
        if not is_one_set:
            raise UserError(f"{name}={stated!r} is not one set of rotary settings; {AGAIN}")
        rope = stated or rope
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
    # Llama 3's scaling bends by the length that the model was first trained with.
    original = "original_max_position_embeddings"
    length = config.get(original, rope.get(original, config["max_position_embeddings"]))
    return RopeScaling(
        kind, rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"], length
    )


def _llama(config: Config) -> dict[str, Any]:
    """Read the settings of Llama and of families that descend from it. Raises UserError for
    settings that transformers ignores or reads otherwise.
    """
    family = config["model_type"]
    bias = config["attention_bias"]
    rotary = _rotary(config, "rope_theta", "partial_rotary_factor")
    for name, value, valid in (
        ("partial_rotary_factor", rotary["rotary_fraction"], (1,)),
        ("use_sliding_window", config["use_sliding_window"], (False,)),  # of Qwen's
        ("decoder_sparse_step", config.get("decoder_sparse_step", 1), (1,)),
        ("mlp_only_layers", config.get("mlp_only_layers"), (None, [])),
    ):
        if value not in valid:
            raise UserError(
                f"{name}={value!r} is not supported for a {family}; take a model whose layers are "
                "alike, with full attention and whole heads rotated"
            )
    settings = {
        **rotary,
        "norm_eps": config["rms_norm_eps"],
        "qkv_bias": config.get("qkv_bias", bias),
        "out_bias": bias,
        "ffn_bias": config["mlp_bias"],
        "qk_norm": family.startswith("qwen3"),
        "sliding_window": None,
    }
    if family in ("mistral", "mixtral"):
        settings["sliding_window"] = config["sliding_window"]
    if family in MIXTURES:
        settings |= _mixture(config)
    return settings


def _mixture(config: Config) -> dict[str, Any]:
    """`num_local_experts` is what today's transformers saves for both names."""
    return {
        "num_experts": config.get("num_local_experts", config["num_experts"]),
        "experts_per_token": config["num_experts_per_tok"],
        "ffn_size": config.get("moe_intermediate_size", config["intermediate_size"]),
        "normalise_experts": config.get("norm_topk_prob", True),
        "shared_expert_size": config.get("shared_expert_intermediate_size", 0),
    }


def _gpt_neox(config: Config) -> dict[str, Any]:
    if config["use_parallel_residual"]:
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


MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe")
DENSE = ("llama", "mistral", "qwen2", "qwen3")
FAMILIES: Mapping[str, Callable[[Config], dict[str, Any]]] = {
    **dict.fromkeys((*DENSE, *MIXTURES), _llama),
    "gpt_neox": _gpt_neox,
}


@dataclass(frozen=True)
class Source:
    """A checkpoint tensor that fills the next rows of one of the decoder's parameters.
    `interleaved` tensors hold (q, k, v) head by head, as GPT-NeoX stores them; one that is `tied`
    to another need not be there, as it has to equal it anyway.
    """

    tensor: str
    shape: tuple[int, ...]
    interleaved: bool = False
    tied: str = ""

    def as_stored(self, rows: Tensor, num_heads: int) -> Tensor:
        """Return the decoder's `rows` in the order in which the checkpoint stores them."""
        if not self.interleaved:
            return rows
        by_kind = rows.view(3, num_heads, -1, *rows.shape[1:])
        return by_kind.transpose(0, 1).reshape(rows.shape)

    def as_computed(self, tensor: Tensor, num_heads: int) -> Tensor:
        """Return a stored `tensor` in the order of the decoder's rows: all q, all k, all v."""
        if not self.interleaved:
            return tensor
        by_head = tensor.view(num_heads, 3, -1, *tensor.shape[1:])
        return by_head.transpose(0, 1).reshape(tensor.shape)


# All experts in one tensor, as transformers holds them and may save them, in any family.
_FUSED = {"gate_up": "{}.mlp.experts.gate_up_proj", "down": "{}.mlp.experts.down_proj"}


def parameter_sources(
    directory: Path, spec: ModelSpec, stored: Container[str]
) -> Iterator[tuple[str, list[Source]]]:
    """Every parameter of `Transformer` and the checkpoint tensors that fill its rows, in order, by
    their names in whichever layout the tensors that are `stored` have.
    """
    family = read_config(directory)["model_type"]
    is_fused = _FUSED["down"].format("model.layers.0") in stored
    families = _known("tensors")
    names = families.get("llama" if is_fused else family, families["llama"])
    table = (spec.vocab_size, spec.hidden_size)
    yield "embedding.weight", [Source(names["embedding"], table)]
    yield (
        "lm_head.weight",
        [Source(names["lm_head"], table, tied=names["embedding"] * spec.tie_embeddings)],
    )
    yield from _norm_sources("final_norm", names["final_norm"], spec)
    for i in range(spec.num_layers):
        ours = f"layers.{i}"
        theirs = names["layer"].format(i)
        yield from _norm_sources(f"{ours}.attention_norm", f"{theirs}.input_layernorm", spec)
        yield from _norm_sources(f"{ours}.ffn_norm", f"{theirs}.post_attention_layernorm", spec)
        for kind in ("q_norm", "k_norm") if spec.qk_norm else ():
            tensor = f"{theirs}.self_attn.{kind}.weight"
            yield f"{ours}.{kind}.weight", [Source(tensor, (spec.head_size,))]
        yield from _linears(ours, theirs, names, spec)
        if spec.num_experts:
            yield from _experts(ours, theirs, names, spec, is_fused=is_fused)


def _norm_sources(ours: str, theirs: str, spec: ModelSpec) -> Iterator[tuple[str, list[Source]]]:
    for kind in ("weight", "bias") if spec.norm == "layer" else ("weight",):
        yield f"{ours}.{kind}", [Source(f"{theirs}.{kind}", (spec.hidden_size,))]


def _linears(
    ours: str, theirs: str, names: Mapping[str, Any], spec: ModelSpec
) -> Iterator[tuple[str, list[Source]]]:
    for linear in spec.layer_linears:
        modules = names[linear.name]
        rows = [linear.out_features // len(modules)] * len(modules)
        # Separate tensors of q, k and v: with grouped queries k and v are smaller.
        if len(modules) == 3:
            rows = [spec.q_size, spec.kv_size, spec.kv_size]
        by_head = linear.name == "qkv_proj" and "interleaved" in names
        widths: dict[str, tuple[int, ...]] = {"weight": (linear.in_features,)}
        if linear.has_bias:
            widths["bias"] = ()
        for kind, width in widths.items():
            sources = [
                Source(f"{theirs}.{module}.{kind}", (count, *width), by_head)
                for module, count in zip(modules, rows, strict=True)
            ]
            yield f"{ours}.{linear.name}.{kind}", sources


def _experts(
    ours: str, theirs: str, names: Mapping[str, Any], spec: ModelSpec, *, is_fused: bool
) -> Iterator[tuple[str, list[Source]]]:
    count = spec.num_experts
    hidden = spec.hidden_size
    size = spec.ffn_size
    for name, rows, columns in (("gate_up", size, hidden), ("down", hidden, size)):
        modules = names[name]
        if is_fused:
            shape = (count, rows * len(modules), columns)
            yield f"{ours}.{name}", [Source(_FUSED[name].format(theirs), shape)]
            continue
        each = [f"{names['experts']}.{i}.{module}" for i in range(count) for module in modules]
        sources = [Source(f"{theirs}.{module}.weight", (rows, columns)) for module in each]
        yield f"{ours}.{name}", sources
