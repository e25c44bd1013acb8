"""Benchmarks of everything but attention, at the paper's sizes, against the plain torch that each
kernel replaces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from sarathi_kernels.attention.kv_cache import write_kv
from sarathi_kernels.benchmarks.measure import Benchmark
from sarathi_kernels.elementwise.activation import activate_, gated_activate_
from sarathi_kernels.elementwise.fused_activation import activation_, gated_activation
from sarathi_kernels.elementwise.norm import NormKind, add_norm
from sarathi_kernels.elementwise.rotary import apply_rotary, rotary_tables
from sarathi_kernels.elementwise.rotary_kv import rotate_and_store
from sarathi_kernels.elementwise.sampling import greedy

BLOCK_SIZE = 16  # tokens of a cache block


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


Ways = tuple[Callable[[], object], Callable[[], object]]
Pair = tuple[str, str, Callable[[], object], Callable[[], object], float]


def benchmarks(device: torch.device, dtype: torch.dtype, quick: bool) -> Iterator[Benchmark]:
    """Tensors of a case are made when it is reached."""
    random = partial(torch.randn, device=device, dtype=dtype)
    for operation, case, by_triton, in_torch, num_bytes in _pairs(random, quick=quick):
        yield Benchmark(operation, case, "triton", by_triton, 0, num_bytes)
        yield Benchmark(operation, case, "torch", in_torch, 0, num_bytes)


def _pairs(random: Callable[..., Tensor], *, quick: bool) -> Iterator[Pair]:
    """Operation, case, both ways to compute it, and the least bytes that it moves."""
    for shape in TINY if quick else SHAPES:
        for num_tokens in shape.num_tokens:
            case = f"{shape.name}, {num_tokens} tokens"
            yield _rotation(shape, num_tokens, case, random)
            for kind in get_args(NormKind)[::-1]:
                yield _norm(random(2, num_tokens, shape.hidden_size), kind, case, random)
            yield from _rows(shape, num_tokens, case, random)
    for vocab in (100,) if quick else VOCABULARIES:
        for num_rows in (1, 3) if quick else (1, 8, 32, 64):
            logits = random(num_rows, vocab)
            ways: Ways = partial(greedy, logits), partial(logits.argmax, dim=1)
            yield "greedy", f"{num_rows} rows of {vocab}", *ways, logits.nbytes


def _rotation(shape: Shape, num_tokens: int, case: str, random: Callable[..., Tensor]) -> Pair:
    heads, head_size = shape.num_heads, shape.head_size
    qkv = random(num_tokens, 3 * heads, head_size)
    num_blocks = -(-num_tokens // BLOCK_SIZE) + 1
    keys, values = random(2, num_blocks, BLOCK_SIZE, heads, head_size)
    positions = torch.arange(num_tokens, device=qkv.device)
    frequencies = 1e4 ** -(torch.arange(0, head_size, 2, device=qkv.device) / head_size)
    tables = rotary_tables(positions, frequencies, torch.float32)
    rounded = rotary_tables(positions, frequencies, qkv.dtype)

    def in_torch() -> None:
        query_key, value = qkv.split((2 * heads, heads), dim=1)
        _, key = apply_rotary(query_key, *rounded).split((heads, heads), dim=1)
        write_kv(key, value, keys, values, positions)

    fused = partial(rotate_and_store, qkv, *tables, positions, keys, values, heads)
    num_bytes = 2 * qkv.nbytes + sum(each.nbytes for each in (*tables, positions))
    return "rotate_and_store", case, fused, in_torch, num_bytes


def _norm(rows: Tensor, kind: NormKind, case: str, random: Callable[..., Tensor]) -> Pair:
    hidden, update = rows
    update *= 1e-3  # it is added at every repetition
    weight, bias = random(2, hidden.shape[-1])

    def in_torch() -> None:
        hidden.add_(update)
        if kind == "layer":
            F.layer_norm(hidden, hidden.shape[-1:], weight, bias, 1e-5)
        else:
            F.rms_norm(hidden, hidden.shape[-1:], weight, 1e-5)

    is_layer = kind == "layer"
    fused = partial(add_norm, hidden, update, weight, bias if is_layer else None, 1e-5, kind)
    num_bytes = 4 * hidden.nbytes + (1 + is_layer) * weight.nbytes
    return "add_norm", f"{kind}, {case}", fused, in_torch, num_bytes


def _rows(
    shape: Shape, num_tokens: int, case: str, random: Callable[..., Tensor]
) -> Iterator[Pair]:
    """Activations."""
    x = random(num_tokens, shape.ffn_size)
    gate_up = random(num_tokens, 2 * shape.ffn_size)
    gate, up = gate_up.chunk(2, dim=1)
    ways: Ways = partial(activation_, x, "gelu"), partial(activate_, x, "gelu")
    yield "activation", f"gelu, {case}", *ways, 2 * x.nbytes
    ways = partial(gated_activation, gate_up, "silu"), partial(gated_activate_, gate, up, "silu")
    yield "gated_activation", f"silu, {case}", *ways, 1.5 * gate_up.nbytes
