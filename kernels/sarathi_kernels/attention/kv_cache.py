"""The write of new keys and values to a paged cache, in plain torch."""

from __future__ import annotations

from torch import Tensor


def write_kv(
    key: Tensor,  # [num_tokens, num_kv_heads, head_size]
    value: Tensor,  # [num_tokens, num_kv_heads, head_size]
    key_cache: Tensor,  # [num_blocks, block_size, num_kv_heads, head_size]
    value_cache: Tensor,
    slots: Tensor,  # [num_tokens] int64: block * block_size + offset within the block
) -> None:
    """Store each token's key and value at its slot; slots are distinct."""
    has_heads_of_cache = key.shape[1:] == key_cache.shape[2:]
    has_a_slot_each = len(slots) == len(key) == len(value)
    if key.shape != value.shape or not has_heads_of_cache or not has_a_slot_each:
        raise ValueError(
            f"keys {tuple(key.shape)} and {len(slots)} slots do not match {tuple(key_cache.shape)}"
        )
    key_cache.flatten(0, 1).index_copy_(0, slots, key)
    value_cache.flatten(0, 1).index_copy_(0, slots, value)
