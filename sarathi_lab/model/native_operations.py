"""A CPU's operations in C++ (`sarathi_kernels.cpu`): whole iterations."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from sarathi_kernels.cpu import library, structures
from sarathi_kernels.cpu.checks import MAX_HEAD_SIZE
from sarathi_kernels.cpu.memory import give_back_freed, use_huge_pages
from sarathi_kernels.cpu.packing import (
    PackedLinear,
    pack_linear,
    pack_together,
    packed_nbytes,
)
from sarathi_kernels.elementwise.rotary import rotary_tables
from sarathi_lab.model.operations import NAN_TOKEN, Operations, PackedInputs
from sarathi_lab.model.spec import ModelSpec
from sarathi_lab.model.transformer import KVCache, Layer, Transformer

DTYPES = (torch.float32, torch.bfloat16)
ACTIVATIONS = ("silu", "gelu", "gelu_tanh")  # numbered as in `structures.h`


def why_not(spec: ModelSpec, dtype: torch.dtype) -> str | None:
    """Why the C++ does not take a model, in words; None if it does."""
    if dtype not in DTYPES:
        return f"it computes float32 and bfloat16, not {str(dtype).removeprefix('torch.')}"
    if spec.head_size > MAX_HEAD_SIZE:
        return f"its heads have up to {MAX_HEAD_SIZE} entries, not {spec.head_size}"
    return None


class NativeLinear(nn.Module):
    """A product with a packed weight, in the place of an `nn.Linear`.

    [rows, in_features] to [rows, out_features]; gated ones to all columns of their panels, in pairs
    of 16.
    """

    def __init__(self, packed: PackedLinear) -> None:
        super().__init__()
        self.packed = packed

    def forward(self, x: Tensor) -> Tensor:
        return library.linear(x, self.packed)


def _pack_all(model: Transformer) -> None:
    """Put packed weights, all in one piece of memory, in place of the model's."""
    weights = list(_weights(model))
    num_bytes = 0
    for parent, name, is_gated in weights:
        num_bytes += packed_nbytes(getattr(parent, name).weight, is_gated=is_gated)

    def packed_in_turn() -> Iterator[PackedLinear]:
        for parent, name, is_gated in weights:
            linear = getattr(parent, name)
            yield pack_linear(linear.weight.detach(), linear.bias, is_gated=is_gated)
            # The packed copy is moved when the next one is asked for: now nothing may hold the
            # plain weight. The C library would keep its memory, as the next has another size, and
            # all of them together would take the memory of the model once more.
            delattr(parent, name)
            del linear
            give_back_freed()

    packed_weights = pack_together(packed_in_turn(), num_bytes, library.copy_by_thread)
    for (parent, name, _), weight in zip(weights, packed_weights, strict=True):
        setattr(parent, name, NativeLinear(weight))


def _weights(model: Transformer) -> Iterator[tuple[nn.Module, str, bool]]:
    """Yield each product as its module and attribute, and whether half of its rows are gates of the
    other half.
    """
    for layer in model.layers:
        for linear in model.spec.layer_linears:
            is_gated = linear.name == "ffn_up" and model.spec.gated_ffn
            yield layer, linear.name, is_gated
    yield model, "lm_head", False


