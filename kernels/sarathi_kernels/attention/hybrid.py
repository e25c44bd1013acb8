"""Paged attention of a hybrid batch, the chunk and the decodes of one iteration: by the kernels of
both in `series`, side by side on two CUDA `streams`, or `fused` into one launch.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Literal, get_args

import torch
from torch import Tensor

from sarathi_kernels.attention.decode import decode_attention
from sarathi_kernels.attention.fused import fused_attention
from sarathi_kernels.attention.plan import AttentionPlan
from sarathi_kernels.attention.prefill import prefill_attention

Variant = Literal["series", "streams", "fused"]


def hybrid_attention(
    query: Tensor,  # [num_tokens, num_heads, head_size], rows may be strided
    key_cache: Tensor,  # [num_blocks, block_size, num_kv_heads, head_size]
    value_cache: Tensor,  # [num_blocks, block_size, num_kv_heads, head_size]
    plan: AttentionPlan,
    scale: float,
    *,
    variant: Variant = "series",
    sliding_window: int | None = None,
    out: Tensor,  # [num_tokens, num_heads, head_size], rows may be strided
) -> None:
    """Write softmax(scale q k^T) v of all rows of `plan` to `out`, without waiting for the device,
    so that graphs can record it. Batches of one phase alone are computed by its kernel.

    Raises ValueError for an unknown variant, and for inputs that the kernels do not take.
    """
    if variant not in get_args(Variant):
        raise ValueError(f"unknown variant {variant!r}: choose one of {get_args(Variant)}")
    inputs = (query, key_cache, value_cache, plan, scale)
    attend_prompts = partial(prefill_attention, *inputs, sliding_window=sliding_window, out=out)
    attend_decodes = partial(decode_attention, *inputs, sliding_window=sliding_window, out=out)
    is_hybrid = plan.num_tiles > 0 and plan.num_decodes > 0
    if is_hybrid and variant == "fused":
        fused_attention(*inputs, sliding_window=sliding_window, out=out)
    elif is_hybrid and variant == "streams" and query.device.type == "cuda":
        current = torch.cuda.current_stream(query.device)
        side = _side_stream(query.device)
        side.wait_stream(current)  # queries and cache are written there
        with torch.cuda.stream(side):
            attend_decodes()
        attend_prompts()
        current.wait_stream(side)
    else:
        attend_prompts()
        attend_decodes()


@lru_cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    # With priority, decodes take the places that the tiles leave instead of waiting behind all of
    # them.
    return torch.cuda.Stream(device, priority=-1)
