"""The KV cache in 8 bits: its error and its bytes, in plain torch, in C++, in the engine and in
simulation.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from native_library import needs_library
from torch import Tensor

from sarathi_kernels.attention.kv_cache import (
    LARGEST,
    QuantizedCache,
    dequantize,
    quantize,
    write_kv,
)
from sarathi_kernels.attention.reference import make_segment, paged_attention
from sarathi_kernels.cpu import library
from sarathi_kernels.runtime.testing import poisoned, relative_error
from sarathi_lab.config.errors import UserError
from sarathi_lab.config.instantiate import load_option
from sarathi_lab.engine.executor import Sizes
from sarathi_lab.engine.request import Batch, Request, SequenceState
from sarathi_lab.executor.simulated.backend import SimulatedBackend
from sarathi_lab.executor.torch.backend import TorchBackend
from sarathi_lab.model.spec import KV_SCALE_BYTES
from sarathi_lab.model.transformer import KVCache

CPU = torch.device("cpu")
KV_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
# Of the error of normal values: int8 rounds to 1/254 of a head's largest entry, fp8 to 1/16 of each
# entry at most.
ERRORS = {torch.int8: (0.003, 0.01), torch.float8_e4m3fn: (0.015, 0.03)}
NATIVE = 3e-6  # beside torch's attention to the same 8 bits
ROUNDED = 4e-3  # where AMX multiplies bfloat16


def heads(*sizes: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal values, heads far from each other in size."""
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(sizes, generator=generator)
        * 10 ** torch.randn(sizes[:-1], generator=generator)[..., None]
    ).to(dtype)


def poisoned_cache(
    num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, dtype: torch.dtype
):
    """Whose scales are no numbers wherever nothing was written."""
    data = torch.full(
        (num_blocks, block_size, num_kv_heads, head_size), 77, dtype=torch.uint8
    ).view(dtype)
    return QuantizedCache(
        data, poisoned(num_blocks, block_size, num_kv_heads, device=CPU, dtype=torch.float32)
    )


