"""Benchmarks of everything but attention, at the paper's sizes, against the plain torch that each
kernel replaces.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sarathi_kernels.attention.kv_cache import write_kv
from sarathi_kernels.benchmarks.measure import Benchmark
from sarathi_kernels.elementwise.activation import activate_, gated_activate_
from sarathi_kernels.elementwise.fused_activation import activation_, gated_activation
from sarathi_kernels.elementwise.norm import add_norm
from sarathi_kernels.elementwise.rotary import apply_rotary, rotary_tables
from sarathi_kernels.elementwise.rotary_kv import rotate_and_store
from sarathi_kernels.elementwise.sampling import greedy

BLOCK_SIZE = 16  # tokens of a cache block
EPSILON = 1e-5


@dataclass(frozen=True)
class Shape:
    """The sizes of a model that matter here, and for how many tokens of an iteration to time it."""

    name: str
    hidden_size: int
    num_heads: int
    head_size: int
    ffn_size: int
    num_tokens: tuple[int, ...]


SHAPES = (
    Shape("13b", 5120, 40, 128, 20_480, (1, 8, 32, 256, 512, 2048)),
    Shape("33b", 6656, 52, 128, 26_624, (32, 512)),
)
TINY = (Shape("tiny", 64, 2, 16, 128, (1, 3)),)
VOCABULARIES = (32_000, 128_256)
QUICK_VOCABULARIES = (100,)
NUM_ROWS = (1, 8, 32, 64)
QUICK_NUM_ROWS = (1, 3)

Random = Callable[..., Tensor]  # `torch.randn` of the case's type, on its device


class Pair(NamedTuple):
    """A case of an operation, both ways to compute it, and the least bytes that it moves."""

    operation: str
    case: str
    by_triton: Callable[[], object]
    in_torch: Callable[[], object]
    num_bytes: float


def benchmarks(device: torch.device, dtype: torch.dtype, quick: bool) -> Iterator[Benchmark]:
    """Tensors of a case are made when it is reached."""
    random = partial(torch.randn, device=device, dtype=dtype)
    for pair in _pairs(random, quick=quick):
        works = {"triton": pair.by_triton, "torch": pair.in_torch}
        for implementation, work in works.items():
            yield Benchmark(
                pair.operation,
                pair.case,
                implementation,
                work,
                flops=0,  # all are bound by memory
                num_bytes=pair.num_bytes,
            )


def _pairs(random: Random, *, quick: bool) -> Iterator[Pair]:
    shapes: Sequence[Shape] = SHAPES
    vocabularies: Sequence[int] = VOCABULARIES
    row_counts: Sequence[int] = NUM_ROWS
    if quick:
        shapes = TINY
        vocabularies = QUICK_VOCABULARIES
        row_counts = QUICK_NUM_ROWS
    for shape in shapes:
        for num_tokens in shape.num_tokens:
            case = f"{shape.name}, {num_tokens} tokens"
            yield _rotation(shape, num_tokens, case, random)
            yield _layer_norm(shape, num_tokens, case, random)
            yield _rms_norm(shape, num_tokens, case, random)
            yield _activation(shape, num_tokens, case, random)
            yield _gated_activation(shape, num_tokens, case, random)
    for vocab in vocabularies:
        for num_rows in row_counts:
            yield _greedy(vocab, num_rows, random)


def _rotation(shape: Shape, num_tokens: int, case: str, random: Random) -> Pair:
    heads = shape.num_heads
    head_size = shape.head_size
    qkv = random(num_tokens, 3 * heads, head_size)
    num_blocks = math.ceil(num_tokens / BLOCK_SIZE) + 1
    keys, values = random(2, num_blocks, BLOCK_SIZE, heads, head_size)
    positions = torch.arange(num_tokens, device=qkv.device)
    even_numbers = torch.arange(0, head_size, 2, device=qkv.device)
    frequencies = 1e4 ** -(even_numbers / head_size)
    tables = rotary_tables(positions, frequencies, torch.float32)
    rounded = rotary_tables(positions, frequencies, qkv.dtype)

    def in_torch() -> None:
        query_key, value = qkv.split((2 * heads, heads), dim=1)
        rotated = apply_rotary(query_key, *rounded)
        _, key = rotated.split((heads, heads), dim=1)
        write_kv(key, value, keys, values, positions)

    fused = partial(rotate_and_store, qkv, *tables, positions, keys, values, heads)
    num_bytes = 2 * qkv.nbytes + positions.nbytes  # QKV are read, and written
    num_bytes += sum(table.nbytes for table in tables)
    return Pair("rotate_and_store", case, fused, in_torch, num_bytes)


def _rms_norm(shape: Shape, num_tokens: int, case: str, random: Random) -> Pair:
    hidden, update = _residuals(shape, num_tokens, random)
    weight = random(shape.hidden_size)

    def in_torch() -> None:
        hidden.add_(update)
        F.rms_norm(hidden, (shape.hidden_size,), weight, EPSILON)

    fused = partial(add_norm, hidden, update, weight, None, EPSILON, "rms")
    # Residuals and their update are read, the sum and its norm written.
    num_bytes = 4 * hidden.nbytes + weight.nbytes
    return Pair("add_norm", f"rms, {case}", fused, in_torch, num_bytes)


def _layer_norm(shape: Shape, num_tokens: int, case: str, random: Random) -> Pair:
    hidden, update = _residuals(shape, num_tokens, random)
    weight, bias = random(2, shape.hidden_size)

    def in_torch() -> None:
        hidden.add_(update)
        F.layer_norm(hidden, (shape.hidden_size,), weight, bias, EPSILON)

    fused = partial(add_norm, hidden, update, weight, bias, EPSILON, "layer")
    num_bytes = 4 * hidden.nbytes + weight.nbytes + bias.nbytes
    return Pair("add_norm", f"layer, {case}", fused, in_torch, num_bytes)


def _residuals(shape: Shape, num_tokens: int, random: Random) -> tuple[Tensor, Tensor]:
    """Return the residual stream, and an update of it."""
    hidden, update = random(2, num_tokens, shape.hidden_size)
    update *= 1e-3  # it is added at every repetition
    return hidden, update


def _activation(shape: Shape, num_tokens: int, case: str, random: Random) -> Pair:
    x = random(num_tokens, shape.ffn_size)
    fused = partial(activation_, x, "gelu")
    in_torch = partial(activate_, x, "gelu")
    num_bytes = 2 * x.nbytes  # read, and written
    return Pair("activation", f"gelu, {case}", fused, in_torch, num_bytes)


def _gated_activation(shape: Shape, num_tokens: int, case: str, random: Random) -> Pair:
    gate_up = random(num_tokens, 2 * shape.ffn_size)
    gate, up = gate_up.chunk(2, dim=1)
    fused = partial(gated_activation, gate_up, "silu")
    in_torch = partial(gated_activate_, gate, up, "silu")
    num_bytes = 1.5 * gate_up.nbytes  # half as much is written as read
    return Pair("gated_activation", f"silu, {case}", fused, in_torch, num_bytes)


def _greedy(vocab: int, num_rows: int, random: Random) -> Pair:
    logits = random(num_rows, vocab)
    fused = partial(greedy, logits)
    in_torch = partial(logits.argmax, dim=1)
    case = f"{num_rows} rows of {vocab}"
    return Pair("greedy", case, fused, in_torch, logits.nbytes)
