"""Modules that a checkpoint's quantisation leaves out: the share of each kind of products that they
are.

Names match as vLLM matches them: a regular expression behind `re:`, and else whole parts of a
module's path, with `*` for any text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from sarathi_lab.config.errors import UserError
from sarathi_lab.config.paths import stated_beside
from sarathi_lab.model.quantisation import KindName
from sarathi_lab.model.spec import ModelSpec

Shares = dict[KindName, float]
FIX = "take the unquantised model"
HEAD = "lm_head"
PREFIXES = ("model.", "language_model.model.", "model.language_model.")
# What no checkpoint of these methods quantises, or is not counted: tables, norms, routers, gates of
# a column, convolutions, encoders and the layers that draft.
NEVER = re.compile(
    r"lm_head|embed|norm|\bgate\b|router|shared_expert_gate|correction_bias|conv1d|in_proj_(a|b|ba)\b"
    r"|\bg_proj|visual|vision|audio|multi_modal|mtp"
)
LAYER = re.compile(r"\blayers\.(\d+)\b")  # in a name that is no expression


class Product(NamedTuple):
    """A product of a layer, which has any of `paths`; one of each expert those of the first expert,
    and `last_paths` of the last.
    """

    num_params: float
    paths: Sequence[str]
    last_paths: Sequence[str] = ()


Products = Mapping[KindName, Sequence[Product]]


class Name:
    """A name in the field's list, as an expression of the paths that it matches."""

    def __init__(self, field: str, text: str) -> None:
        self.text = text
        self.setting = f"quantization_config.{field}={text}"
        self.layer: int | None = None
        expression = text.removeprefix("re:")
        if expression == text:
            pieces = [re.escape(piece) for piece in text.split("*")]
            expression = r"(.*\.)?" + ".*".join(pieces) + r"(\..*)?$"
            stated = LAYER.search(text)
            if stated is not None:
                self.layer = int(stated[1])
        try:
            self._expression = re.compile(expression)
        except re.error as error:
            raise UserError(
                f"{self.setting} is no regular expression ({error}); fetch config.json again"
            ) from None

    @property
    def is_of_head(self) -> bool:
        """Whether the name matches the output head."""
        paths = [HEAD]
        for prefix in PREFIXES:
            paths.append(f"{prefix}{HEAD}")
        return any(map(self._expression.match, paths))

    def matches(self, paths: Sequence[str], layer: int) -> bool:
        """Return whether one of the `paths` of a product in a layer has the name."""
        if self.layer not in (None, layer):
            return False
        for path in paths:
            for prefix in PREFIXES:
                if self._expression.match(f"{prefix}layers.{layer}.{path}"):
                    return True
        return False


def ignored_shares(field: str, texts: Sequence[str], spec: ModelSpec) -> Shares:
    """Return the share of each kind of products that the modules named in `field` are; of kinds
    that the model has. Raises UserError for a name whose product is not known.
    """
    products_of_kinds = _products(spec)
    names = [Name(field, text) for text in texts]
    for name in names:
        _check_known(name, products_of_kinds, spec.num_layers)
    shares: Shares = {}
    for kind, num_layers in _layers_of_kinds(spec).items():
        if num_layers == 0:
            continue
        products = products_of_kinds[kind]
        of_layer = sum(product.num_params for product in products)
        ignored = 0.0
        for layer in range(spec.num_layers):
            ignored += _ignored_params(names, products, layer)
        # Names without a number of a layer match in layers that lack the kind, too.
        shares[kind] = min(1.0, ignored / of_layer / num_layers)
    return shares


def _ignored_params(names: Sequence[Name], products: Sequence[Product], layer: int) -> float:
    """Return the parameters of the products in a layer that have one of the names. Raises UserError
    for names of some experts.
    """
    num_params = 0.0
    for product in products:
        is_ignored = any(name.matches(product.paths, layer) for name in names)
        is_last_ignored = any(name.matches(product.last_paths, layer) for name in names)
        if product.last_paths and is_ignored != is_last_ignored:
            raise UserError(f"{names[0].setting} names some of the experts of a layer; {FIX}")
        if is_ignored:
            num_params += product.num_params
    return num_params


