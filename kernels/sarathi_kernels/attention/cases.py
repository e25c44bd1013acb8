"""Batches that tests and benchmarks of the attention kernels share, their inputs, and the reference
for them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sarathi_kernels.attention.plan import AttentionPlan, make_plan
from sarathi_kernels.runtime.testing import poisoned


@dataclass(frozen=True)
class AttentionCase:
    """A batch of sequences, each (new tokens, tokens of context with the new ones), and the shape
    of the heads.
    """

    sequences: tuple[tuple[int, int], ...]
    num_heads: int
    num_kv_heads: int
    head_size: int = 64
    block_size: int = 16
    sliding_window: int | None = None

    @property
    def num_tokens(self) -> int:
        """Packed rows."""
        return sum(num_queries for num_queries, _ in self.sequences)

    @property
    def flops(self) -> float:
        """Of both matrix products over the pairs of query and visible key: 4 * head_size a pair and
        head.
        """
        pairs = sum(
            min(key + 1, self.sliding_window or key + 1)
            for num_queries, kv_len in self.sequences
            for key in range(kv_len - num_queries, kv_len)
        )
        return 4.0 * self.head_size * self.num_heads * pairs

    def num_bytes(self, itemsize: int) -> float:
        """Keys and values of every context read once, queries read and results written once."""
        window = self.sliding_window
        cached = sum(
            kv_len if window is None else min(kv_len, num_queries + window - 1)
            for num_queries, kv_len in self.sequences
        )
        return (
            2.0
            * self.head_size
            * itemsize
            * (cached * self.num_kv_heads + self.num_tokens * self.num_heads)
        )


# Sequences whose chunks begin and end on, before and behind the edges of cache blocks and of tiles.
AWKWARD = {
    "whole prompts": AttentionCase(((2, 2), (17, 17), (70, 70), (16, 16)), 2, 2),
    "chunks at an offset": AttentionCase(((16, 32), (15, 48), (17, 66), (2, 129), (66, 200)), 2, 1),
    "decodes": AttentionCase(((1, 1), (1, 2), (1, 16), (1, 17), (1, 150), (1, 128)), 2, 2),
    "grouped decodes": AttentionCase(((1, 1), (1, 33), (1, 150)), 6, 2),
    "hybrid": AttentionCase(((1, 40), (20, 90), (1, 1), (3, 3), (1, 64)), 2, 2),
    "large tiles": AttentionCase(((130, 200), (1, 70)), 2, 2),
    "head size 80": AttentionCase(((18, 50), (1, 65)), 2, 2, head_size=80),
    "head size 96": AttentionCase(((18, 50), (1, 65)), 4, 2, head_size=96, block_size=32),
    "head size 128": AttentionCase(((18, 150), (1, 65)), 2, 2, head_size=128),
    "head size 256": AttentionCase(((18, 50), (1, 65)), 2, 1, head_size=256),
    "large blocks": AttentionCase(((18, 300), (1, 257), (1, 256)), 2, 2, block_size=128),
    "largest blocks": AttentionCase(((18, 300), (1, 257)), 4, 2, block_size=256),
    "blocks of no power of two": AttentionCase(((18, 100), (1, 70)), 2, 2, block_size=24),
    "window within a tile": AttentionCase(
        ((40, 150), (70, 70), (1, 150), (1, 3)), 2, 2, sliding_window=9
    ),
    "window over tiles": AttentionCase(
        ((40, 450), (1, 300)), 4, 2, sliding_window=150, block_size=128
    ),
    "window of one token": AttentionCase(((5, 20), (1, 20)), 2, 2, sliding_window=1),
}


@dataclass(frozen=True)
class AttentionInputs:
    """Tensors of a case; the caches hold NaN wherever no token of a context lies."""

    query: Tensor  # [num_tokens, num_heads, head_size]
    key_cache: Tensor  # [num_blocks, block_size, num_kv_heads, head_size]
    value_cache: Tensor  # [num_blocks, block_size, num_kv_heads, head_size]
    plan: AttentionPlan
    scale: float
    blocks: list[list[int]]  # of each sequence, in order

    @property
    def arguments(self) -> tuple[Tensor, Tensor, Tensor, AttentionPlan, float]:
        """What every kernel takes first."""
        return self.query, self.key_cache, self.value_cache, self.plan, self.scale


def make_inputs(
    case: AttentionCase, *, device: torch.device, dtype: torch.dtype, num_sms: int, seed: int = 0
) -> AttentionInputs:
    """Seeded inputs of `case`, whose contexts lie in scattered blocks, with the plan for `num_sms`
    multiprocessors.
    """
    generator = torch.Generator().manual_seed(seed)
    needed = [-(-kv_len // case.block_size) for _, kv_len in case.sequences]
    order = (
        1 + torch.randperm(sum(needed), generator=generator)
    ).tolist()  # the first block belongs to nobody
    blocks = [[order.pop() for _ in range(count)] for count in needed]
    on_device = torch.Generator(device).manual_seed(seed)
    heads = (case.num_kv_heads, case.head_size)
    caches = [
        poisoned(sum(needed) + 1, case.block_size, *heads, device=device, dtype=dtype)
        for _ in range(2)
    ]
    for cache in caches:
        for ids, (_, kv_len) in zip(blocks, case.sequences, strict=True):
            cached = torch.arange(kv_len, device=device)
            slots = torch.tensor(ids, device=device)[cached // case.block_size] * case.block_size
            tokens = torch.randn(kv_len, *heads, generator=on_device, device=device).to(dtype)
            cache.flatten(0, 1)[slots + cached % case.block_size] = tokens
    query = torch.randn(
        case.num_tokens, case.num_heads, case.head_size, generator=on_device, device=device
    ).to(dtype)
    plan = make_plan(
        [num_queries for num_queries, _ in case.sequences],
        [kv_len for _, kv_len in case.sequences],
        blocks,
        num_heads=case.num_heads,
        num_kv_heads=case.num_kv_heads,
        num_sms=num_sms,
        device=device,
        sliding_window=case.sliding_window,
    )
    return AttentionInputs(query, caches[0], caches[1], plan, case.head_size**-0.5, blocks)


def reference(case: AttentionCase, inputs: AttentionInputs) -> Tensor:
    """Attention of every sequence by its definition in float64, [num_tokens, num_heads,
    head_size].
    """
    results = []
    start = 0
    for ids, (num_queries, kv_len) in zip(inputs.blocks, case.sequences, strict=True):
        query = inputs.query[start : start + num_queries].double()
        key, value = (
            cache[ids]
            .flatten(0, 1)[:kv_len]
            .double()
            .repeat_interleave(case.num_heads // case.num_kv_heads, dim=1)
            for cache in (inputs.key_cache, inputs.value_cache)
        )
        positions = torch.arange(kv_len - num_queries, kv_len, device=query.device)[:, None]
        tokens = torch.arange(kv_len, device=query.device)[None, :]
        hidden = tokens > positions
        if case.sliding_window is not None:
            hidden |= tokens <= positions - case.sliding_window
        scores = torch.einsum("qhd,khd->hqk", query, key) * inputs.scale
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        results.append(torch.einsum("hqk,khd->qhd", weights, value))
        start += num_queries
    return torch.cat(results)
