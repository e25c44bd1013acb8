"""Matrix products in 8 bits, with a scale for every output channel and every token."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sarathi_kernels.attention.kv_cache import quantize

E4M3 = torch.float8_e4m3fn
ROW_WISE = F.ScalingType.RowWise
OLDEST = (8, 9)  # compute capability that multiplies e4m3
MULTIPLE = 16  # of the sizes of a product on a GPU
EXACT = 1024  # products of two int8 whose sum float32 holds exactly: 127 * 127 * 1024 < 2^24


class Fp8Linear(nn.Module):
    """Product of `linear` in e4m3: weights [out_features, in_features], float32 scales. A GPU
    multiplies in 8 bits; torch's CPU code converts both sides to float32 before it does.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight, scales = quantize(linear.weight, E4M3)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.scales = nn.Parameter(scales[None], requires_grad=False)  # [1, out_features]
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """Map [num_tokens, in_features] to [num_tokens, out_features], in the dtype of `x`."""
        rows, scales = quantize(x, E4M3)
        sides = (rows, self.weight.t(), scales[:, None], ROW_WISE, self.scales, ROW_WISE)
        product = F.scaled_mm(*sides, output_dtype=x.dtype)
        return product if self.bias is None else product.add_(self.bias)


def why_not_fp8(
    linears: list[tuple[int, int]], device: torch.device, dtype: torch.dtype
) -> str | None:
    """Return why `device` can't multiply weights of these sizes in e4m3; None if it can."""
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


class Int8Linear(nn.Module):
    """Product of `linear` in int8 with exact sums: weights [out_features, in_features], float32
    scales.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight, scales = quantize(linear.weight, torch.int8)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.scales = nn.Parameter(scales, requires_grad=False)  # [out_features]
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """Map [num_tokens, in_features] to [num_tokens, out_features], in the dtype of `x`."""
        rows, scales = quantize(x, torch.int8)
        sums = torch.zeros(len(rows), len(self.weight), dtype=torch.int32, device=rows.device)
        # In float32, as torch has no fast product of integers on every CPU.
        parts = zip(rows.split(EXACT, 1), self.weight.split(EXACT, 1), strict=True)
        for some, of_weight in parts:
            sums += (some.float() @ of_weight.float().t()).int()
        product = sums.float() * scales[:, None] * self.scales
        return (product if self.bias is None else product + self.bias).to(x.dtype)
