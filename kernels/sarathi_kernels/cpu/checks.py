"""Sizes that a model hands to the C++, held against each other: it reads as far as they say."""

from __future__ import annotations

from sarathi_kernels.cpu.structures import LayerStruct, ModelStruct, NormStruct

MAX_HEAD_SIZE = 256


def check_heads(model: ModelStruct) -> None:
    """Raise ValueError for heads, or a window, that attention does not take."""
    if min(model.num_heads, model.num_kv_heads) < 1 or model.num_heads % model.num_kv_heads:
        heads = f"{model.num_heads} query heads do not share {model.num_kv_heads} of keys evenly"
        raise ValueError(heads)
    if not 1 <= model.head_size <= MAX_HEAD_SIZE:
        raise ValueError(f"heads have from 1 to {MAX_HEAD_SIZE} entries, not {model.head_size}")
    if model.window < 0:
        raise ValueError(f"a sliding window has no negative size: {model.window}")


def check_model(model: ModelStruct) -> None:
    """Raise ValueError unless heads, norms and weights have sizes that belong together."""
    check_heads(model)
    if not 0 <= 2 * model.rotary_half <= model.head_size:
        raise ValueError(f"more is rotated than a head has: 2 times {model.rotary_half} entries")
    head = (model.head.in_features, model.head.out_features)
    if head != (model.hidden_size, model.vocab_size) or model.num_layers < 1:
        raise ValueError(f"no layers, or an output head of {head} inputs and results")
    norms = {"final_norm": _is_norm(model.final_norm, model.hidden_size)}
    faults = [name for name, is_sound in norms.items() if not is_sound]
    for number in range(model.num_layers):
        faults += (f"layer {number}'s {name}" for name in _faults(model.layers[number], model))
    if faults:
        raise ValueError(f"weights do not match the model's sizes: {', '.join(faults)}")


def _faults(layer: LayerStruct, model: ModelStruct) -> list[str]:
    """What does not match, by name. Blocks are as wide as those of the first layer, for which the
    C++ makes room.
    """
    width, queries, first = model.hidden_size, model.num_heads * model.head_size, model.layers[0]
    sizes = {
        "qkv": (width, queries + 2 * model.num_kv_heads * model.head_size),
        "out": (queries, width),
        "up": (width, first.down.in_features),
        "down": (first.down.in_features, width),
    }
    is_sound = {}
    for name, expected in sizes.items():
        linear = getattr(layer, name)
        sizes_of_linear = (linear.in_features, linear.out_features)
        is_sound[name] = bool(linear.weight) and sizes_of_linear == expected
    for name in ("attention_norm", "ffn_norm"):
        is_sound[name] = _is_norm(getattr(layer, name), width)
    for name in ("query_norm", "key_norm"):
        norm = getattr(layer, name)
        is_sound[name] = not norm.weight or _is_norm(norm, model.head_size)
    return [name for name, sound in is_sound.items() if not sound]


def _is_norm(norm: NormStruct, size: int) -> bool:
    return bool(norm.weight) and norm.size == size
