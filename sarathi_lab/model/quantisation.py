"""How a checkpoint stores the weights of its layers' products."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Quantised = Literal["layers", "experts"]
BITS_OF_BYTE = 8
SCALE_BITS = 16  # of the scale of a group of weights
# Bits of one weight with its share of a block's scale, by the OCP MX specification 1.0 (32 values
# and 8 bits) and NVIDIA's NVFP4 (16 values and 8 bits).
MXFP4_BITS = 4 + 8 / 32
NVFP4_BITS = 4 + 8 / 16


@dataclass(frozen=True)
class Quantisation:
    """Weights of the layers' products in fewer bits; embedding and output head are as the rest.

    Attributes:
        name: The method, as config.json names it.
        weight_bytes: Bytes of one weight, with its share of the scales.
        has_fp8_products: Whether activations have 8 bits, too, so that products run at the rate of
            these on a device that has them. Otherwise weights are only stored so, and products
            computed in the model's type.
        of: All products of the layers but the router, or those of the experts.
    """

    name: str
    weight_bytes: float
    has_fp8_products: bool = False
    of: Quantised = "layers"


FP8 = Quantisation("fp8", 1.0, has_fp8_products=True)
# By names that a run states, of usual checkpoints: 4 bits in groups of 128 (AWQ, GPTQ), and
# gpt-oss's experts.
STORED: Mapping[str, Quantisation] = {
    "fp8": FP8,
    "int4": Quantisation("int4", (4 + (SCALE_BITS + 4) / 128) / BITS_OF_BYTE),
    "mxfp4": Quantisation("mxfp4", MXFP4_BITS / BITS_OF_BYTE, of="experts"),
}
