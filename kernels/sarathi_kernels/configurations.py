"""Every kernel configuration that the engine can pick, as launches of the public functions on tensors without data.

Shapes of heads, cache and tiles are taken in all combinations that change the hot code; model sizes (hidden, heads,
vocabulary) as the models of the lab have them, as they change little but constants.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor

from sarathi_kernels.attention_plan import MAX_SPLITS, TILE_ROWS, AttentionPlan
from sarathi_kernels.attention_support import SUPPORTED_DTYPES, SUPPORTED_HEAD_SIZES
from sarathi_kernels.chip import Chip
from sarathi_kernels.decode_attention import decode_attention
from sarathi_kernels.fused_activation import activation_, gated_activation
from sarathi_kernels.launch import Launch, recorded
from sarathi_kernels.norm import NormKind, add_norm
from sarathi_kernels.prefill_attention import prefill_attention
from sarathi_kernels.rotary_kv import rotate_and_store
from sarathi_kernels.sampling import greedy

BLOCK_SIZES = (16, 64, 128, 256)
GROUPS = (1, 4, 8)  # query heads a KV head
SPLITS = tuple(2**n for n in range(MAX_SPLITS.bit_length()))
HIDDEN_SIZES = (4096, 5120, 6656)  # 7B and 8B, 13B, 33B
VOCAB_SIZES = (32_000, 128_256, 151_936)
NUM_KV_HEADS = 8


@dataclass(frozen=True)
class HeadShape:
    """What attention kernels are compiled for: heads, cache and window of a model."""

    dtype: torch.dtype = torch.bfloat16
    head_size: int = 128
    group: int = 4
    block_size: int = 16
    window: int | None = None


HOT_SHAPES = (HeadShape(), HeadShape(group=1))  # what the lab measures: 8B, and 13B or 33B


def record(chip: Chip, *, quick: bool = False, num_tokens: int = 48) -> list[Launch]:
    """The launches, repeated ones included, of all operations on `chip`; `num_tokens` must make no difference.

    `quick` leaves the hot shapes on every chip, with one of each head size, dtype and block size on Hopper.
    """
    with recorded(chip) as recording:
        for shape in head_shapes(chip, quick):
            _attend(shape, num_tokens, quick)
            _rotate(shape, num_tokens)
        for dtype in (torch.bfloat16,) if quick else SUPPORTED_DTYPES:
            for hidden_size in HIDDEN_SIZES[:1] if quick else HIDDEN_SIZES:
                _work_on_rows(dtype, hidden_size, num_tokens)
            for vocab_size in VOCAB_SIZES[:1] if quick else VOCAB_SIZES:
                greedy(_meta(num_tokens, vocab_size, dtype=dtype))
    return recording.launches


def head_shapes(chip: Chip, quick: bool) -> list[HeadShape]:
    """The shapes to compile attention for on `chip`, each once."""
    if not quick:
        return list(dict.fromkeys((*HOT_SHAPES, *_all_head_shapes())))
    if not chip.is_hopper:
        return list(HOT_SHAPES)
    varied = [
        *(HeadShape(head_size=size) for size in SUPPORTED_HEAD_SIZES),
        *(HeadShape(dtype=dtype) for dtype in SUPPORTED_DTYPES),
        HeadShape(block_size=BLOCK_SIZES[-1]),
        HeadShape(window=4096),
    ]
    return list(dict.fromkeys((*HOT_SHAPES, *varied)))


def _all_head_shapes() -> Iterator[HeadShape]:
    """bf16 with every block size and group; the other types, and windows, with every head size."""
    for head_size in SUPPORTED_HEAD_SIZES:
        shape = HeadShape(head_size=head_size)
        for block_size, group in product(BLOCK_SIZES, GROUPS):
            if block_size == BLOCK_SIZES[0] or group == GROUPS[1]:
                yield replace(shape, block_size=block_size, group=group)
        for dtype, group in product((torch.float16, torch.float32), GROUPS[:2]):
            yield replace(shape, dtype=dtype, group=group)
        yield replace(shape, window=4096)


def _attend(shape: HeadShape, num_tokens: int, quick: bool) -> None:
    """Chunks in both sizes of tile, with and without decodes among them; decodes whole and split."""
    num_heads = NUM_KV_HEADS * shape.group
    qkv = _meta(num_tokens, num_heads + 2 * NUM_KV_HEADS, shape.head_size, dtype=shape.dtype)
    cache = _cache(shape)
    out = _meta(num_tokens, num_heads, shape.head_size, dtype=shape.dtype)
    inputs = (qkv[:, :num_heads], cache, cache)
    for tile_rows in TILE_ROWS:
        plan = _plan(num_tokens, tile_rows=tile_rows)
        for with_decodes in (False,) if quick else (False, True):
            prefill_attention(*inputs, plan, 0.1, sliding_window=shape.window, out=out, with_decodes=with_decodes)
    for num_splits in (1, 8) if quick else SPLITS:
        plan = _plan(num_tokens, num_splits=num_splits)
        decode_attention(*inputs, plan, 0.1, sliding_window=shape.window, out=out)


def _rotate(shape: HeadShape, num_tokens: int) -> None:
    """All of a head rotated, and a quarter of it."""
    num_heads = NUM_KV_HEADS * shape.group
    cache = _cache(shape)
    qkv = _meta(num_tokens, num_heads + 2 * NUM_KV_HEADS, shape.head_size, dtype=shape.dtype)
    for rotary_size in (shape.head_size, shape.head_size // 4):
        table = _meta(num_tokens, 1, rotary_size // 2, dtype=torch.float32)
        slots = _meta(num_tokens, dtype=torch.int32)
        rotate_and_store(qkv, table, table, slots, cache, cache, num_heads)


def _work_on_rows(dtype: torch.dtype, hidden_size: int, num_tokens: int) -> None:
    """Norms of both kinds, of hidden states and of heads, and activations."""
    hidden = _meta(num_tokens, hidden_size, dtype=dtype)
    weight = _meta(hidden_size, dtype=dtype)
    kinds: tuple[tuple[NormKind, Tensor | None], ...] = (("rms", None), ("layer", weight))
    for (kind, bias), update in product(kinds, (None, hidden)):
        add_norm(hidden, update, weight, bias, 1e-5, kind)
    heads = _meta(num_tokens, 3 * NUM_KV_HEADS, 128, dtype=dtype)[:, :NUM_KV_HEADS]
    add_norm(heads, None, _meta(128, dtype=dtype), None, 1e-5, "rms", out=heads)
    gate_up = _meta(num_tokens, 8 * hidden_size, dtype=dtype)
    gated_activation(gate_up, "silu")
    gated_activation(gate_up, "gelu")
    gated_activation(gate_up, "gelu_tanh")
    activation_(gate_up, "silu")
    activation_(gate_up, "gelu")
    activation_(gate_up, "gelu_tanh")


def _plan(num_tokens: int, tile_rows: int = TILE_ROWS[0], num_splits: int = 1) -> AttentionPlan:
    """A plan of a batch in which everything occurs; the sizes of its tensors follow the number of tokens."""
    return AttentionPlan(
        query_starts=_meta(num_tokens + 1, dtype=torch.int32),
        kv_lens=_meta(num_tokens, dtype=torch.int32),
        block_table=_meta(num_tokens, num_tokens, dtype=torch.int32),
        tiles=_meta(num_tokens, 2, dtype=torch.int32),
        decodes=_meta(num_tokens, dtype=torch.int32),
        tile_rows=tile_rows,
        num_splits=num_splits,
    )


def _cache(shape: HeadShape) -> Tensor:
    return _meta(1024, shape.block_size, NUM_KV_HEADS, shape.head_size, dtype=shape.dtype)


def _meta(*sizes: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(sizes, dtype=dtype, device="meta")
