"""Random weights in the place of vLLM's dummies (`load_format=dummy`), many of which are zero.

vLLM draws its dummies within 0.001 of zero. Up to 0.32 these round to zero in 8-bit floats (98 % of
them), packed integers (GPTQ's and AWQ's, in all versions up to 0.33) stay what the memory held, and
in float16 what a few products make of them is zero. A GPU multiplies zeros with less power, so at a
higher clock. Here weights have the deviations with which the lab draws its models.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

PART = 1 << 24  # elements drawn at once: weights of 8 bits are drawn in 16
BYTES = (torch.int8, torch.uint8, torch.int32)  # of packed weights: 8 bits, 4 bits, GPTQ and AWQ
# Parts of the names of parameters that belong to a weight but are none: factors, zero points,
# orders of columns and sizes. Orders are addresses, which must not be random.
NO_WEIGHTS = ("scale", "zero", "idx", "shape", "perm")


def draw_weights(model: nn.Module, seed: int) -> None:
    """Draw the weights of `model` from `seed`: biases are 0, norms 1, other floats normal, and
    packed integers random bits. The same name has the same values in all processes, which share
    what is not split.
    """
    with torch.inference_mode():
        for name, parameter in model.named_parameters():
            generator = torch.Generator(parameter.device)
            generator.manual_seed(seed + zlib.crc32(name.encode()))
            _draw(name, parameter.data, generator)


def _draw(name: str, values: Tensor, generator: torch.Generator) -> None:
    kind = name.rpartition(".")[-1]
    if any(part in kind for part in NO_WEIGHTS):
        return
    if values.is_floating_point():
        if values.ndim > 1:
            _draw_floats(name, values, generator)
        elif kind in ("weight", "bias"):
            values.fill_(0.0 if kind == "bias" else 1.0)
    elif "weight" in kind and values.dtype in BYTES:
        limits = torch.iinfo(values.dtype)
        values.random_(limits.min, limits.max + 1, generator=generator)


def _draw_floats(name: str, values: Tensor, generator: torch.Generator) -> None:
    if values.itemsize > 1:
        deviation = 1.0 if "embed" in name else values.shape[-1] ** -0.5
        values.normal_(0.0, deviation, generator=generator)
        return
    for part in _parts(values):  # torch draws no floats of 8 bits
        drawn = torch.empty(part.shape, dtype=torch.float16, device=part.device)
        part.copy_(drawn.normal_(generator=generator))


def _parts(values: Tensor) -> Iterator[Tensor]:
    """Split rows, so that a copy of a part takes little memory."""
    elements_of_row = max(1, values.numel() // max(1, values.shape[0]))
    yield from values.split(max(1, PART // elements_of_row))
