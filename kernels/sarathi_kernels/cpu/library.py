"""The compiled C++ and its calls, on torch's tensors of a CPU. Structures are those of
`structures.h`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, Structure, byref, c_float, c_int32, c_int64, c_void_p
from functools import cache
from typing import Any

import torch
from torch import Tensor

from sarathi_kernels.attention.kv_cache import Cache, QuantizedCache
from sarathi_kernels.attention.reference import Segment
from sarathi_kernels.cpu.build import build
from sarathi_kernels.cpu.packing import PackedLinear

MAX_HEAD_SIZE = 256
KV_TYPES = (None, torch.int8, torch.float8_e4m3fn)  # numbered as in `structures.h`


class LinearStruct(Structure):
    """`Linear`."""

    _fields_ = (
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("in_features", c_int64),
        ("out_features", c_int64),
    )


class NormStruct(Structure):
    """`Norm`."""

    _fields_ = (
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("epsilon", c_float),
        ("is_layer", c_int32),
    )


class LayerStruct(Structure):
    """`Layer`."""

    _fields_ = (
        *((name, NormStruct) for name in ("attention_norm", "ffn_norm", "query_norm", "key_norm")),
        *((name, LinearStruct) for name in ("qkv", "out", "up", "down")),
    )


class ModelStruct(Structure):
    """`Model`."""

    _fields_ = (
        ("layers", POINTER(LayerStruct)),
        *((name, c_void_p) for name in ("embedding", "cosines", "sines")),
        ("final_norm", NormStruct),
        ("head", LinearStruct),
        *(
            (name, c_int64)
            for name in (
                "num_layers",
                "hidden_size",
                "num_heads",
                "num_kv_heads",
                "head_size",
                "rotary_half",
                "window",
            )
        ),
        *((name, c_int32) for name in ("is_bf16", "activation", "is_gated")),
        ("scale", c_float),
    )


class SegmentStruct(Structure):
    """`Segment`."""

    _fields_ = (
        *((name, c_int64) for name in ("start", "num_queries", "kv_len", "first_block")),
        ("blocks", c_void_p),
    )


class ShapeStruct(Structure):
    """`Shape`."""

    _fields_ = (
        *(
            (name, c_int64)
            for name in ("num_heads", "num_kv_heads", "head_size", "block_size", "window")
        ),
        ("scale", c_float),
    )


class BatchStruct(Structure):
    """`Batch`."""

    _fields_ = (
        *((name, c_void_p) for name in ("token_ids", "positions", "slots", "emit_rows")),
        ("segments", POINTER(SegmentStruct)),
        *((name, c_int64) for name in ("num_tokens", "num_segments", "num_emits")),
        *((name, c_void_p) for name in ("keys", "values", "key_scales", "value_scales")),
        ("num_blocks", c_int64),
        ("block_size", c_int64),
        ("logits", c_void_p),
        ("kv_type", c_int32),
    )


SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "sarathi_start": (c_int32, (c_int32, c_int32)),
    "sarathi_make_decoder": (c_void_p, (POINTER(ModelStruct),)),
    "sarathi_free_decoder": (None, (c_void_p,)),
    "sarathi_forward": (None, (c_void_p, POINTER(BatchStruct), c_void_p, c_void_p)),
    "sarathi_linear": (None, (POINTER(LinearStruct), c_int32, c_void_p, c_int64, c_void_p)),
    "sarathi_attention": (
        None,
        (POINTER(ShapeStruct), POINTER(SegmentStruct), c_int64, c_int32, c_int32, *(c_void_p,) * 6),
    ),
    "sarathi_greedy": (None, (c_void_p, c_int64, c_int64, c_int64, c_void_p)),
}


@cache
def load() -> ctypes.CDLL:
    """The library, compiled now unless it was before. Raises NotBuilt."""
    library = ctypes.CDLL(str(build()))
    for name, (result, arguments) in SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def start(num_threads: int, *, allows_amx: bool = True) -> bool:
    """Start so many threads, before any other call; returns whether bfloat16 is multiplied by AMX.
    Raises NotBuilt.
    """
    if num_threads < 1:
        raise ValueError(f"{num_threads} threads compute nothing; use 1 or more")
    return bool(load().sarathi_start(num_threads, allows_amx))


def linear_struct(linear: PackedLinear) -> LinearStruct:
    """Valid as long as `linear`."""
    return LinearStruct(
        linear.weight.data_ptr(), address(linear.bias), linear.in_features, linear.out_features
    )


def address(tensor: Tensor | None) -> int | None:
    """Where `tensor` lies in memory, null for none."""
    return None if tensor is None else tensor.data_ptr()


def segment_structs(segments: Sequence[Segment]) -> ctypes.Array[SegmentStruct]:
    """Valid as long as `segments`."""
    structs = (SegmentStruct * len(segments))()
    for struct, segment in zip(structs, segments, strict=True):
        struct.start, struct.num_queries, struct.kv_len = (
            segment.start,
            segment.num_queries,
            segment.kv_len,
        )
        if isinstance(segment.blocks, slice):
            struct.first_block = segment.blocks.start
        else:
            struct.blocks = segment.blocks.data_ptr()
    return structs


def linear(x: Tensor, weight: PackedLinear) -> Tensor:
    """x [rows, in_features] times a packed weight; [rows, out_features] of x's dtype.

    Of a gated weight all columns of the panels: 16 gates and the 16 columns they scale, and so on.
    Sums are float32. With AMX, x is rounded to bfloat16 beforehand if the weight is of it. Raises
    ValueError if sizes do not match.
    """
    if x.shape[1] != weight.in_features:
        raise ValueError(f"x {tuple(x.shape)} does not match {weight.in_features} inputs")
    taken = x.float().contiguous()
    struct = linear_struct(weight)
    if weight.is_gated:
        struct.out_features = weight.num_columns
    out = torch.empty(len(x), struct.out_features)
    load().sarathi_linear(byref(struct), weight.is_bf16, taken.data_ptr(), len(x), out.data_ptr())
    return out.to(x.dtype)


def attention(
    query: Tensor,  # [num_tokens, num_heads, head_size]
    keys: Cache,  # [num_blocks, block_size, num_kv_heads, head_size], float32, bfloat16 or 8 bits
    values: Cache,
    segments: Sequence[Segment],
    scale: float,
    sliding_window: int | None,
) -> Tensor:
    """`attention.paged_attention`, without masks; [num_tokens, num_heads, head_size] of the query's
    dtype.

    With AMX a cache in 8 bits is multiplied as bfloat16 if the query is of it. Raises ValueError
    for other shapes.
    """
    num_heads, head_size = query.shape[1:]
    if head_size > MAX_HEAD_SIZE or num_heads % keys.shape[2] or keys.shape[3] != head_size:
        raise ValueError(f"query {tuple(query.shape)} does not match the cache {tuple(keys.shape)}")
    (key_data, key_scales), (value_data, value_scales) = _parts(keys), _parts(values)
    if not all(
        t.is_contiguous() for t in (key_data, value_data, key_scales, value_scales) if t is not None
    ):
        raise ValueError("one layer's cache lies in one piece")
    taken = query.float().contiguous()
    out = torch.empty_like(taken)
    shape = ShapeStruct(
        num_heads, keys.shape[2], head_size, keys.shape[1], sliding_window or 0, scale
    )
    structs = segment_structs(segments)
    load().sarathi_attention(
        byref(shape),
        structs,
        len(structs),
        (query if key_data.dtype in KV_TYPES else key_data).dtype == torch.bfloat16,
        kv_type(key_data.dtype),
        key_data.data_ptr(),
        value_data.data_ptr(),
        address(key_scales),
        address(value_scales),
        taken.data_ptr(),
        out.data_ptr(),
    )
    return out.to(query.dtype)


def _parts(cache: Cache) -> tuple[Tensor, Tensor | None]:
    return (cache.data, cache.scales) if isinstance(cache, QuantizedCache) else (cache, None)


def kv_type(dtype: torch.dtype) -> int:
    """The number that `structures.h` has for a cache of `dtype`: zero for all that is not in 8
    bits.
    """
    return KV_TYPES.index(dtype) if dtype in KV_TYPES else 0


def greedy(logits: Tensor, nan_token: int) -> Tensor:
    """The likeliest token of each row of [rows, vocab_size] float32; `nan_token` where a logit is
    not a number.
    """
    if logits.dtype != torch.float32 or not logits.is_contiguous():
        raise ValueError(f"logits of {logits.dtype} are not contiguous float32")
    out = torch.empty(len(logits), dtype=torch.int64)
    load().sarathi_greedy(logits.data_ptr(), *logits.shape, nan_token, out.data_ptr())
    return out
