"""Random weights in the place of vLLM's dummies (`load_format=dummy`), many of which are zero.

vLLM draws its dummies within 0.001 of zero. Up to 0.32 these round to zero in 8-bit floats (98 % of
them), packed integers (GPTQ's and AWQ's, in all versions up to 0.33) stay what the memory held, and
in float16 what a few products make of them is zero. A GPU multiplies zeros with less power, so at a
higher clock. Here weights have the deviations with which the lab draws its models.
"""

from __future__ import annotations

import zlib

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
            # Python's `hash` of a text differs from process to process.
            seed_of_name = zlib.crc32(name.encode())
            generator.manual_seed(seed + seed_of_name)
            _draw(name, parameter.data, generator)


def _draw(name: str, values: Tensor, generator: torch.Generator) -> None:
    kind = name.rpartition(".")[-1]
    if any(part in kind for part in NO_WEIGHTS):
        return
    if not values.is_floating_point():
        is_packed = values.dtype in BYTES
        if is_packed and "weight" in kind:
            _draw_bits(values, generator)
    elif values.ndim > 1:
        _draw_floats(name, values, generator)
    elif kind == "bias":
        values.zero_()
    elif kind == "weight":
        values.fill_(1.0)


def _draw_bits(values: Tensor, generator: torch.Generator) -> None:
    limits = torch.iinfo(values.dtype)
    end = limits.max + 1
    values.random_(limits.min, end, generator=generator)


def _draw_floats(name: str, values: Tensor, generator: torch.Generator) -> None:
    if values.itemsize > 1:
        deviation = 1.0
        if "embed" not in name:
            in_features = values.shape[-1]
            deviation = in_features**-0.5
        values.normal_(0.0, deviation, generator=generator)
        return
    # torch draws no floats of 8 bits. Few rows at a time, so that their copy takes little memory.
    num_rows = max(1, values.shape[0])
    elements_of_row = max(1, values.numel() // num_rows)
    rows_at_once = max(1, PART // elements_of_row)
    for rows in values.split(rows_at_once):
        drawn = torch.empty(rows.shape, dtype=torch.float16, device=rows.device)
        drawn.normal_(generator=generator)
        rows.copy_(drawn)
