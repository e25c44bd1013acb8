"""A published model's config.json as a `ModelSpec` for simulation: shapes alone, without weights.

Fields are named as in the configurations of transformers 5. An architecture is taken only if it is
one of `FAMILIES`, as another may have parts that its fields do not name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from sarathi_lab.config.errors import UserError
from sarathi_lab.config.paths import read_object
from sarathi_lab.model.config_facts import (
    AGAIN,
    CHUNKED,
    CONV,
    FFN_LAYERS,
    FULL,
    HEADS,
    LINEAR,
    MAMBA,
    SLIDING,
    WIDTHS,
    WITHOUT_CONTEXT,
    Config,
    Facts,
)
from sarathi_lab.model.families import FAMILIES, Family
from sarathi_lab.model.layers import (
    ALIKE,
    CompressedCache,
    HeadSizes,
    Index,
    Latent,
    Layers,
    Linear,
    LinearAttention,
    Window,
)
from sarathi_lab.model.own_fields import of_blocks
from sarathi_lab.model.quantised_config import FIELD as QUANTISATION
from sarathi_lab.model.quantised_config import read_quantisation, unused_fields
from sarathi_lab.model.spec import DTYPE_BYTES, ModelSpec, StoredDtype

# Beside the config.json of ModelOpt's checkpoints, which may lack the quantisation.
QUANTISED_FILE = "hf_quant_config.json"
KINDS = (FULL, SLIDING, CHUNKED, *WITHOUT_CONTEXT)
# Names of a layer's kind that mean one of the above.
SAME_KIND = {"attention": FULL, "mamba2": MAMBA, "none": "", "indexed_attention": FULL}
# Nemotron-H's letters: Mamba-2, attention, an FFN or experts instead of either.
PATTERN_KINDS = {"M": MAMBA, "*": FULL, "-": "", "E": ""}
FLOAT_BYTES = 4
DTYPE_FIELDS = ("dtype", "torch_dtype")  # of today's transformers, and of older ones
FFN_SIZES = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size")
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
CHOSEN = (
    *("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k"),
    *("experts_per_token", "top_k_experts"),
)
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
    "sparse_attention_config": ("attention to blocks that an index selects (MiniMax-M3)", ()),
    "index_block_size": ("attention to blocks that an index selects (MiniMax-M3)", ()),
    "share_q_dim": ("queries of heads from a space of their own (Step-3)", ()),
    "hc_mult": ("several residual streams (DeepSeek-V4)", (1,)),
    "routed_expert_hidden_size": ("experts in a space of their own", ()),
    "kv_source_layers": ("keys and values of other layers by their number (Mistral Large 4)", ()),
    "attn_res_block_size": ("attention to earlier layers", ()),
    "moe_latent_size": ("experts in a space of their own", ()),
}
# What can be done with a model that no formula is for.
OTHERWISE = (
    "use executor=vllm if vLLM runs it, or state a shape of about its size in "
    "FOLDER/model/NAME.yaml and add --config-dir FOLDER model=NAME"
)
# Parts around the text's model: encoders, and a model that speaks (Qwen's omni models).
ENCODERS = (
    *("vision_config", "audio_config", "img_processor", "audio_processor"),
    *("talker_config", "code2wav_config"),
)
THINKER = "thinker_config"  # has the text's model and encoders of Qwen's omni models


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
    thinker = config.get(THINKER)
    if isinstance(thinker, Mapping):
        config = {**config, **thinker}
    encoders = [name for name in ENCODERS if config.get(name)]
    fields = dict(config)
    # What a model of several parts states of its language model counts.
    text = config.get("text_config") or config.get("llm_config")
    published_dtype = _published_dtype(config)
    if isinstance(text, Mapping):
        fields |= text
        if published_dtype == "auto":  # as vLLM asks them
            published_dtype = _published_dtype(text)
    _check_parts(fields)
    family = _family_of(fields)
    if fields.get("block_configs") is not None:
        fields |= of_blocks(Facts(fields))
    _check_embedding(Facts(fields))
    fields = {**family.defaults, **fields}
    if family.normal is not None:
        fields |= family.normal(Facts(fields))
    elif fields.get("per_layer_config"):
        raise UserError("per_layer_config: layers of different sizes have no formula here")
    spec = Reader(Facts(fields), family).spec(name)
    quantisation = read_quantisation(fields, spec)
    usual_weights: StoredDtype = "auto"
    if quantisation is None:
        usual_weights = family.usual_weights
    return replace(
        spec,
        quantisation=quantisation,
        usual_weights=usual_weights,
        published_dtype=published_dtype,
        uncounted=(*encoders, *unused_fields(fields)),
    )


def _published_dtype(config: Config) -> str:
    """Return the type of the elements that are not quantised; "auto" where the file says none."""
    for name in DTYPE_FIELDS:
        dtype = str(config.get(name) or "").removeprefix("torch.")
        if dtype in DTYPE_BYTES:
            return dtype
    return "auto"


def _model_type_of(fields: Config) -> str:
    """Return the model_type, of a language model without what says that it is one."""
    return str(fields.get("model_type", "")).removesuffix("_text")


def _family_of(fields: Config) -> Family:
    """Return the family of a model_type. Raises UserError for one that has no formulas."""
    model_type = _model_type_of(fields)
    if model_type not in FAMILIES:
        raise UserError(
            f"model_type={fields.get('model_type')!r} has no formulas; {OTHERWISE}; formulas are "
            f"there for {', '.join(sorted(FAMILIES))}"
        )
    return FAMILIES[model_type]


def _check_parts(fields: Config) -> None:
    """Raise UserError for parts that no formula has, or none but that of another family."""
    counted: tuple[str, ...] = ()
    model_type = _model_type_of(fields)
    if model_type in FAMILIES:
        counted = FAMILIES[model_type].counted
    for name, (part, absent) in NOT_COUNTED.items():
        value = fields.get(name)
        if value and value not in absent and name not in counted:
            raise UserError(f"{name}={str(value)[:40]}: {part} has no formula; {OTHERWISE}")


def _check_embedding(facts: Facts) -> None:
    """Raise UserError for an embedding that has another width than the layers."""
    name = "word_embed_proj_dim"
    if facts.has(name) and facts.size(name) != facts.size(*WIDTHS):
        raise UserError(
            f"{name}={facts.size(name)}: an embedding of another width than the layers "
            f"({facts.size(*WIDTHS)}) has no formula; take another model"
        )


class Reader:
    """Reads the shapes of one config.json of a `family`. Raises UserError, naming the field."""

    def __init__(self, facts: Facts, family: Family) -> None:
        self.facts = facts
        self.family = family
        self.num_layers = facts.num_layers()

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
        query_rank = None  # DeepSeek-V2-Lite's queries pass none
        if facts.has("q_lora_rank"):
            query_rank = facts.size("q_lora_rank")
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
        kinds_of_layers = self._kinds()
        borrowing = self._borrowing(kinds_of_layers)
        kinds = [kind for kind in kinds_of_layers if kind]
        num_attention = sum(kind not in WITHOUT_CONTEXT for kind in kinds)
        if num_attention == 0:
            raise UserError("no layer has attention; models of states alone have no formula")
        attention = None  # in all layers
        if num_attention < self.num_layers:
            attention = num_attention
        dense = 0
        dense_ffn_size = 0
        if mixture.num_experts > 0 and mixture.num_dense > 0:
            dense = mixture.num_dense
            dense_ffn_size = mixture.dense_width
        layers = Layers(
            attention=attention,
            ffn=self._num_ffn_layers(mixture),
            dense=dense,
            dense_ffn_size=dense_ffn_size,
            shared_gate=family.has_shared_gate or mixture.shared_width == 0,
            output_gate=self.facts.flag("attn_output_gate", default=family.has_output_gate),
            latent=latent,
            linear=self._linear(kinds),
            window=self._window(kinds, len(borrowing) - borrowing.count(FULL)),
            borrowing=borrowing.count(FULL),
            parallel=family.has_both,
            index=self._index(),
            value_size=self._value_size(latent),
            value_product=not self.facts.flag("attention_k_eq_v", default=False),
            further=self._further(),
            table_params=self._table_params(),
            compressed=self._compressed(),
        )
        if layers == ALIKE:
            return ALIKE  # the same object, which others ask for
        return layers

    def _num_ffn_layers(self, mixture: Mixture) -> int | None:
        """Count the layers with an FFN or experts; None: all."""
        if self.facts.has("hybrid_override_pattern"):  # layers of one part each
            return mixture.num_layers + mixture.num_dense
        if self.facts.has(FFN_LAYERS):
            return self.facts.count(FFN_LAYERS)
        return None

    def _linear(self, kinds: Sequence[str]) -> LinearAttention | None:
        """Return the linear attention of a model whose layers have `kinds`; None without one."""
        family = self.family
        num_layers = sum(kind in WITHOUT_CONTEXT for kind in kinds)
        if family.has_both:
            num_layers = self.num_layers
        if num_layers == 0:
            return None
        if family.linear is None:
            raise UserError(f"layer_types: {kinds[0]} has no formula for this model_type")
        linear = family.linear(self.facts, num_layers)
        if family.float_states or self.facts.text("mamba_ssm_dtype") == "float32":
            return replace(linear, state_bytes=FLOAT_BYTES)
        return linear

    def _kinds(self) -> list[str]:
        """Return the kind of attention of each layer; "" for none."""
        facts = self.facts
        if facts.has("hybrid_override_pattern"):
            return [PATTERN_KINDS[part] for part in self._pattern()]
        name = facts.first("layer_types", "layers_block_type")
        if name is not None:
            kinds = [SAME_KIND.get(kind, kind) for kind in facts.names(name) or ()]
            for kind in kinds:
                if kind and kind not in KINDS:
                    raise UserError(f"{name}: a layer of {kind!r} has no formula")
            return kinds
        if facts.has("full_attention_interval"):
            interval = facts.period("full_attention_interval")
            return self._full_at(range(interval - 1, self.num_layers, interval), LINEAR)
        if facts.has("attn_layer_indices"):
            return self._full_at(facts.numbers("attn_layer_indices") or (), MAMBA)
        if facts.has("full_attn_idxs"):
            return self._full_at(facts.numbers("full_attn_idxs") or (), CONV)
        if facts.has("attn_layer_period"):
            period = facts.period("attn_layer_period")
            offset = facts.count("attn_layer_offset")
            return self._full_at(range(offset, self.num_layers, period), MAMBA)
        if self.family.linear is not None and not self.family.has_both:
            raise UserError(
                f"layer_types is missing, which says which layers have attention; {AGAIN}"
            )
        return self._window_kinds()

    def _full_at(self, full_layers: Sequence[int], kind: str) -> list[str]:
        """Return `kind`, but for `full_layers`, which see the whole context."""
        kinds = [kind] * self.num_layers
        for layer in full_layers:
            if layer < self.num_layers:  # files may list layers that draft behind the last
                kinds[layer] = FULL
        return kinds

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
            every = facts.period("sliding_window_pattern")
        if every == 0:
            return [kind] * self.num_layers
        return self._full_at(range(every - 1, self.num_layers, every), kind)

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
        own_heads = "swa_num_attention_heads"
        own_kv_heads = "swa_num_key_value_heads"
        own_size = "swa_head_dim"
        if facts.first(own_heads, own_kv_heads, own_size) is None:
            return None
        num_heads = facts.size(own_heads, "num_attention_heads")
        usual_size = self._head_size(facts.size(*WIDTHS), num_heads)
        key_size = facts.count(own_size, usual_size)
        num_kv_heads = facts.size(own_kv_heads, "num_key_value_heads")
        value_size = facts.size_or(key_size, "swa_v_head_dim", "v_head_dim")
        return HeadSizes(num_heads, num_kv_heads, key_size, value_size)

    def _value_size(self, latent: Latent | None) -> int | None:
        """Return the entries of a value where keys have others."""
        facts = self.facts
        if latent is not None or not facts.has("v_head_dim"):
            return None
        size = facts.size("v_head_dim")
        if size == facts.count("head_dim", size):
            return None
        return size

    def _index(self) -> Index | None:
        facts = self.facts
        if not facts.has("index_topk") or facts.has("compressed_window"):
            return None
        return Index(
            facts.size("index_n_heads"),
            facts.size("index_head_dim"),
            facts.size("index_topk"),
            self._num_index_layers(),
        )

    def _compressed(self) -> CompressedCache | None:
        facts = self.facts
        if not facts.has("compressed_window"):
            return None
        return CompressedCache(
            window=facts.size("compressed_window"),
            sparse_layers=facts.count("sparse_layers"),
            heavy_layers=facts.count("heavy_layers"),
            index_size=facts.size("index_topk"),
            index_heads=facts.size("index_n_heads"),
            index_key_size=facts.size("index_head_dim"),
            query_rank=facts.size("q_lora_rank"),
            output_groups=facts.size("o_groups"),
            output_rank=facts.size("o_lora_rank"),
            streams=facts.count("hc_mult", 1),
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
        # By SGLang's `dsa_layer_skips_topk`: the layers before the offset have an index each, and
        # then each `frequency`-th layer has, counted from the layer before the offset.
        offset = facts.count("index_skip_topk_offset", 2)
        num_layers = 0
        for layer in range(self.num_layers):
            distance = max(layer - (offset - 1), 0)
            if distance % frequency == 0:
                num_layers += 1
        return num_layers

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
        num_experts = facts.size_or(0, *EXPERTS)
        num_layers = self.num_layers
        num_dense = self._num_dense()
        if facts.has("hybrid_override_pattern"):
            pattern = self._pattern()
            num_layers = pattern.count("E")
            num_dense = pattern.count("-")
            if num_layers == 0:
                num_experts = 0
        elif num_experts:
            num_layers -= num_dense
        if num_experts == 0:
            sizes: tuple[str, ...] = FFN_SIZES
            if facts.first(*EXPERTS) is not None:
                # Granite 4's dense models keep the name of their mixtures.
                sizes = ("shared_intermediate_size", *FFN_SIZES)
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
        # A width of its own is that of one shared expert, where no number is stated.
        num_shared = facts.size_or(1, *SHARED_EXPERTS)
        if facts.has("moe_shared_expert_intermediate_size"):
            return num_shared * facts.size("moe_shared_expert_intermediate_size")
        direct = facts.first("shared_expert_intermediate_size", "shared_intermediate_size")
        direct = direct or self.family.shared_size
        if direct is not None:
            return facts.count(direct)
        if facts.first(*SHARED_EXPERTS) is None:
            return 0
        return num_shared * width

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
            period = facts.period("expert_layer_period")
            offset = facts.count("expert_layer_offset")
            return sum((number - 1) % period != offset for number in numbers)
        if facts.has("first_k_dense_replace"):
            if facts.count("moe_layer_freq", 1) != 1:
                raise UserError(f"moe_layer_freq={facts.text('moe_layer_freq')} has no formula")
            return facts.count("first_k_dense_replace")
        if facts.has("interleave_moe_layer_step"):
            step = facts.period("interleave_moe_layer_step")
            return sum(number % step != 0 for number in numbers)
        if facts.has("moe_layer_start_index"):
            interval = facts.period("moe_layer_interval")
            start = facts.count("moe_layer_start_index")
            return sum(number <= start or number % interval != 0 for number in numbers)
        step = facts.period("decoder_sparse_step")
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
