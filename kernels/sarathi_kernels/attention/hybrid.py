"""Paged attention of a hybrid batch, the chunk and the decodes of one iteration: the prefill kernel
and then the decode kernel in `series`, or both side by side on two CUDA `streams`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal, get_args

import torch
from torch import Tensor

from sarathi_kernels.attention.decode import decode_attention
from sarathi_kernels.attention.kv_cache import Cache
from sarathi_kernels.attention.plan import AttentionPlan
from sarathi_kernels.attention.prefill import prefill_attention

Variant = Literal["series", "streams"]


def hybrid_attention(
    query: Tensor,  # [num_tokens, num_heads, head_size], rows may be strided
    key_cache: Cache,  # [num_blocks, block_size, num_kv_heads, head_size]
    value_cache: Cache,  # [num_blocks, block_size, num_kv_heads, head_size]
    plan: AttentionPlan,
    scale: float,
    *,
    variant: Variant = "series",
    sliding_window: int | None = None,
    out: Tensor,  # [num_tokens, num_heads, head_size], rows may be strided
) -> None:
    """Write softmax(scale q k^T) v of all rows of `plan` to `out`.

    Raises ValueError for an unknown variant and for inputs that the kernels do not take
    (`check_inputs`).
    """
    if variant not in get_args(Variant):
        raise ValueError(
            f"unknown variant {variant!r} of hybrid attention: choose one of {get_args(Variant)}"
        )
    inputs = (query, key_cache, value_cache, plan, scale)
    if variant == "streams" and plan.num_tiles and plan.num_decodes:
        _attend_on_streams(*inputs, sliding_window, out)
    else:
        prefill_attention(*inputs, sliding_window=sliding_window, out=out)
        decode_attention(*inputs, sliding_window=sliding_window, out=out)


@lru_cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    # With priority, decodes take the places that the tiles leave instead of waiting behind all of
    # them.
    return torch.cuda.Stream(device, priority=-1)


def _attend_on_streams(
    query: Tensor,
    key_cache: Cache,
    value_cache: Cache,
    plan: AttentionPlan,
    scale: float,
    sliding_window: int | None,
    out: Tensor,
) -> None:
    """Decodes on a separate stream, joined to the current one by events; without CUDA, one
    after the other.
    """
    inputs = (query, key_cache, value_cache, plan, scale)
    if query.device.type != "cuda":
        decode_attention(*inputs, sliding_window=sliding_window, out=out)
        prefill_attention(*inputs, sliding_window=sliding_window, out=out)
        return
    current, side = torch.cuda.current_stream(query.device), _side_stream(query.device)
    side.wait_stream(current)
    with torch.cuda.stream(side):
        decode_attention(*inputs, sliding_window=sliding_window, out=out)
    prefill_attention(*inputs, sliding_window=sliding_window, out=out)
    current.wait_stream(side)
