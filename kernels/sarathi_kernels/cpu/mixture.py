"""The experts of one layer in C++ (`mixture.h`), by themselves."""

from __future__ import annotations

from ctypes import byref

import torch
from torch import Tensor

from sarathi_kernels.cpu import library
from sarathi_kernels.cpu.packing import PackedLinear
from sarathi_kernels.cpu.structures import LayerStruct, ModelStruct


def experts(
    x: Tensor,
    router_logits: Tensor,
    gate_up: PackedLinear,
    down: PackedLinear,
    *,
    top_k: int,
    normalised: bool,
) -> Tensor:
    """Each row of x [rows, hidden_size] through the `top_k` experts of its largest logits [rows,
    experts], with SiLU; weighted by their softmax, over the chosen alone if `normalised`. In x's
    dtype, from sums in float32. Raises ValueError if sizes do not match.
    """
    num_experts, size = gate_up.count, down.out_features
    is_whole = (x.shape[1], down.in_features) == (gate_up.in_features, gate_up.out_features)
    is_whole &= x.shape == (len(x), size) and router_logits.shape == (len(x), num_experts)
    if not is_whole or down.count != num_experts or not 0 < top_k <= num_experts:
        raise ValueError(
            f"x {tuple(x.shape)} and logits {tuple(router_logits.shape)} do not match {top_k} of "
            f"{num_experts} experts of {gate_up.in_features} inputs"
        )
    model = ModelStruct(hidden_size=size, num_experts=num_experts, experts_per_token=top_k)
    model.is_bf16, model.is_gated, model.normalises = gate_up.is_bf16, gate_up.is_gated, normalised
    layer = LayerStruct(
        expert_up=library.linear_struct(gate_up), expert_down=library.linear_struct(down)
    )
    taken, logits = x.float().contiguous(), router_logits.float().contiguous()
    out = torch.empty_like(taken)
    rows = (taken.data_ptr(), logits.data_ptr(), len(x), out.data_ptr())
    library.load().sarathi_experts(byref(model), byref(layer), *rows)
    return out.to(x.dtype)
