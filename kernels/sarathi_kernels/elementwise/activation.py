"""Activations of the feed-forward block; both may overwrite their (first) input, which is not read
again.
"""

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


def gated_activate_(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    """act(gate) * up, both of one shape; returns a tensor of it."""
    return activate_(gate, activation).mul_(up)
