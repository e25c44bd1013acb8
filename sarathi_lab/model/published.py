"""A published model's config.json as a `ModelSpec` for simulation: shapes alone, without weights.

Fields are named as in the configurations of transformers 5. An architecture is taken only if it is
one of `FAMILIES`, as another may have parts that its fields do not name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from sarathi_lab.config.errors import UserError
from sarathi_lab.config.paths import read_object
from sarathi_lab.model.layers import (
    ALIKE,
    HeadSizes,
    Index,
    Latent,
    Layers,
    Linear,
    LinearAttention,
    Window,
)
from sarathi_lab.model.quantised_config import FIELD as QUANTISATION
from sarathi_lab.model.quantised_config import read_quantisation, unused_fields
from sarathi_lab.model.spec import ModelSpec

Config = Mapping[str, object]
# Beside the config.json of ModelOpt's checkpoints, which may lack the quantisation.
QUANTISED_FILE = "hf_quant_config.json"
AGAIN = "fetch the file again, or write conf/model/NAME.yaml"
FULL, SLIDING, CHUNKED, LINEAR, MAMBA, CONV = (
    *("full_attention", "sliding_attention", "chunked_attention"),
    *("linear_attention", "mamba", "conv"),
)
WITHOUT_CONTEXT = (LINEAR, MAMBA, CONV)
KINDS = (FULL, SLIDING, CHUNKED, *WITHOUT_CONTEXT)
# Names of a layer's kind that mean one of the above.
SAME_KIND = {"attention": FULL, "mamba2": MAMBA, "none": "", "indexed_attention": FULL}
# Nemotron-H's letters: Mamba-2, attention, an FFN or experts instead of either.
PATTERN_KINDS = {"M": MAMBA, "*": FULL, "-": "", "E": ""}
FLOAT_BYTES = 4
FFN_LAYERS = "num_ffn_layers"  # no field of a file: by `_of_blocks`
FFN_SIZES = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size")
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
CHOSEN = (
    *("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k"),
    *("experts_per_token", "top_k_experts"),
)
HEADS = ("num_attention_heads", "n_head", "num_heads")
WIDTHS = ("hidden_size", "n_embd", "n_embed")
POSITIONS = (
    *("max_position_embeddings", "n_positions", "n_ctx", "model_max_length"),
    *("max_seq_len", "seq_length"),
)
SHARED_EXPERTS = (
    *("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "num_shared_expert"),
)
# Fields of parts that no formula has, and what they are; with these values they are not there.
NOT_COUNTED: Mapping[str, tuple[str, Sequence[object]]] = {
    "index_kpool": ("an index of pooled keys", (1,)),
    "compress_ratios": ("a compressed cache (DeepSeek-V4)", ()),
    "hc_mult": ("several residual streams (DeepSeek-V4)", (1,)),
    "routed_expert_hidden_size": ("experts in a space of their own", ()),
    "attn_res_block_size": ("attention to earlier layers", ()),
    "moe_latent_size": ("experts in a space of their own", ()),
}
ENCODERS = ("vision_config", "audio_config")


@dataclass(frozen=True)
class Family:
    """What config.json leaves to the code of an architecture.

    Attributes:
        gated: Whether an FFN has a gate.
        tied: Whether the output head is the embedding, where the file does not say.
        every_full: Of how many layers the last sees the whole context, where a window is set and no
            layer is named; 0: none does.
        has_window_switch: Whether a window counts only with `use_sliding_window`.
        has_shared_gate: Whether a shared expert's output passes a gate.
        has_output_gate: Whether attention's output passes a gate.
        shared_size: The field of the width of shared experts, where no other has it.
        dense_size: The field of the width of an FFN in layers without experts.
        linear: How layers without a context are read, by their number.
        normal: Returns fields by the names of other models, where an architecture has its own.
        has_both: Whether every layer has attention of both kinds.
        float_states: Whether vLLM keeps the states in float32 though the file does not say so.
        defaults: Fields that published files leave out.
    """

    gated: bool = True
    tied: bool = False
    every_full: int = 0
    has_window_switch: bool = False
    has_shared_gate: bool = False
    has_output_gate: bool = False
    shared_size: str | None = None
    dense_size: str = "intermediate_size"
    linear: Callable[[Facts, int], LinearAttention] | None = None
    normal: Callable[[Facts], Config] | None = None
    has_both: bool = False
    float_states: bool = False
    defaults: Config = field(default_factory=dict)


class Facts:
    """The fields of a config.json, with their types checked. Raises UserError, naming the field."""

    def __init__(self, config: Config) -> None:
        self._config = config

    def has(self, name: str) -> bool:
        """Return whether a field is there and not null."""
        return self._config.get(name) is not None

    def first(self, *names: str) -> str | None:
        """Return the first of `names` that the file has."""
        return next((name for name in names if self.has(name)), None)

    def size(self, *names: str) -> int:
        """Return the first of the fields `names`. Raises UserError for none, or no whole number."""
        name = self.first(*names)
        if name is None:
            raise UserError(f"{names[0]} is missing, which the size follows from; {AGAIN}")
        return self.count(name)

    def count(self, name: str, default: int = 0) -> int:
        """Return a whole number from 0, or `default` for a field that is not there."""
        value = self._config.get(name)
        if value is None:
            return default
        if isinstance(value, list) and value and value.count(value[0]) == len(value):
            value = value[0]  # of each layer, all alike
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise UserError(f"{name}={value!r} is not a whole number from 0; {AGAIN}")
        return value

    def flag(self, name: str, *, default: bool) -> bool:
        value = self._config.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise UserError(f"{name}={value!r} is not true or false; {AGAIN}")
        return value

    def text(self, name: str) -> str:
        return str(self._config.get(name, ""))

    def names(self, name: str) -> list[str] | None:
        """Return a list of a name for each layer; None if it is not there."""
        value = self._config.get(name)
        if value is None:
            return None
        num_layers = self.size("num_hidden_layers", "n_layer")
        if isinstance(value, str) or not isinstance(value, Sequence) or len(value) != num_layers:
            raise UserError(
                f"{name} does not name each of num_hidden_layers={num_layers} layers; {AGAIN}"
            )
        return [str(of_layer) for of_layer in value]

    def numbers(self, name: str) -> list[int] | None:
        """Return a list of whole numbers; None if it is not there."""
        value = self._config.get(name)
        if value is None:
            return None
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise UserError(f"{name}={value!r} is not a list of numbers; {AGAIN}")
        numbers = []
        for number in value:
            if not isinstance(number, int):
                raise UserError(f"{name} has {number!r}, which is no whole number; {AGAIN}")
            numbers.append(number)
        return numbers

    def number(self, name: str, default: float) -> float:
        """Return a number above 0, or `default` for a field that is not there."""
        value = self._config.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise UserError(f"{name}={value!r} is not a number above 0; {AGAIN}")
        return value

    def optional_size(self, name: str, default: int) -> int | None:
        """Return a size that may be null, or `default` for a field that is not there."""
        if name in self._config and self._config[name] is None:
            return None
        return self.size(name) if self.has(name) else default

    def object(self, name: str) -> Facts:
        """Return the facts of an object; of none for a field that is not there."""
        value = self._config.get(name)
        if value is None:
            return Facts({})
        if not isinstance(value, Mapping):
            raise UserError(f"{name}={value!r} is not an object; {AGAIN}")
        return Facts(value)

    def object_of_layers(self, name: str) -> Facts:
        """Return the facts that an object has for some layers, all of which must have the same."""
        value = self._config.get(name) or {}
        if not isinstance(value, Mapping):
            raise UserError(f"{name}={value!r} is not an object; {AGAIN}")
        of_layers = list(value.values())
        if not of_layers:
            return Facts({})
        if of_layers.count(of_layers[0]) != len(of_layers) or not isinstance(of_layers[0], Mapping):
            raise UserError(f"{name} gives layers different sizes, which has no formula")
        return Facts(of_layers[0])

    def objects(self, name: str) -> list[Config]:
        """Return a list of objects."""
        value = self._config.get(name)
        if not isinstance(value, Sequence) or not all(isinstance(each, Mapping) for each in value):
            raise UserError(f"{name}={value!r} is not a list of objects; {AGAIN}")
        return list(value)


def read_published(directory: Path) -> ModelSpec:
    """Read `directory`/config.json. Raises UserError, naming the field, for what has no formula."""
    path = directory / "config.json"
    if not path.exists():
        raise UserError(
            f"model.path={directory} has no config.json; name a folder that has one, or a hub id "
            "such as Qwen/Qwen3-8B"
        )
    config = read_object(path, AGAIN)
    quantised = directory / QUANTISED_FILE
    if not config.get(QUANTISATION) and quantised.exists():
        settings = read_object(quantised, AGAIN).get("quantization")
        if isinstance(settings, Mapping) and settings.get("quant_algo"):
            config = {**config, QUANTISATION: {"quant_method": "modelopt", **settings}}
    try:
        return published_spec(config, directory.resolve().name)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def published_spec(config: Config, name: str) -> ModelSpec:
    """Make the spec that a config.json describes. Raises UserError, naming the field, for what has
    no formula.
    """
    encoders = [name for name in ENCODERS if config.get(name)]
    text = config.get("text_config") or config.get("llm_config")
    if isinstance(text, Mapping):
        config = {**config, **text}
    model_type = str(config.get("model_type", "")).removesuffix("_text")
    if model_type not in FAMILIES:
        raise UserError(
            f"model_type={config.get('model_type')!r} has no formulas; take a model of "
            f"{', '.join(sorted(FAMILIES))}, state its shape in conf/model/NAME.yaml, or use "
            "executor=vllm, which runs others"
        )
    if config.get("block_configs") is not None:
        config = {**config, **_of_blocks(Facts(config))}
    for name_of_part, (part, absent) in NOT_COUNTED.items():
        value = config.get(name_of_part)
        if value and value not in absent:
            raise UserError(
                f"{name_of_part}={str(value)[:40]}: {part} has no formula; take another model"
            )
    family = FAMILIES[model_type]
    config = {**family.defaults, **config}
    if family.normal is not None:
        config = {**config, **family.normal(Facts(config))}
    elif config.get("per_layer_config"):
        raise UserError("per_layer_config: layers of different sizes have no formula here")
    reader = Reader(Facts(config), family)
    spec = reader.spec(name)
    return replace(
        spec,
        quantisation=read_quantisation(config, spec),
        uncounted=(*encoders, *unused_fields(config)),
    )


class Reader:
    """Reads the shapes of one config.json of a `family`. Raises UserError, naming the field."""

    def __init__(self, facts: Facts, family: Family) -> None:
        self.facts = facts
        self.family = family
        self.num_layers = facts.size("num_hidden_layers", "n_layer")

    def spec(self, name: str) -> ModelSpec:
        """Make the spec, with weights in the model's type."""
        facts = self.facts
        family = self.family
        num_heads = facts.size(*HEADS)
        hidden = facts.size(*WIDTHS)
        latent = self._latent()
        if latent is None:
            num_kv_heads = facts.count("num_key_value_heads", num_heads)
            head_size = self._head_size(hidden, num_heads)
        else:
            num_kv_heads = num_heads
            head_size = facts.size("qk_nope_head_dim") + latent.rope_size
        mixture = self._mixture()
        return ModelSpec(
            name=name,
            num_layers=self.num_layers,
            hidden_size=hidden,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_size=head_size,
            vocab_size=facts.size("vocab_size"),
            max_position=facts.size(*POSITIONS),
            gated_ffn=family.gated,
            activation="silu" if family.gated else "gelu",
            tie_embeddings=facts.flag("tie_word_embeddings", default=family.tied),
            ffn_size=mixture.width,
            num_experts=mixture.num_experts,
            experts_per_token=mixture.num_chosen,
            shared_expert_size=mixture.shared_width,
            layers=self._layers(mixture, latent),
            simulation_only=True,
        )

    def _head_size(self, hidden: int, num_heads: int) -> int:
        name = self.facts.first("head_dim", "attention_head_dim")
        if name is not None:
            return self.facts.size(name)
        if num_heads == 0 or hidden % num_heads:
            raise UserError(
                f"hidden_size={hidden} is not a multiple of num_attention_heads={num_heads}, and "
                f"there is no head_dim; {AGAIN}"
            )
        return hidden // num_heads

    def _latent(self) -> Latent | None:
        facts = self.facts
        if not facts.has("kv_lora_rank"):
            return None
        query_rank = facts.size("q_lora_rank") if facts.has("q_lora_rank") else None
        nope = "qk_nope_head_dim"  # which values are as wide as where the file does not say
        return Latent(
            rank=facts.size("kv_lora_rank"),
            rope_size=facts.size("qk_rope_head_dim"),
            query_rank=query_rank,
            value_size=facts.size("v_head_dim", nope),
        )

    # -- which layer has what ----------------------------------------------------------------------

    def _layers(self, mixture: Mixture, latent: Latent | None) -> Layers:
        family = self.family
        kinds = self._kinds()
        num_ffns = None
        if self.facts.has("hybrid_override_pattern"):  # layers of one part each
            num_ffns = mixture.num_layers + mixture.num_dense
        elif self.facts.has(FFN_LAYERS):
            num_ffns = self.facts.count(FFN_LAYERS)
        borrowing = self._borrowing(kinds)
        kinds = [kind for kind in kinds if kind]
        num_linear = sum(kind in WITHOUT_CONTEXT for kind in kinds)
        num_attention = len(kinds) - num_linear
        if num_attention == 0:
            raise UserError("no layer has attention; models of states alone have no formula")
        if family.has_both:
            num_linear = self.num_layers
        linear = None
        if num_linear and family.linear is None:
            raise UserError(f"layer_types: {kinds[0]} has no formula for this model_type")
        if num_linear and family.linear is not None:
            linear = family.linear(self.facts, num_linear)
            if family.float_states or self.facts.text("mamba_ssm_dtype") == "float32":
                linear = replace(linear, state_bytes=FLOAT_BYTES)
        is_everywhere = num_attention == self.num_layers
        has_dense = mixture.num_experts > 0 and mixture.num_dense > 0
        layers = Layers(
            attention=None if is_everywhere else num_attention,
            ffn=num_ffns,
            dense=mixture.num_dense if has_dense else 0,
            dense_ffn_size=mixture.dense_width if has_dense else 0,
            shared_gate=family.has_shared_gate or mixture.shared_width == 0,
            output_gate=self.facts.flag("attn_output_gate", default=family.has_output_gate),
            latent=latent,
            linear=linear,
            window=self._window(kinds, len(borrowing) - borrowing.count(FULL)),
            borrowing=borrowing.count(FULL),
            parallel=family.has_both,
            index=self._index(),
            value_size=self._value_size(latent),
            value_product=not self.facts.flag("attention_k_eq_v", default=False),
            further=self._further(),
            table_params=self._table_params(),
        )
        return ALIKE if layers == ALIKE else layers

    def _kinds(self) -> list[str]:
        """Return the kind of attention of each layer; "" for none."""
        facts = self.facts
        if facts.has("hybrid_override_pattern"):
            return [PATTERN_KINDS[part] for part in self._pattern()]
        name = facts.first("layer_types", "layers_block_type")
        named = None if name is None else facts.names(name)
        if named is not None:
            kinds = [SAME_KIND.get(kind, kind) for kind in named]
            for kind in kinds:
                if kind and kind not in KINDS:
                    raise UserError(f"{name}: a layer of {kind!r} has no formula")
            return kinds
        numbers = range(1, self.num_layers + 1)
        if facts.has("full_attention_interval"):
            interval = facts.size("full_attention_interval")
            return [LINEAR if number % interval else FULL for number in numbers]
        if facts.has("attn_layer_indices"):
            places = facts.numbers("attn_layer_indices") or []
            return [FULL if number - 1 in places else MAMBA for number in numbers]
        if facts.has("full_attn_idxs"):
            places = facts.numbers("full_attn_idxs") or []
            return [FULL if number - 1 in places else CONV for number in numbers]
        if facts.has("attn_layer_period"):
            period = facts.size("attn_layer_period")
            offset = facts.count("attn_layer_offset")
            return [FULL if (number - 1) % period == offset else MAMBA for number in numbers]
        if self.family.linear is not None and not self.family.has_both:
            raise UserError(
                f"layer_types is missing, which says which layers have attention; {AGAIN}"
            )
        return self._window_kinds()

    def _window_kinds(self) -> list[str]:
        """Return the kinds where the file has a window, and the architecture has its layers."""
        facts = self.facts
        family = self.family
        all_full = [FULL] * self.num_layers
        if facts.has("attention_chunk_size"):
            return self._every(CHUNKED)
        if not facts.has("sliding_window"):
            return all_full
        if family.has_window_switch:
            if not facts.flag("use_sliding_window", default=False):
                return all_full
            num_full = min(self.num_layers, facts.count("max_window_layers"))
            return [FULL] * num_full + [SLIDING] * (self.num_layers - num_full)
        return self._every(SLIDING)

    def _every(self, kind: str) -> list[str]:
        """Return `kind`, but for the last of every few layers."""
        facts = self.facts
        every = self.family.every_full
        pattern = facts.text("sliding_window_pattern")
        if pattern and set(pattern) <= {"L", "G"}:
            every = len(pattern)  # LLLG: three local ones, one global
        elif facts.has("sliding_window_pattern"):
            every = facts.size("sliding_window_pattern")
        if every == 0:
            return [kind] * self.num_layers
        numbers = range(1, self.num_layers + 1)
        return [kind if number % every else FULL for number in numbers]

    def _window(self, kinds: Sequence[str], borrowing: int) -> Window | None:
        heads = self._window_heads()
        if SLIDING in kinds:
            size = self.facts.size("sliding_window", "sliding_window_size")
            return Window(kinds.count(SLIDING), size, heads=heads, borrowing=borrowing)
        if CHUNKED in kinds:
            size = self.facts.size("attention_chunk_size")
            return Window(kinds.count(CHUNKED), size, "chunked", heads, borrowing)
        return None

    def _window_heads(self) -> HeadSizes | None:
        """Return the heads of layers with a window, where the file has some of their own."""
        facts = self.facts
        names = ("swa_num_attention_heads", "swa_num_key_value_heads", "swa_head_dim")
        if facts.first(*names) is None:
            return None
        num_heads = facts.size(names[0], "num_attention_heads")
        key_size = facts.count(names[2], self._head_size(facts.size(*WIDTHS), num_heads))
        num_kv_heads = facts.size(names[1], "num_key_value_heads")
        value_size = facts.first("swa_v_head_dim", "v_head_dim")
        return HeadSizes(
            num_heads, num_kv_heads, key_size, facts.size(value_size) if value_size else key_size
        )

    def _value_size(self, latent: Latent | None) -> int | None:
        """Return the entries of a value where keys have others."""
        facts = self.facts
        if latent is not None or not facts.has("v_head_dim"):
            return None
        size = facts.size("v_head_dim")
        return None if size == facts.count("head_dim", size) else size

    def _index(self) -> Index | None:
        facts = self.facts
        if not facts.has("index_topk"):
            return None
        return Index(
            facts.size("index_n_heads"),
            facts.size("index_head_dim"),
            facts.size("index_topk"),
            self._num_index_layers(),
        )

    def _num_index_layers(self) -> int | None:
        """Count the layers with an index of their own; None: all."""
        facts = self.facts
        kinds = facts.names("indexer_types")
        if kinds is not None:
            return self.num_layers - kinds.count("shared")
        pattern = facts.text("index_topk_pattern")
        if pattern:
            return self.num_layers - pattern.count("S")
        frequency = facts.count("index_topk_freq", 1)
        if frequency <= 1:
            return None
        # Of SGLang's `dsa_layer_skips_topk`: the first ones have their own, then every few.
        first = facts.count("index_skip_topk_offset", 2)
        steps = (max(layer - first + 1, 0) for layer in range(self.num_layers))
        return sum(step % frequency == 0 for step in steps)

    def _borrowing(self, kinds: Sequence[str]) -> list[str]:
        """Return the kinds of the layers that use the keys and values of another: the last ones, or
        all but the first of each few.
        """
        facts = self.facts
        if not facts.flag("use_cla", default=False):
            return list(kinds[len(kinds) - facts.count("num_kv_shared_layers") :])
        num_owning = math.ceil(self.num_layers / facts.size("cla_share_factor"))
        return [FULL] * (self.num_layers - num_owning)

    # -- parts that few models have ----------------------------------------------------------------

    def _further(self) -> tuple[Linear, ...]:
        """List the products of inputs of single layers, of low-rank residuals and of several
        residual streams (Gemma 3n and 4).
        """
        facts = self.facts
        hidden = facts.size(*WIDTHS)
        layers = self.num_layers
        products = list[Linear]()
        width = facts.count("hidden_size_per_layer_input")
        if width:
            products += [
                Linear("inputs_of_layers", hidden, layers * width, 1),
                Linear("input_gate", hidden, width, layers),
                Linear("input_up", width, hidden, layers),
            ]
        rank = facts.count("laurel_rank")
        if rank:
            products.append(Linear("residual_down", hidden, rank, layers))
            products.append(Linear("residual_up", rank, hidden, layers))
        streams = facts.count("altup_num_inputs", 1)
        if streams > 1:
            # To and from the streams; their coefficients in the layers are too few to count.
            products.append(Linear("streams", hidden, hidden, 2 * (streams - 1)))
        return tuple(products)

    def _table_params(self) -> int:
        """Count the parameters of tables that are looked up, but for the embedding."""
        facts = self.facts
        width = facts.count("hidden_size_per_layer_input")
        if not width:
            return 0
        vocab = facts.size("vocab_size_per_layer_input", "vocab_size")
        return vocab * self.num_layers * width

    # -- FFNs and experts --------------------------------------------------------------------------

    def _pattern(self) -> str:
        """Return Nemotron-H's layers, a letter each."""
        pattern = self.facts.text("hybrid_override_pattern")
        if len(pattern) != self.num_layers or not set(pattern) <= set(PATTERN_KINDS):
            raise UserError(
                f"hybrid_override_pattern={pattern!r} is not one of {''.join(PATTERN_KINDS)} for "
                f"each of num_hidden_layers={self.num_layers} layers; {AGAIN}"
            )
        return pattern

    def _mixture(self) -> Mixture:
        facts = self.facts
        name = facts.first(*EXPERTS)
        num_experts = facts.count(name) if name else 0
        num_layers = self.num_layers
        num_dense = self._num_dense()
        if facts.has("hybrid_override_pattern"):
            pattern = self._pattern()
            num_layers = pattern.count("E")
            num_dense = pattern.count("-")
            num_experts = num_experts if num_layers else 0
        elif num_experts:
            num_layers -= num_dense
        if num_experts == 0:
            # Granite 4's dense models keep the name of their mixtures.
            sizes = ("shared_intermediate_size", *FFN_SIZES) if name else FFN_SIZES
            return Mixture(facts.size(*sizes), num_dense=num_dense)
        width = facts.size("moe_intermediate_size", *FFN_SIZES)
        return Mixture(
            width,
            num_experts,
            num_chosen=facts.size(*CHOSEN),
            shared_width=self._shared_width(width),
            num_layers=num_layers,
            num_dense=num_dense,
            dense_width=facts.count(self.family.dense_size),
        )

    def _shared_width(self, width: int) -> int:
        """Return the width of all shared experts together."""
        facts = self.facts
        number = facts.first(*SHARED_EXPERTS)
        num_shared = facts.count(number) if number else 1
        if facts.has("moe_shared_expert_intermediate_size"):
            return num_shared * facts.size("moe_shared_expert_intermediate_size")
        direct = facts.first("shared_expert_intermediate_size", "shared_intermediate_size")
        direct = direct or self.family.shared_size
        if direct is not None:
            return facts.count(direct)
        return num_shared * width if number else 0

    def _num_dense(self) -> int:
        """Count the layers without experts."""
        facts = self.facts
        numbers = range(1, self.num_layers + 1)
        kinds = facts.names("mlp_layer_types")
        if kinds is not None:
            return kinds.count("dense")
        if facts.has("num_dense_layers"):
            return facts.count("num_dense_layers")
        if facts.has("expert_layer_period"):
            period = facts.size("expert_layer_period")
            offset = facts.count("expert_layer_offset")
            return sum((number - 1) % period != offset for number in numbers)
        if facts.has("first_k_dense_replace"):
            if facts.count("moe_layer_freq", 1) != 1:
                raise UserError(f"moe_layer_freq={facts.text('moe_layer_freq')} has no formula")
            return facts.count("first_k_dense_replace")
        if facts.has("interleave_moe_layer_step"):
            step = facts.size("interleave_moe_layer_step")
            return sum(number % step != 0 for number in numbers)
        if facts.has("moe_layer_start_index"):
            interval = facts.count("moe_layer_interval", 1)
            start = facts.count("moe_layer_start_index")
            return sum(number <= start or number % interval != 0 for number in numbers)
        step = facts.count("decoder_sparse_step", 1)
        excluded = facts.numbers("mlp_only_layers") or []
        return sum(number - 1 in excluded or number % step != 0 for number in numbers)


