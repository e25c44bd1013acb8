"""Products in int8: weights with a scale for every output channel, inputs with one for every token,
sums exact.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sarathi_kernels.attention.kv_cache import quantize

EXACT = 1024  # products of two int8 whose sum float32 holds exactly: 127 * 127 * 1024 < 2^24


class Int8Linear(nn.Module):
    """The product of `linear`: weights [out_features, in_features] in int8, float32 scales."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight, scales = quantize(linear.weight, torch.int8)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.scales = nn.Parameter(scales, requires_grad=False)  # [out_features]
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """[num_tokens, in_features] to [num_tokens, out_features], in the dtype of `x`."""
        rows, scales = quantize(x, torch.int8)
        product = _sums(rows, self.weight) * scales[:, None] * self.scales
        return (product if self.bias is None else product + self.bias).to(x.dtype)


def _sums(rows: Tensor, weight: Tensor) -> Tensor:
    """`rows` times the transposed `weight`, both int8, as int32 has it; rounded to float32."""
    sums = torch.zeros(len(rows), len(weight), dtype=torch.int32, device=rows.device)
    # In float32, as torch has no fast product of integers on every CPU.
    for some, of_weight in zip(rows.split(EXACT, 1), weight.split(EXACT, 1), strict=True):
        sums += (some.float() @ of_weight.float().t()).int()
    return sums.float()
