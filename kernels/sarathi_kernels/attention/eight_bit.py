"""What kernels do with a cache in 8 bits: entries to numbers and back (see `kv_cache`).

Entries are int8 or e4m3. Chips before sm_89 have no type for e4m3 and get it in bytes, whose fields
are those of wider floats. Scales are not multiplied into entries, of which a tile has many, but
into what a token has one of for each query: its score and its weight.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Added to the exponents of weights, which then take the scales of values: float16 would round the
# product of a small scale and a small weight to few bits. Less than 127, by which the scales of
# int8 are below the values they are made of, so that nothing overflows that did not before.
WEIGHT_GAIN_LOG2 = tl.constexpr(4)
MAX_FLOAT16 = tl.constexpr(65504.0)


@triton.jit
def product_operand(query: tl.tensor) -> tl.tensor:
    """Queries in the type of their products with entries: float16 for bfloat16, to which entries
    take four times as long to convert. What float16 does not hold saturates.
    """
    if query.dtype == tl.bfloat16:
        wide = query.to(tl.float32)
        query = tl.clamp(wide, -MAX_FLOAT16, MAX_FLOAT16, tl.PropagateNan.ALL).to(tl.float16)
    return query


@triton.jit
def decoded(
    tile: tl.tensor,  # int8, e4m3, or uint8 for e4m3
    DTYPE: tl.constexpr,  # a type of queries: each holds any entry exactly
) -> tl.tensor:
    """The entries in DTYPE, without their scales; a tile of another type as it is."""
    if tile.dtype == tl.uint8:
        bits = tile.to(tl.uint16)
        half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        # of float16, whose exponent begins 8 below e4m3's
        tile = half.to(tl.float16, bitcast=True) * 256.0
    elif tile.dtype == tl.int8 and tl.float16 == DTYPE:
        # 128 more than the entry, in the last bits of 1024 to 1279; to convert takes longer
        half = tile.to(tl.uint8, bitcast=True).to(tl.uint16) ^ 0x6480
        tile = half.to(tl.float16, bitcast=True) - 1152.0
    return tile.to(DTYPE)


@triton.jit
def columns_of(
    words: tl.tensor,  # [rows, columns / 2] uint16: two entries each
    ENTRY: tl.constexpr,
    DTYPE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """The even and the odd columns, decoded, of entries that were loaded two at a time.

    For a sum over rows, matrix instructions take two rows of a column side by side: the load that
    transposes for them takes words of 16 bits, and bytes would be read one by one.
    """
    even = (words & 0xFF).to(tl.uint8).to(ENTRY, bitcast=True)
    odd = (words >> 8).to(tl.uint8).to(ENTRY, bitcast=True)
    return decoded(even, DTYPE), decoded(odd, DTYPE)


@triton.jit
def quantized(
    steps: tl.tensor,  # float32, multiples of a scale
    DTYPE: tl.constexpr,
) -> tl.tensor:
    """Rounded to DTYPE: int8, or uint8 for e4m3."""
    if tl.uint8 == DTYPE:
        # At 2^-120 of its size, a float's exponent is that of e4m3, below the least one too; ties
        # go to even.
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