@dataclass(frozen=True)
class Mixture:
    """The FFNs: of `width`, or experts of it in `num_layers` layers and FFNs of `dense_width` in
    `num_dense` others.
    """

    width: int
    num_experts: int = 0
    num_chosen: int = 0
    shared_width: int = 0
    num_layers: int = 0
    num_dense: int = 0
    dense_width: int = 0


def _of_blocks(facts: Facts) -> Config:
    """Return what the `block_configs` of Llama Nemotron stand for, by the names of other models:
    layers without attention or FFN, and FFNs of different widths, which count by their mean.
    """
    blocks = facts.objects("block_configs")
    num_layers = facts.size("num_hidden_layers")
    if len(blocks) != num_layers:
        raise UserError(
            f"block_configs has {len(blocks)} blocks for num_hidden_layers={num_layers}, each of "
            f"which may be different; {AGAIN}"
        )
    kinds: list[str] = []
    groups: set[int] = set()
    widths: list[int] = []
    for block in blocks:
        attention = block.get("attention")
        ffn = block.get("ffn")
        if not isinstance(attention, Mapping) or not isinstance(ffn, Mapping):
            raise UserError(f"block_configs has {block!r}, without attention or ffn; {AGAIN}")
        if attention.get("replace_with_linear") or ffn.get("replace_with_linear"):
            raise UserError("block_configs: replace_with_linear has no formula")
        kinds.append("none" if attention.get("no_op") else FULL)
        if not attention.get("no_op"):
            groups.add(Facts(attention).size("n_heads_in_group"))
        if not ffn.get("no_op"):
            widths.append(_width_of(ffn, facts.size("hidden_size")))
    if len(groups) != 1 or not widths:
        raise UserError(
            f"block_configs: n_heads_in_group of {sorted(groups)} with {len(widths)} FFNs has no "
            "formula, which needs one number of KV heads"
        )
    return {
        "layer_types": kinds,
        "num_key_value_heads": facts.size("num_attention_heads") // groups.pop(),
        "intermediate_size": round(sum(widths) / len(widths)),
        FFN_LAYERS: len(widths),
    }


