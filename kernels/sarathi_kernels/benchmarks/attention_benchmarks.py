"""Benchmarks of attention: chunks, decodes, hybrid batches, and a prompt whole against the same
prompt in chunks.

The peers are torch's attention on the same data, unpaged, and FlashAttention 3 and FlashInfer on
the same pages where they are installed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import get_args

import torch
from torch import Tensor

from sarathi_kernels.attention.decode import decode_attention
from sarathi_kernels.attention.hybrid import Variant, hybrid_attention
from sarathi_kernels.attention.plan import PART_TOKENS, AttentionPlan, make_plan, with_parts_of
from sarathi_kernels.attention.prefill import prefill_attention
from sarathi_kernels.benchmarks.attention_cases import AttentionCase, AttentionInputs, make_inputs
from sarathi_kernels.benchmarks.attention_peers import (
    Ways,
    flash_attention,
    flashinfer_decode,
    flashinfer_hybrid,
    flashinfer_prefill,
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


Sequences = tuple[tuple[int, int], ...]


def benchmarks(device: torch.device, dtype: torch.dtype, quick: bool) -> Iterator[Benchmark]:
    """Tensors of a case are made when it is reached; `quick` takes tiny sizes, for the
    interpreter.
    """
    make = partial(make_inputs, device=device, dtype=dtype, num_sms=chip_of(device).num_sms)
    for operation, heads, label, sequences in _cases(quick):
        case = _case(heads, sequences, quick)
        inputs = make(case)
        ways = WAYS[operation](case, inputs, torch.empty_like(inputs.query))
        for way, work in ways.items():
            num_bytes = case.num_bytes(dtype.itemsize)
            yield Benchmark(operation, f"{heads} {label}", way, work, case.flops, num_bytes)
    for prompt in (48,) if quick else PROMPTS:
        inputs = make(_case("mha", ((prompt, prompt),), quick))
        yield from _reread(prompt, inputs, (16,) if quick else CHUNKS, quick)


def _cases(quick: bool) -> Iterator[tuple[str, str, str, Sequences]]:
    """Operation, heads, label, and sequences of new tokens and contexts."""
    for heads in ("gqa",) if quick else HEADS:
        for offset, chunk in ((20, 18),) if quick else product(OFFSETS, CHUNKS):
            label = f"chunk {chunk} at {offset}"
            yield "prefill_attention", heads, label, ((chunk, offset + chunk),)
        for count, context in ((2, 33),) if quick else DECODES:
            yield "decode_attention", heads, f"{count} x {context}", ((1, context),) * count
        decodes = ((2, 33),) if quick else HYBRID_DECODES
        for (count, context), chunk in product(decodes, (18,) if quick else HYBRID_CHUNKS):
            sequences = ((chunk, context), *((1, context),) * count)
            yield "hybrid_attention", heads, f"{chunk} + {count} x {context}", sequences


def _case(name: str, sequences: Sequences, quick: bool) -> AttentionCase:
    if quick:
        return AttentionCase(sequences, num_heads=4, num_kv_heads=2, head_size=64)
    num_heads, num_kv_heads = HEADS[name]
    return AttentionCase(sequences, num_heads, num_kv_heads, HEAD_SIZE)


def _prefill(case: AttentionCase, inputs: AttentionInputs, out: Tensor) -> Ways:
    return {
        "paged": partial(prefill_attention, *inputs.arguments, out=out),
        **torch_attention(case, inputs),
        **flash_attention(case, inputs),
        **flashinfer_prefill(case, inputs),
    }


def _decode(case: AttentionCase, inputs: AttentionInputs, out: Tensor) -> Ways:
    _, context = case.sequences[0]
    plans = {"paged": inputs.plan}
    for num_parts in (1, 2, 4, 8, 16):
        if num_parts * PART_TOKENS <= context or num_parts == 1:
            part_tokens = -(-context // (num_parts * PART_TOKENS)) * PART_TOKENS
            plans[f"paged, {num_parts} parts"] = with_parts_of(inputs.plan, part_tokens)
    query, keys, values, _, scale = inputs.arguments
    ways: Ways = {}
    for name, plan in plans.items():
        ways[name] = partial(decode_attention, query, keys, values, plan, scale, out=out)
    return {**ways, **flash_attention(case, inputs), **flashinfer_decode(case, inputs)}


def _hybrid(case: AttentionCase, inputs: AttentionInputs, out: Tensor) -> Ways:
    arguments = inputs.arguments
    variants: Ways = {
        name: partial(hybrid_attention, *arguments, variant=name, out=out)
        for name in get_args(Variant)
    }
    return {
        **variants,
        "unified": partial(unified_attention, *arguments, out=out),
        # The longer of the two is what a perfect overlap takes.
        "chunk alone": partial(prefill_attention, *arguments, out=out),
        "decodes alone": partial(decode_attention, *arguments, out=out),
        **flash_attention(case, inputs),
        **flashinfer_hybrid(case, inputs),
    }


WAYS: dict[str, Callable[[AttentionCase, AttentionInputs, Tensor], Ways]] = {
    "prefill_attention": _prefill,
    "decode_attention": _decode,
    "hybrid_attention": _hybrid,
}


def unified_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    plan: AttentionPlan,
    scale: float,
    *,
    sliding_window: int | None = None,
    out: Tensor,
) -> None:
    """`prefill_attention` of all rows of a plan: each decode is a tile of one query."""
    first_query = torch.zeros_like(plan.decodes)
    of_decodes = torch.stack([plan.decodes, first_query], dim=1)
    all_tiles = torch.cat([of_decodes, plan.tiles])
    unified = replace(plan, tiles=all_tiles)
    prefill_attention(query, keys, values, unified, scale, sliding_window=sliding_window, out=out)


def _reread(
    prompt: int, inputs: AttentionInputs, chunks: tuple[int, ...], quick: bool
) -> Iterator[Benchmark]:
    """One layer's attention of a whole prompt at once and chunk by chunk, which reads earlier keys
    and values again.
    """
    _, keys, values, _, scale = inputs.arguments
    for chunk in (prompt, *chunks):
        query = inputs.query[:chunk]
        out = torch.empty_like(query)
        works = []
        flops = num_bytes = 0.0
        for end in range(chunk, prompt + 1, chunk):
            case = _case("mha", ((chunk, end),), quick)
            plan = _plan_of(case, inputs)
            works.append(partial(prefill_attention, query, keys, values, plan, scale, out=out))
            flops += case.flops
            num_bytes += case.num_bytes(query.itemsize)
        attend = partial(_call_all, works)
        label = f"prompt {prompt} by {chunk}"
        yield Benchmark("kv_reread", label, "paged", attend, flops, num_bytes)


def _call_all(works: Sequence[Callable[[], object]]) -> None:
    for work in works:
        work()


def _plan_of(case: AttentionCase, inputs: AttentionInputs) -> AttentionPlan:
    """The plan of a case whose contexts lie in the first blocks of `inputs`."""
    device = inputs.query.device
    query_lens, kv_lens = zip(*case.sequences, strict=True)
    return make_plan(
        query_lens,
        kv_lens,
        inputs.blocks,
        num_heads=case.num_heads,
        num_kv_heads=case.num_kv_heads,
        num_sms=chip_of(device).num_sms,
        device=device,
    )
