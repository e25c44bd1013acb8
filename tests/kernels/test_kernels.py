"""Every operation against an independent, naive implementation on awkward shapes."""

from __future__ import annotations

import pytest
import torch

from sarathi_kernels.attention.kv_cache import write_kv
from sarathi_kernels.attention.reference import make_segment, paged_attention
from sarathi_kernels.elementwise.activation import activate_, gated_activate_
from sarathi_kernels.elementwise.rotary import apply_rotary, rotary_tables

CPU = torch.device("cpu")
BLOCK_SIZE = 4


def naive_attention(query, key, value, scale, window):
    """One sequence, one query and one head at a time; query [n, heads, d], key and value [m,
    kv_heads, d].
    """
    num_queries, num_heads, _ = query.shape
    group = num_heads // key.shape[1]
    out = torch.empty_like(query)
    for i in range(num_queries):
        position = len(key) - num_queries + i
        first = 0 if window is None else max(0, position - window + 1)
        for head in range(num_heads):
            keys, values = (
                key[first : position + 1, head // group],
                value[first : position + 1, head // group],
            )
            weights = torch.softmax(keys @ query[i, head] * scale, dim=0)
            out[i, head] = weights @ values
    return out


@pytest.mark.parametrize("window", [None, 3, 100])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (6, 2)])
def test_paged_attention(num_heads, num_kv_heads, window):
    torch.manual_seed(0)
    head_size = 5
    cache_shape = (40, BLOCK_SIZE, num_kv_heads, head_size)
    keys, values = torch.full(cache_shape, float("nan")), torch.full(cache_shape, float("nan"))
    free = torch.randperm(40).tolist()
    # (queries, context): whole prompts, chunks at, before and after block edges, decodes
    lengths = [(7, 7), (1, 1), (4, 4), (1, 9), (3, 8), (5, 9), (8, 16), (1, 4), (2, 13)]
    segments, expected, row = [], [], 0
    query = torch.randn(sum(n for n, _ in lengths), num_heads, head_size)
    for i, (num_queries, kv_len) in enumerate(lengths):
        num_blocks = -(-kv_len // BLOCK_SIZE)
        if i % 2:
            blocks = torch.tensor([free.pop() for _ in range(num_blocks)])
        else:  # neighbours
            start = next(b for b in range(40) if all(b + j in free for j in range(num_blocks)))
            blocks = slice(start, start + num_blocks)
            free = [b for b in free if not start <= b < start + num_blocks]
        key, value = torch.randn(2, kv_len, num_kv_heads, head_size)
        ids = torch.arange(40)[blocks]
        slots = (
            ids.repeat_interleave(BLOCK_SIZE)[:kv_len] * BLOCK_SIZE
            + torch.arange(kv_len) % BLOCK_SIZE
        )
        write_kv(key, value, keys, values, slots)
        segments.append(
            make_segment(
                row,
                num_queries,
                kv_len,
                blocks,
                sliding_window=window,
                device=CPU,
                dtype=torch.float32,
            )
        )
        expected.append(naive_attention(query[row : row + num_queries], key, value, 0.3, window))
        row += num_queries
    out = paged_attention(query, keys, values, segments, 0.3)
    torch.testing.assert_close(out, torch.cat(expected), rtol=1e-4, atol=1e-5)


def test_attention_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match="5 queries"):
        make_segment(0, 5, 4, slice(0, 1), sliding_window=None, device=CPU, dtype=torch.float32)
    cache = torch.zeros(2, 4, 2, 8)
    with pytest.raises(ValueError, match="does not match the cache"):
        paged_attention(torch.zeros(1, 3, 8), cache, cache, [], 1.0)
    with pytest.raises(ValueError, match="do not match"):
        write_kv(torch.zeros(2, 2, 8), torch.zeros(2, 2, 8), cache, cache, torch.tensor([0]))


def test_write_kv_touches_its_slots_only():
    keys, values = torch.full((2, 3, 4, 2, 5), float("nan"))
    key, value = torch.randn(2, 3, 2, 5)
    write_kv(key, value, keys, values, torch.tensor([11, 0, 5]))
    assert torch.equal(keys.flatten(0, 1)[[11, 0, 5]], key)
    assert torch.equal(values[2, 3], value[0])
    assert torch.isnan(keys).sum() == 9 * 2 * 5


@pytest.mark.parametrize(("head_size", "rotary_size"), [(8, 8), (10, 4), (6, 6)])
def test_rotary_is_a_rotation_of_pairs(head_size, rotary_size):
    """As complex numbers: (x_j + i x_{j+half}) turns by position * frequency_j; the rest stays."""
    torch.manual_seed(1)
    half = rotary_size // 2
    positions, frequencies = torch.tensor([0, 3, 100, 7]), torch.rand(half)
    x = torch.randn(4, 3, head_size)
    out = apply_rotary(x, *rotary_tables(positions, frequencies, torch.float32))
    turned = torch.complex(x[..., :half], x[..., half:rotary_size]) * torch.polar(
        torch.ones(4, 1, half), (positions[:, None] * frequencies)[:, None]
    )
    torch.testing.assert_close(out[..., :half], turned.real)
    torch.testing.assert_close(out[..., half:rotary_size], turned.imag)
    assert torch.equal(out[..., rotary_size:], x[..., rotary_size:])
    assert torch.equal(out[0], x[0])


def test_activations():
    x, up = torch.randn(2, 5, 7)
    sigmoid = 1 / (1 + torch.exp(-x))
    torch.testing.assert_close(gated_activate_(x.clone(), up, "silu"), x * sigmoid * up)
    normal = torch.distributions.Normal(0.0, 1.0).cdf(x)
    torch.testing.assert_close(activate_(x.clone(), "gelu"), x * normal)
    inner = torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))
    torch.testing.assert_close(activate_(x.clone(), "gelu_tanh"), 0.5 * x * (1 + inner))
    with pytest.raises(ValueError, match="unknown"):
        activate_(x, "relu")
