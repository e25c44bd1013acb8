"""Operations of a layer besides its matrix products, in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sarathi_kernels.attention.kv_cache import write_kv
from sarathi_kernels.attention.reference import paged_attention
from sarathi_kernels.elementwise.activation import activate_, gated_activate_
from sarathi_kernels.elementwise.rotary import apply_rotary, rotary_tables
from sarathi_lab.model.spec import ModelSpec

# How a chunk and decodes share a device in attention.
Hybrid = Literal["series", "streams", "fused"]
Rotary = tuple[Tensor, Tensor]  # cosines and sines
Range = Callable[[str], AbstractContextManager[object]]
Record = Callable[[str, float], None]  # takes an operation's seconds
NAN_TOKEN = -2  # sampled from logits that are not numbers


@dataclass(frozen=True)
class PackedInputs:
    """Tokens of one iteration, those of all sequences one after the other.

    `slots` are the cache slots of keys and values, `emit_rows` the rows whose logits are needed,
    `attention` the context of each sequence's tokens, as the operations take it. Where `feed_rows`
    is not negative, the token is that row of the tokens sampled last; None if the host has all.
    """

    token_ids: Tensor  # [num_tokens]
    positions: Tensor  # [num_tokens]
    slots: Tensor  # [num_tokens]
    emit_rows: Tensor  # [num_emits]
    attention: Any
    feed_rows: Tensor | None = None  # [num_tokens]


class Operations:
    """Operations of a decoder over packed tokens and a paged cache, in plain torch; the base of
    those in Triton and C++.

    `keys` and `values` are one layer's cache, [num_blocks, block_size, num_kv_heads, head_size].
    A profiler sets `range`, which encloses each named operation, and `recorder`,
    which receives the seconds that operations measure themselves. Attention comes as a sequence of
    `Segment`, with masks if `wants_masks`. `rotary_dtype` is of cosines and sines.
    """

    wants_masks = True

    def __init__(
        self, spec: ModelSpec, inverse_frequencies: Tensor, rotary_dtype: torch.dtype
    ) -> None:
        self.spec = spec
        self.range: Range = nullcontext
        self.recorder: Record | None = None
        self._scale = spec.head_size**-0.5
        self._inverse_frequencies = inverse_frequencies
        self._rotary_dtype = rotary_dtype

    def rotary(self, positions: Tensor) -> Rotary:
        """Return cosines and sines of `positions`, each [num_tokens, rotary_size / 2]."""
        return rotary_tables(positions, self._inverse_frequencies, self._rotary_dtype)

    def add_norm(self, hidden: Tensor, update: Tensor | None, norm: nn.Module) -> Tensor:
        """Add `update` to `hidden` in place, both [num_tokens, hidden_size]; return its norm."""
        if update is not None:
            hidden += update
        return norm(hidden)

    def norm_heads(self, heads: Tensor, norm: nn.Module) -> None:
        """Norm each head of [num_tokens, heads, head_size], in place."""
        heads.copy_(norm(heads))

    def rotate_and_store(
        self,
        heads: Tensor,
        inputs: PackedInputs,
        rotary: Rotary,
        keys: Tensor,
        values: Tensor,
    ) -> Tensor:
        """Rotate queries and keys, store keys and values at their slots; return the queries.

        `heads` holds queries, keys and values side by side, [num_tokens, num_heads + 2
        num_kv_heads, head_size].
        """
        num_heads = self.spec.num_heads
        num_kv_heads = self.spec.num_kv_heads
        num_rotated = num_heads + num_kv_heads
        query_key, value = heads.split((num_rotated, num_kv_heads), dim=1)
        rotated = apply_rotary(query_key, *rotary)
        query, key = rotated.split((num_heads, num_kv_heads), dim=1)
        write_kv(key, value, keys, values, inputs.slots)
        return query

    def attend(
        self,
        query: Tensor,
        inputs: PackedInputs,
        keys: Tensor,
        values: Tensor,
    ) -> Tensor:
        """Attend causally from queries [num_tokens, num_heads, head_size] to the cache."""
        return paged_attention(
            query,
            keys,
            values,
            inputs.attention,
            scale=self._scale,
        )

    def expand(self, x: Tensor, up: nn.Linear) -> Tensor:
        """Multiply by `up` and activate: [num_tokens, hidden_size] to [., ffn_size]."""
        if not self.spec.gated_ffn:
            return activate_(up(x), self.spec.activation)
        # Two products, as contiguous results save the activation and the next product more (a
        # quarter of the block's time on 4,096 tokens) than one wide product saves.
        gate_weight, up_weight = up.weight.chunk(2)
        gate_bias = up_bias = None
        if up.bias is not None:
            gate_bias, up_bias = up.bias.chunk(2)
        gate = F.linear(x, gate_weight, gate_bias)
        raised = F.linear(x, up_weight, up_bias)
        return gated_activate_(gate, raised, self.spec.activation)

    def greedy(self, logits: Tensor) -> Tensor:
        """Return the likeliest token of each row of [num_emits, vocab_size], NAN_TOKEN for NaN."""
        largest, token_ids = logits.max(dim=-1)
        return token_ids.masked_fill_(largest.isnan(), NAN_TOKEN)