def _width_of(ffn: Config, hidden: int) -> int:
    """Return the width of an FFN by its `ffn_mult`: two thirds of it, in whole 256."""
    value = ffn.get("ffn_mult")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UserError(f"block_configs: ffn_mult={value!r} is no number; {AGAIN}")
    return math.ceil(int(2 * value * hidden / 3) / 256) * 256


def _normal_lfm2(facts: Facts) -> Config:
    """LFM2 states the width of its FFNs before a gate takes a third of it."""
    width = facts.size("block_ff_dim", "intermediate_size")
    if facts.flag("block_auto_adjust_ff_dim", default=False):
        multiple = facts.count("block_multiple_of", 256)
        width = int(2 * width / 3)
        factor = facts.number("block_ffn_dim_multiplier", 1.0)
        width = multiple * math.ceil(int(factor * width) / multiple)
    return {
        "intermediate_size": width,
        "tie_word_embeddings": facts.flag(
            "tie_embedding", default=facts.flag("tie_word_embeddings", default=True)
        ),
    }


def _normal_kimi_linear(facts: Facts) -> Config:
    """Kimi Linear has the kinds of its layers, by numbers from 1, in an object."""
    attention = facts.object("linear_attn_config")
    fields: dict[str, object] = {}
    if attention.has("full_attn_layers"):
        places = attention.numbers("full_attn_layers") or []
        numbers = range(1, facts.size("num_hidden_layers") + 1)
        fields["layer_types"] = [FULL if number in places else LINEAR for number in numbers]
    for name, of_object in (
        ("linear_num_heads", "num_heads"),
        ("linear_head_dim", "head_dim"),
        ("linear_conv_kernel_dim", "short_conv_kernel_size"),
    ):
        if attention.has(of_object):
            fields[name] = attention.size(of_object)
    if attention.flag("use_full_rank_gate", default=False):
        fields["linear_gate_rank"] = None
    return fields


