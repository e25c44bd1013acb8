"""Fields of architectures with names and meanings of their own, by the names of other models."""

from __future__ import annotations

import math
from collections.abc import Mapping

from sarathi_lab.config.errors import UserError
from sarathi_lab.model.config_facts import (
    AGAIN,
    FFN_LAYERS,
    FULL,
    HEADS,
    LINEAR,
    SLIDING,
    WIDTHS,
    Config,
    Facts,
)

SPARSE, HEAVY = "compressed_sparse_attention", "heavily_compressed_attention"
# Of DeepSeek-V4: tokens of an entry of the cache; 0 or 1 for layers with a window alone.
KINDS_OF_RATIOS = {0: SLIDING, 1: SLIDING, 4: SPARSE, 128: HEAVY}
DEFAULTS_OF_V4: Config = {"num_key_value_heads": 1, "head_dim": 512, "sliding_window": 128}
DENSE_OF_STEP = 3  # first layers without experts, where Step-3.5's file does not say


def of_blocks(facts: Facts) -> Config:
    """Return what the `block_configs` of Llama Nemotron stand for, by the names of other models:
    layers without attention or FFN, and FFNs of different widths, which count by their mean.
    """
    blocks = facts.objects("block_configs")
    num_layers = facts.num_layers()
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
    width = int(2 * value * hidden / 3)
    return math.ceil(width / 256) * 256


def of_lfm2(facts: Facts) -> Config:
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


def of_kimi_linear(facts: Facts) -> Config:
    """Kimi Linear has the kinds of its layers, by numbers from 1, in an object."""
    attention = facts.object("linear_attn_config")
    fields: dict[str, object] = {}
    if attention.has("full_attn_layers"):
        places = attention.numbers("full_attn_layers") or []
        numbers = range(1, facts.num_layers() + 1)
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


def of_mimo(facts: Facts) -> Config:
    """MiMo-V2 numbers the kinds of its layers: 1 has a window, or experts."""
    fields: dict[str, object] = {}
    pattern = facts.numbers("hybrid_layer_pattern")
    if pattern is not None:
        fields["layer_types"] = [SLIDING if number else FULL for number in pattern]
    of_experts = facts.numbers("moe_layer_freq")
    if of_experts is not None:
        fields["mlp_layer_types"] = ["sparse" if number else "dense" for number in of_experts]
        fields["moe_layer_freq"] = None
    # As MiMo-V2-Flash's code has it by default.
    if not facts.has("swa_num_key_value_heads"):
        fields["swa_num_key_value_heads"] = 2 * facts.size("num_key_value_heads")
    return fields


def of_laguna(facts: Facts) -> Config:
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


def of_step(facts: Facts) -> Config:
    """Step-3.5 has other heads in layers with a window, and lists the kinds of the layers that
    draft behind those of its own.
    """
    num_layers = facts.num_layers()
    fields: dict[str, object] = {
        "num_key_value_heads": facts.size("num_attention_groups", "num_key_value_heads"),
        "num_experts_per_tok": facts.size("moe_top_k", "num_experts_per_tok"),
        "shared_expert_intermediate_size": facts.size("share_expert_dim"),
    }
    if facts.has("layer_types"):
        fields["layer_types"] = facts.texts("layer_types")[:num_layers]
    others = facts.object("attention_other_setting")
    for name, of_others in (
        ("swa_num_attention_heads", "num_attention_heads"),
        ("swa_num_key_value_heads", "num_attention_groups"),
        ("swa_head_dim", "head_dim"),
    ):
        if others.has(of_others):
            fields[name] = others.size(of_others)
    if not facts.has("mlp_layer_types") and not facts.has("first_k_dense_replace"):
        sparse_layers = [*range(DENSE_OF_STEP, num_layers)]
        if facts.has("moe_layers_enum"):
            sparse_layers = [int(layer) for layer in facts.text("moe_layers_enum").split(",")]
        fields["mlp_layer_types"] = [
            "sparse" if layer in sparse_layers else "dense" for layer in range(num_layers)
        ]
    return fields


