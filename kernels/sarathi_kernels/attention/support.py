"""What the paged attention kernels accept. Imports no Triton, so that an engine can ask before it
loads any weight.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sarathi_kernels.attention.plan import AttentionPlan

SUPPORTED_HEAD_SIZES = (64, 80, 96, 128, 256)
SUPPORTED_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# Shared memory of a block, by which launches are configured: sm_90 and sm_100 have the large one
# and matrix instructions that work from it, A100 lies between, and sm_89 and 120 have less than
# the small one.
LARGE_SHARED_MEMORY = 200 * 1024
SMALL_SHARED_MEMORY = 128 * 1024
LOG2_E = (
    1.4426950408889634  # the kernels' softmax works with powers of two: exp(x) = exp2(x log2 e)
)


def check_supported(head_size: int, dtype: torch.dtype, block_size: int) -> None:
    """Raise ValueError unless the kernels can attend with heads and a cache of this shape (tokens a
    block) and type.
    """
    if head_size not in SUPPORTED_HEAD_SIZES:
        raise ValueError(
            f"head size {head_size} is not supported by the attention kernels: "
            f"{SUPPORTED_HEAD_SIZES} are"
        )
    if dtype not in SUPPORTED_DTYPES:
        raise ValueError(
            f"{dtype} is not supported by the attention kernels: {SUPPORTED_DTYPES} are"
        )
    if block_size < 1:
        raise ValueError(f"a cache block holds at least 1 token, not {block_size}")


def check_inputs(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    plan: AttentionPlan,
    scale: float,
    sliding_window: int | None,
    out: Tensor,
) -> None:
    """Raise ValueError unless shapes, types and strides are what every attention kernel assumes."""
    _, num_heads, head_size = query.shape
    check_supported(head_size, query.dtype, key_cache.shape[1])
    is_alike = key_cache.shape == value_cache.shape and key_cache.dtype == value_cache.dtype
    if not is_alike or key_cache.stride() != value_cache.stride():
        raise ValueError(
            f"the caches of keys {tuple(key_cache.shape)} and values {tuple(value_cache.shape)} "
            "differ"
        )
    if key_cache.shape[3] != head_size or num_heads % key_cache.shape[2]:
        raise ValueError(
            f"query {tuple(query.shape)} does not match the cache {tuple(key_cache.shape)}"
        )
    if out.shape != query.shape or not query.dtype == out.dtype == key_cache.dtype:
        raise ValueError(
            f"query, caches and output differ in shape or type: {query.dtype}, {key_cache.dtype}"
        )
    for tensor in (query, key_cache, out):
        if tensor.stride()[-2:] != (head_size, 1):
            raise ValueError(
                f"the heads of a token must be contiguous, not strided by {tensor.stride()[-2:]}"
            )
    if scale <= 0 or (sliding_window is not None and sliding_window < 1):
        raise ValueError(f"scale {scale} and sliding window {sliding_window} must be positive")
    if plan.tile_rows & (plan.tile_rows - 1) or plan.tile_rows < 16:
        raise ValueError(f"tiles of {plan.tile_rows} queries: a power of two from 16 on is needed")
    if plan.block_table.stride(1) != 1:
        raise ValueError("the block table's rows must be contiguous")