def _normal_mimo(facts: Facts) -> Config:
    """MiMo-V2 numbers the kinds of its layers: 1 has a window, or experts."""
    fields: dict[str, object] = {}
    pattern = facts.numbers("hybrid_layer_pattern")
    if pattern is not None:
        fields["layer_types"] = [SLIDING if number else FULL for number in pattern]
    of_experts = facts.numbers("moe_layer_freq")
    if of_experts is not None:
        fields["mlp_layer_types"] = ["sparse" if number else "dense" for number in of_experts]
        fields["moe_layer_freq"] = None
    if not facts.has("swa_num_key_value_heads"):
        fields["swa_num_key_value_heads"] = 2 * facts.size("num_key_value_heads")
    return fields


def _normal_laguna(facts: Facts) -> Config:
    """Laguna lists the heads of each layer, of which those with a window have more."""
    heads = facts.numbers("num_attention_heads_per_layer")
    kinds = facts.names("layer_types")
    if heads is None or kinds is None or len(heads) != len(kinds):
        return {}
    fields: dict[str, object] = {}
    of_kinds = ((FULL, "num_attention_heads"), (SLIDING, "swa_num_attention_heads"))
    for kind, name in of_kinds:
        numbers = {number for number, of in zip(heads, kinds, strict=True) if of == kind}
        if len(numbers) > 1:
            raise UserError(
                f"num_attention_heads_per_layer has {sorted(numbers)} heads in layers of {kind}, "
                "which has no formula"
            )
        if numbers:
            fields[name] = numbers.pop()
    return fields


