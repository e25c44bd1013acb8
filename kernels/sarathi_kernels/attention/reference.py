"""Attention of packed tokens over a paged KV cache: prefill chunks and decodes in one call.

A *segment* is the newest `num_queries` tokens of one sequence; it attends causally to the
sequence's first `kv_len` cached tokens, itself included. A whole prompt is a segment with
num_queries == kv_len, a decode one with num_queries == 1, a chunk anything between, so no operation
needs to know which phase a sequence is in.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Segment(NamedTuple):
    """Packed rows `start` to `start + num_queries` and the cached tokens they see; made by
    `make_segment`.

    `blocks` are the cache blocks that hold the context, as a slice where they are neighbours (then
    the context is a view, and nothing is copied), else as an index. `first_key` is the oldest token
    that any query still sees. `mask` is added to the scores [num_queries, kv_len - first_key], None
    where `is_causal` or full sight says it all.
    """

    start: int
    num_queries: int
    kv_len: int
    blocks: slice | Tensor
    first_key: int
    mask: Tensor | None

    @property
    def is_causal(self) -> bool:
        """Whether the mask is the plain lower triangle, which needs no tensor."""
        return self.mask is None and self.num_queries > 1


def make_segment(
    start: int,
    num_queries: int,
    kv_len: int,
    blocks: slice | Tensor,
    *,
    sliding_window: int | None,
    device: torch.device,
    dtype: torch.dtype,
) -> Segment:
    """Work out once per iteration what every layer needs to attend for one sequence.

    With `sliding_window` w, the query at position i sees the keys j with i - w < j <= i (Mistral
    7B). Raises ValueError unless 1 <= num_queries <= kv_len, and for a window below 1.
    """
    if not 1 <= num_queries <= kv_len:
        raise ValueError(f"{num_queries} queries cannot be the newest of {kv_len} tokens")
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"a sliding window of {sliding_window} tokens sees nothing")
    first_query = kv_len - num_queries
    first_key = 0 if sliding_window is None else max(0, first_query - sliding_window + 1)
    window_cuts = sliding_window is not None and kv_len - first_key > sliding_window
    if num_queries == 1 or (first_query == 0 and not window_cuts):
        mask = None
    else:
        queries = torch.arange(first_query, kv_len, device=device)[:, None]
        keys = torch.arange(first_key, kv_len, device=device)[None, :]
        hidden = keys > queries
        if sliding_window is not None:
            hidden |= keys <= queries - sliding_window
        mask = torch.zeros(hidden.shape, device=device, dtype=dtype).masked_fill_(
            hidden, float("-inf")
        )
    return Segment(start, num_queries, kv_len, blocks, first_key, mask)


def paged_attention(
    query: Tensor,  # [num_tokens, num_heads, head_size]
    key_cache: Tensor,  # [num_blocks, block_size, num_kv_heads, head_size]
    value_cache: Tensor,  # [num_blocks, block_size, num_kv_heads, head_size]
    segments: Sequence[Segment],
    scale: float,
) -> Tensor:
    """Softmax(scale q k^T) v for every segment; returns [num_tokens, num_heads, head_size].

    The segments' rows must cover `query` in order and without gaps; their tokens' keys and
    values must be in the cache.
    """
    num_heads = query.shape[1]
    num_kv_heads = key_cache.shape[2]
    if (
        num_heads % num_kv_heads
        or key_cache.shape != value_cache.shape
        or query.shape[2] != key_cache.shape[3]
    ):
        raise ValueError(
            f"query {tuple(query.shape)} does not match the cache {tuple(key_cache.shape)}"
        )
    parts = [
        _attend(
            query[segment.start : segment.start + segment.num_queries],
            _context(key_cache, segment),
            _context(value_cache, segment),
            segment,
            scale,
        )
        for segment in segments
    ]
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts)


def _context(cache: Tensor, segment: Segment) -> Tensor:
    """The visible cached tokens, [kv_len - first_key, num_kv_heads, head_size]."""
    if isinstance(segment.blocks, slice):
        blocks = cache[segment.blocks]
    else:
        blocks = cache.index_select(0, segment.blocks)
    return blocks.flatten(0, 1)[segment.first_key : segment.kv_len]


def _attend(query: Tensor, key: Tensor, value: Tensor, segment: Segment, scale: float) -> Tensor:
    num_queries, num_heads, head_size = query.shape
    num_kv_heads = key.shape[1]
    # [1, num_kv_heads, keys, head_size]
    key = key.transpose(0, 1)[None]
    value = value.transpose(0, 1)[None]
    if num_queries == 1:
        # The heads of a group see the same keys: as queries of one head they read them once.
        grouped = query.view(1, num_kv_heads, num_heads // num_kv_heads, head_size)
        attended = F.scaled_dot_product_attention(grouped, key, value, scale=scale)
        return attended.view(1, num_heads, head_size)
    attended = F.scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        key,
        value,
        attn_mask=segment.mask,
        is_causal=segment.is_causal,
        scale=scale,
        enable_gqa=num_heads != num_kv_heads,
    )
    return attended[0].transpose(0, 1)
