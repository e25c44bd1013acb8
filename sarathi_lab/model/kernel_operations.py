"""The operations of a layer as Triton kernels: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sarathi_kernels.attention.hybrid import hybrid_attention
from sarathi_kernels.elementwise.fused_activation import activation_, gated_activation
from sarathi_kernels.elementwise.norm import NormKind, add_norm
from sarathi_kernels.elementwise.rotary_kv import rotate_and_store
from sarathi_kernels.elementwise.sampling import greedy
from sarathi_lab.model.operations import Hybrid, Operations, PackedInputs, Rotary
from sarathi_lab.model.spec import ModelSpec


class KernelOperations(Operations):
    """Every method is a launch or two; `inputs.attention` is an `AttentionPlan`."""

    wants_masks = False

    def __init__(self, spec: ModelSpec, inverse_frequencies: Tensor, hybrid: Hybrid) -> None:
        super().__init__(spec, inverse_frequencies, torch.float32)
        self._hybrid = hybrid

    def add_norm(self, hidden: Tensor, update: Tensor | None, norm: nn.Module) -> Tensor:
        return add_norm(hidden, update, *_weights(norm))

    def norm_heads(self, heads: Tensor, norm: nn.Module) -> None:
        add_norm(heads, None, *_weights(norm), out=heads)

    def rotate_and_store(
        self,
        heads: Tensor,
        inputs: PackedInputs,
        rotary: Rotary,
        keys: Tensor,
        values: Tensor,
    ) -> Tensor:
        return rotate_and_store(
            heads,
            *rotary,
            inputs.slots,
            keys,
            values,
            self.spec.num_heads,
        )

    def attend(
        self,
        query: Tensor,
        inputs: PackedInputs,
        keys: Tensor,
        values: Tensor,
    ) -> Tensor:
        out = torch.empty(query.shape, device=query.device, dtype=query.dtype)
        hybrid_attention(
            query,
            keys,
            values,
            inputs.attention,
            self._scale,
            variant=self._hybrid,
            sliding_window=self.spec.sliding_window,
            out=out,
        )
        return out

    def expand(self, x: Tensor, up: nn.Linear) -> Tensor:
        activate = gated_activation if self.spec.gated_ffn else activation_
        return activate(up(x), self.spec.activation)

    def greedy(self, logits: Tensor) -> Tensor:
        return greedy(logits)


def _weights(norm: nn.Module) -> tuple[Tensor, Tensor | None, float, NormKind]:
    """Weight, bias, epsilon and kind of a norm of the model."""
    if isinstance(norm, nn.LayerNorm):
        return norm.weight, norm.bias, norm.eps, "layer"
    assert isinstance(norm, nn.RMSNorm), "the model has no other norms"
    assert norm.eps is not None
    return norm.weight, None, norm.eps, "rms"
