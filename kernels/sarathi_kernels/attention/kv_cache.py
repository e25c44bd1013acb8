"""The paged cache of keys and values, as it is or in 8 bits, and the write of new ones.

In 8 bits every head of every token has a separate scale, for keys and for values, so that a
write touches nothing but its slot and blocks can be shared, copied and dropped like any others: x
is kept as q = round(x / s) with s = max |x| / largest, largest being 127 for int8 and 448 for fp8
(e4m3). A head takes head_size + 4 bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

LARGEST = {
    torch.int8: 127.0,
    torch.float8_e4m3fn: 448.0,
}  # the numbers that a head's largest entry becomes


@dataclass(frozen=True)
class QuantizedCache:
    """Keys or values of one layer in 8 bits: every head's entries, and the scale that they are
    multiples of.
    """

    data: Tensor  # [num_blocks, block_size, num_kv_heads, head_size] int8 or float8_e4m3fn
    scales: Tensor  # [num_blocks, block_size, num_kv_heads] float32

    @property
    def shape(self) -> torch.Size:
        """That of the entries."""
        return self.data.shape

    @property
    def raw(self) -> Tensor:
        """The entries as torch can index them in every type: the same memory, in numbers without a
        meaning.
        """
        return self.data.view(torch.uint8)


Cache: TypeAlias = (
    Tensor | QuantizedCache
)  # of one layer, [num_blocks, block_size, num_kv_heads, head_size]


def quantize(heads: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`heads` [..., head_size] in `dtype`, int8 or float8_e4m3fn, and their scales [...] in
    float32.

    A head of zeros has a scale of zero. Of a head with an entry that is not finite, the scale is
    not finite either, so that what is read is no number.
    """
    wide = heads.float()
    scales = wide.abs().amax(-1) / LARGEST[dtype]
    inverse = torch.where(scales > 0, 1 / scales, 0.0)[..., None]
    steps = wide * inverse
    if dtype == torch.int8:
        steps = steps.round()
    return steps.nan_to_num_(0.0).clamp_(-LARGEST[dtype], LARGEST[dtype]).to(dtype), scales


def dequantize(data: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """What `quantize` was given, but for its error: [..., head_size] in `dtype`, multiplied in
    float32.
    """
    return (data.float() * scales[..., None]).to(dtype)


def write_kv(
    key: Tensor,  # [num_tokens, num_kv_heads, head_size]
    value: Tensor,  # [num_tokens, num_kv_heads, head_size]
    key_cache: Cache,
    value_cache: Cache,
    slots: Tensor,  # [num_tokens] int64: block * block_size + offset within the block
) -> None:
    """Store each token's key and value at its slot; slots are distinct."""
    if key.shape != value.shape or key.shape[1:] != key_cache.shape[2:] or len(slots) != len(key):
        raise ValueError(
            f"keys {tuple(key.shape)} and {len(slots)} slots do not match {tuple(key_cache.shape)}"
        )
    _write(key, key_cache, slots)
    _write(value, value_cache, slots)


def _write(heads: Tensor, cache: Cache, slots: Tensor) -> None:
    if isinstance(cache, QuantizedCache):
        data, scales = quantize(heads, cache.data.dtype)
        cache.raw.flatten(0, 1).index_copy_(0, slots, data.view(torch.uint8))
        cache.scales.flatten(0, 1).index_copy_(0, slots, scales)
    else:
        cache.flatten(0, 1).index_copy_(0, slots, heads)
