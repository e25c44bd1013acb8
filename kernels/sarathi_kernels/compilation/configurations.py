"""Every kernel configuration that the engine can pick, as launches of the public functions on
tensors without data.

Shapes of heads, cache and tiles are taken in all combinations that change the hot code; model sizes
(hidden, heads, vocabulary) as the models of the lab have them, as they change little but constants.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from sarathi_kernels.attention.hybrid import Variant, hybrid_attention
from sarathi_kernels.attention.kv_cache import LARGEST, Cache, QuantizedCache
from sarathi_kernels.attention.plan import TILE_ROWS, AttentionPlan
from sarathi_kernels.attention.support import SUPPORTED_DTYPES, SUPPORTED_HEAD_SIZES
from sarathi_kernels.elementwise.fused_activation import activation_, gated_activation
from sarathi_kernels.elementwise.norm import NormKind, add_norm
from sarathi_kernels.elementwise.rotary_kv import rotate_and_store
from sarathi_kernels.elementwise.sampling import greedy
from sarathi_kernels.products.tiled_matmul import TILES, Tile, tiled_matmul
from sarathi_kernels.runtime.chip import Chip
from sarathi_kernels.runtime.launch import Launch, recorded

BLOCK_SIZES = (16, 64, 128, 256)
GROUPS = (1, 4, 8)  # query heads a KV head
VARIANTS: tuple[Variant, ...] = (
    "series",
    "unified",
    "fused",
)  # "streams" launches what "series" does
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
    kv: torch.dtype | None = None  # of a cache in 8 bits


HOT_SHAPES = (HeadShape(), HeadShape(group=1))  # what the lab measures: 8B, and 13B or 33B


def record(chip: Chip, *, quick: bool = False, num_tokens: int = 48) -> list[Launch]:
    """The launches, repeated ones included, of all operations on `chip`; `num_tokens` must make no
    difference.

    `quick` leaves one hot configuration of every kernel on every chip, with an 8-bit cache on
    Hopper.
    """
    with recorded(chip) as recording:
        for shape in head_shapes(chip, quick):
            _attend(shape, num_tokens, quick)
            _rotate(shape, num_tokens, quick)
        for dtype in (torch.bfloat16,) if quick else SUPPORTED_DTYPES:
            for hidden_size in HIDDEN_SIZES[:1] if quick else HIDDEN_SIZES:
                _work_on_rows(dtype, hidden_size, num_tokens)
            for vocab_size in VOCAB_SIZES[:1] if quick else VOCAB_SIZES:
                greedy(_meta(num_tokens, vocab_size, dtype=dtype))
            for tile in TILES[:1] if quick else TILES:
                _multiply(dtype, tile)
    return recording.launches


def head_shapes(chip: Chip, quick: bool) -> list[HeadShape]:
    """The shapes to compile attention for on `chip`, each once."""
    if not quick:
        return list(dict.fromkeys((*HOT_SHAPES, *_all_shapes())))
    return [HeadShape(), *(HeadShape(kv=kv) for kv in list(LARGEST)[:1] if chip.is_hopper)]


def _all_shapes() -> Iterator[HeadShape]:
    """Every head size with every dtype, alone, and in large blocks; the rest with the most used
    size.
    """
    for head_size in SUPPORTED_HEAD_SIZES:
        yield from (HeadShape(head_size=head_size, dtype=dtype) for dtype in SUPPORTED_DTYPES)
        yield HeadShape(head_size=head_size, group=1)
        yield HeadShape(head_size=head_size, block_size=BLOCK_SIZES[-1])
    yield from (HeadShape(group=group) for group in GROUPS)
    yield from (
        HeadShape(block_size=size, group=group) for size, group in product(BLOCK_SIZES, GROUPS[:2])
    )
    yield HeadShape(window=4096)
    for kv in LARGEST:
        yield from (HeadShape(kv=kv, group=group) for group in GROUPS[:2])
        yield from (HeadShape(kv=kv, head_size=head_size) for head_size in SUPPORTED_HEAD_SIZES)
        yield from (HeadShape(kv=kv, dtype=dtype) for dtype in SUPPORTED_DTYPES)
        yield from (HeadShape(kv=kv, block_size=BLOCK_SIZES[-1]), HeadShape(kv=kv, window=4096))


def _attend(shape: HeadShape, num_tokens: int, quick: bool) -> None:
    """Chunks and decodes of one batch, in kernels of their own and in one for both."""
    num_heads = NUM_KV_HEADS * shape.group
    qkv = _meta(num_tokens, num_heads + 2 * NUM_KV_HEADS, shape.head_size, dtype=shape.dtype)
    cache, out = _cache(shape), _meta(num_tokens, num_heads, shape.head_size, dtype=shape.dtype)
    for variant, tile_rows, is_split in dict.fromkeys(_work_divisions(shape, quick)):
        plan = _plan(num_tokens, tile_rows, is_split)
        inputs = (qkv[:, :num_heads], cache, cache, plan, 0.1)
        hybrid_attention(*inputs, variant=variant, sliding_window=shape.window, out=out)


def _work_divisions(shape: HeadShape, quick: bool) -> Iterator[tuple[Variant, int, bool]]:
    """Variant, rows of a tile, and whether decodes are split; all there are for the hot shapes."""
    if quick:
        yield "series", TILE_ROWS[-1], True
        if shape in HOT_SHAPES:
            yield "fused", TILE_ROWS[-1], True
        return
    yield from product(VARIANTS[:2], TILE_ROWS, (False, True))
    yield "fused", TILE_ROWS[-1], True
    if shape in HOT_SHAPES:
        yield from product(VARIANTS, TILE_ROWS, (False, True))


def _rotate(shape: HeadShape, num_tokens: int, quick: bool) -> None:
    """All of a head rotated, and a quarter of it."""
    num_heads = NUM_KV_HEADS * shape.group
    cache = _cache(shape)
    qkv = _meta(num_tokens, num_heads + 2 * NUM_KV_HEADS, shape.head_size, dtype=shape.dtype)
    for rotary_size in (shape.head_size, shape.head_size // 4)[: 1 if quick else 2]:
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


def _multiply(dtype: torch.dtype, tile: Tile) -> None:
    """By pointers, and by descriptors where the chip has them."""
    a, b = _meta(512, 5120, dtype=dtype), _meta(5120, 5120, dtype=dtype)
    tiled_matmul(a, b, tile, use_descriptors=False)
    tiled_matmul(a, b, tile)


def _plan(num_tokens: int, tile_rows: int, is_split: bool) -> AttentionPlan:
    """A plan of a batch in which everything occurs; the sizes of its tensors follow the number of
    tokens.
    """
    return AttentionPlan(
        query_starts=_meta(num_tokens + 1, dtype=torch.int32),
        kv_lens=_meta(num_tokens, dtype=torch.int32),
        block_table=_meta(num_tokens, num_tokens, dtype=torch.int32),
        tiles=_meta(num_tokens, 2, dtype=torch.int32),
        decodes=_meta(num_tokens, dtype=torch.int32),
        parts=_meta(num_tokens, 4, dtype=torch.int32),
        reductions=_meta(num_tokens if is_split else 0, 3, dtype=torch.int32),
        tile_rows=tile_rows,
    )


def _cache(shape: HeadShape) -> Cache:
    entries = _meta(
        1024, shape.block_size, NUM_KV_HEADS, shape.head_size, dtype=shape.kv or shape.dtype
    )
    if shape.kv is None:
        return entries
    return QuantizedCache(entries, _meta(1024, shape.block_size, NUM_KV_HEADS, dtype=torch.float32))


def _meta(*sizes: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(sizes, dtype=dtype, device="meta")
