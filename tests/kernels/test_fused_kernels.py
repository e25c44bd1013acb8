"""Rotation with KV write, and norms: the kernels, interpreted or on a GPU, against plain torch."""

from __future__ import annotations

import pytest
import torch
from kernel_inputs import BOUNDS, DEVICE, DTYPES, ROTARY_CASES, RotaryCase, random, rotary_inputs

from sarathi_kernels.elementwise.norm import NormKind, add_norm, add_norm_reference
from sarathi_kernels.elementwise.rotary import rotary_tables
from sarathi_kernels.elementwise.rotary_kv import rotate_and_store, rotate_and_store_reference
from sarathi_kernels.runtime.testing import poisoned, relative_error


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", ROTARY_CASES, ids=str)
def test_rotation_and_store_match_plain_torch_and_write_nothing_else(
    case: RotaryCase, dtype: torch.dtype
) -> None:
    qkv, cos, sin, slots = rotary_inputs(case, dtype)
    before = qkv.clone()
    shape = (2 * case.num_tokens, case.block_size, case.num_kv_heads, case.head_size)
    pools = [poisoned(shape[0] + 1, *shape[1:], device=DEVICE, dtype=dtype) for _ in range(4)]
    caches = [pool[1:] for pool in pools]  # slot -1 would be the last of the block before
    expected = rotate_and_store_reference(before, cos, sin, slots, *caches[2:], case.num_heads)

    slot_dtype = torch.int32 if case.num_tokens % 2 else torch.int64  # both occur
    query = rotate_and_store(qkv, cos, sin, slots.to(slot_dtype), *caches[:2], case.num_heads)

    assert query.data_ptr() == qkv.data_ptr()
    assert relative_error(query, expected) < BOUNDS[dtype]
    assert torch.equal(qkv[:, case.num_heads :], before[:, case.num_heads :])
    written = torch.zeros(shape[0] * shape[1], dtype=torch.bool, device=DEVICE)
    written[slots[slots >= 0]] = True
    assert pools[0][0].isnan().all()
    assert pools[1][0].isnan().all()
    for cache, wanted in zip(caches[:2], caches[2:], strict=True):
        assert (
            relative_error(cache.flatten(0, 1)[written], wanted.flatten(0, 1)[written])
            < BOUNDS[dtype]
        )
        assert cache.flatten(0, 1)[~written].isnan().all()
    assert torch.equal(caches[1].flatten(0, 1)[written], caches[3].flatten(0, 1)[written])


def test_rotation_stays_accurate_at_far_positions() -> None:
    positions = torch.tensor([131_071], device=DEVICE, dtype=torch.int32)
    frequencies = 1e4 ** -(torch.arange(0, 64, 2, device=DEVICE) / 64)
    qkv = random(1, 3, 64, dtype=torch.float32)
    first, second = qkv[0, 0].double().cpu().split(32)
    angles = (
        (positions.float() * frequencies).double().cpu()
    )  # the angle as float32 has it, its sine exactly
    expected = torch.cat(
        (first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin())
    )
    cache = poisoned(1, 16, 1, 64, device=DEVICE, dtype=torch.float32)
    slots = torch.zeros(1, device=DEVICE, dtype=torch.int64)
    query = rotate_and_store(
        qkv, *rotary_tables(positions, frequencies, torch.float32), slots, cache, cache.clone(), 1
    )
    assert relative_error(query[0, 0].cpu(), expected) < 1e-6


@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize(
    ("num_rows", "size", "dtype"),
    [(3, 4096, DTYPES[-1]), (1, 16_384, DTYPES[-1]), (33, 80, DTYPES[0]), (5, 1, DTYPES[1])],
    ids=str,
)
def test_norm_adds_and_normalises(
    kind: NormKind, num_rows: int, size: int, dtype: torch.dtype
) -> None:
    all_hidden = random(num_rows + 64, size, dtype=dtype) * 3 + 1
    rows_behind, hidden = all_hidden[num_rows:].clone(), all_hidden[:num_rows]
    update, weight, bias = (
        random(num_rows, size, dtype=dtype, seed=1),
        *random(2, size, dtype=dtype, seed=2),
    )
    expected_hidden = hidden.clone()
    eps = 0.1  # large, so that forgetting it shows
    expected = add_norm_reference(expected_hidden, update, weight, bias, eps, kind)
    all_out = poisoned(num_rows + 64, size, device=DEVICE, dtype=dtype)
    out = all_out[:num_rows]
    assert add_norm(hidden, update, weight, bias, eps, kind, out=out) is out
    assert all_out[num_rows:].isnan().all()
    assert torch.equal(all_hidden[num_rows:], rows_behind)
    assert torch.equal(hidden, expected_hidden)
    assert relative_error(out, expected) < BOUNDS[dtype] or (
        size == 1 and torch.equal(out, expected)
    )


def test_norm_normalises_the_sum_as_it_is_stored() -> None:
    hidden = torch.full(
        (1, 2), 2048.0, device=DEVICE, dtype=torch.float16
    )  # the next number is 2050
    update = torch.tensor([[0.5, -0.5]], device=DEVICE, dtype=torch.float16)
    out = add_norm(hidden, update, torch.ones_like(update[0]), None, 1e-6, "layer")
    assert out.tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_norm_without_update_or_bias_leaves_its_input(kind: NormKind) -> None:
    hidden, weight = random(3, 80, dtype=torch.float32), random(80, dtype=torch.float32, seed=1)
    before = hidden.clone()
    out = add_norm(hidden, None, weight, None, 1e-6, kind)
    assert torch.equal(hidden, before)
    assert relative_error(out, add_norm_reference(before, None, weight, None, 1e-6, kind)) < 1e-6


@pytest.mark.parametrize("head_size", [128, 80])
def test_norm_by_head_works_in_place_on_a_part_of_the_heads(head_size: int) -> None:
    qkv = random(5, 7, head_size, dtype=torch.float16)
    before, weight = qkv.clone(), random(head_size, dtype=torch.float16, seed=1)
    queries = qkv[:, 1:4]
    add_norm(queries, None, weight, None, 1e-6, "rms", out=queries)
    expected = add_norm_reference(before[:, 1:4], None, weight, None, 1e-6, "rms")
    assert relative_error(queries, expected) < BOUNDS[torch.float16]
    assert torch.equal(qkv[:, 4:], before[:, 4:])
    assert torch.equal(qkv[:, :1], before[:, :1])
