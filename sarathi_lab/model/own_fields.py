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
        of_block = Facts({"block_configs": block}).object("block_configs")
        parts = Facts(of_block)
        for name in ("attention.replace_with_linear", "ffn.replace_with_linear"):
            if parts.flag(name, default=False):
                raise UserError(f"block_configs: {name} has no formula")
        if parts.flag("attention.no_op", default=False):
            kinds.append(NONE)
        else:
            kinds.append(FULL)
            groups.add(parts.size("attention.n_heads_in_group"))
        if not parts.flag("ffn.no_op", default=False):
            # Two thirds of the stated multiple, as a gate takes a third, in whole 256.
            multiple = parts.number("ffn.ffn_mult")
            width = 2 * multiple * facts.size("hidden_size") / 3
            widths.append(math.ceil(int(width) / 256) * 256)
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


def _of_gemma4(facts: Facts) -> Config:
    """Gemma 4 states the heads of layers with a window, and others of the whole context."""
    sizes = [*facts.object(SIZES_OF_LAYERS).values()]
    if any(of_layer != sizes[0] for of_layer in sizes):
        raise UserError(f"{SIZES_OF_LAYERS} gives layers different sizes, which has no formula")
    full = facts
    if sizes and isinstance(sizes[0], Mapping):
        head_size = sizes[0].get("head_dim")
        full = facts.updated({"global_head_dim": head_size, **sizes[0]})
    num_full_kv_heads = full.size("num_key_value_heads")
    if facts.flag("attention_k_eq_v", default=False):
        num_full_kv_heads = facts.count("num_global_key_value_heads", num_full_kv_heads)
    fields: dict[str, object] = {
        "swa_head_dim": facts.size("head_dim"),
        "swa_num_key_value_heads": facts.size("num_key_value_heads"),
        "head_dim": full.count("global_head_dim", 512),
        "num_key_value_heads": num_full_kv_heads,
    }
    if facts.flag("enable_moe_block", default=False):
        # Beside the experts of each layer.
        fields["shared_expert_intermediate_size"] = facts.size("intermediate_size")
    else:
        fields["num_experts"] = None
    return fields


def _of_nemotron_h(facts: Facts) -> Config:
    """Nemotron-H's newer files leave the number of layers to the list of them."""
    if facts.has("num_hidden_layers"):
        return {}
    return {"num_hidden_layers": len(facts.list_of("layers_block_type"))}


OF_TYPES: Mapping[str, Callable[[Facts], Config]] = {
    "gemma4": _of_gemma4,
    "gemma4_unified": _of_gemma4,
    "nemotron_h": _of_nemotron_h,
}
