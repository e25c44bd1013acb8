"""A Hugging Face config.json as a `ModelSpec`, without transformers, and how checkpoints name the
tensors that fill the decoder's parameters.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from sarathi_lab.config.errors import UserError
from sarathi_lab.config.paths import read_object, stated_beside
from sarathi_lab.model.config_facts import FULL, Config, Facts
from sarathi_lab.model.spec import ModelSpec, RopeKind, RopeScaling

if TYPE_CHECKING:
    from torch import Tensor

AGAIN = "fetch the checkpoint again"
MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe")
WINDOWED = ("mistral", "mixtral")
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", *MIXTURES, "gpt_neox")
# Settings by which layers may differ, or have parts that the decoder has not, with the values that
# it takes.
PLAIN: Mapping[str, Sequence[object]] = {
    "quantization_config": ({},),
    "use_sliding_window": (False,),  # Qwen's
    "decoder_sparse_step": (1,),
    "mlp_only_layers": ([],),
    "use_parallel_residual": (False,),  # GPT-NeoX's, of attention beside the FFN
}


def _stated(section: str) -> Mapping[str, Any]:
    """Return a section of huggingface.yaml."""
    sections: Mapping[str, Any] = stated_beside(__file__, "huggingface.yaml")[section]
    return sections


def read_config(directory: Path) -> Config:
    """Read `directory`/config.json, with the defaults of transformers. Raises UserError if there is
    none, if it is no JSON object, or of an architecture that is not supported.
    """
    path = directory / "config.json"
    if not path.exists():
        raise UserError(
            f"model.path={directory} has no config.json; name a folder saved by transformers' "
            "save_pretrained"
        )
    config = read_object(path, AGAIN)
    _require_supported(f"{path}: model_type", config.get("model_type"), FAMILIES)
    return with_defaults(config)


def with_defaults(config: Config) -> Config:
    """Return `config`, of a supported `model_type`, with the defaults of transformers."""
    family = Facts(config).text("model_type")
    of_family = _stated("own_defaults").get(family, {})
    return {**_stated("defaults"), **of_family, **config}


def read_spec(directory: Path) -> ModelSpec:
    """Read the checkpoint's spec. Raises UserError, naming the setting, for unsupported ones."""
    config = read_config(directory)
    try:
        return spec_of(config, directory.resolve().name)
    except UserError as error:
        raise UserError(f"{directory}/config.json: {error}") from None