def _normal_minimax(facts: Facts) -> Config:
    """MiniMax-01 numbers the kinds of its layers: 1 has attention to a context."""
    pattern = facts.numbers("attn_type_list")
    if pattern is None:
        return {}
    return {"layer_types": [FULL if number else LINEAR for number in pattern]}


def _normal_gemma4(facts: Facts) -> Config:
    """Gemma 4 states the heads of layers with a window, and others of the whole context; FFNs of
    layers that borrow keys and values may be twice as wide.
    """
    full = facts.object_of_layers("per_layer_config")
    same_values = facts.flag("attention_k_eq_v", default=False)
    num_kv_heads = facts.size("num_key_value_heads")
    num_full_kv_heads = full.count("num_key_value_heads", num_kv_heads)
    if same_values:
        num_full_kv_heads = facts.count("num_global_key_value_heads", num_full_kv_heads)
    width = facts.size("intermediate_size")
    if facts.flag("use_double_wide_mlp", default=False):
        num_layers = facts.size("num_hidden_layers")
        width = round(width * (1 + facts.count("num_kv_shared_layers") / num_layers))
    fields: dict[str, object] = {
        "swa_head_dim": facts.size("head_dim"),
        "swa_num_key_value_heads": num_kv_heads,
        "head_dim": full.count("head_dim", facts.count("global_head_dim", 512)),
        "num_key_value_heads": num_full_kv_heads,
        "intermediate_size": width,
    }
    if facts.flag("enable_moe_block", default=False):
        fields["shared_expert_intermediate_size"] = width  # beside the experts of each layer
    else:
        fields["num_experts"] = None
    return fields