def of_minimax(facts: Facts) -> Config:
    """MiniMax-01 numbers the kinds of its layers: 1 has attention to a context."""
    pattern = facts.numbers("attn_type_list")
    if pattern is None:
        return {}
    return {"layer_types": [FULL if number else LINEAR for number in pattern]}


def of_gemma4(facts: Facts) -> Config:
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
    # FFNs of two widths count by their mean, as all products of a kind are one sum here.
    if facts.flag("use_double_wide_mlp", default=False):
        num_layers = facts.num_layers()
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


def of_nemotron_h(facts: Facts) -> Config:
    """Nemotron-H's newer files have words for the letters of its layers."""
    if facts.has("hybrid_override_pattern") or not facts.has("layers_block_type"):
        return {}
    kinds = facts.texts("layers_block_type")
    letters = {"mamba": "M", "attention": "*", "mlp": "-", "moe": "E"}
    letters |= {"linear_attention": "M", FULL: "*"}  # as transformers calls them today
    return {
        "num_hidden_layers": facts.count("num_hidden_layers", len(kinds)),
        "hybrid_override_pattern": "".join(letters.get(kind, "?") for kind in kinds),
    }


def of_falcon(facts: Facts) -> Config:
    """Falcon has as many KV heads as a flag says, and FFNs of four times the width."""
    num_heads = facts.size(*HEADS)
    num_kv_heads = facts.count("num_kv_heads", facts.count("n_head_kv", num_heads))
    # Falcon-7B's file, of the older kind, has no number of KV heads.
    if not facts.flag("new_decoder_architecture", default=False):
        num_kv_heads = 1 if facts.flag("multi_query", default=True) else num_heads
    width = facts.count("ffn_hidden_size", 4 * facts.size("hidden_size"))
    return {"num_key_value_heads": num_kv_heads, "intermediate_size": width}


def of_gpt2(facts: Facts) -> Config:
    """GPT-2 and its kind have FFNs of four times the width, unless they say otherwise."""
    width = facts.count("n_inner", 4 * facts.size(*WIDTHS))
    fields: dict[str, object] = {"n_inner": width}
    if facts.flag("multi_query", default=False):
        fields["num_key_value_heads"] = 1
    return fields


def of_longcat(facts: Facts) -> Config:
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


def of_deepseek_v4(facts: Facts) -> Config:
    """DeepSeek-V4 has the kinds of its layers by name, or as the tokens of an entry; files list
    those of layers that draft behind its own.
    """
    num_layers = facts.num_layers()
    ratios = facts.numbers("compress_ratios")
    if facts.has("layer_types"):
        kinds = facts.texts("layer_types")
    elif ratios is not None:
        kinds = [KINDS_OF_RATIOS.get(ratio, f"compress_ratio {ratio}") for ratio in ratios]
    else:
        raise UserError(f"compress_ratios is missing, which says what layers see; {AGAIN}")
    kinds = kinds[:num_layers]
    if len(kinds) != num_layers or not set(kinds) <= {*KINDS_OF_RATIOS.values()}:
        raise UserError(
            f"compress_ratios: {sorted({*kinds})} of {len(kinds)} layers has no formula, which "
            f"needs each of {', '.join(map(str, KINDS_OF_RATIOS))} for num_hidden_layers="
            f"{num_layers}; {AGAIN}"
        )
    return {
        "layer_types": [FULL] * num_layers,
        "sliding_window": None,
        "compressed_window": facts.size("sliding_window"),
        "sparse_layers": kinds.count(SPARSE),
        "heavy_layers": kinds.count(HEAVY),
    }


def of_jamba(facts: Facts) -> Config:
    """Jamba may leave the rank of its step sizes to the width."""
    if facts.text("mamba_dt_rank") == "auto":
        return {"mamba_dt_rank": math.ceil(facts.size("hidden_size") / 16)}
    return {}