class NativeOperations(Operations):
    """Whole iterations in C++ (`whole_pass`), and what probes time or call alone.

    Weights are packed and replace the model's, so that there is one copy of each; a
    tied embedding is kept as it was, beside the packed output head.
    """

    wants_masks = False

    def __init__(self, model: Transformer) -> None:
        super().__init__(model.spec, model.inverse_frequencies, model.dtype)
        _pack_all(model)
        self._kept: list[object] = []  # what the structures point at
        model_struct = self._model_struct(model)
        self.decoder = library.Decoder(model_struct, self._kept)
        self._cache: Callable[[], KVCache | None] = lambda: None  # the last one seen
        # Cosines and sines of all positions so far.
        self._tables = rotary_tables(torch.arange(0), self._inverse_frequencies, torch.float32)

    # -- the whole iteration -----------------------------------------------------------------------

    def whole_pass(self, inputs: PackedInputs, cache: KVCache) -> Tensor:
        """Compute as `Transformer.forward`; logits [num_emits, vocab_size] are float32."""
        if self._cache() is not cache:
            self._cache = weakref.ref(cache)
            for tensor in cache.tensors:
                use_huge_pages(tensor)
        num_positions = max(segment.kv_len for segment in inputs.attention)
        if num_positions > len(self._tables[0]):  # and as many again, so that it is seldom
            positions = torch.arange(max(1024, 2 * num_positions))
            self._tables = rotary_tables(positions, self._inverse_frequencies, torch.float32)
        rows = (inputs.token_ids, inputs.positions, inputs.slots, inputs.emit_rows)
        return self.decoder.forward(
            *rows,
            inputs.attention,
            cache.keys,
            cache.values,
            self._tables,
            self.recorder,
        )

    # -- one operation at a time -------------------------------------------------------------------

    def attend(
        self,
        query: Tensor,
        inputs: PackedInputs,
        keys: Tensor,
        values: Tensor,
    ) -> Tensor:
        window = self.spec.sliding_window
        return library.attention(query, keys, values, inputs.attention, self._scale, window)

    def greedy(self, logits: Tensor) -> Tensor:
        return library.greedy(logits.float().contiguous(), NAN_TOKEN)

    # -- structures --------------------------------------------------------------------------------

    def _model_struct(self, model: Transformer) -> structures.ModelStruct:
        spec = self.spec
        layer_structs = map(self._layer_struct, model.layers)
        array_type = structures.LayerStruct * spec.num_layers
        layers = array_type(*layer_structs)
        self._kept += [layers, model.embedding.weight]
        vocab_size, hidden_size = model.embedding.weight.shape
        return structures.ModelStruct(
            layers=ctypes.cast(layers, ctypes.POINTER(structures.LayerStruct)),
            embedding=model.embedding.weight.data_ptr(),
            final_norm=self._norm_struct(model.final_norm),
            head=_linear_struct(model.lm_head),
            num_layers=spec.num_layers,
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_size=spec.head_size,
            rotary_half=len(self._inverse_frequencies),
            window=spec.sliding_window or 0,
            is_bf16=model.dtype == torch.bfloat16,
            activation=ACTIVATIONS.index(spec.activation),
            is_gated=spec.gated_ffn,
            scale=self._scale,
        )

    def _layer_struct(self, layer: nn.Module) -> structures.LayerStruct:
        assert isinstance(layer, Layer), "the model has no other layers"
        return structures.LayerStruct(
            attention_norm=self._norm_struct(layer.attention_norm),
            ffn_norm=self._norm_struct(layer.ffn_norm),
            query_norm=self._norm_struct(getattr(layer, "q_norm", None)),
            key_norm=self._norm_struct(getattr(layer, "k_norm", None)),
            qkv=_linear_struct(layer.qkv_proj),
            out=_linear_struct(layer.out_proj),
            up=_linear_struct(layer.ffn_up),
            down=_linear_struct(layer.ffn_down),
        )

    def _norm_struct(self, norm: nn.Module | None) -> structures.NormStruct:
        if norm is None:
            return structures.NormStruct()
        assert isinstance(norm, nn.RMSNorm | nn.LayerNorm), "the model has no other norms"
        weight = _as_floats(norm.weight)
        bias = None
        if isinstance(norm, nn.LayerNorm):
            bias = _as_floats(norm.bias)
        self._kept += [weight, bias]
        return library.norm_struct(weight, bias, norm.eps or 0.0)


def _as_floats(parameter: Tensor) -> Tensor:
    return parameter.detach().float().contiguous()


def _linear_struct(linear: object) -> structures.LinearStruct:
    assert isinstance(linear, NativeLinear), "the weights are packed"
    return library.linear_struct(linear.packed)
