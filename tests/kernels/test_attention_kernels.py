"""The paged attention kernels against attention by its definition in float64: interpreted, or on a
GPU.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from attention_cases import AWKWARD, reference
from torch import Tensor

from sarathi_kernels.attention.decode import decode_attention
from sarathi_kernels.attention.plan import (
    PADDING,
    TILE_ROWS,
    AttentionPlan,
    choose_tile_rows,
    with_parts_of,
)
from sarathi_kernels.attention.prefill import PrefillConfig, prefill_attention
from sarathi_kernels.attention.support import (
    check_supported,
)
from sarathi_kernels.benchmarks.attention_cases import AttentionCase, AttentionInputs, make_inputs
from sarathi_kernels.runtime.testing import poisoned, relative_error

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
MAX_ERROR = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
DTYPES = [
    torch.float32,
    torch.float16,
    *([torch.bfloat16] if HAS_GPU else []),
]  # the interpreter cannot multiply bf16
NUM_SMS = 4  # few, so that small batches are cut into large tiles, too


def inputs_of(
    case: AttentionCase, dtype: torch.dtype = torch.float32, part_tokens: int | None = None
) -> AttentionInputs:
    inputs = make_inputs(case, device=DEVICE, dtype=dtype, num_sms=NUM_SMS)
    if part_tokens is None:
        return inputs
    return replace(inputs, plan=with_parts_of(inputs.plan, part_tokens, case.sliding_window))


def attend(
    case: AttentionCase, inputs: AttentionInputs, *, prefill: bool = True, decode: bool = True
) -> Tensor:
    """What the kernels write into an output of NaN."""
    out = poisoned(*inputs.query.shape, device=DEVICE, dtype=inputs.query.dtype)
    if prefill:
        prefill_attention(*inputs.arguments, sliding_window=case.sliding_window, out=out)
    if decode:
        decode_attention(*inputs.arguments, sliding_window=case.sliding_window, out=out)
    return out


# The interpreter is slow: each case in one dtype, and those that differ most in all.
ALL_DTYPES = AWKWARD if DEVICE.type == "cuda" else ("hybrid", "grouped decodes", "head size 80")


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, dtype) for name in AWKWARD for dtype in (DTYPES if name in ALL_DTYPES else DTYPES[:1])],
    ids=str,
)
def test_kernels_compute_attention_of_awkward_batches(name: str, dtype: torch.dtype) -> None:
    case = AWKWARD[name]
    inputs = inputs_of(case, dtype)
    assert relative_error(attend(case, inputs), reference(case, inputs)) < MAX_ERROR[dtype]


@pytest.mark.parametrize(
    ("name", "part_tokens"),
    [("decodes", 32), ("grouped decodes", 64), ("window over tiles", 64)],
)
def test_parts_of_contexts_add_up(name: str, part_tokens: int) -> None:
    case = AWKWARD[name]
    inputs = inputs_of(case, part_tokens=part_tokens)
    assert len(inputs.plan.reductions) > 0
    assert relative_error(attend(case, inputs), reference(case, inputs)) < 1e-5


def test_each_kernel_writes_its_own_rows_only() -> None:
    case = AWKWARD["hybrid"]
    inputs = inputs_of(case)
    is_decode = torch.tensor([n == 1 for n, _ in case.sequences for _ in range(n)], device=DEVICE)
    prefilled, decoded = attend(case, inputs, decode=False), attend(case, inputs, prefill=False)
    assert torch.equal(prefilled.isnan().all(-1).all(-1), is_decode)
    assert torch.equal(decoded.isnan().all(-1).all(-1), ~is_decode)


def padded(plan: AttentionPlan) -> AttentionPlan:
    """`plan` as a CUDA graph would have it: more tiles, decodes and columns than the batch
    needs.
    """

    def extended(entries: Tensor, count: int) -> Tensor:
        return torch.cat([entries, entries.new_full((count, *entries.shape[1:]), PADDING)])

    table = torch.nn.functional.pad(plan.block_table, (0, 3), value=PADDING)
    return replace(
        plan,
        tiles=extended(plan.tiles, 3),
        decodes=extended(plan.decodes, 2),
        parts=extended(plan.parts, 4),
        reductions=extended(plan.reductions, 2),
        block_table=table,
    )


@pytest.mark.parametrize("part_tokens", [256, 32])
def test_padding_of_the_plan_changes_nothing(part_tokens: int) -> None:
    case = AWKWARD["hybrid"]
    inputs = inputs_of(case, part_tokens=part_tokens)
    with_padding = replace(inputs, plan=padded(inputs.plan))
    assert torch.equal(attend(case, with_padding), attend(case, inputs))


def test_rows_of_query_and_output_and_blocks_of_the_cache_may_be_strided() -> None:
    case = AWKWARD["hybrid"]
    inputs = inputs_of(case)
    expected = attend(case, inputs)
    fused = torch.randn(case.num_tokens, 3 * case.num_heads * case.head_size, device=DEVICE)
    query = fused[:, : case.num_heads * case.head_size].view(inputs.query.shape)
    query.copy_(inputs.query)
    caches = torch.stack([inputs.key_cache, inputs.value_cache], dim=1)
    out = poisoned(case.num_tokens, 2, *inputs.query.shape[1:], device=DEVICE, dtype=torch.float32)[
        :, 0
    ]
    arguments = (query, caches[:, 0], caches[:, 1], inputs.plan, inputs.scale)
    prefill_attention(*arguments, out=out)
    decode_attention(*arguments, out=out)
    assert torch.equal(out, expected)


def test_blocks_beyond_2_to_the_31_elements_are_found() -> None:
    case = AttentionCase(((3, 20), (1, 17)), 2, 2)
    inputs = inputs_of(case, torch.float16)
    num_blocks = 2**31 // inputs.key_cache[0].numel() + len(inputs.key_cache)
    if HAS_GPU and torch.cuda.mem_get_info()[0] < 12e9:
        pytest.skip("needs 9 GB of GPU memory")
    moved = []
    for cache in (inputs.key_cache, inputs.value_cache):
        pool = torch.empty(
            num_blocks, *cache.shape[1:], dtype=cache.dtype, device=DEVICE
        )  # only its end is touched
        pool[-len(cache) :] = cache
        moved.append(pool)
    table = inputs.plan.block_table + num_blocks - len(inputs.key_cache)
    far = replace(
        inputs,
        key_cache=moved[0],
        value_cache=moved[1],
        plan=replace(inputs.plan, block_table=table),
    )
    assert torch.equal(attend(case, far), attend(case, inputs))


def test_a_tile_may_be_worked_on_in_parts() -> None:
    case = AWKWARD["large tiles"]
    inputs = inputs_of(case)
    assert inputs.plan.tile_rows == TILE_ROWS[-1]
    out = attend(case, inputs, prefill=False)
    prefill_attention(
        *inputs.arguments,
        out=out,
        config=PrefillConfig(32, block_n=32, num_warps=4, num_stages=1),
    )
    assert relative_error(out, reference(case, inputs)) < 1e-5


@pytest.mark.parametrize("name", ["large tiles", "window over tiles"])
def test_scores_may_be_computed_ahead_of_the_softmax(name: str) -> None:
    case = AWKWARD[name]
    inputs = inputs_of(case)
    out = attend(case, inputs, prefill=False)
    prefill_attention(
        *inputs.arguments,
        sliding_window=case.sliding_window,
        out=out,
        config=PrefillConfig(64, block_n=32, num_warps=4, num_stages=1, ahead=True),
    )
    assert relative_error(out, reference(case, inputs)) < 1e-5


@pytest.mark.parametrize(
    ("num_tokens", "num_heads", "num_sms", "rows"),
    [
        (128, 40, 132, 64),  # 80 programs instead of 40
        (256, 40, 132, 128),  # a wave, as long as the two of small tiles
        (512, 40, 132, 64),  # three waves of 64 rows instead of two of 128
        (2048, 40, 132, 128),  # many waves: large tiles cost less a row
    ],
)
def test_tiles_are_as_large_as_fills_the_waves(
    num_tokens: int, num_heads: int, num_sms: int, rows: int
) -> None:
    assert choose_tile_rows(num_tokens, num_heads, num_sms) == rows


def test_unsupported_inputs_are_refused_with_the_value_and_what_works() -> None:
    with pytest.raises(ValueError, match=r"head size 72 is not supported.*128"):
        check_supported(72, torch.float16, 16)
    with pytest.raises(ValueError, match=r"torch.float64 is not supported.*bfloat16"):
        check_supported(64, torch.float64, 16)
    inputs = inputs_of(AWKWARD["hybrid"])
    arguments = (inputs.key_cache, inputs.value_cache, inputs.plan, inputs.scale)
    out = torch.empty_like(inputs.query)
    with pytest.raises(ValueError, match="contiguous"):
        prefill_attention(
            inputs.query.transpose(0, 2).contiguous().transpose(0, 2), *arguments, out=out
        )
    with pytest.raises(ValueError, match="does not match the cache"):
        decode_attention(inputs.query[:, :1].expand(-1, 3, -1).contiguous(), *arguments, out=out)
    with pytest.raises(ValueError, match="sliding window 0"):
        decode_attention(inputs.query, *arguments, sliding_window=0, out=out)


@pytest.mark.gpu
@pytest.mark.parametrize("num_kv_heads", [40, 8])
def test_a_batch_of_a_13b_model_is_right_on_the_gpu(num_kv_heads: int) -> None:
    sequences = ((512, 1537), (300, 300), *((1, kv_len) for kv_len in (1, 1024, 1025, 5000)))
    case = AttentionCase(sequences, 40, num_kv_heads, head_size=128)
    for part_tokens in (8192, 1024):
        inputs = inputs_of(case, torch.bfloat16, part_tokens)
        assert relative_error(attend(case, inputs), reference(case, inputs)) < 1e-2


@pytest.mark.gpu
def test_a_captured_graph_attends_to_what_the_plan_says_at_its_replay() -> None:
    case = AWKWARD["hybrid"]
    inputs = inputs_of(case, torch.float16, part_tokens=64)
    attend(case, inputs)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(case, inputs)
    inputs.query.copy_(torch.randn_like(inputs.query))
    graph.replay()
    assert relative_error(out, reference(case, inputs)) < 2e-3
