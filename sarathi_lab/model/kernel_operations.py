"""The operations of a layer as Triton kernels: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sarathi_kernels.attention.hybrid import hybrid_attention
from sarathi_kernels.attention.kv_cache import Cache
from sarathi_kernels.attention.plan import AttentionPlan
from sarathi_kernels.elementwise.fused_activation import activation_, gated_activation
from sarathi_kernels.elementwise.norm import NormKind, add_norm
from sarathi_kernels.elementwise.rotary import rotary_tables
from sarathi_kernels.elementwise.rotary_kv import rotate_and_store
from sarathi_kernels.elementwise.sampling import greedy
from sarathi_lab.model.operations import Hybrid, PackedInputs, Range, unwatched
from sarathi_lab.model.spec import ModelSpec


class KernelOperations:
    """An `Operations` whose every method is a launch or two; attention comes as an `AttentionPlan`.

    `hybrid` is how chunks and decodes of one batch share a launch.
    """

    wants_masks = False

    def __init__(self, spec: ModelSpec, inverse_frequencies: Tensor, hybrid: Hybrid) -> None:
        self.spec = spec
        self.hybrid = hybrid
        self._inverse_frequencies = inverse_frequencies
        self.range: Range = unwatched

    def rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines, in float32."""
        return rotary_tables(positions, self._inverse_frequencies, torch.float32)

    def add_norm(self, hidden: Tensor, update: Tensor | None, norm: nn.Module) -> Tensor:
        """See `Operations`."""
        return add_norm(hidden, update, *_weights(norm))

    def norm_heads(self, heads: Tensor, norm: nn.Module) -> None:
        """See `Operations`."""
        add_norm(heads, None, *_weights(norm), out=heads)

    def rotate_and_store(
        self,
        heads: Tensor,
        inputs: PackedInputs,
        rotary: tuple[Tensor, Tensor],
        keys: Cache,
        values: Cache,
    ) -> Tensor:
        """See `Operations`."""
        return rotate_and_store(heads, *rotary, inputs.slots, keys, values, self.spec.num_heads)

    def attend(self, query: Tensor, inputs: PackedInputs, keys: Cache, values: Cache) -> Tensor:
        """See `Operations`."""
        plan: AttentionPlan = inputs.attention
        out = torch.empty(query.shape, device=query.device, dtype=query.dtype)
        spec = self.spec
        scale, window = spec.head_size**-0.5, spec.sliding_window
        hybrid_attention(
            query, keys, values, plan, scale, variant=self.hybrid, sliding_window=window, out=out
        )
        return out

    def expand(self, x: Tensor, up: nn.Linear) -> Tensor:
        """See `Operations`."""
        if self.spec.gated_ffn:
            return gated_activation(up(x), self.spec.activation)
        return activation_(up(x), self.spec.activation)

    def greedy(self, logits: Tensor) -> Tensor:
        """See `Operations`."""
        return greedy(logits)


def _weights(norm: nn.Module) -> tuple[Tensor, Tensor | None, float, NormKind]:
    """Weight, bias, epsilon and kind of a norm of the model."""
    if isinstance(norm, nn.LayerNorm):
        return norm.weight, norm.bias, norm.eps, "layer"
    assert isinstance(norm, nn.RMSNorm), "the model has no other norms"
    assert norm.eps is not None
    return norm.weight, None, norm.eps, "rms"
