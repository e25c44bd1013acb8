"""Products of layers in 8 bits (e4m3): weights with a scale for every output channel, activations
with one for every token.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sarathi_kernels.attention.kv_cache import quantize

E4M3 = torch.float8_e4m3fn
BY_ROW = F.ScalingType.RowWise
OLDEST = (8, 9)  # compute capability that multiplies e4m3
MULTIPLE = 16  # of the sizes of a product on a GPU


class Fp8Linear(nn.Module):
    """The product of `linear`: weights [out_features, in_features] in e4m3, float32 scales.

    A GPU multiplies in 8 bits; torch's CPU code converts both sides to float32 before it does.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight, scales = quantize(linear.weight, E4M3)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.scales = nn.Parameter(scales[None], requires_grad=False)  # [1, out_features]
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """[num_tokens, in_features] to [num_tokens, out_features], in the dtype of `x`."""
        rows, scales = quantize(x, E4M3)
        sides = (rows, self.weight.t(), scales[:, None], BY_ROW, self.scales, BY_ROW)
        product = F.scaled_mm(*sides, output_dtype=x.dtype)
        return product if self.bias is None else product.add_(self.bias)


def why_not(linears: list[tuple[int, int]], device: torch.device, dtype: torch.dtype) -> str | None:
    """Why `device` can't multiply weights of these sizes in 8 bits; None if it can."""
    if device.type == "cpu":
        return None
    capability = torch.cuda.get_device_capability(device)
    if capability < OLDEST:
        number, oldest = (".".join(map(str, one)) for one in (capability, OLDEST))
        return f"the GPU's compute capability is {number}, below {oldest}"
    if dtype != torch.bfloat16:
        return f"its products on a GPU give bfloat16, and dtype is {str(dtype).split('.')[-1]}"
    if odd := [size for sizes in linears for size in sizes if size % MULTIPLE]:
        return f"a layer's size, {odd[0]}, is no multiple of {MULTIPLE}"
    return None
