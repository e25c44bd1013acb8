"""One compact decoder over packed tokens; every supported family is a setting of its `ModelSpec`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import skip_init

from sarathi_kernels.activation import activate_, gated_activate_
from sarathi_kernels.attention import Segment, paged_attention
from sarathi_kernels.kv_cache import write_kv
from sarathi_kernels.rotary import apply_rotary, rotary_tables
from sarathi_lab.model.spec import ModelSpec, RopeScaling


@dataclass(frozen=True)
class PackedInputs:
    """The tokens of one iteration, those of all sequences one after the other.

    `slots` says where each token's key and value go; `segments` what each sequence's tokens see; `emit_rows` the rows
    whose logits are wanted.
    """

    token_ids: Tensor  # [num_tokens] int64
    positions: Tensor  # [num_tokens] int64
    slots: Tensor  # [num_tokens] int64
    emit_rows: Tensor  # [num_emits] int64
    segments: Sequence[Segment]


class KVCache:
    """Keys and values of all layers, paged.

    Within a block a token's heads lie together, so that neighbouring blocks form one [tokens, heads, head_size] view
    that attention reads in place; layers come first, so that each layer's blocks do so too.
    """

    def __init__(
        self, spec: ModelSpec, num_blocks: int, block_size: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        shape = (spec.num_layers, num_blocks, block_size, spec.num_kv_heads, spec.head_size)
        # Zeroed by hand: fresh pages would otherwise be mapped during the first iterations, and be timed with them.
        self.keys = torch.empty(shape, device=device, dtype=dtype).zero_()
        self.values = torch.empty(shape, device=device, dtype=dtype).zero_()


class Transformer(nn.Module):
    """Decoder-only transformer; parameters are made uninitialised, `weights.load_model` fills them."""

    def __init__(self, spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.spec = spec
        self.device = device
        self.dtype = dtype
        placed = {"device": device, "dtype": dtype}
        self.embedding = skip_init(nn.Embedding, spec.vocab_size, spec.hidden_size, **placed)
        self.layers = nn.ModuleList(Layer(spec, device, dtype) for _ in range(spec.num_layers))
        self.final_norm = _norm(spec, device, dtype)
        self.lm_head = skip_init(nn.Linear, spec.hidden_size, spec.vocab_size, bias=False, **placed)
        if spec.tie_embeddings:
            self.lm_head.weight = self.embedding.weight
        self.inverse_frequencies = inverse_frequencies(spec).to(device)
        self.requires_grad_(False)

    def forward(self, inputs: PackedInputs, cache: KVCache) -> Tensor:
        """Write the tokens' keys and values to `cache` and return the logits of `emit_rows`, [num_emits, vocab]."""
        hidden = self.embedding(inputs.token_ids)  # [num_tokens, hidden_size]
        rotary = rotary_tables(inputs.positions, self.inverse_frequencies, self.dtype)
        for layer, keys, values in zip(self.layers, cache.keys, cache.values, strict=True):
            layer(hidden, inputs, rotary, keys, values)
        emitting = hidden.index_select(0, inputs.emit_rows)
        return self.lm_head(self.final_norm(emitting))


class Layer(nn.Module):
    """Attention and feed-forward block, each behind its norm and added to the residual stream."""

    qkv_proj: nn.Linear
    out_proj: nn.Linear
    ffn_up: nn.Linear
    ffn_down: nn.Linear

    def __init__(self, spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.spec = spec
        placed = {"device": device, "dtype": dtype}
        biases = {
            "qkv_proj": spec.qkv_bias,
            "out_proj": spec.out_bias,
            "ffn_up": spec.ffn_bias,
            "ffn_down": spec.ffn_bias,
        }
        for linear in spec.layer_linears:
            made = skip_init(nn.Linear, linear.in_features, linear.out_features, bias=biases[linear.name], **placed)
            self.add_module(linear.name, made)
        self.attention_norm = _norm(spec, device, dtype)
        self.ffn_norm = _norm(spec, device, dtype)
        if spec.qk_norm:
            self.q_norm = nn.RMSNorm(spec.head_size, spec.norm_eps, device=device, dtype=dtype)
            self.k_norm = nn.RMSNorm(spec.head_size, spec.norm_eps, device=device, dtype=dtype)

    def forward(
        self, hidden: Tensor, inputs: PackedInputs, rotary: tuple[Tensor, Tensor], keys: Tensor, values: Tensor
    ) -> None:
        """Add the layer's two blocks to `hidden` [num_tokens, hidden_size], in place."""
        hidden += self._attention(self.attention_norm(hidden), inputs, rotary, keys, values)
        hidden += self.feed_forward(self.ffn_norm(hidden))

    def _attention(
        self, x: Tensor, inputs: PackedInputs, rotary: tuple[Tensor, Tensor], keys: Tensor, values: Tensor
    ) -> Tensor:
        spec = self.spec
        heads = self.qkv_proj(x).view(len(x), -1, spec.head_size)  # queries, keys and values side by side
        query_key, value = heads.split((spec.num_heads + spec.num_kv_heads, spec.num_kv_heads), dim=1)
        if spec.qk_norm:
            query, key = query_key.split((spec.num_heads, spec.num_kv_heads), dim=1)
            query_key = torch.cat((self.q_norm(query), self.k_norm(key)), dim=1)
        query, key = apply_rotary(query_key, *rotary).split((spec.num_heads, spec.num_kv_heads), dim=1)
        write_kv(key, value, keys, values, inputs.slots)
        attended = paged_attention(query, keys, values, inputs.segments, scale=spec.head_size**-0.5)
        return self.out_proj(attended.flatten(1))

    def feed_forward(self, x: Tensor) -> Tensor:
        """The block behind its norm, on [num_tokens, hidden_size]."""
        activation = self.spec.activation
        if not self.spec.gated_ffn:
            return self.ffn_down(activate_(self.ffn_up(x), activation))
        # Two products of the one weight: their results are contiguous, which the activation and the next product
        # gain more from (a quarter of the block's time on 4,096 tokens) than one wide product saves.
        weights = self.ffn_up.weight.chunk(2)
        biases = (None, None) if self.ffn_up.bias is None else self.ffn_up.bias.chunk(2)
        gate, up = (F.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True))
        return self.ffn_down(gated_activate_(gate, up, activation))


def _norm(spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> nn.Module:
    kind = nn.RMSNorm if spec.norm == "rms" else nn.LayerNorm
    return kind(spec.hidden_size, spec.norm_eps, device=device, dtype=dtype)


def inverse_frequencies(spec: ModelSpec) -> Tensor:
    """Rotary angle per position of each pair, [rotary_size / 2] float32, scaled as the spec says."""
    exponents = torch.arange(0, spec.rotary_size, 2, dtype=torch.float32) / spec.rotary_size
    frequencies = 1.0 / spec.rope_theta**exponents
    scaling = spec.rope_scaling
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    return _llama3_frequencies(frequencies, scaling)


def _llama3_frequencies(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3.1's scaling: wavelengths beyond the original context are stretched, short ones kept, between blended."""
    turns = scaling.original_max_position * frequencies / (2 * math.pi)  # within the original context
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * frequencies / scaling.factor + blend * frequencies
