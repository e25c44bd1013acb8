"""The Triton kernels on a cache in 8 bits, interpreted or on a GPU: against attention by its
definition.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from attention_cases import AWKWARD, reference
from kernel_inputs import DEVICE, DTYPES, ROTARY_CASES, RotaryCase, random, rotary_inputs
from kv_quality import Cuts, teacher_forced_logits
from torch import Tensor
from toy_executors import SPEC, load_family, make_family, on_kernels

from sarathi_kernels.attention.cases import AttentionInputs, make_inputs
from sarathi_kernels.attention.eight_bit import decoded
from sarathi_kernels.attention.hybrid import hybrid_attention
from sarathi_kernels.attention.kv_cache import LARGEST, QuantizedCache, dequantize, quantize
from sarathi_kernels.attention.plan import with_parts_of
from sarathi_kernels.attention.prefill import prefill_attention
from sarathi_kernels.attention.support import entries_and_scales
from sarathi_kernels.elementwise.quantized_rows import quantize_rows
from sarathi_kernels.elementwise.rotary_kv import rotate_and_store, rotate_and_store_reference
from sarathi_kernels.runtime.chip import CHIPS, assumed, chip_of
from sarathi_kernels.runtime.testing import poisoned, relative_error
from sarathi_lab.executor.torch import backend
from sarathi_lab.executor.torch.executor import TorchExecutor
from sarathi_lab.model.weights import load_model

MAX_ERROR = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
# A kernel divides and rotates in another order than torch does, so that an entry between two steps
# may go to either.
STEP = {torch.int8: 1 / 127, torch.float8_e4m3fn: 1 / 8}
NUM_SMS = 4
MULTIPLIED = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32  # by fp8 weights


def in_8_bits(cache: Tensor, dtype: torch.dtype) -> QuantizedCache:
    """With scales that are no numbers where the cache holds none, and entries that would show."""
    data, scales = quantize(cache, dtype)
    data.view(torch.uint8)[scales.isnan()] = 77
    return QuantizedCache(data, scales)


def cases_of(
    name: str, dtype: torch.dtype, kv: torch.dtype, part_tokens: int = 256
) -> tuple[AttentionInputs, Tensor]:
    """Inputs whose caches are in 8 bits, and attention to the numbers that these stand for."""
    inputs = make_inputs(AWKWARD[name], device=DEVICE, dtype=dtype, num_sms=NUM_SMS)
    window = AWKWARD[name].sliding_window
    inputs = replace(inputs, plan=with_parts_of(inputs.plan, part_tokens, window))
    caches = [in_8_bits(cache, kv) for cache in (inputs.key_cache, inputs.value_cache)]
    held = [dequantize(cache.data, cache.scales, torch.float32) for cache in caches]
    exact = replace(inputs, key_cache=held[0], value_cache=held[1])
    return replace(inputs, key_cache=caches[0], value_cache=caches[1]), reference(
        AWKWARD[name], exact
    )


def attend(name: str, inputs: AttentionInputs) -> Tensor:
    out = poisoned(*inputs.query.shape, device=DEVICE, dtype=inputs.query.dtype)
    given = (inputs.query, inputs.key_cache, inputs.value_cache, inputs.plan, inputs.scale)
    hybrid_attention(*given, sliding_window=AWKWARD[name].sliding_window, out=out)
    return out


@triton.jit
def decode_entries(entries: tl.tensor, out: tl.tensor) -> None:
    offsets = tl.arange(0, 256)
    tl.store(out + offsets, decoded(tl.load(entries + offsets), out.dtype.element_ty))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("kv", LARGEST, ids=str)
def test_every_entry_is_decoded_exactly(kv: torch.dtype, dtype: torch.dtype) -> None:
    entries = torch.arange(256, dtype=torch.uint8, device=DEVICE).view(kv)
    expected = entries.to(dtype)
    is_number = expected.isfinite()  # `quantize` makes no others
    cache = QuantizedCache(entries, torch.ones(256, device=DEVICE))
    for chip in (CHIPS[80], CHIPS[90]):
        if chip.capability > chip_of(entries.device).capability:
            continue  # its type is not to be had
        with assumed(chip):
            out = poisoned(256, device=DEVICE, dtype=dtype)
            decode_entries[(1,)](entries_and_scales(cache)[0], out)
            assert torch.equal(out[is_number], expected[is_number])


@pytest.mark.parametrize("kv", LARGEST, ids=str)
@pytest.mark.parametrize(
    "name", ["grouped decodes", "head size 80", "blocks of no power of two", "window within a tile"]
)
def test_awkward_batches(name: str, kv: torch.dtype) -> None:
    dtype = DTYPES[kv == torch.int8]  # each way of reading with one of them
    inputs, expected = cases_of(name, dtype, kv)
    assert relative_error(attend(name, inputs), expected) < MAX_ERROR[dtype]


def test_chips_without_a_type_for_e4m3() -> None:
    inputs, expected = cases_of("grouped decodes", torch.float16, torch.float8_e4m3fn)
    with assumed(CHIPS[80]):
        found = attend("grouped decodes", inputs)
    assert relative_error(found, expected) < MAX_ERROR[torch.float16]


@pytest.mark.parametrize("kv", LARGEST, ids=str)
def test_small_values_are_as_exact_as_large_ones(kv: torch.dtype) -> None:
    """Weights take the scales of values, which float16 would round to few bits."""
    inputs, expected = cases_of("grouped decodes", torch.float16, kv)
    values = inputs.value_cache
    assert isinstance(values, QuantizedCache)
    inputs = replace(inputs, value_cache=replace(values, scales=values.scales / 1024))
    found = attend("grouped decodes", inputs) * 1024
    assert relative_error(found, expected) < MAX_ERROR[torch.float16]


def test_queries_in_bfloat16_are_multiplied_in_float16() -> None:
    """Which the interpreter can do, unlike products of bfloat16."""
    inputs, expected = cases_of("grouped decodes", torch.float32, torch.float8_e4m3fn)
    query = inputs.query.bfloat16()
    for factor in (1.0, 2.0**100):  # saturating, not overflowing
        inputs = replace(inputs, query=query * factor)
        found = attend("grouped decodes", inputs)
        assert found.isfinite().all()
        if factor == 1:
            assert relative_error(found.float(), expected) < 2 * MAX_ERROR[torch.bfloat16]


@pytest.mark.parametrize("kv", LARGEST, ids=str)
@pytest.mark.parametrize("case", [ROTARY_CASES[1], ROTARY_CASES[5]], ids=str)
def test_rotation_stores_what_torch_would(case: RotaryCase, kv: torch.dtype) -> None:
    for dtype in DTYPES:
        qkv, cos, sin, slots = rotary_inputs(case, dtype)
        before = qkv.clone()
        shape = (2 * case.num_tokens, case.block_size, case.num_kv_heads, case.head_size)
        found, expected = ([empty_cache(shape, kv) for _ in range(2)] for _ in range(2))
        query = rotate_and_store_reference(before, cos, sin, slots, *expected, case.num_heads)
        assert (
            relative_error(rotate_and_store(qkv, cos, sin, slots, *found, case.num_heads), query)
            < MAX_ERROR[dtype]
        )
        for ours, theirs in zip(found, expected, strict=True):
            written = ~theirs.scales.isnan()
            assert torch.equal(~ours.scales.isnan(), written)
            assert (ours.raw[~written] == 77).all()
            assert relative_error(ours.scales[written], theirs.scales[written]) < MAX_ERROR[dtype]
            steps = [cache.data.float()[written] for cache in (ours, theirs)]
            assert (
                (steps[0] - steps[1]).abs()
                <= STEP[kv] * steps[1].abs().clamp(min=127 if kv == torch.int8 else 1)
            ).all()
            assert (steps[0] == steps[1]).float().mean() > 0.97


def empty_cache(shape: tuple[int, ...], kv: torch.dtype) -> QuantizedCache:
    data = torch.full(shape, 77, dtype=torch.uint8, device=DEVICE).view(kv)
    return QuantizedCache(data, poisoned(*shape[:-1], device=DEVICE, dtype=torch.float32))


@pytest.mark.parametrize("kv", LARGEST, ids=str)
def test_heads_of_zeros_and_of_no_numbers(kv: torch.dtype) -> None:
    qkv = random(3, 3, 64, dtype=torch.float32)
    qkv[0] = 0
    qkv[1, 1, 5] = float("nan")
    qkv[1, 2, 50] = float("inf")
    table = torch.ones(3, 1, 32, device=DEVICE)
    caches = [empty_cache((1, 4, 1, 64), kv) for _ in range(2)]
    rotate_and_store(qkv, table, 0 * table, torch.arange(3, device=DEVICE), *caches, 1)
    for cache in caches:
        held = dequantize(cache.data, cache.scales, torch.float32)[0]
        assert (held[0] == 0).all()
        assert held[1].isnan().all()
        assert held[2].isfinite().all()


@pytest.mark.parametrize("size", [48, 5000])  # of columns in one pass, and in two
def test_rows_are_quantised_as_in_torch(size: int) -> None:
    x = random(5, size + 3, dtype=torch.float16)[:, :size]  # rows further apart than they are long
    x[1], x[2, 7], x[3, 7] = 0.0, float("nan"), float("inf")
    x[4] *= 2.0**-20
    rows, scales = quantize_rows(x)
    expected, expected_scales = quantize(x, torch.float8_e4m3fn)
    is_number = torch.tensor([True, True, False, False, True], device=DEVICE)
    assert torch.equal(scales.isfinite(), is_number)
    torch.testing.assert_close(scales[is_number], expected_scales[is_number])
    steps, wanted = rows[is_number].float(), expected[is_number].float()
    assert ((steps - wanted).abs() <= wanted.abs() / 8).all()
    assert (steps == wanted).float().mean() > 0.99


def test_the_engine_quantises_rows_by_that_kernel() -> None:
    model = load_model(replace(SPEC, weight_dtype="fp8"), None, DEVICE, MULTIPLIED, seed=0)
    linear, x = model.layers[0].qkv_proj, random(3, SPEC.hidden_size, dtype=MULTIPLIED)
    expected = linear(x)
    backend.use_triton(model, "series")
    assert linear.quantize_rows is quantize_rows
    assert relative_error(linear(x), expected) < 0.01


def test_what_does_not_go_together_is_refused() -> None:
    inputs, _ = cases_of("hybrid", torch.float32, torch.int8)
    given = (inputs.plan, inputs.scale)
    out = torch.empty_like(inputs.query)
    keys, values = inputs.key_cache, inputs.value_cache
    assert isinstance(keys, QuantizedCache)
    wide = replace(keys, scales=keys.scales[..., None].expand(*keys.shape).contiguous()[..., 0])
    with pytest.raises(ValueError, match="scales strided by"):
        prefill_attention(inputs.query, wide, wide, *given, out=out)
    plain = dequantize(values.data, values.scales, torch.float32)
    with pytest.raises(ValueError, match="differ"):
        prefill_attention(inputs.query, keys, plain, *given, out=out)


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_the_engine_on_kernels_says_what_it_says_on_torch(kv_dtype, tmp_path) -> None:
    """Chunks at offsets beside a decode, through the packed inputs of each."""
    model = load_family(make_family("llama gqa, llama3 rope", tmp_path))
    model.spec = replace(model.spec, kv_dtype=kv_dtype)
    tokens = np.random.default_rng(3).integers(0, 97, (2, 24), dtype=np.int32)
    expected = teacher_forced_logits(
        TorchExecutor(model, num_blocks=12, block_size=16), tokens[0], Cuts(11, 5), tokens[1:]
    )
    backend.use_triton(model, "series")
    found = teacher_forced_logits(
        on_kernels(model, num_blocks=12), tokens[0], Cuts(11, 5), tokens[1:]
    )
    # What lies between two steps of the cache may be rounded to either, and later layers see it.
    assert relative_error(found, expected) < 0.02