def _check_known(name: Name, products_of_kinds: Products, num_layers: int) -> None:
    """Raise UserError for a name that may be a product's in a spelling that is not known."""
    # Behind the last layer are those that draft, whatever they have.
    if name.layer is not None and name.layer >= num_layers:
        return
    layers: Sequence[int] = range(num_layers + 1)
    if name.layer is not None:
        layers = [name.layer]
    for products in products_of_kinds.values():
        for product in products:
            if any(name.matches(product.paths, layer) for layer in layers):
                return
    if not NEVER.search(name.text):
        raise UserError(f"{name.setting} is none of the modules that are known; {FIX}")


def _layers_of_kinds(spec: ModelSpec) -> dict[KindName, int]:
    linear = spec.layers.linear
    return {
        "attention": spec.num_attention_layers,
        "linear attention": linear.num_layers if linear else 0,
        "FFNs": spec.num_ffn_layers - spec.num_expert_layers,
        "shared experts": spec.num_expert_layers if spec.shared_expert_size else 0,
        "experts": spec.num_expert_layers,
    }


def _products(spec: ModelSpec) -> Products:
    """Return the products of all kinds, also of those that this model lacks."""
    ffn = dict.fromkeys(("up_proj", "down_proj"), 1.0)
    if spec.gated_ffn:
        ffn["gate_proj"] = 1.0
    last_expert = max(0, spec.num_experts - 1)
    experts = []
    for product, num_params in ffn.items():
        paths = _paths("experts", product, expert=0)
        experts.append(Product(num_params, paths, _paths("experts", product, last_expert)))
    return {
        "attention": _plain("attention", _attention_params(spec)),
        "linear attention": _plain("linear attention", _linear_params(spec)),
        "FFNs": _plain("FFNs", ffn),
        "shared experts": _plain("shared experts", ffn),
        "experts": experts,
    }


def _plain(kind: KindName, params: Mapping[str, float]) -> list[Product]:
    products = []
    for name, num_params in params.items():
        paths = _paths(kind, name)
        products.append(Product(num_params, paths))
    return products


def _paths(kind: KindName, product: str, expert: int | None = None) -> list[str]:
    """List the ways to name a product in a layer; of an expert by its number, or with all."""
    modules = stated_beside(__file__, "modules.yaml")
    paths = []
    for parent in modules["parents"][kind]:
        for name in modules["names_of_products"].get(product, [product]):
            paths.append(f"{parent}.{name}")
            if expert is not None:
                paths.append(f"{parent}.{expert}.{name}")
    return paths


def _attention_params(spec: ModelSpec) -> dict[str, float]:
    """Return the parameters of products of attention by their names."""
    hidden = spec.hidden_size
    latent = spec.layers.latent
    if latent is None:
        heads = spec.heads
        return {
            "q_proj": hidden * heads.query_size * (1 + spec.layers.output_gate),
            "k_proj": hidden * heads.num_kv_heads * heads.key_size,
            "v_proj": hidden * heads.num_kv_heads * heads.value_size,
            "o_proj": heads.output_size * hidden,
        }
    params: dict[str, float] = {
        "kv_a_proj_with_mqa": hidden * latent.cached_size,
        "kv_b_proj": latent.rank * latent.expanded_size(spec.num_heads, spec.head_size),
        "o_proj": spec.num_heads * latent.value_size * hidden,
    }
    query_size = spec.num_heads * spec.head_size
    if latent.query_rank is None:
        params["q_proj"] = hidden * query_size
    else:
        params["q_a_proj"] = hidden * latent.query_rank
        params["q_b_proj"] = latent.query_rank * query_size
    return params


def _linear_params(spec: ModelSpec) -> dict[str, float]:
    """Return the parameters of products of linear attention, by a share of the hidden state's."""
    linear = spec.layers.linear
    if linear is None:
        return dict.fromkeys(("in_proj_qkv", "in_proj_z", "out_proj"), 1.0)
    return {
        "in_proj_qkv": linear.num_channels,
        "in_proj_z": linear.inner_size,
        "out_proj": linear.inner_size,
    }
