"""Benchmarks of attention: chunks, decodes, hybrid batches, and a prompt whole against the same
prompt in chunks.

The peers are torch's attention on the same data, unpaged, and FlashAttention 3 and FlashInfer on
the same pages where they are installed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import get_args

import torch
from torch import Tensor

from sarathi_kernels.attention.cases import AttentionCase, AttentionInputs, make_inputs
from sarathi_kernels.attention.decode import decode_attention
from sarathi_kernels.attention.hybrid import HybridAttention, Variant
from sarathi_kernels.attention.kv_cache import Cache
from sarathi_kernels.attention.plan import PART_TOKENS, AttentionPlan, make_plan, with_parts_of
from sarathi_kernels.attention.prefill import prefill_attention
from sarathi_kernels.benchmarks.attention_peers import (
    flashinfer_pod,
    flashinfer_prefill,
    library_attention,
    torch_attention,
)
from sarathi_kernels.benchmarks.measure import Benchmark
from sarathi_kernels.runtime.chip import chip_of

HEADS = {"mha": (40, 40), "gqa": (32, 8)}  # of a 13B model, and of one with four heads a KV head
HEAD_SIZE = 128
CHUNKS = (256, 512, 1024, 2048)
OFFSETS = (0, 1024, 4096, 16_384)
DECODES = ((1, 1024), (8, 1024), (32, 1024), (32, 2048), (8, 16_384))
HYBRID_DECODES = (
    (17, 1024),
    (9, 2048),
    (5, 3072),
    (4, 8192),
    (2, 16_384),
)  # the paper's grid, and longer contexts
HYBRID_CHUNKS = (256, 512, 1024)
PROMPTS = (4096, 16_384)


def benchmarks(device: torch.device, dtype: torch.dtype, quick: bool) -> Iterator[Benchmark]:
    """Tensors of a case are made when it is reached; `quick` takes tiny sizes, for the
    interpreter.
    """
    for name in ("gqa",) if quick else HEADS:
        for offset in (20,) if quick else OFFSETS:
            for chunk in (18,) if quick else CHUNKS:
                yield from _prefill(name, chunk, offset, device, dtype, quick)
        for count, context in ((2, 33),) if quick else DECODES:
            yield from _decode(name, count, context, device, dtype, quick)
        for count, context in ((2, 33),) if quick else HYBRID_DECODES:
            for chunk in (18,) if quick else HYBRID_CHUNKS:
                yield from _hybrid(name, chunk, count, context, device, dtype, quick)
    for prompt in (48,) if quick else PROMPTS:
        yield from _reread(prompt, (16,) if quick else CHUNKS, device, dtype, quick)


def _case(
    name: str, sequences: tuple[tuple[int, int], ...], quick: bool, block_size: int = 16
) -> AttentionCase:
    num_heads, num_kv_heads = (4, 2) if quick else HEADS[name]
    return AttentionCase(sequences, num_heads, num_kv_heads, 64 if quick else HEAD_SIZE, block_size)


def _inputs(case: AttentionCase, device: torch.device, dtype: torch.dtype) -> AttentionInputs:
    return make_inputs(case, device=device, dtype=dtype, num_sms=chip_of(device).num_sms)


def _benchmark(
    operation: str,
    case: AttentionCase,
    label: str,
    implementation: str,
    dtype: torch.dtype,
    work: Callable[[], object],
) -> Benchmark:
    return Benchmark(
        operation, label, implementation, work, case.flops, case.num_bytes(dtype.itemsize)
    )


def _prefill(
    name: str, chunk: int, offset: int, device: torch.device, dtype: torch.dtype, quick: bool
) -> Iterator[Benchmark]:
    case = _case(name, ((chunk, offset + chunk),), quick)
    inputs = _inputs(case, device, dtype)
    label = f"{name} chunk {chunk} at {offset}"
    out = torch.empty_like(inputs.query)
    arguments = inputs.arguments

    def paged() -> None:
        prefill_attention(*arguments, out=out)

    yield _benchmark("prefill_attention", case, label, "paged", dtype, paged)
    peers = torch_attention(case, inputs) | library_attention(case, inputs, out)
    for peer, attend in peers.items():
        yield _benchmark("prefill_attention", case, label, peer, dtype, attend)
    if (attend_paged := flashinfer_prefill(case, inputs)) is not None:
        yield _benchmark("prefill_attention", case, label, "flashinfer", dtype, attend_paged)


def _decode(
    name: str, count: int, context: int, device: torch.device, dtype: torch.dtype, quick: bool
) -> Iterator[Benchmark]:
    case = _case(name, ((1, context),) * count, quick)
    inputs = _inputs(case, device, dtype)
    label = f"{name} {count} x {context}"
    out = torch.empty_like(inputs.query)
    plans = {"paged": inputs.plan}
    for num_parts in (1, 2, 4, 8, 16):
        if num_parts * PART_TOKENS <= context or num_parts == 1:
            part_tokens = -(-context // (num_parts * PART_TOKENS)) * PART_TOKENS
            plans[f"paged, {num_parts} parts"] = with_parts_of(inputs.plan, part_tokens)
    for implementation, plan in plans.items():

        def paged(plan: AttentionPlan = plan) -> None:
            decode_attention(
                inputs.query, inputs.key_cache, inputs.value_cache, plan, inputs.scale, out=out
            )

        yield _benchmark("decode_attention", case, label, implementation, dtype, paged)
    for peer, attend in library_attention(case, inputs, out).items():
        yield _benchmark("decode_attention", case, label, peer, dtype, attend)


def _hybrid(
    name: str,
    chunk: int,
    count: int,
    context: int,
    device: torch.device,
    dtype: torch.dtype,
    quick: bool,
) -> Iterator[Benchmark]:
    case = _case(name, ((chunk, context), *((1, context),) * count), quick)
    inputs = _inputs(case, device, dtype)
    out = torch.empty_like(inputs.query)
    arguments = inputs.arguments
    ways: dict[str, Callable[[], object]] = {
        variant: partial(HybridAttention(variant).attend, *arguments, None, out)
        for variant in get_args(Variant)
    }
    ways["unified"] = partial(unified_attention, *arguments, out=out)
    # The longer of the two is what a perfect overlap takes.
    ways["chunk alone"] = partial(prefill_attention, *arguments, out=out)
    ways["decodes alone"] = partial(decode_attention, *arguments, out=out)
    ways |= library_attention(case, inputs, out)
    label = f"{name} {chunk} + {count} x {context}"
    for way, attend in ways.items():
        yield _benchmark("hybrid_attention", case, label, way, dtype, attend)
    if (attend_batch := flashinfer_prefill(case, inputs)) is not None:
        yield _benchmark("hybrid_attention", case, label, "flashinfer", dtype, attend_batch)
    if (attend_pod := flashinfer_pod(case, inputs)) is not None:
        yield _benchmark("hybrid_attention", case, label, "flashinfer pod", dtype, attend_pod)


def unified_attention(
    query: Tensor,
    keys: Cache,
    values: Cache,
    plan: AttentionPlan,
    scale: float,
    *,
    sliding_window: int | None = None,
    out: Tensor,
) -> None:
    """`prefill_attention` of all rows of a plan: each decode is a tile of one query."""
    of_decodes = torch.nn.functional.pad(plan.decodes[:, None], (0, 1))
    whole = replace(plan, tiles=torch.cat([of_decodes, plan.tiles]))
    prefill_attention(query, keys, values, whole, scale, sliding_window=sliding_window, out=out)


def _reread(
    prompt: int, chunks: tuple[int, ...], device: torch.device, dtype: torch.dtype, quick: bool
) -> Iterator[Benchmark]:
    """One layer's attention of a whole prompt at once and chunk by chunk, which reads earlier keys
    and values anew.
    """
    whole = _case("mha", ((prompt, prompt),), quick)
    inputs = _inputs(whole, device, dtype)
    for chunk in (prompt, *chunks):
        parts = [_case("mha", ((chunk, end),), quick) for end in range(chunk, prompt + 1, chunk)]
        plans = [_plan_of_cached(part, inputs.blocks, device) for part in parts]
        query, out = inputs.query[:chunk], torch.empty_like(inputs.query[:chunk])

        def attend(
            plans: list[AttentionPlan] = plans, query: Tensor = query, out: Tensor = out
        ) -> None:
            for plan in plans:
                prefill_attention(
                    query, inputs.key_cache, inputs.value_cache, plan, inputs.scale, out=out
                )

        yield Benchmark(
            "kv_reread",
            f"prompt {prompt} by {chunk}",
            "paged",
            attend,
            sum(part.flops for part in parts),
            sum(part.num_bytes(dtype.itemsize) for part in parts),
        )


def _plan_of_cached(
    case: AttentionCase, blocks: list[list[int]], device: torch.device
) -> AttentionPlan:
    """The plan of a case whose contexts lie in the first of `blocks`."""
    return make_plan(
        [num_queries for num_queries, _ in case.sequences],
        [kv_len for _, kv_len in case.sequences],
        blocks,
        num_heads=case.num_heads,
        num_kv_heads=case.num_kv_heads,
        num_sms=chip_of(device).num_sms,
        device=device,
    )
