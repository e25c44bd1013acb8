"""The structures of `structures.h` and `attention_cache.h`, field by field."""

from __future__ import annotations

from ctypes import POINTER, Structure, c_float, c_int32, c_int64, c_void_p

OPERATIONS = (  # in the order of `Operation`
    *("embedding", "elementwise", "qkv_proj", "rotary", "attention_prefill"),
    *("attention_decode", "out_proj", "ffn_up", "ffn_down", "lm_head", "waiting"),
)


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
        ("size", c_int64),
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
        ("embedding", c_void_p),
        ("final_norm", NormStruct),
        ("head", LinearStruct),
        *(
            (name, c_int64)
            for name in (
                "num_layers",
                "vocab_size",
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
        *(
            (name, c_int64)
            for name in ("start", "num_queries", "kv_len", "first_block", "num_blocks")
        ),
        ("blocks", c_void_p),
    )


class BatchStruct(Structure):
    """`Batch`."""

    _fields_ = (
        *((name, c_void_p) for name in ("token_ids", "positions", "slots", "emit_rows")),
        ("segments", POINTER(SegmentStruct)),
        *((name, c_int64) for name in ("num_tokens", "num_segments", "num_emits")),
        *((name, c_void_p) for name in ("keys", "values")),
        ("num_blocks", c_int64),
        ("block_size", c_int64),
        ("cosines", c_void_p),
        ("sines", c_void_p),
        ("num_positions", c_int64),
        ("logits", c_void_p),
        ("kv_type", c_int32),
        ("nanoseconds", POINTER(c_int64)),  # of each of OPERATIONS
    )