def _normal_nemotron_h(facts: Facts) -> Config:
    """Nemotron-H's newer files have words for the letters of its layers."""
    names = facts.names("layers_block_type")
    if facts.has("hybrid_override_pattern") or names is None:
        return {}
    letters = {"mamba": "M", "attention": "*", "mlp": "-", "moe": "E"}
    return {"hybrid_override_pattern": "".join(letters.get(name, "?") for name in names)}


def _normal_falcon(facts: Facts) -> Config:
    """Falcon has as many KV heads as a flag says, and FFNs of four times the width."""
    num_heads = facts.size(*HEADS)
    num_kv_heads = facts.count("num_kv_heads", facts.count("n_head_kv", num_heads))
    if not facts.flag("new_decoder_architecture", default=False):
        num_kv_heads = 1 if facts.flag("multi_query", default=True) else num_heads
    width = facts.count("ffn_hidden_size", 4 * facts.size("hidden_size"))
    return {"num_key_value_heads": num_kv_heads, "intermediate_size": width}


def _normal_gpt2(facts: Facts) -> Config:
    """GPT-2 and its kind have FFNs of four times the width, unless they say otherwise."""
    width = facts.count("n_inner", 4 * facts.size(*WIDTHS))
    fields: dict[str, object] = {"n_inner": width}
    if facts.flag("multi_query", default=False):
        fields["num_key_value_heads"] = 1
    return fields


