"""What kernels do with a cache in 8 bits: entries to numbers and back (see `kv_cache`).

Entries are int8, or e4m3 in bytes: chips before sm_89 have no type for it, and its fields are those
of wider floats.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def dequantized(
    tile: tl.tensor,  # [rows, columns] int8, or uint8 for e4m3
    scales: tl.tensor,  # [rows] float32
    DTYPE: tl.constexpr,
) -> tl.tensor:
    """The entries times the scale of their row, multiplied in float32, in DTYPE."""
    if tile.dtype == tl.uint8:
        bits = tile.to(tl.uint16)
        half = ((bits & 0x80) << 8) | (
            (bits & 0x7F) << 7
        )  # of float16, whose exponent begins 8 below e4m3's
        wide = half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    else:
        wide = tile.to(tl.float32)
    return (wide * scales[:, None]).to(DTYPE)


@triton.jit
def quantized(
    steps: tl.tensor,  # float32, multiples of a scale
    DTYPE: tl.constexpr,
) -> tl.tensor:
    """Rounded to DTYPE: int8, or uint8 for e4m3."""
    if tl.uint8 == DTYPE:
        # At 2^-120 of its size, a float's exponent is e4m3's own, below the least one too; ties go
        # to even.
        raw = (steps * 7.52316384526264e-37).to(tl.uint32, bitcast=True)
        size = raw & 0x7FFFFFFF
        bits = tl.minimum((size + 0x7FFFF + ((size >> 20) & 1)) >> 20, 0x7E)  # 448; beyond is NaN
        entries = (bits | ((raw >> 24) & 0x80)).to(tl.uint8)
    else:
        entries = tl.floor(steps + 0.5).to(tl.int8)
    return entries


@triton.jit
def scale_of(
    largest: tl.tensor,  # of a head's entries, without their signs
    poison: tl.tensor,  # zero times their sum: no number if one of them is not finite
    DTYPE: tl.constexpr,
) -> tl.tensor:
    """The scale by which a head fits into DTYPE."""
    return largest / (448.0 if tl.uint8 == DTYPE else 127.0) + poison