def spec_of(config: Config, name: str) -> ModelSpec:
    """Make the spec that a config.json `with_defaults` describes. Raises UserError, naming the
    setting, for a setting that is missing or not supported.
    """
    facts = Facts(config, AGAIN)
    family = facts.text("model_type")
    _require_plain_layers(facts, config)
    activation = facts.text("hidden_act")
    activations = _stated("activations")
    _require_supported("hidden_act", activation, activations)
    num_heads = facts.size("num_attention_heads")
    hidden_size = facts.size("hidden_size")
    bias = facts.flag("attention_bias", default=False)
    fields = _rotary(facts)
    if family in MIXTURES:
        fields |= _mixture(facts)
    elif family == "gpt_neox":
        fields |= {"norm": "layer", "gated_ffn": False, "ffn_bias": True}
    elif fields["rotary_fraction"] != 1:
        raise UserError(
            f"partial_rotary_factor={fields['rotary_fraction']} is not supported for a {family}; "
            "take a model whose heads are rotated as a whole"
        )
    if family in WINDOWED and facts.has("sliding_window"):
        fields["sliding_window"] = facts.size("sliding_window")
    return ModelSpec(
        name=name,
        num_layers=facts.num_layers(),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=facts.count("num_key_value_heads", num_heads),
        head_size=facts.count("head_dim", hidden_size // num_heads),
        vocab_size=facts.size("vocab_size"),
        max_position=facts.size("max_position_embeddings"),
        norm_eps=facts.number("layer_norm_eps", facts.number("rms_norm_eps")),
        activation=activations[activation],
        qkv_bias=facts.flag("qkv_bias", default=bias),
        out_bias=bias,
        qk_norm=family.startswith("qwen3"),
        tie_embeddings=facts.flag("tie_word_embeddings", default=False),
        **{"ffn_size": facts.size("intermediate_size"), **fields},
    )


def _require_supported(name: str, value: object, valid: Iterable[object]) -> None:
    """Raise UserError unless `value` is one of `valid`."""
    options = [*valid]
    if value not in options:
        raise UserError(
            f"{name}={value!r} is not supported; take a model with {', '.join(map(str, options))}"
        )


def _require_plain_layers(facts: Facts, config: Config) -> None:
    """Raise UserError for settings by which layers are not alike, or not in the model's type."""
    for name, valid in PLAIN.items():
        value = config.get(name)
        _require_supported(name, value, [None, *valid])
    for kind in facts.of_layers("layer_types") or ():
        _require_supported("layer_types", kind, [FULL])


def _rotary(facts: Facts) -> dict[str, Any]:
    """Read the rotary settings: in one object, by a new name or an old one, or beside it, where
    GPT-NeoX has names of its own.
    """
    stated: Config = {}
    for name in ("rope_parameters", "rope_scaling"):  # the old one counts, as in transformers
        stated = facts.object(name) or stated
    if any(isinstance(value, Mapping) for value in stated.values()):
        raise UserError(f"rope_parameters has settings for several kinds of layers; {AGAIN}")
    rope = Facts(stated, AGAIN)
    theta = facts.number("rotary_emb_base", facts.number("rope_theta"))
    fraction = facts.number("rotary_pct", facts.number("partial_rotary_factor"))
    return {
        "rope_theta": rope.number("rope_theta", theta),
        "rotary_fraction": rope.number("partial_rotary_factor", fraction),
        "rope_scaling": _rope_scaling(rope, facts),
        "ffn_bias": facts.flag("mlp_bias", default=False),
    }


def _rope_scaling(rope: Facts, facts: Facts) -> RopeScaling | None:
    kind: Any = rope.text("rope_type") or rope.text("type") or "default"
    _require_supported("rope_type", kind, ("default", *get_args(RopeKind)))
    if kind == "default":
        return None
    factor = rope.number("factor")
    if kind == "linear":
        return RopeScaling(kind, factor)
    # Llama 3's scaling bends by the length that the model was first trained with.
    original = "original_max_position_embeddings"
    max_position = facts.size("max_position_embeddings")
    return RopeScaling(
        kind,
        factor,
        rope.number("low_freq_factor"),
        rope.number("high_freq_factor"),
        facts.count(original, rope.count(original, max_position)),
    )


def _mixture(facts: Facts) -> dict[str, Any]:
    return {
        # Today's transformers saves the first name for both.
        "num_experts": facts.size("num_local_experts", "num_experts"),
        "experts_per_token": facts.size("num_experts_per_tok"),
        "ffn_size": facts.size("moe_intermediate_size", "intermediate_size"),
        "normalise_experts": facts.flag("norm_topk_prob", default=True),
        "shared_expert_size": facts.count("shared_expert_intermediate_size"),
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
        shape_of_row = rows.shape[1:]
        by_kind = rows.view(3, num_heads, -1, *shape_of_row)
        return by_kind.transpose(0, 1).reshape(rows.shape)

    def as_computed(self, tensor: Tensor, num_heads: int) -> Tensor:
        """Return a stored `tensor` in the order of the decoder's rows: all q, all k, all v."""
        if not self.interleaved:
            return tensor
        shape_of_row = tensor.shape[1:]
        by_head = tensor.view(num_heads, 3, -1, *shape_of_row)
        return by_head.transpose(0, 1).reshape(tensor.shape)


Names = Mapping[str, Any]  # of a family's tensors, by huggingface.yaml
# Each parameter of the decoder, and the tensors that fill its rows, in order.
Sources = Iterator[tuple[str, list[Source]]]
# All experts in one tensor, as transformers holds them and may save them, in any family.
_FUSED = {"gate_up": "{}.mlp.experts.gate_up_proj", "down": "{}.mlp.experts.down_proj"}


def parameter_sources(directory: Path, spec: ModelSpec, stored: Container[str]) -> Sources:
    """Every parameter of `Transformer` and the checkpoint tensors that fill its rows, in order, by
    their names in whichever layout the tensors that are `stored` have.
    """
    family = Facts(read_config(directory)).text("model_type")
    is_fused = _FUSED["down"].format("model.layers.0") in stored
    families = _stated("tensors")
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
        if spec.qk_norm:
            shape = (spec.head_size,)
            for kind in ("q_norm", "k_norm"):
                tensor = f"{theirs}.self_attn.{kind}.weight"
                yield f"{ours}.{kind}.weight", [Source(tensor, shape)]
        yield from _linears(ours, theirs, names, spec)
        if spec.num_experts:
            yield from _experts(
                ours,
                theirs,
                names,
                spec,
                is_fused=is_fused,
            )


def _norm_sources(ours: str, theirs: str, spec: ModelSpec) -> Sources:
    kinds = ["weight"]
    if spec.norm == "layer":
        kinds.append("bias")
    shape = (spec.hidden_size,)
    for kind in kinds:
        source = Source(f"{theirs}.{kind}", shape)
        yield f"{ours}.{kind}", [source]


def _linears(ours: str, theirs: str, names: Names, spec: ModelSpec) -> Sources:
    for linear in spec.layer_linears:
        modules = names[linear.name]
        num_modules = len(modules)
        rows = [linear.out_features // num_modules] * num_modules
        # Separate tensors of q, k and v: with grouped queries k and v are smaller.
        if num_modules == 3:
            rows = [spec.q_size, spec.kv_size, spec.kv_size]
        by_head = linear.name == "qkv_proj" and "interleaved" in names
        weights = []
        biases = []
        for module, count in zip(modules, rows, strict=True):
            shape = (count, linear.in_features)
            weights.append(Source(f"{theirs}.{module}.weight", shape, by_head))
            biases.append(Source(f"{theirs}.{module}.bias", (count,), by_head))
        yield f"{ours}.{linear.name}.weight", weights
        if linear.has_bias:
            yield f"{ours}.{linear.name}.bias", biases


def _experts(
    ours: str,
    theirs: str,
    names: Names,
    spec: ModelSpec,
    *,
    is_fused: bool,
) -> Sources:
    hidden = spec.hidden_size
    size = spec.ffn_size
    for name, rows, columns in (("gate_up", size, hidden), ("down", hidden, size)):
        modules = names[name]
        if is_fused:
            shape = (spec.num_experts, rows * len(modules), columns)
            tensor = _FUSED[name].format(theirs)
            yield f"{ours}.{name}", [Source(tensor, shape)]
            continue
        sources = []
        for number in range(spec.num_experts):
            expert = f"{theirs}.{names['experts']}.{number}"
            for module in modules:
                tensor = f"{expert}.{module}.weight"
                sources.append(Source(tensor, (rows, columns)))
        yield f"{ours}.{name}", sources