def _normal_longcat(facts: Facts) -> Config:
    """LongCat-Flash has in each layer two attentions and FFNs, which all tokens pass, and experts
    beside them; those that compute nothing are taken for chosen as often as others (arXiv
    2509.01322, section 2.1).
    """
    num_layers = facts.size("num_layers")
    num_experts = facts.size("n_routed_experts")
    num_all = num_experts + facts.count("zero_expert_num")
    chosen = facts.size("moe_topk") * num_experts / num_all
    return {
        "num_hidden_layers": 2 * num_layers,
        FFN_LAYERS: num_layers,
        "shared_expert_intermediate_size": 2 * facts.size("ffn_hidden_size"),
        "moe_intermediate_size": facts.size("expert_ffn_hidden_size"),
        "moe_topk": round(chosen),
    }


def _normal_jamba(facts: Facts) -> Config:
    """Jamba may leave the rank of its step sizes to the width."""
    if facts.text("mamba_dt_rank") == "auto":
        return {"mamba_dt_rank": math.ceil(facts.size("hidden_size") / 16)}
    return {}


def _short_conv(facts: Facts, num_layers: int) -> LinearAttention:
    """Read LFM2's short convolutions, as wide as the hidden state."""
    return LinearAttention(
        num_layers,
        num_heads=1,
        num_key_heads=1,
        key_size=1,
        value_size=facts.size("hidden_size"),
        rule="short_conv",
        conv_size=facts.count("conv_L_cache", 3),
    )


def _kda(facts: Facts, num_layers: int) -> LinearAttention:
    """Read Kimi Linear's layers."""
    num_heads = facts.size("linear_num_heads")
    size = facts.size("linear_head_dim")
    return LinearAttention(
        num_layers,
        num_heads=num_heads,
        num_key_heads=num_heads,
        key_size=size,
        value_size=size,
        rule="kda",
        conv_size=facts.count("linear_conv_kernel_dim", 4),
        gate_rank=facts.optional_size("linear_gate_rank", size),
    )


