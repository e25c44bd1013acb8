"""Modules that a checkpoint's quantisation names: the share of each kind of products that they are.

Names match as vLLM matches them: a regular expression behind `re:`, and else whole parts of a
module's path, with `*` for any text.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from sarathi_lab.config.errors import UserError
from sarathi_lab.model.quantisation import KindName
from sarathi_lab.model.spec import ModelSpec

Leaves = tuple[str, ...]
FIX = "take the unquantised model"
HEAD = "lm_head"
PREFIXES = ("model.", "language_model.model.", "model.language_model.")
# Ways to name all products of a kind in one layer.
ATTENTION: tuple[Leaves, ...] = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
    ("self_attn.qkv_proj", "self_attn.o_proj"),
    (
        *("self_attn.q_a_proj", "self_attn.q_b_proj", "self_attn.o_proj"),
        *("self_attn.kv_a_proj_with_mqa", "self_attn.kv_b_proj"),
    ),
    ("mixer.q_proj", "mixer.k_proj", "mixer.v_proj", "mixer.o_proj"),
)
LINEAR_ATTENTION: tuple[Leaves, ...] = (
    ("linear_attn.in_proj_qkvz", "linear_attn.out_proj"),
    ("mamba.in_proj", "mamba.out_proj"),
    ("mixer.in_proj", "mixer.out_proj"),
    ("conv.in_proj", "conv.out_proj"),
    ("short_conv.in_proj", "short_conv.out_proj"),
    ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z", "linear_attn.out_proj"),
)
FFN: tuple[Leaves, ...] = (
    ("gate_proj", "up_proj", "down_proj"),
    ("gate_up_proj", "down_proj"),
    ("w1", "w2", "w3"),
)
FFN_PARENTS = ("mlp", "feed_forward")
SHARED_PARENTS = ("mlp.shared_expert", "mlp.shared_experts", "feed_forward.shared_expert")
EXPERT_PARENTS = ("mlp.experts", "feed_forward.experts", "block_sparse_moe.experts")
SIZES_OF_FFN = {"gate_up_proj": 2.0}  # against those of each other product
EXPERT_NUMBER = re.compile(r"\.(\d+)\.")  # in the path of a single expert
# What no checkpoint of these methods quantises, or is not counted: tables, norms, routers, gates of
# a column, convolutions, encoders and the layers that draft.
NEVER = re.compile(
    r"lm_head|embed|norm|\bgate\b|router|shared_expert_gate|correction_bias|conv1d|in_proj_(a|b|ba)\b"
    r"|\bg_proj|visual|vision|audio|multi_modal|mtp"
)
LAYER = re.compile(r"\blayers\.(\d+)\b")  # in a name that is no expression


@dataclass(frozen=True)
class Kind:
    """Products of one kind: `num_layers` have them, by one of the `namings` of all in a layer. The
    last part of a leaf has a size among `sizes`, by its parameters; others are equally large.
    """

    name: KindName
    num_layers: int
    namings: tuple[Leaves, ...]
    sizes: Mapping[str, float] = field(default_factory=dict)

    @cached_property
    def leaves(self) -> set[str]:
        """Paths of modules in a layer, by every naming."""
        return set().union(*self.namings)

    def share(self, leaves: set[str]) -> float:
        """Return the share of a layer's parameters that `leaves` have: all, if they are all leaves
        of a naming, else by the first naming that has any of them.
        """
        shares = []
        for naming in self.namings:
            sizes = {leaf: self.sizes.get(leaf.rpartition(".")[2], 1.0) for leaf in naming}
            covered = sum(size for leaf, size in sizes.items() if leaf in leaves)
            shares.append(covered / sum(sizes.values()))
        if 1.0 in shares:
            return 1.0
        return next((share for share in shares if share), 0.0)


def kinds_of(spec: ModelSpec) -> list[Kind]:
    """Return the kinds of products that the layers of models have; some have none in this one."""
    num_linear = 0
    if spec.layers.linear is not None:
        num_linear = spec.layers.linear.num_layers
    num_dense = spec.num_ffn_layers - spec.num_expert_layers
    num_shared = 0
    if spec.shared_expert_size:
        num_shared = spec.num_expert_layers
    ends = {0, max(0, spec.num_experts - 1)}  # a list of single experts lacks one of these
    # One by one, or all of a layer as one module.
    of_experts = (*_under(EXPERT_PARENTS, sorted(ends)), *_under(EXPERT_PARENTS))
    return [
        Kind("attention", spec.num_attention_layers, ATTENTION, _sizes_of_attention(spec)),
        Kind("linear attention", num_linear, LINEAR_ATTENTION, _sizes_of_linear(spec)),
        Kind("FFNs", num_dense, _under(FFN_PARENTS), SIZES_OF_FFN),
        Kind("shared experts", num_shared, _under(SHARED_PARENTS), SIZES_OF_FFN),
        Kind("experts", spec.num_expert_layers, of_experts, SIZES_OF_FFN),
    ]


def _under(parents: Sequence[str], experts: Sequence[int] = ()) -> tuple[Leaves, ...]:
    """Return the namings of an FFN's products below each of `parents`."""
    namings = []
    for parent in parents:
        ffns = [f"{parent}.{number}" for number in experts] or [parent]
        for leaves in FFN:
            namings.append(tuple(f"{ffn}.{leaf}" for ffn in ffns for leaf in leaves))
    return tuple(namings)


