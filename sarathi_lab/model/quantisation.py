"""How a checkpoint stores the weights of its layers' products."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Quantised = Literal["layers", "experts", "parts"]
ProductType = Literal["model", "fp8", "int8", "fp4"]
KindName = Literal["attention", "linear attention", "FFNs", "shared experts", "experts"]
BITS_OF_BYTE = 8
SCALE_BITS = 16  # of the scale of a group of weights
# Bits of one weight with its share of a block's scale, by the OCP MX specification 1.0 (32 values
# and 8 bits) and NVIDIA's NVFP4 (16 values and 8 bits).
MXFP4_BITS = 4 + 8 / 32
NVFP4_BITS = 4 + 8 / 16


# Kinds of the products of `ModelSpec.layer_linears`, by the beginning of their names; routers,
# gates of a column and coefficients of residual streams stay in the model's type.
KINDS_OF_PRODUCTS: Mapping[str, KindName | None] = {
    "router": None,
    "shared_gate": None,
    "shared": "shared experts",
    "state": "linear attention",
    "ffn": "FFNs",
    "dense": "FFNs",
    "mixing": None,
}


def kind_of_product(name: str) -> KindName | None:
    """Return the kind of a product over all tokens; None for one that no checkpoint quantises."""
    for beginning, kind in KINDS_OF_PRODUCTS.items():
        if name.startswith(beginning):
            return kind
    return "attention"


@dataclass(frozen=True)
class StoredPart:
    """How the products of one kind are stored.

    Attributes:
        kind: Of the products.
        share: The share of their weights that is quantised.
        weight_bytes: Bytes of one of these, in the mean.
    """

    kind: KindName
    share: float
    weight_bytes: float

    def mean_bytes(self, dtype_bytes: float) -> float:
        """Return the bytes of a weight, where others have `dtype_bytes`."""
        unquantised_share = 1 - self.share
        return self.share * self.weight_bytes + unquantised_share * dtype_bytes


@dataclass(frozen=True)
class Quantisation:
    """Weights of the layers' products in fewer bits; embedding and output head are in the model's
    type, unless the head has bytes of its own.

    Attributes:
        name: The method, as config.json names it.
        weight_bytes: Bytes of one weight, with its share of the scales.
        product_type: Of weights and activations in products, on a device that has such products.
            Else, and with "model", weights are only stored in fewer bits, and products computed in
            the model's type.
        of: All products of the layers but the router, those of the experts, or `parts`.
        parts: Of each kind of products, if they differ.
        head_bytes: Of a weight of an output head that is no embedding; None: as the embedding.
    """

    name: str
    weight_bytes: float
    product_type: ProductType = "model"
    of: Quantised = "layers"
    parts: tuple[StoredPart, ...] = ()
    head_bytes: float | None = None

    def __post_init__(self) -> None:
        # A file states a list, which has no hash.
        object.__setattr__(self, "parts", tuple(self.parts))

    def part(self, kind: KindName | None) -> StoredPart:
        """Return how products of a kind are stored (None: of a kind that is not quantised)."""
        for part in self.parts:
            if part.kind == kind:
                return part
        is_quantised = self.of in ("layers", kind)
        return StoredPart(kind or "attention", float(is_quantised), self.weight_bytes)

    def rate_of_products(
        self, *, fp8: float | None, fp4: float | None, int8: float | None
    ) -> float | None:
        """Return which of a device's rates the products have; None: the one of the model's type.

        Args:
            fp8: FLOP/s of products of 8-bit floats; None where the device has none. The same of:
            fp4: 4-bit floats.
            int8: 8-bit integers.
        """
        rates = {"model": None, "fp8": fp8, "fp4": fp4, "int8": int8}
        return rates[self.product_type]

    @property
    def description(self) -> str:
        """Of the quantised weights, such as "experts' weights, 0.531 bytes each"."""
        if self.of != "parts":
            return f"{self.of}' weights are read as {self.weight_bytes:.3g} bytes each"
        of_parts = [
            f"{part.weight_bytes:.3g} bytes in {part.share:.0%} of the {part.kind}"
            for part in self.parts
            if part.share
        ]
        return f"weights are read as {' and '.join(of_parts) or 'those of the model type'}"


FP8 = Quantisation("fp8", 1.0, product_type="fp8")
# By names that a run states, of usual checkpoints: 8 bits with a scale a column, and activations in
# as many (w8a8) or in the model's type; 4 bits in groups of 128 (AWQ, GPTQ); gpt-oss's experts.
STORED: Mapping[str, Quantisation] = {
    "fp8": FP8,
    "int8": Quantisation("int8", 1.0),
    "w8a8": Quantisation("w8a8", 1.0, product_type="int8"),
    "nvfp4": Quantisation("nvfp4", NVFP4_BITS / BITS_OF_BYTE, product_type="fp4"),
    "int4": Quantisation("int4", (4 + (SCALE_BITS + 4) / 128) / BITS_OF_BYTE),
    "mxfp4": Quantisation("mxfp4", MXFP4_BITS / BITS_OF_BYTE, of="experts"),
}