def _lightning(facts: Facts, num_layers: int) -> LinearAttention:
    """Read MiniMax-01's layers, whose heads are as those of attention to a context."""
    num_heads = facts.size("num_attention_heads")
    size = facts.count("head_dim", facts.size("hidden_size") // num_heads)
    return LinearAttention(
        num_layers,
        num_heads=num_heads,
        num_key_heads=num_heads,
        key_size=size,
        value_size=size,
        rule="lightning",
        conv_size=1,
        chunk=facts.count("block_size", 256),
    )


def _mamba1(facts: Facts, num_layers: int) -> LinearAttention:
    """Read Jamba's layers of Mamba."""
    return LinearAttention(
        num_layers,
        num_heads=1,
        num_key_heads=1,
        key_size=facts.size("mamba_d_state"),
        value_size=facts.count("mamba_expand", 2) * facts.size("hidden_size"),
        rule="mamba1",
        conv_size=facts.count("mamba_d_conv", 4),
        gate_rank=facts.size("mamba_dt_rank"),
    )


def _gated_delta(facts: Facts, num_layers: int) -> LinearAttention:
    """Read Qwen3-Next's layers."""
    return LinearAttention(
        num_layers,
        num_heads=facts.size("linear_num_value_heads"),
        num_key_heads=facts.size("linear_num_key_heads"),
        key_size=facts.size("linear_key_head_dim"),
        value_size=facts.size("linear_value_head_dim"),
        conv_size=facts.count("linear_conv_kernel_dim", 4),
    )


def _mamba2(facts: Facts, num_layers: int) -> LinearAttention:
    """Read layers of Mamba-2, by the names of Nemotron-H or of Bamba and what came from it."""
    num_heads = facts.size("mamba_num_heads", "mamba_n_heads")
    if facts.text("mamba_d_head") == "auto":
        inner = facts.size("mamba_expand") * facts.size("hidden_size")
        value_size = inner // num_heads
    else:
        value_size = facts.size("mamba_head_dim", "mamba_d_head")
    conv = facts.first("conv_kernel", "mamba_d_conv")
    chunk = facts.first("chunk_size", "mamba_chunk_size")
    return LinearAttention(
        num_layers,
        num_heads=num_heads,
        num_key_heads=facts.size("n_groups", "mamba_n_groups"),
        key_size=facts.size("ssm_state_size", "mamba_d_state"),
        value_size=value_size,
        rule="mamba2",
        conv_size=facts.size(conv) if conv else 4,
        chunk=facts.size(chunk) if chunk else 128,
    )


def _index_of(num_heads: int) -> Config:
    """Return the fields of an index, which files of some converters leave out."""
    return {"index_n_heads": num_heads, "index_head_dim": 128, "index_topk": 2048}


_PLAIN = Family()
_TIED = Family(tied=True)
_UNGATED = Family(gated=False)
_QWEN = Family(has_window_switch=True)
_DELTA = Family(has_shared_gate=True, has_output_gate=True, linear=_gated_delta)
# Of the 4B model, whose file names little else.
_GEMMA3: Config = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
    "sliding_window": 1024,
}
_2048_POSITIONS: Config = {"max_position_embeddings": 2048}
_LFM2 = Family(tied=True, linear=_short_conv, normal=_normal_lfm2)
_GEMMA4 = Family(tied=True, normal=_normal_gemma4)
_GPT2 = Family(gated=False, tied=True, normal=_normal_gpt2)
FAMILIES: Mapping[str, Family] = {
    **dict.fromkeys(("llama", "olmo", "olmo2", "granite", "glm", "glm4", "stablelm"), _PLAIN),
    **dict.fromkeys(("seed_oss", "internlm2", "internlm3", "mistral", "phi3", "exaone"), _PLAIN),
    **dict.fromkeys(("ministral", "ministral3", "aquila", "nemotron-nas", "helium"), _PLAIN),
    **dict.fromkeys(("cwm", "hyperclovax", "iquestcoder", "minicpm3", "mellum"), _PLAIN),
    **dict.fromkeys(("gemma", "cohere", "smollm3", "ernie4_5", "hunyuan_v1_dense"), _TIED),
    **dict.fromkeys(("minicpm", "youtu"), _TIED),
    **dict.fromkeys(("qwen2", "qwen2_5_vl", "qwen2_vl", "qwen3", "qwen3_vl"), _QWEN),
    **dict.fromkeys(("nemotron", "gpt_neox", "apertus", "arcee", "phi", "jais2"), _UNGATED),
    **dict.fromkeys(("opt", "starcoder2"), Family(gated=False, tied=True)),
    **dict.fromkeys(("gpt2", "gpt_bigcode"), _GPT2),
    "bloom": replace(_GPT2, defaults=_2048_POSITIONS),
    "gptj": Family(gated=False, normal=_normal_gpt2),
    "falcon": Family(gated=False, tied=True, normal=_normal_falcon, defaults=_2048_POSITIONS),
    **dict.fromkeys(("gemma2", "vaultgemma"), Family(tied=True, every_full=2)),
    "gemma3": Family(tied=True, every_full=6, defaults=_GEMMA3),
    "gemma3n": Family(tied=True, every_full=5),
    **dict.fromkeys(("gemma4", "gemma4_unified"), _GEMMA4),
    **dict.fromkeys(("cohere2", "cohere2_moe"), Family(tied=True, every_full=4)),
    **dict.fromkeys(("olmo3", "exaone4", "exaone_moe"), Family(every_full=4)),
    "gpt_oss": Family(every_full=2),
    **dict.fromkeys(("mixtral", "minimax_m2", "olmoe", "phimoe", "granitemoe"), _PLAIN),
    **dict.fromkeys(("glm4_moe", "dots1", "bailing_moe", "bailing_moe_v2"), _PLAIN),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe_lite"), _PLAIN),
    **dict.fromkeys(("solar_open", "hy_v3", "axk1"), _PLAIN),
    **dict.fromkeys(("granitemoeshared", "flex_olmo", "glm4v", "glm4v_moe"), _PLAIN),
    **dict.fromkeys(("ernie4_5_moe", "hunyuan", "hunyuan_v1_moe"), _TIED),
    **dict.fromkeys(("qwen3_moe", "qwen3_vl_moe"), _QWEN),
    "qwen2_moe": Family(has_window_switch=True, has_shared_gate=True),
    "afmoe": Family(has_output_gate=True, every_full=4),
    **dict.fromkeys(("mimo_v2_flash", "mimo_v2"), Family(normal=_normal_mimo)),
    "longcat_flash": Family(normal=_normal_longcat),
    "laguna": Family(normal=_normal_laguna),
    "deepseek_v32": Family(defaults=_index_of(64)),
    "glm_moe_dsa": Family(defaults=_index_of(32)),
    "llama4": Family(
        every_full=4, shared_size="intermediate_size", dense_size="intermediate_size_mlp"
    ),
    **dict.fromkeys(("qwen3_next", "qwen3_5", "qwen3_5_moe"), _DELTA),
    "olmo_hybrid": Family(linear=_gated_delta),
    "kimi_linear": Family(linear=_kda, normal=_normal_kimi_linear, float_states=True),
    **dict.fromkeys(("lfm2", "lfm2_moe"), _LFM2),
    "minimax": Family(linear=_lightning, normal=_normal_minimax),
    "jamba": Family(linear=_mamba1, normal=_normal_jamba),
    "nemotron_h": Family(gated=False, linear=_mamba2, normal=_normal_nemotron_h, float_states=True),
    "falcon_h1": Family(linear=_mamba2, has_both=True),
    **dict.fromkeys(("granitemoehybrid", "bamba"), Family(linear=_mamba2)),
}