# -- the scheme ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", LARGEST, ids=str)
@pytest.mark.parametrize("own", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("sizes", [(1, 1, 1), (7, 1, 80), (5, 4, 128), (0, 2, 64)], ids=str)
def test_every_head_is_rounded_by_itself(dtype, own, sizes):
    x = heads(*sizes, dtype=own)
    data, scales = quantize(x, dtype)
    assert (data.dtype, scales.dtype, scales.shape) == (dtype, torch.float32, x.shape[:-1])
    back = dequantize(data, scales, torch.float32)
    largest = x.float().abs().amax(-1, keepdim=True) if len(x) else x.float()[..., :1]
    # Half a step of int8; half of the last of four bits of an entry of fp8, or half its least step.
    step = (
        largest / 254
        if dtype == torch.int8
        else torch.maximum(x.float().abs() / 16, largest / 448 / 1024)
    )
    assert ((back - x.float()).abs() <= 1.001 * step).all()
    if min(sizes) > 5:
        low, high = ERRORS[dtype]
        assert low < relative_error(back / largest, x.float() / largest) < high


@pytest.mark.parametrize("dtype", LARGEST, ids=str)
def test_zeros_stay_zeros_and_what_is_no_number_stays_none(dtype):
    x = torch.ones(4, 8)
    x[0] = 0
    x[1, 3] = float("nan")
    x[2, 5] = float("-inf")
    back = dequantize(*quantize(x, dtype), torch.float32)
    assert torch.equal(back[0], x[0])
    assert back[1].isnan().all()
    assert back[2].isnan().any()
    assert torch.equal(back[3], x[3])


@pytest.mark.parametrize("dtype", LARGEST, ids=str)
@pytest.mark.parametrize(
    ("num_tokens", "num_kv_heads", "head_size", "block_size"), [(1, 1, 6, 1), (17, 3, 80, 5)]
)
def test_a_write_touches_its_slots_only(dtype, num_tokens, num_kv_heads, head_size, block_size):
    key, value = (heads(num_tokens, num_kv_heads, head_size, seed=seed) for seed in (0, 1))
    caches = [
        poisoned_cache(2 * num_tokens, block_size, num_kv_heads, head_size, dtype) for _ in range(2)
    ]
    slots = torch.randperm(2 * num_tokens * block_size, generator=torch.Generator().manual_seed(1))[
        :num_tokens
    ]
    write_kv(key, value, *caches, slots)
    for x, cache in zip((key, value), caches, strict=True):
        data, scales = quantize(x, dtype)
        assert torch.equal(cache.raw.flatten(0, 1)[slots], data.view(torch.uint8))
        assert torch.equal(cache.scales.flatten(0, 1)[slots], scales)
        others = torch.ones(2 * num_tokens * block_size, dtype=torch.bool)
        others[slots] = False
        assert cache.scales.flatten(0, 1)[others].isnan().all()
        assert (cache.raw.flatten(0, 1)[others] == 77).all()


# -- attention -------------------------------------------------------------------------------------

SHAPES = [(8, 4, 64, 16, None), (4, 4, 12, 4, 7), (4, 1, 80, 8, None), (2, 2, 256, 16, 33)]
LENGTHS = [(1, 37), (5, 5), (100, 150), (1, 1), (33, 64), (129, 200)]  # new tokens, context


@pytest.fixture(params=[True, False], ids=["amx", "avx512"])
def allows_amx(request) -> bool:
    library.start(2, allows_amx=request.param)
    yield request.param
    library.start(2)


def filled(shape, dtype: torch.dtype, kv_len: int, blocks: slice | Tensor):
    """Caches that hold `kv_len` tokens in `blocks` and poison elsewhere, and the same in
    float64.
    """
    _, num_kv_heads, head_size, block_size, _ = shape
    used = torch.arange(60)[blocks] if isinstance(blocks, slice) else blocks
    slots = (used[:, None] * block_size + torch.arange(block_size)).flatten()[:kv_len]
    caches = [poisoned_cache(60, block_size, num_kv_heads, head_size, dtype) for _ in range(2)]
    generator = torch.Generator().manual_seed(1)
    write_kv(*torch.randn(2, kv_len, num_kv_heads, head_size, generator=generator), *caches, slots)
    return caches, [dequantize(cache.data, cache.scales, torch.float64) for cache in caches]


def cases(shape, dtype: torch.dtype):
    """Queries, segments, caches in 8 bits and in float64, of neighbouring and of scattered
    blocks.
    """
    num_heads, _, head_size, block_size, window = shape
    generator = torch.Generator().manual_seed(0)
    scattered = torch.randperm(60, generator=generator)
    for number, (num_queries, kv_len) in enumerate(LENGTHS):
        num_blocks = -(-kv_len // block_size)
        blocks = slice(3, 3 + num_blocks) if number % 2 else scattered[:num_blocks]
        segment = make_segment(
            0, num_queries, kv_len, blocks, sliding_window=window, device=CPU, dtype=torch.float64
        )
        query = torch.randn(num_queries, num_heads, head_size, generator=generator)
        yield query, [segment], *filled(shape, dtype, kv_len, blocks)


@pytest.mark.parametrize("dtype", LARGEST, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_torch_attends_to_what_is_in_the_cache(dtype, shape):
    for query, segments, caches, exact in cases(shape, dtype):
        expected = paged_attention(query.double(), *exact, segments, shape[2] ** -0.5)
        assert (
            relative_error(
                paged_attention(query.double(), *caches, segments, shape[2] ** -0.5), expected
            )
            < 1e-6
        )


@needs_library
@pytest.mark.parametrize("query_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", LARGEST, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_cpp_attends_to_what_is_in_the_cache(allows_amx, query_dtype, dtype, shape):
    for query, segments, caches, exact in cases(shape, dtype):
        given = query.to(query_dtype)
        expected = paged_attention(given.double(), *exact, segments, shape[2] ** -0.5)
        found = library.attention(given, *caches, segments, shape[2] ** -0.5, shape[-1])
        assert relative_error(found, expected) < (
            NATIVE if query_dtype == torch.float32 else 2 * ROUNDED
        )


# -- the engine ------------------------------------------------------------------------------------


def executor_of(kv_dtype: str, **settings):
    spec = dataclasses.replace(load_option("model", "tiny"), kv_dtype=kv_dtype)
    return TorchBackend(device="cpu", threads=1, **settings).build(
        spec, None, Sizes(30, 16, batch_size=2)
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_the_cache_takes_what_the_spec_says(kv_dtype, dtype):
    executor = executor_of(kv_dtype, dtype=dtype, kernels="torch")
    spec, cache = executor.model.spec, executor.cache
    assert cache.keys.dtype == cache.values.dtype == KV_DTYPES[kv_dtype]
    stored = sum(tensor.untyped_storage().nbytes() for tensor in cache.tensors)
    assert stored == 30 * 16 * spec.kv_bytes_per_token({"float32": 4}.get(dtype, 2))
    assert stored == 30 * 16 * 2 * spec.num_layers * spec.num_kv_heads * (
        spec.head_size + KV_SCALE_BYTES
    )


def caches_after(executor, tokens) -> KVCache:
    """Having computed `tokens` in two chunks, the second of which sees the first."""
    sequence = SequenceState(Request(0, 0.0, len(tokens), 1, tokens), order=0)
    sequence.block_ids = list(range(2, 30))
    for start, end in ((0, 21), (21, len(tokens))):
        batch = Batch()
        sequence.num_computed, sequence.in_flight = start, False
        batch.add(sequence, end - start)
        executor.submit(batch)
        executor.collect()
    return executor.cache


@needs_library
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_the_cpp_writes_what_torch_writes(kv_dtype):
    tokens = np.random.default_rng(0).integers(0, 97, 60, dtype=np.int32)
    expected = caches_after(executor_of(kv_dtype, dtype="float32", kernels="torch"), tokens)
    found = caches_after(executor_of(kv_dtype, dtype="float32", kernels="native"), tokens)
    for (key, value), (their_key, their_value) in zip(
        found.layers(), expected.layers(), strict=True
    ):
        for ours, theirs in ((key, their_key), (value, their_value)):
            assert relative_error(ours.scales, theirs.scales) < 1e-4
            both = (
                dequantize(cache.data, cache.scales, torch.float32)[2:5] for cache in (ours, theirs)
            )
            assert (
                relative_error(*both) < ERRORS[KV_DTYPES[kv_dtype]][0]
            )  # the second layer sees the rounded first


# -- what follows from the bytes -------------------------------------------------------------------


def test_bytes_of_a_token():
    spec = load_option("model", "13b")
    assert spec.kv_bytes_per_token(2) == 2 * 40 * 40 * 128 * 2
    for kv_dtype in KV_DTYPES:
        assert dataclasses.replace(spec, kv_dtype=kv_dtype).kv_bytes_per_token(2) == 2 * 40 * 40 * (
            128 + 4
        )
    with pytest.raises(
        UserError, match=r"kv_dtype=int4 is unknown \(did you mean int8\?\); use one of auto, int8"
    ):
        dataclasses.replace(spec, kv_dtype="int4")


def test_a_simulation_says_what_it_does_not_count():
    spec = dataclasses.replace(load_option("model", "13b"), kv_dtype="fp8")
    backend = SimulatedBackend(load_option("hardware", "a6000"))
    assert any("cache.dtype=fp8" in line for line in backend.cautions(spec))
    profiled = SimulatedBackend(load_option("hardware", "a6000"), cost_model="profiled")
    with pytest.raises(UserError, match="was measured with a cache in the model's type, not with"):
        profiled.check(spec, 16)
