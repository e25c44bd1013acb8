"""Batches of tests and benchmarks of attention, and inputs for them."""

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
    ).tolist()  # the first block belongs to no sequence
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