class Name:
    """A name in the field's list, as an expression of the paths that it matches."""

    def __init__(self, field: str, text: str) -> None:
        self.text = text
        self.setting = f"quantization_config.{field}={text}"
        expression = text.removeprefix("re:")
        stated = None
        if expression == text:
            pieces = [re.escape(piece) for piece in text.split("*")]
            expression = r"(.*\.)?" + ".*".join(pieces) + r"(\..*)?$"
            stated = LAYER.search(text)
        self.layer = int(stated[1]) if stated else None
        try:
            self._expression = re.compile(expression)
        except re.error as error:
            raise UserError(
                f"{self.setting} is no regular expression ({error}); fetch config.json again"
            ) from None

    @property
    def is_of_head(self) -> bool:
        """Whether the name matches the output head."""
        return any(self._expression.match(f"{prefix}{HEAD}") for prefix in ("", *PREFIXES))

    def matched(self, kind: Kind, layer: int) -> set[str]:
        """Return the paths of a kind's modules in a layer that the name matches."""
        if self.layer not in (None, layer):
            return set()
        matched = set()
        for leaf in kind.leaves:
            paths = [f"{prefix}layers.{layer}.{leaf}" for prefix in PREFIXES]
            if any(map(self._expression.match, paths)):
                matched.add(leaf)
        return matched


def _sizes_of_attention(spec: ModelSpec) -> dict[str, float]:
    """Return the parameters of products of attention by the last parts of their names."""
    hidden = spec.hidden_size
    latent = spec.layers.latent
    if latent is not None:
        queries = spec.num_heads * spec.head_size
        rank = latent.query_rank or 0
        expanded = latent.expanded_size(spec.num_heads, spec.head_size)
        return {
            "q_a_proj": hidden * rank,
            "q_b_proj": (rank or hidden) * queries,
            "q_proj": hidden * queries,
            "kv_a_proj_with_mqa": hidden * latent.cached_size,
            "kv_b_proj": latent.rank * expanded,
            "o_proj": spec.num_heads * latent.value_size * hidden,
        }
    heads = spec.heads
    queries = heads.query_size * (1 + spec.layers.output_gate)
    return {
        "q_proj": hidden * queries,
        "k_proj": hidden * heads.num_kv_heads * heads.key_size,
        "v_proj": hidden * heads.num_kv_heads * heads.value_size,
        "qkv_proj": hidden * (queries + heads.projected_size),
        "o_proj": heads.output_size * hidden,
    }


def _sizes_of_linear(spec: ModelSpec) -> dict[str, float]:
    """Return the parameters of products of linear attention by the last parts of their names."""
    linear = spec.layers.linear
    if linear is None:
        return {}
    return {
        "in_proj_qkvz": linear.num_channels + linear.inner_size,
        "in_proj_qkv": linear.num_channels,
        "in_proj_z": linear.inner_size,
        "in_proj": linear.num_channels + linear.inner_size,
        "out_proj": linear.inner_size,
    }


def named_shares(field: str, texts: Sequence[str], spec: ModelSpec) -> dict[KindName, float]:
    """Return the share of each kind of products that the modules named in `field` are; of kinds
    that the model has. Raises UserError for a name whose product is not known.
    """
    kinds = kinds_of(spec)
    names = [Name(field, text) for text in texts]
    names = [name for name in names if _is_of_products(name, kinds, spec.num_layers)]
    return {
        kind.name: _named_share(kind, names, spec.num_layers) for kind in kinds if kind.num_layers
    }


def _is_of_products(name: Name, kinds: Sequence[Kind], num_layers: int) -> bool:
    """Return whether a name matches a product of any kind. Raises UserError for a name that may be
    one's in a spelling that is not known.
    """
    if name.layer is not None and name.layer >= num_layers:
        return False  # of a layer that drafts
    # An expression may be of the layer that drafts, behind the last.
    layers: Sequence[int] = range(num_layers + 1)
    if name.layer is not None:
        layers = [name.layer]
    for kind in kinds:
        if any(name.matched(kind, layer) for layer in layers):
            return True
    if NEVER.search(name.text):
        return False
    raise UserError(f"{name.setting} is none of the modules that are known; {FIX}")


def _named_share(kind: Kind, names: Sequence[Name], num_layers: int) -> float:
    """Return the share of a kind's parameters that `names` match, over all layers."""
    total = 0.0
    for layer in range(num_layers):
        covered: set[str] = set()
        for name in names:
            covered |= name.matched(kind, layer)
        if _is_of_some_experts(kind, covered):
            raise UserError(f"{names[0].setting} names some of the experts of a layer; {FIX}")
        total += kind.share(covered)
    # Names that are no numbers of layers match in layers that lack the kind, too.
    return min(1.0, total / kind.num_layers)


def _is_of_some_experts(kind: Kind, covered: set[str]) -> bool:
    """Return whether `covered` has products of one of a layer's experts and not of another: the
    first and the last are looked at.
    """
    products = defaultdict[str, set[str]](set)
    for leaf in kind.leaves:
        number = EXPERT_NUMBER.search(leaf)
        if number is None:
            continue
        of_expert = products[number[1]]
        if leaf in covered:
            of_expert.add(EXPERT_NUMBER.sub(".", leaf))
    return len({frozenset(of_expert) for of_expert in products.values()}) > 1
