"""One compact decoder over packed tokens; every family is a setting of its `ModelSpec`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TypedDict

import torch
from torch import Tensor, nn

from sarathi_lab.model.operations import Operations, PackedInputs, Rotary
from sarathi_lab.model.spec import ModelSpec


class Placement(TypedDict):
    """Where a model's tensors are, and their type: keywords of torch's constructors."""

    device: torch.device
    dtype: torch.dtype


class KVCache:
    """Keys and values of all layers: [num_layers, num_blocks, block_size, num_kv_heads, head_size].

    So neighbouring blocks of a layer form one view that attention reads in place.
    """

    def __init__(
        self,
        spec: ModelSpec,
        num_blocks: int,
        block_size: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        shape = (spec.num_layers, num_blocks, block_size, spec.num_kv_heads, spec.head_size)
        # Zeroed: fresh pages would otherwise be mapped during the first iterations, and be timed
        # with them. (`torch.zeros` may leave the pages to the system until they are written.)
        placement: Placement = {"device": device, "dtype": dtype}
        self.keys = torch.empty(shape, **placement).zero_()
        self.values = torch.empty(shape, **placement).zero_()
        self.tensors = (self.keys, self.values)

    def layers(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Keys and values of one layer after another."""
        return zip(self.keys, self.values, strict=True)


WholePass = Callable[[PackedInputs, KVCache], Tensor]  # returns the logits


class EmptyLinear(nn.Linear):
    """One whose parameters are filled later. (`torch.nn.utils.skip_init` takes 1.5 s: to make
    tensors on the meta device torch imports its compiler.)
    """

    def reset_parameters(self) -> None: ...


class EmptyEmbedding(nn.Embedding):
    """As `EmptyLinear`."""

    def reset_parameters(self) -> None: ...


