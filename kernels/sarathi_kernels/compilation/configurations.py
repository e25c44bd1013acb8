"""The kernel configurations that the engine can pick, as launches of the public functions without
data.

Every chip has what whole batches launch, with caches of each type, what else the hot shapes may be
launched with (tiles, whole and split contexts), and one dtype of the rest. Other shapes and dtypes
are there on `THOROUGH` chips, one with each kind of matrix instruction that a tile is chosen for:
what they could do wrong is to spill, and the other two chips take the same tiles or smaller ones.
Model sizes (hidden, heads, vocabulary) change constants only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor

from sarathi_kernels.attention.fused import fused_attention
from sarathi_kernels.attention.hybrid import hybrid_attention
from sarathi_kernels.attention.kv_cache import LARGEST, Cache, QuantizedCache
from sarathi_kernels.attention.plan import TILE_ROWS, AttentionPlan, make_plan
from sarathi_kernels.attention.support import SUPPORTED_DTYPES, SUPPORTED_HEAD_SIZES
from sarathi_kernels.elementwise.fused_activation import activation_, gated_activation
from sarathi_kernels.elementwise.norm import NormKind, add_norm
from sarathi_kernels.elementwise.quantized_rows import quantize_rows
from sarathi_kernels.elementwise.rotary_kv import rotate_and_store
from sarathi_kernels.elementwise.sampling import greedy
from sarathi_kernels.experts.mixture import mixture_of_experts
from sarathi_kernels.runtime.chip import Chip
from sarathi_kernels.runtime.launch import Launch, recorded

BLOCK_SIZE = 256  # larger than any tile
THOROUGH = (80, 90)
HIDDEN_SIZES = (4096, 5120, 6656)  # 7B and 8B, 13B, 33B
VOCAB_SIZE = 32_000
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


@dataclass(frozen=True)
class Batch:
    """One iteration of a model: a chunk at the end of its prompt, and decodes with contexts as
    long.
    """

    num_heads: int
    num_kv_heads: int
    chunk: int
    num_decodes: int
    context: int
    kv: torch.dtype | None = None


# Sarathi's Figs 8 and 9 have 18 requests of 1K on an A6000, of which a chunk takes one place, and
# Fig 10 LLaMA-33B on an A100; the last has what today's models have, heads that share a cache.
LLAMA_13B = Batch(40, 40, 512, 17, 1024)
LLAMA_8B = Batch(32, 8, 512, 31, 4096)
BATCHES = (
    replace(LLAMA_13B, chunk=256),
    Batch(52, 52, 512, 9, 1024),
    *(replace(batch, kv=kv) for batch in (LLAMA_8B, LLAMA_13B) for kv in (None, *LARGEST)),
)


@dataclass(frozen=True)
class ExpertBatch:
    """So many tokens of an iteration, and the experts of one layer of a model."""

    hidden_size: int
    size: int
    num_experts: int
    top_k: int
    num_tokens: int
    dtype: torch.dtype = torch.bfloat16


# Mixtral-8x7B's chunk, whose experts have more rows than the largest tile; Qwen3-30B-A3B's decodes,
# with few rows for each; and its chunk, for which there is a third tile.
DECODES = ExpertBatch(2048, 768, 128, 8, 32)
EXPERTS = (
    ExpertBatch(4096, 14336, 8, 2, 543),
    DECODES,
    replace(DECODES, num_tokens=543),
    replace(DECODES, num_tokens=543, dtype=torch.float32),
)
HOT_SHAPES = (HeadShape(), HeadShape(group=1))  # what the lab measures: 8B, and 13B or 33B


def record(chip: Chip, *, quick: bool = False) -> list[Launch]:
    """The launches, repeated ones included, of all operations on `chip`. `quick` leaves one hot
    configuration of every kernel, with an 8-bit cache on Hopper.
    """
    with recorded(chip) as recording:
        for batch in _quick_batches(chip) if quick else BATCHES:
            _work_on(batch, chip)
        for experts in EXPERTS[:1] if quick else EXPERTS:
            mix(experts)
    return recording.launches + record_shapes(chip, quick=quick)


def _quick_batches(chip: Chip) -> tuple[Batch, ...]:
    """Heads that share a cache, in 8 bits only on Hopper."""
    in_8_bits = replace(LLAMA_8B, kv=torch.float8_e4m3fn)
    return (LLAMA_8B, in_8_bits) if chip.is_hopper else (LLAMA_8B,)


def record_shapes(chip: Chip, *, quick: bool = False, num_tokens: int = 48) -> list[Launch]:
    """The launches of every shape; `num_tokens` must make no difference."""
    with recorded(chip) as recording:
        for shape in head_shapes(chip, quick):
            _attend(shape, num_tokens, quick)
            _rotate(shape, num_tokens, quick)
        dtypes = SUPPORTED_DTYPES if chip.capability in THOROUGH and not quick else [torch.bfloat16]
        for dtype in dtypes:
            is_short = quick or dtype != torch.bfloat16
            for hidden_size in HIDDEN_SIZES[:1] if is_short else HIDDEN_SIZES:
                _work_on_rows(dtype, hidden_size, num_tokens)
            greedy(_meta(num_tokens, VOCAB_SIZE, dtype=dtype))
    return recording.launches


def _work_on(batch: Batch, chip: Chip) -> None:
    """Attention, and where the cache is in 16 bits what else a layer launches, and sampling."""
    lengths = [batch.chunk, *[1] * batch.num_decodes]
    blocks = [[0] * (batch.context // HeadShape.block_size)] * len(lengths)
    plan = make_plan(
        lengths, [batch.context] * len(lengths), blocks, num_heads=batch.num_heads,
        num_kv_heads=batch.num_kv_heads, num_sms=chip.num_sms, device=torch.device("meta"),
    )  # fmt: skip
    shape = HeadShape(group=batch.num_heads // batch.num_kv_heads, kv=batch.kv)
    qkv, cache, out = _tensors(shape, sum(lengths), batch.num_kv_heads)
    inputs = (qkv[:, : batch.num_heads], cache, cache, plan, 0.1)
    hybrid_attention(*inputs, out=out)
    if batch.kv is not None:
        return
    fused_attention(*inputs, out=out)
    table, slots = _rotary_inputs(sum(lengths), shape.head_size)
    rotate_and_store(qkv, table, table, slots, cache, cache, batch.num_heads)
    hidden_size = batch.num_heads * shape.head_size
    hidden = _meta(sum(lengths), hidden_size, dtype=shape.dtype)
    add_norm(hidden, hidden, hidden[0], None, 1e-5, "rms")
    gated_activation(_meta(sum(lengths), 8 * hidden_size, dtype=shape.dtype), "silu")
    greedy(_meta(batch.num_decodes + 1, VOCAB_SIZE, dtype=shape.dtype))


def head_shapes(chip: Chip, quick: bool) -> list[HeadShape]:
    """The shapes to compile attention for on `chip`, each once."""
    if quick:
        return [HeadShape()]
    others = _other_shapes() if chip.capability in THOROUGH else ()
    return list(dict.fromkeys((*HOT_SHAPES, *others)))


def _other_shapes() -> Iterator[HeadShape]:
    """What changes the hot code: each change alone, and 8 bits with what takes most registers."""
    yield from (HeadShape(head_size=head_size) for head_size in SUPPORTED_HEAD_SIZES)
    yield from (HeadShape(dtype=dtype) for dtype in SUPPORTED_DTYPES)
    yield from (HeadShape(block_size=BLOCK_SIZE), HeadShape(window=4096), HeadShape(group=8))
    for kv in LARGEST:
        yield from (HeadShape(kv=kv, head_size=256), HeadShape(kv=kv, window=4096))
        yield HeadShape(kv=kv, block_size=BLOCK_SIZE)


def _attend(shape: HeadShape, num_tokens: int, quick: bool) -> None:
    """Chunks and decodes of one batch."""
    qkv, cache, out = _tensors(shape, num_tokens)
    for tile_rows, is_split in dict.fromkeys(_work_divisions(shape, quick)):
        plan = _plan(num_tokens, tile_rows, is_split)
        inputs = (qkv[:, : out.shape[1]], cache, cache, plan, 0.1)
        hybrid_attention(*inputs, sliding_window=shape.window, out=out)
        if shape.kv is None:
            fused_attention(*inputs, sliding_window=shape.window, out=out)


def _work_divisions(shape: HeadShape, quick: bool) -> Iterator[tuple[int, bool]]:
    """Rows of a tile, and whether decodes are split; all there are for the hot shapes."""
    yield TILE_ROWS[-1], True
    if quick:
        return
    if shape.kv is None and shape.window is None:
        yield TILE_ROWS[0], True
    if shape in HOT_SHAPES:
        yield from product(TILE_ROWS, (False, True))


def _rotate(shape: HeadShape, num_tokens: int, quick: bool) -> None:
    """All of a head rotated, and of the first shape a quarter; nothing where another shape's is the
    same.
    """
    if shape.window or shape.group != HeadShape.group or shape.block_size != HeadShape.block_size:
        return
    qkv, cache, out = _tensors(shape, num_tokens)
    is_first = shape == HeadShape() and not quick
    for rotary_size in (shape.head_size, shape.head_size // 4)[: 2 if is_first else 1]:
        table, slots = _rotary_inputs(num_tokens, rotary_size)
        rotate_and_store(qkv, table, table, slots, cache, cache, out.shape[1])


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
    quantize_rows(gate_up)
    gated_activation(gate_up, "silu")
    gated_activation(gate_up, "gelu")
    gated_activation(gate_up, "gelu_tanh")
    activation_(gate_up, "silu")
    activation_(gate_up, "gelu")
    activation_(gate_up, "gelu_tanh")


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


def _tensors(
    shape: HeadShape, num_tokens: int, num_kv_heads: int = NUM_KV_HEADS
) -> tuple[Tensor, Cache, Tensor]:
    """Queries, keys and values; the cache of either of the latter; the output."""
    num_heads, size, dtype = num_kv_heads * shape.group, shape.head_size, shape.dtype
    entries = _meta(1024, shape.block_size, num_kv_heads, size, dtype=shape.kv or dtype)
    cache: Cache = entries
    if shape.kv is not None:
        cache = QuantizedCache(entries, _meta(*entries.shape[:-1], dtype=torch.float32))
    qkv = _meta(num_tokens, num_heads + 2 * num_kv_heads, size, dtype=dtype)
    return qkv, cache, _meta(num_tokens, num_heads, size, dtype=dtype)


def _rotary_inputs(num_tokens: int, rotary_size: int) -> tuple[Tensor, Tensor]:
    """The table of sines or cosines, and the tokens' slots."""
    table = _meta(num_tokens, 1, rotary_size // 2, dtype=torch.float32)
    return table, _meta(num_tokens, dtype=torch.int32)


def _meta(*sizes: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(sizes, dtype=dtype, device="meta")


def mix(batch: ExpertBatch) -> None:
    """Launch a layer's experts; the number of tokens chooses a tile, and changes nothing else."""
    experts, hidden, size = batch.num_experts, batch.hidden_size, batch.size
    shapes = (
        (batch.num_tokens, hidden),
        (batch.num_tokens, experts),
        (experts, 2 * size, hidden),
        (experts, hidden, size),
    )
    tensors = (_meta(*shape, dtype=batch.dtype) for shape in shapes)
    mixture_of_experts(*tensors, top_k=batch.top_k, normalised=True)
