"""Batches that attention must not fail on, and the reference for any."""

from __future__ import annotations

import torch
from torch import Tensor

from sarathi_kernels.attention.reference import make_segment, paged_attention
from sarathi_kernels.benchmarks.attention_cases import AttentionCase, AttentionInputs

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


def reference(case: AttentionCase, inputs: AttentionInputs) -> Tensor:
    """Attention of every sequence in plain torch and float64, [num_tokens, num_heads, head_size],
    which `test_kernels.py` holds against its definition.
    """
    segments, start, device = [], 0, inputs.query.device
    for ids, (num_queries, kv_len) in zip(inputs.blocks, case.sequences, strict=True):
        segments.append(
            make_segment(
                start, num_queries, kv_len, torch.tensor(ids, device=device),
                sliding_window=case.sliding_window, device=device, dtype=torch.float64,
            )
        )  # fmt: skip
        start += num_queries
    wide = (each.double() for each in (inputs.query, inputs.key_cache, inputs.value_cache))
    return paged_attention(*wide, segments, inputs.scale)
