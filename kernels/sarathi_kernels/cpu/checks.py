"""Sizes that a model hands to the C++, held against each other: it reads as far as they say."""

from __future__ import annotations

from sarathi_kernels.cpu.structures import LayerStruct, LinearStruct, ModelStruct, NormStruct

MAX_HEAD_SIZE = 256


def check_heads(model: ModelStruct) -> None:
    """Raise ValueError for heads, or a window, that attention does not take."""
    heads = model.num_heads
    kv_heads = model.num_kv_heads
    if min(heads, kv_heads) < 1 or heads % kv_heads:
        raise ValueError(f"{heads} query heads do not share {kv_heads} of keys evenly")
    if not 1 <= model.head_size <= MAX_HEAD_SIZE:
        raise ValueError(f"heads have from 1 to {MAX_HEAD_SIZE} entries, not {model.head_size}")
    if model.window < 0:
        raise ValueError(f"a sliding window has no negative size: {model.window}")


def check_model(model: ModelStruct) -> None:
    """Raise ValueError unless heads, norms and weights have sizes that belong together."""
    check_heads(model)
    rotary_size = 2 * model.rotary_half
    if not 0 <= rotary_size <= model.head_size:
        raise ValueError(f"more is rotated than a head has: 2 times {model.rotary_half} entries")
    if model.num_layers < 1:
        raise ValueError(f"a model has layers, not {model.num_layers}")
    faults = []
    if not _is_linear(model.head, model.hidden_size, model.vocab_size):
        faults.append("head")
    if not _is_norm(model.final_norm, model.hidden_size):
        faults.append("final_norm")
    for number in range(model.num_layers):
        layer = model.layers[number]
        for name in _faults(layer, model):
            faults.append(f"layer {number}'s {name}")
    if faults:
        names = ", ".join(faults)
        raise ValueError(f"weights do not match the model's sizes: {names}")


def _faults(layer: LayerStruct, model: ModelStruct) -> list[str]:
    """What does not match, by name. Blocks are as wide as those of the first layer, for which the
    C++ makes room.
    """
    width = model.hidden_size
    query_size = model.num_heads * model.head_size
    kv_size = model.num_kv_heads * model.head_size
    qkv_size = query_size + 2 * kv_size
    ffn_size = model.layers[0].down.in_features
    is_sound = {
        "qkv": _is_linear(layer.qkv, width, qkv_size),
        "out": _is_linear(layer.out, query_size, width),
        "up": _is_linear(layer.up, width, ffn_size),
        "down": _is_linear(layer.down, ffn_size, width),
        "attention_norm": _is_norm(layer.attention_norm, width),
        "ffn_norm": _is_norm(layer.ffn_norm, width),
        "query_norm": _is_absent_or_norm(layer.query_norm, model.head_size),
        "key_norm": _is_absent_or_norm(layer.key_norm, model.head_size),
    }
    faults = []
    for name, has_its_sizes in is_sound.items():
        if not has_its_sizes:
            faults.append(name)
    return faults


def _is_linear(linear: LinearStruct, in_features: int, out_features: int) -> bool:
    if not linear.weight:  # a null pointer
        return False
    sizes = (linear.in_features, linear.out_features)
    return sizes == (in_features, out_features)


def _is_norm(norm: NormStruct, size: int) -> bool:
    has_weight = bool(norm.weight)
    return has_weight and norm.size == size


def _is_absent_or_norm(norm: NormStruct, size: int) -> bool:
    return not norm.weight or _is_norm(norm, size)
