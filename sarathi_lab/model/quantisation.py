"""How a checkpoint stores the weights of its layers' products, by its config.json."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from sarathi_lab.config.errors import UserError

Settings = Mapping[str, object]
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


def read_quantisation(config: Settings) -> Quantisation | None:
    """Read `quantization_config` of a config.json; None: the model's type. Raises UserError, naming
    the field, for a method whose bytes are not known.
    """
    settings = config.get("quantization_config")
    if not settings:
        return None
    if not isinstance(settings, Mapping):
        raise UserError(f"quantization_config={settings!r} is no object; fetch config.json again")
    method = str(settings.get("quant_method"))
    if method in ("fp8", "fbgemm_fp8"):
        return FP8
    if method == "mxfp4":
        # gpt-oss keeps all but its experts in 16 bits, by `modules_to_not_convert`.
        return STORED[method]
    if method in ("awq", "gptq", "awq_marlin", "gptq_marlin"):
        return _integers(method, settings)
    if method == "compressed-tensors":
        return _compressed_tensors(settings)
    if method == "modelopt":
        return _modelopt(settings)
    raise UserError(
        f"quantization_config.quant_method={method} has no formula of its bytes; take fp8, awq, "
        "gptq, mxfp4, modelopt or compressed-tensors, or the unquantised model"
    )


def _integers(method: str, settings: Settings) -> Quantisation:
    """Integers of `bits`, with a scale and a zero for each group along the inner dimension."""
    bits = _number("bits", settings)
    group = _number("group_size", settings)
    of_group = 0.0  # one of a whole column, where the size is -1
    if group > 0:
        of_group = (SCALE_BITS + bits) / group
    return Quantisation(method, (bits + of_group) / BITS_OF_BYTE)


def _compressed_tensors(settings: Settings) -> Quantisation:
    groups = settings.get("config_groups")
    if not isinstance(groups, Mapping) or len(groups) != 1:
        raise UserError(
            f"quantization_config.config_groups={groups!r} is not one group of weights, which the "
            "bytes would follow from; take another quantisation of the model"
        )
    group = next(iter(groups.values()))
    weights = group.get("weights") or {}
    activations = group.get("input_activations")
    bits = _number("num_bits", weights)
    of_group = 0.0
    if weights.get("strategy") == "group":
        of_group = SCALE_BITS / _number("group_size", weights)
    if weights.get("strategy") == "tensor_group":
        of_group = BITS_OF_BYTE / _number("group_size", weights)
    return Quantisation(
        "compressed-tensors",
        (bits + of_group) / BITS_OF_BYTE,
        has_fp8_products=bits == BITS_OF_BYTE and activations is not None,
        of=_part(settings.get("ignore")),
    )


def _modelopt(settings: Settings) -> Quantisation:
    algorithm = str(settings.get("quant_algo"))
    ignored = settings.get("ignore") or settings.get("exclude_modules")
    if algorithm == "FP8":
        return Quantisation("modelopt fp8", 1.0, has_fp8_products=True, of=_part(ignored))
    if algorithm == "NVFP4":
        return Quantisation("modelopt nvfp4", NVFP4_BITS / BITS_OF_BYTE, of=_part(ignored))
    raise UserError(
        f"quantization_config.quant_algo={algorithm} has no formula of its bytes; take FP8 or NVFP4"
    )


def _part(ignored: object) -> Quantised:
    """Return the part of the weights that the modules which are `ignored` leave."""
    names = ignored if isinstance(ignored, Sequence) and not isinstance(ignored, str) else ()
    if any(re.search(r"(self_)?attn", str(name)) for name in names):
        return "experts"
    return "layers"


def _number(name: str, settings: Settings) -> float:
    value = settings.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UserError(
            f"quantization_config: {name}={value!r} is no number; fetch config.json again"
        )
    return value