class Transformer(nn.Module):
    """Decoder-only transformer; parameters are made uninitialised, `weights.load_model` fills them.

    `operations` may be exchanged. A `whole_pass` computes `forward` in one call, and nothing below
    the model is called.
    """

    def __init__(self, spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.spec = spec
        self.device = device
        self.dtype = dtype
        placement: Placement = {"device": device, "dtype": dtype}
        self.embedding = EmptyEmbedding(spec.vocab_size, spec.hidden_size, **placement)
        self.layers = nn.ModuleList()
        for _ in range(spec.num_layers):
            self.layers.append(Layer(spec, placement))
        self.final_norm = _norm(spec, placement)
        self.lm_head = EmptyLinear(spec.hidden_size, spec.vocab_size, bias=False, **placement)
        if spec.tie_embeddings:
            self.lm_head.weight = self.embedding.weight
        self.inverse_frequencies = inverse_frequencies(spec).to(device)
        self.operations = Operations(spec, self.inverse_frequencies, dtype)
        self.whole_pass: WholePass | None = None
        self.requires_grad_(False)

    def forward(self, inputs: PackedInputs, cache: KVCache) -> Tensor:
        """Write keys and values to `cache`; returns the logits, [num_emits, vocab_size]."""
        if self.whole_pass is not None:
            return self.whole_pass(inputs, cache)
        with self.operations.range("embedding"):
            hidden = self.embedding(inputs.token_ids)  # [num_tokens, hidden_size]
        update = self.pass_layers(hidden, inputs, cache)
        return self.logits(hidden, update, inputs.emit_rows)

    def pass_layers(self, hidden: Tensor, inputs: PackedInputs, cache: KVCache) -> Tensor:
        """Let `hidden` [num_tokens, hidden_size] pass all layers, which add to it in place; returns
        the last layer's update, which is still to be added.
        """
        operations = self.operations
        with operations.range("embedding"):
            rotary = operations.rotary(inputs.positions)
        update: Tensor | None = None
        for layer, (keys, values) in zip(self.layers, cache.layers(), strict=True):
            update = layer(hidden, update, operations, inputs, rotary, keys, values)
        assert update is not None, "a model has layers"
        return update

    def logits(self, hidden: Tensor, update: Tensor, rows: Tensor) -> Tensor:
        """Return the logits of some rows behind the last layer, [len(rows), vocab_size]."""
        with self.operations.range("logits"):
            emitting = hidden.index_select(0, rows)
            last_update = update.index_select(0, rows)
            normed = self.operations.add_norm(emitting, last_update, self.final_norm)
            return self.lm_head(normed)

    def greedy(self, logits: Tensor) -> Tensor:
        """Return the likeliest token of each row of [num_emits, vocab_size], NAN_TOKEN for NaN."""
        return self.operations.greedy(logits)


class Layer(nn.Module):
    """Attention and feed-forward block, each behind its norm and added to the residual stream.

    Parameters of a mixture are there to be drawn for checkpoints; vLLM computes it.
    """

    qkv_proj: nn.Linear
    out_proj: nn.Linear
    ffn_up: nn.Linear
    ffn_down: nn.Linear

    def __init__(self, spec: ModelSpec, placement: Placement) -> None:
        super().__init__()
        self.spec = spec
        for linear in spec.layer_linears:
            module = EmptyLinear(
                linear.in_features,
                linear.out_features,
                bias=linear.has_bias,
                **placement,
            )
            self.add_module(linear.name, module)
        if spec.num_experts:
            hidden_size = spec.hidden_size
            gate_up_size = 2 * spec.ffn_size
            gate_up = torch.empty(spec.num_experts, gate_up_size, hidden_size, **placement)
            down = torch.empty(spec.num_experts, hidden_size, spec.ffn_size, **placement)
            self.gate_up = nn.Parameter(gate_up)
            self.down = nn.Parameter(down)
        self.attention_norm = _norm(spec, placement)
        self.ffn_norm = _norm(spec, placement)
        if spec.qk_norm:
            self.q_norm = nn.RMSNorm(spec.head_size, spec.norm_eps, **placement)
            self.k_norm = nn.RMSNorm(spec.head_size, spec.norm_eps, **placement)

    def forward(
        self,
        hidden: Tensor,
        update: Tensor | None,
        operations: Operations,
        inputs: PackedInputs,
        rotary: Rotary,
        keys: Tensor,
        values: Tensor,
    ) -> Tensor:
        """Add `update`, left by the layer before, and the attention block to `hidden`, in place.

        Both are [num_tokens, hidden_size]. Returns what the feed-forward block adds: the next norm
        adds it on the way.
        """
        spec = self.spec
        with operations.range("elementwise"):
            x = operations.add_norm(hidden, update, self.attention_norm)
        with operations.range("qkv_proj"):
            projected = self.qkv_proj(x)
            # Queries, keys and values side by side: [num_tokens, heads of all, head_size].
            heads = projected.view(len(x), -1, spec.head_size)
        with operations.range("rotary"):
            if spec.qk_norm:
                queries = heads[:, : spec.num_heads]
                new_keys = heads[:, spec.num_heads : -spec.num_kv_heads]
                operations.norm_heads(queries, self.q_norm)
                operations.norm_heads(new_keys, self.k_norm)
            query = operations.rotate_and_store(heads, inputs, rotary, keys, values)
        with operations.range("attention"):
            attended = operations.attend(query, inputs, keys, values)
        with operations.range("out_proj"):
            update = self.out_proj(attended.flatten(1))
        with operations.range("elementwise"):
            x = operations.add_norm(hidden, update, self.ffn_norm)
        with operations.range("ffn"):
            return self.feed_forward(x, operations)

    def feed_forward(self, x: Tensor, operations: Operations) -> Tensor:
        """The block behind its norm, on [num_tokens, hidden_size]."""
        expanded = operations.expand(x, self.ffn_up)
        return self.ffn_down(expanded)


def _norm(spec: ModelSpec, placement: Placement) -> nn.Module:
    kind = nn.RMSNorm if spec.norm == "rms" else nn.LayerNorm
    return kind(spec.hidden_size, spec.norm_eps, **placement)


def inverse_frequencies(spec: ModelSpec) -> Tensor:
    """Rotary angle per position of each pair, [rotary_size / 2] float32, scaled by the spec."""
    even_entries = torch.arange(0, spec.rotary_size, 2, dtype=torch.float32)
    exponents = even_entries / spec.rotary_size
    frequencies = 1.0 / spec.rope_theta**exponents
    scaling = spec.rope_scaling
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    # Llama 3.1's: pairs that turn often within the original context keep their frequency, pairs
    # that hardly turn have it divided, with a linear transition between the two.
    turns = scaling.original_max_position * frequencies / (2 * math.pi)
    transition = scaling.high_freq_factor - scaling.low_freq_factor
    unscaled_share = (turns - scaling.low_freq_factor) / transition
    unscaled_share = unscaled_share.clamp(0.0, 1.0)
    scaled = (1 - unscaled_share) * frequencies / scaling.factor
    return scaled + unscaled_share * frequencies
