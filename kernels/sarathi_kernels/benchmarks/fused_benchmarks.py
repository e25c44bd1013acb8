"""Benchmarks of everything but attention, at the paper's sizes, against the plain torch that each
kernel replaces.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from sarathi_kernels.attention.kv_cache import quantize, write_kv
from sarathi_kernels.benchmarks.measure import Benchmark
from sarathi_kernels.elementwise.activation import activate_, gated_activate_
from sarathi_kernels.elementwise.fused_activation import activation_, gated_activation
from sarathi_kernels.elementwise.norm import NormKind, add_norm
from sarathi_kernels.elementwise.quantized_rows import quantize_rows
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


def benchmarks(device: torch.device, dtype: torch.dtype, quick: bool) -> Iterator[Benchmark]:
    """Tensors of a case are made when it is reached."""
    shapes = TINY if quick else SHAPES
    for shape in shapes:
        for num_tokens in shape.num_tokens:
            yield from _rotation(shape, num_tokens, device, dtype)
            yield from _norm(shape, num_tokens, "layer", device, dtype)
            yield from _norm(shape, num_tokens, "rms", device, dtype)
            yield from _activation(shape, num_tokens, device, dtype)
            yield from _gated_activation(shape, num_tokens, device, dtype)
            yield from _quantized(shape, num_tokens, device, dtype)
    for vocab in (100,) if quick else VOCABULARIES:
        for num_rows in (1, 3) if quick else (1, 8, 32, 64):
            yield from _greedy(num_rows, vocab, device, dtype)


def _random(*sizes: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.randn(sizes, device=device, dtype=dtype)


def _size(*tensors: Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _rotation(
    shape: Shape, num_tokens: int, device: torch.device, dtype: torch.dtype
) -> Iterator[Benchmark]:
    heads, head_size = shape.num_heads, shape.head_size
    qkv = _random(num_tokens, 3 * heads, head_size, device=device, dtype=dtype)
    num_blocks = -(-num_tokens // BLOCK_SIZE) + 1
    keys, values = _random(2, num_blocks, BLOCK_SIZE, heads, head_size, device=device, dtype=dtype)
    positions = torch.arange(num_tokens, device=device)
    frequencies = 1e4 ** -(torch.arange(0, head_size, 2, device=device) / head_size)
    tables = rotary_tables(positions, frequencies, torch.float32)
    rounded = rotary_tables(positions, frequencies, dtype)

    def in_torch() -> None:
        query_key, value = qkv.split((2 * heads, heads), dim=1)
        _, key = apply_rotary(query_key, *rounded).split((heads, heads), dim=1)
        write_kv(key, value, keys, values, positions)

    def fused() -> None:
        rotate_and_store(qkv, *tables, positions, keys, values, heads)

    num_bytes = 2 * _size(qkv) + _size(*tables, positions)
    case = f"{shape.name}, {num_tokens} tokens"
    yield Benchmark("rotate_and_store", case, "triton", fused, 0, num_bytes)
    yield Benchmark("rotate_and_store", case, "torch", in_torch, 0, num_bytes)


def _norm(
    shape: Shape, num_tokens: int, kind: NormKind, device: torch.device, dtype: torch.dtype
) -> Iterator[Benchmark]:
    hidden, update = _random(2, num_tokens, shape.hidden_size, device=device, dtype=dtype)
    update *= 1e-3  # it is added at every repetition
    weight, bias = _random(2, shape.hidden_size, device=device, dtype=dtype)
    num_bytes = 4 * _size(hidden) + (1 + (kind == "layer")) * _size(weight)

    def in_torch() -> None:
        hidden.add_(update)
        if kind == "layer":
            F.layer_norm(hidden, hidden.shape[-1:], weight, bias, 1e-5)
        else:
            F.rms_norm(hidden, hidden.shape[-1:], weight, 1e-5)

    def fused() -> None:
        add_norm(hidden, update, weight, bias if kind == "layer" else None, 1e-5, kind)

    case = f"{kind}, {shape.name}, {num_tokens} tokens"
    yield Benchmark("add_norm", case, "triton", fused, 0, num_bytes)
    yield Benchmark("add_norm", case, "torch", in_torch, 0, num_bytes)


def _activation(
    shape: Shape, num_tokens: int, device: torch.device, dtype: torch.dtype
) -> Iterator[Benchmark]:
    x = _random(num_tokens, shape.ffn_size, device=device, dtype=dtype)
    case, num_bytes = f"gelu, {shape.name}, {num_tokens} tokens", 2 * _size(x)
    yield Benchmark("activation", case, "triton", lambda: activation_(x, "gelu"), 0, num_bytes)
    yield Benchmark("activation", case, "torch", lambda: activate_(x, "gelu"), 0, num_bytes)


def _quantized(
    shape: Shape, num_tokens: int, device: torch.device, dtype: torch.dtype
) -> Iterator[Benchmark]:
    x = _random(num_tokens, shape.hidden_size, device=device, dtype=dtype)
    case, num_bytes = f"{shape.name}, {num_tokens} tokens", _size(x) + x.numel()
    in_torch = partial(quantize, x, torch.float8_e4m3fn)
    yield Benchmark("quantize_rows", case, "triton", lambda: quantize_rows(x), 0, num_bytes)
    yield Benchmark("quantize_rows", case, "torch", in_torch, 0, num_bytes)


def _gated_activation(
    shape: Shape, num_tokens: int, device: torch.device, dtype: torch.dtype
) -> Iterator[Benchmark]:
    gate_up = _random(num_tokens, 2 * shape.ffn_size, device=device, dtype=dtype)

    def in_torch() -> None:
        gate, up = gate_up.chunk(2, dim=1)
        gated_activate_(gate, up, "silu")

    case, num_bytes = f"silu, {shape.name}, {num_tokens} tokens", 1.5 * _size(gate_up)
    yield Benchmark(
        "gated_activation", case, "triton", lambda: gated_activation(gate_up, "silu"), 0, num_bytes
    )
    yield Benchmark("gated_activation", case, "torch", in_torch, 0, num_bytes)


def _greedy(
    num_rows: int, vocab: int, device: torch.device, dtype: torch.dtype
) -> Iterator[Benchmark]:
    logits = _random(num_rows, vocab, device=device, dtype=dtype)
    case = f"{num_rows} rows of {vocab}"
    yield Benchmark("greedy", case, "triton", lambda: greedy(logits), 0, _size(logits))
    yield Benchmark("greedy", case, "torch", lambda: logits.argmax(dim=1), 0, _size(logits))
