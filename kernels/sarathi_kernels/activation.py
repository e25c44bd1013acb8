"""Activations of the feed-forward block; both overwrite their input, which nobody reads again."""

from __future__ import annotations

from typing import Literal

import torch.nn.functional as F
from torch import Tensor

Activation = Literal["silu", "gelu", "gelu_tanh"]


def activate_(x: Tensor, activation: Activation) -> Tensor:
    """Apply `activation` to `x` of any shape, in place where torch can."""
    if activation == "silu":
        return F.silu(x, inplace=True)
    if activation == "gelu":
        return F.gelu(x)
    if activation == "gelu_tanh":
        return F.gelu(x, approximate="tanh")
    raise ValueError(f"unknown activation {activation}")


def gated_activate_(gate_up: Tensor, activation: Activation) -> Tensor:
    """act(gate) * up for `gate_up` [num_tokens, 2 * ffn_size] = (gate, up); returns [num_tokens, ffn_size]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return activate_(gate, activation).mul_(up)
