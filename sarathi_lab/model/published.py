"""A published model's config.json as a `ModelSpec` for simulation: shapes alone, without weights.

Fields are named as in the configurations of transformers 5, or otherwise by architectures.yaml. An
architecture is taken only if it stands there, as another may have parts that its fields do not
name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from sarathi_lab.config.errors import UserError
from sarathi_lab.config.paths import read_object, stated_beside
from sarathi_lab.model.config_facts import AGAIN, FULL, Config, Facts
from sarathi_lab.model.families import ARCHITECTURES, Family, families
from sarathi_lab.model.layers import (
    ALIKE,
    CompressedCache,
    HeadSizes,
    Index,
    Latent,
    Layers,
    LinearAttention,
    Window,
)
from sarathi_lab.model.own_fields import FFN_LAYERS, NONE, own_fields
from sarathi_lab.model.quantised_config import FIELD as QUANTISATION
from sarathi_lab.model.quantised_config import read_quantisation, unused_fields
from sarathi_lab.model.spec import DTYPE_BYTES, ModelSpec, StoredDtype
from sarathi_lab.model.state_layers import read_states

# Beside the config.json of ModelOpt's checkpoints, which may lack the quantisation.
QUANTISED_FILE = "hf_quant_config.json"
# What a layer has: attention of some kind, states, or one part alone.
SLIDING = "sliding_attention"
CHUNKED = "chunked_attention"
SPARSE = "compressed_sparse_attention"
HEAVY = "heavily_compressed_attention"
STATES = "linear_attention"
MLP = "mlp"
MOE = "moe"
WITH_CONTEXT = (FULL, SLIDING, CHUNKED, SPARSE, HEAVY)
KINDS = (*WITH_CONTEXT, STATES, MLP, MOE, NONE)
FLOAT_BYTES = 4
DTYPE_FIELDS = ("dtype", "torch_dtype")  # of today's transformers, and of older ones
MOST_LETTERS = 40  # of a value in a message
# What can be done with a model that no formula is for.
OTHERWISE = (
    "use executor=vllm if vLLM runs it, or state a shape of about its size in "
    "FOLDER/model/NAME.yaml and add --config-dir FOLDER model=NAME"
)
THINKER = "thinker_config"  # has the text's model and encoders of Qwen's omni models


def stated(section: str) -> Any:
    """Return a section of architectures.yaml."""
    return stated_beside(__file__, ARCHITECTURES)[section]


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
            config[QUANTISATION] = {"quant_method": "modelopt", **settings}
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
    # What a model of several parts states of its language model counts.
    text = config.get("text_config") or config.get("llm_config")
    if not isinstance(text, Mapping):
        text = {}
    fields = {**config, **text}
    model_type = str(fields.get("model_type", "")).removesuffix("_text")
    _check_parts(fields, model_type)
    family = _family_of(fields, model_type)
    with_names = {**family.defaults, **fields}
    for field, name_in_file in family.renamed.items():
        with_names[field] = fields.get(name_in_file)
    facts = Facts.renamed(with_names, stated("names"))
    facts = facts.updated(own_fields(facts, model_type))
    spec = Reader(facts, family).spec(name)
    quantisation = read_quantisation(fields, spec)
    usual_weights: StoredDtype = "auto"
    if quantisation is None:
        usual_weights = family.usual_weights
    encoders = [encoder for encoder in stated("encoders") if config.get(encoder)]
    return replace(
        spec,
        quantisation=quantisation,
        usual_weights=usual_weights,
        published_dtype=_published_dtype(config, text),
        uncounted=(*encoders, *unused_fields(fields)),
    )


def _published_dtype(*configs: Config) -> str:
    """Return the type of the elements that are not quantised, by the first of `configs` that states
    one, as vLLM asks them; "auto" without any.
    """
    for config in configs:
        for name in DTYPE_FIELDS:
            dtype = str(config.get(name) or "").removeprefix("torch.")
            if dtype in DTYPE_BYTES:
                return dtype
    return "auto"


def _family_of(fields: Config, model_type: str) -> Family:
    """Return the family of a model_type. Raises UserError for one that has no formulas."""
    if model_type not in families():
        raise UserError(
            f"model_type={fields.get('model_type')!r} has no formulas; {OTHERWISE}; formulas are "
            f"there for {', '.join(sorted(families()))}"
        )
    return families()[model_type]


def _check_parts(fields: Config, model_type: str) -> None:
    """Raise UserError for parts that no formula has, or none but that of another family."""
    family = families().get(model_type, Family())
    for name, part in stated("not_counted").items():
        value = fields.get(name)
        is_counted = name in family.counted
        is_absent = not value or value in part.get("absent", ())
        if not is_counted and not is_absent:
            shown = str(value)
            if len(shown) > MOST_LETTERS:
                shown = f"{shown[:MOST_LETTERS]}..."
            raise UserError(f"{name}={shown}: {part['part']} has no formula; {OTHERWISE}")


class Reader:
    """Reads the shapes of one config.json of a `family`. Raises UserError, naming the field."""

    def __init__(self, facts: Facts, family: Family) -> None:
        self.facts = facts
        self.family = family
        self.num_layers = facts.num_layers()
        self.kinds = self._kinds()
        # Layers of one part each (Nemotron-H): attention, states, an FFN or experts.
        self.has_single_parts = MLP in self.kinds or MOE in self.kinds
        self.num_experts = facts.count("num_experts")
        if self.has_single_parts and MOE not in self.kinds:
            self.num_experts = 0

    def spec(self, name: str) -> ModelSpec:
        """Make the spec, with weights in the model's type."""
        facts = self.facts
        family = self.family
        num_heads = facts.size("num_attention_heads")
        latent = self._latent()
        if latent is None:
            num_kv_heads = self._num_kv_heads(num_heads)
            head_size = self._head_size(num_heads)
        else:
            num_kv_heads = num_heads
            head_size = facts.size("qk_nope_head_dim") + latent.rope_size
        num_chosen = 0
        shared_expert_size = 0
        if self.num_experts:
            num_chosen = facts.size("num_experts_per_tok")
            shared_expert_size = self._shared_expert_size()
        return ModelSpec(
            name=name,
            num_layers=self.num_layers,
            hidden_size=self._hidden_size(),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_size=head_size,
            vocab_size=facts.size("vocab_size"),
            max_position=facts.size("max_position_embeddings"),
            gated_ffn=family.gated,
            activation="silu" if family.gated else "gelu",
            tie_embeddings=facts.flag("tie_word_embeddings", default=family.tied),
            ffn_size=self._ffn_size(),
            num_experts=self.num_experts,
            experts_per_token=num_chosen,
            shared_expert_size=shared_expert_size,
            layers=self._layers(latent, shared_expert_size),
            simulation_only=True,
        )

    def _hidden_size(self) -> int:
        hidden = self.facts.size("hidden_size")
        width = self.facts.count("word_embed_proj_dim", hidden)
        if width != hidden:
            raise UserError(
                f"word_embed_proj_dim={width}: an embedding of another width than the layers "
                f"({hidden}) has no formula; take another model"
            )
        return hidden

    def _num_kv_heads(self, num_heads: int) -> int:
        facts = self.facts
        is_new_falcon = facts.flag("new_decoder_architecture", default=False)
        if facts.flag("multi_query", default=False) and not is_new_falcon:
            return 1
        return facts.count("num_key_value_heads", num_heads)

    def _head_size(self, num_heads: int) -> int:
        if self.facts.has("head_dim"):
            return self.facts.size("head_dim")
        hidden = self.facts.size("hidden_size")
        if hidden % num_heads:
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
        return Latent(
            rank=facts.size("kv_lora_rank"),
            rope_size=facts.size("qk_rope_head_dim"),
            query_rank=query_rank,
            # Where the file does not say, values are as wide as keys that are not rotated.
            value_size=facts.size("v_head_dim", "qk_nope_head_dim"),
        )

    # -- which layer has what ----------------------------------------------------------------------

    def _kinds(self) -> list[str]:
        """Return what each layer has, as one of `KINDS`."""
        facts = self.facts
        for name, kinds_by_word in stated("layer_kinds").items():
            words = facts.of_layers(name)
            if words is None:
                continue
            kinds = [kinds_by_word.get(word, word) for word in words]
            for kind in kinds:
                if kind not in KINDS:
                    raise UserError(f"{name}: a layer of {kind!r} has no formula")
            return kinds
        for name, first in stated("full_layers").items():
            if facts.has(name):
                full_layers = facts.list_of(name)
                numbers = range(first, first + self.num_layers)
                return [FULL if number in full_layers else STATES for number in numbers]
        if facts.has("full_attention_interval"):
            return self._last_full(STATES, facts.count("full_attention_interval", minimum=1))
        if self.family.states_layers:
            raise UserError(
                f"layer_types is missing, which says which layers have attention; {AGAIN}"
            )
        return self._window_kinds()

    def _last_full(self, kind: str, every: int) -> list[str]:
        """Return `kind`, but for the last of `every` few layers; all of `kind` for 0."""
        kinds = [kind] * self.num_layers
        if every:
            num_full = self.num_layers // every
            kinds[every - 1 :: every] = [FULL] * num_full
        return kinds

    def _window_kinds(self) -> list[str]:
        """Return the kinds where the file has a window, and the architecture has its layers."""
        facts = self.facts
        every = self.family.every_full
        if facts.has("attention_chunk_size"):
            return self._last_full(CHUNKED, every)
        is_switched_off = self.family.has_window_switch and not facts.flag(
            "use_sliding_window", default=False
        )
        if is_switched_off or not facts.has("sliding_window"):
            return [FULL] * self.num_layers
        if self.family.has_window_switch:
            num_full = min(self.num_layers, facts.count("max_window_layers"))
            num_windowed = self.num_layers - num_full
            return [FULL] * num_full + [SLIDING] * num_windowed
        pattern = facts.text("sliding_window_pattern")
        if pattern and set(pattern) <= {"L", "G"}:
            every = len(pattern)  # LLLG: three local ones, one global
        elif facts.has("sliding_window_pattern"):
            every = facts.count("sliding_window_pattern", minimum=1)
        return self._last_full(SLIDING, every)

    def _layers(self, latent: Latent | None, shared_expert_size: int) -> Layers:
        facts = self.facts
        family = self.family
        num_attention: int | None = sum(kind in WITH_CONTEXT for kind in self.kinds)
        if num_attention == 0:
            raise UserError("no layer has attention; models of states alone have no formula")
        if num_attention == self.num_layers:
            num_attention = None
        num_dense = self._num_dense() if self.num_experts else 0
        dense_ffn_size = 0
        if num_dense:
            dense_ffn_size = facts.size("dense_ffn_size", "intermediate_size")
        compressed = self._compressed()
        index = None
        if compressed is None:
            index = self._index()
        layers = Layers(
            attention=num_attention,
            ffn=self._num_ffn_layers(),
            dense=num_dense,
            dense_ffn_size=dense_ffn_size,
            shared_gate=family.has_shared_gate or shared_expert_size == 0,
            output_gate=facts.flag("attn_output_gate", default=family.has_output_gate),
            latent=latent,
            linear=self._states(),
            window=None if compressed else self._window(),
            parallel=family.has_both,
            index=index,
            value_size=self._value_size(latent),
            value_product=not facts.flag("attention_k_eq_v", default=False),
            compressed=compressed,
        )
        if layers == ALIKE:
            return ALIKE  # the same object, which others ask for
        return layers

    def _num_ffn_layers(self) -> int | None:
        """Count the layers with an FFN or experts; None: all."""
        if self.has_single_parts:
            return self.kinds.count(MLP) + self.kinds.count(MOE)
        if self.facts.has(FFN_LAYERS):
            return self.facts.count(FFN_LAYERS)
        return None

    def _states(self) -> LinearAttention | None:
        """Return the layers with states; None without any."""
        family = self.family
        num_layers = self.kinds.count(STATES)
        if family.has_both:
            num_layers = self.num_layers
        if num_layers == 0:
            return None
        if family.states is None:
            raise UserError(f"layer_types: {STATES} has no formula for this model_type")
        states = read_states(family.states, self.facts, num_layers)
        if family.float_states or self.facts.text("mamba_ssm_dtype") == "float32":
            return replace(states, state_bytes=FLOAT_BYTES)
        return states

    def _window(self) -> Window | None:
        facts = self.facts
        heads = self._window_heads()
        if SLIDING in self.kinds:
            num_layers = self.kinds.count(SLIDING)
            size = facts.size("sliding_window")
            return Window(num_layers, size, "sliding", heads)
        if CHUNKED in self.kinds:
            num_layers = self.kinds.count(CHUNKED)
            size = facts.size("attention_chunk_size")
            return Window(num_layers, size, "chunked", heads)
        return None

    def _window_heads(self) -> HeadSizes | None:
        """Return the heads of layers with a window, where the file has some of their own."""
        facts = self.facts
        own_fields = ("swa_num_attention_heads", "swa_num_key_value_heads", "swa_head_dim")
        if not any(facts.has(name) for name in own_fields):
            return None
        num_heads = facts.size("swa_num_attention_heads", "num_attention_heads")
        key_size = facts.count("swa_head_dim", self._head_size(num_heads))
        value_size = facts.count("swa_v_head_dim", facts.count("v_head_dim", key_size))
        num_kv_heads = facts.size("swa_num_key_value_heads", "num_key_value_heads")
        return HeadSizes(num_heads, num_kv_heads, key_size, value_size)

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
        num_layers = None  # all
        owners = facts.of_layers("indexer_types")
        if owners is not None:
            num_layers = self.num_layers - owners.count("shared")
        return Index(
            facts.size("index_n_heads"),
            facts.size("index_head_dim"),
            facts.size("index_topk"),
            num_layers,
        )

    def _compressed(self) -> CompressedCache | None:
        facts = self.facts
        if SPARSE not in self.kinds and HEAVY not in self.kinds:
            return None
        return CompressedCache(
            window=facts.size("sliding_window"),
            sparse_layers=self.kinds.count(SPARSE),
            heavy_layers=self.kinds.count(HEAVY),
            index_size=facts.size("index_topk"),
            index_heads=facts.size("index_n_heads"),
            index_key_size=facts.size("index_head_dim"),
            query_rank=facts.size("q_lora_rank"),
            output_groups=facts.size("o_groups"),
            output_rank=facts.size("o_lora_rank"),
            streams=facts.count("hc_mult", 1),
        )

    # -- FFNs and experts --------------------------------------------------------------------------

    def _ffn_size(self) -> int:
        """Return the width of an FFN, or of one expert."""
        facts = self.facts
        if self.num_experts:
            return facts.size("moe_intermediate_size", "intermediate_size")
        shared = "shared_expert_intermediate_size"
        # Granite 4's dense models keep the names of their mixtures.
        if facts.has("num_experts") and facts.has(shared):
            return facts.size(shared)
        if not facts.has("intermediate_size") and self.family.ffn_multiple:
            return self.family.ffn_multiple * facts.size("hidden_size")
        return facts.size("intermediate_size")

    def _shared_expert_size(self) -> int:
        """Return the width of all shared experts together."""
        facts = self.facts
        # A width of its own is that of one shared expert, where no number is stated.
        num_shared = facts.count("n_shared_experts", 1)
        if facts.has("moe_shared_expert_intermediate_size"):
            return num_shared * facts.size("moe_shared_expert_intermediate_size")
        if facts.has("shared_expert_intermediate_size"):
            return facts.count("shared_expert_intermediate_size")
        if facts.has("n_shared_experts"):
            return num_shared * self._ffn_size()
        return 0

    def _num_dense(self) -> int:
        """Count the layers without experts."""
        facts = self.facts
        if self.has_single_parts:
            return self.kinds.count(MLP)
        for name in ("mlp_layer_types", "moe_layer_freq"):  # the latter as MiMo has it
            kinds = facts.of_layers(name) if facts.has_list(name) else None
            if kinds is not None:
                return kinds.count("dense") + kinds.count("0")
        if facts.has("moe_layers_enum"):
            return self.num_layers - len(facts.text("moe_layers_enum").split(","))
        if facts.count("moe_layer_freq", 1) != 1:
            raise UserError(f"moe_layer_freq={facts.text('moe_layer_freq')} has no formula")
        num_first = facts.count("first_k_dense_replace")
        interval = facts.count("expert_interval", 1, minimum=1)
        excluded = facts.list_of("mlp_only_layers") if facts.has("mlp_only_layers") else []
        num_dense = 0
        for layer in range(self.num_layers):
            has_turn = (layer + 1) % interval == 0
            if layer < num_first or layer in excluded or not has_turn:
                num_dense += 1
        return num_dense
