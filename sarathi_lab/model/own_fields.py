"""Fields of architectures that mean more than a number, by the names of other models."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from sarathi_lab.config.errors import UserError
from sarathi_lab.model.config_facts import AGAIN, FULL, Config, Facts

FFN_LAYERS = "num_ffn_layers"  # no field of a file: by `of_blocks`
NONE = "none"
SIZES_OF_LAYERS = "per_layer_config"


def own_fields(facts: Facts, model_type: str) -> Config:
    """Return what the fields of a `model_type` stand for."""
    if facts.has("block_configs"):
        return _of_blocks(facts)
    if model_type in OF_TYPES:
        return OF_TYPES[model_type](facts)
    if facts.object(SIZES_OF_LAYERS):
        raise UserError(f"{SIZES_OF_LAYERS}: layers of different sizes have no formula here")
    return {}


def _of_blocks(facts: Facts) -> Config:
    """Llama Nemotron has layers without attention or FFN, and FFNs of different widths, which count
    by their mean.
    """
    blocks = facts.list_of("block_configs")
    num_layers = facts.num_layers()
    if len(blocks) != num_layers:
        raise UserError(
            f"block_configs has {len(blocks)} blocks for num_hidden_layers={num_layers}, each of "
            f"which may be different; {AGAIN}"
        )
    kinds = list[str]()
    groups = set[int]()
    widths = list[int]()
    for block in blocks:
        attention = _part_of(block, "attention")
        ffn = _part_of(block, "ffn")
        if attention.has("replace_with_linear") or ffn.has("replace_with_linear"):
            raise UserError("block_configs: replace_with_linear has no formula")
        has_attention = not attention.flag("no_op", default=False)
        kinds.append(FULL if has_attention else NONE)
        if has_attention:
            groups.add(attention.size("n_heads_in_group"))
        if not ffn.flag("no_op", default=False):
            # Two thirds of the stated multiple, as a gate takes a third, in whole 256.
            width = 2 * ffn.number("ffn_mult") * facts.size("hidden_size") / 3
            widths.append(_rounded_up(int(width), 256))
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


def _part_of(block: object, name: str) -> Facts:
    """Return the facts of a block's attention or FFN. Raises UserError without any."""
    part = block.get(name) if isinstance(block, Mapping) else None
    if not isinstance(part, Mapping):
        raise UserError(f"block_configs has {block!r}, without {name}; {AGAIN}")
    stated = {key: value for key, value in part.items() if value is not False}
    return Facts(stated)


def _rounded_up(width: int, multiple: int) -> int:
    return math.ceil(width / multiple) * multiple


def _of_lfm2(facts: Facts) -> Config:
    """LFM2 states the width of its FFNs before a gate takes a third of it."""
    if not facts.flag("block_auto_adjust_ff_dim", default=False):
        return {}
    width = int(2 * facts.size("intermediate_size") / 3)
    width = int(facts.number("block_ffn_dim_multiplier", 1.0) * width)
    return {"intermediate_size": _rounded_up(width, facts.count("block_multiple_of", 256))}


def _of_gemma4(facts: Facts) -> Config:
    """Gemma 4 states the heads of layers with a window, and others of the whole context; FFNs of
    layers that borrow keys and values may be twice as wide.
    """
    sizes = [*facts.object(SIZES_OF_LAYERS).values()]
    if any(of_layer != sizes[0] for of_layer in sizes):
        raise UserError(f"{SIZES_OF_LAYERS} gives layers different sizes, which has no formula")
    full = facts
    if sizes and isinstance(sizes[0], Mapping):
        full = facts.updated({"global_head_dim": sizes[0].get("head_dim"), **sizes[0]})
    num_full_kv_heads = full.size("num_key_value_heads")
    if facts.flag("attention_k_eq_v", default=False):
        num_full_kv_heads = facts.count("num_global_key_value_heads", num_full_kv_heads)
    width = facts.size("intermediate_size")
    # FFNs of two widths count by their mean, as all products of a kind are one sum here.
    if facts.flag("use_double_wide_mlp", default=False):
        num_wide = facts.count("num_kv_shared_layers")
        width = round(width * (1 + num_wide / facts.num_layers()))
    fields: dict[str, object] = {
        "swa_head_dim": facts.size("head_dim"),
        "swa_num_key_value_heads": facts.size("num_key_value_heads"),
        "head_dim": full.count("global_head_dim", 512),
        "num_key_value_heads": num_full_kv_heads,
        "intermediate_size": width,
    }
    if facts.flag("enable_moe_block", default=False):
        fields["shared_expert_intermediate_size"] = width  # beside the experts of each layer
    else:
        fields["num_experts"] = None
    return fields


def _of_nemotron_h(facts: Facts) -> Config:
    """Nemotron-H's newer files leave the number of layers to the list of them."""
    if facts.has("num_hidden_layers"):
        return {}
    return {"num_hidden_layers": len(facts.list_of("layers_block_type"))}


OF_TYPES: Mapping[str, Callable[[Facts], Config]] = {
    "lfm2": _of_lfm2,
    "gemma4": _of_gemma4,
    "gemma4_unified": _of_gemma4,
    "nemotron_h": _of_nemotron_h,
}
