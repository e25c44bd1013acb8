"""Modules that a quantised checkpoint ignores: which kinds of products they leave as they were.

A kind counts as ignored where the names cover it in all layers. Names match as vLLM matches them: a
regular expression behind `re:`, and else whole parts of a module's path, with `*` for any text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from sarathi_lab.config.errors import UserError
from sarathi_lab.model.quantisation import Quantised
from sarathi_lab.model.spec import ModelSpec

KindName = Literal["attention", "linear attention", "FFNs", "shared experts", "experts"]
Leaves = tuple[str, ...]
FIX = "take the unquantised model, or a checkpoint that ignores a kind in all layers or in none"
PREFIXES = ("model.", "language_model.model.", "model.language_model.")
# Ways to name all products of a kind in one layer.
ATTENTION: tuple[Leaves, ...] = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
    ("self_attn.qkv_proj", "self_attn.o_proj"),
    (
        *("self_attn.q_a_proj", "self_attn.q_b_proj", "self_attn.o_proj"),
        *("self_attn.kv_a_proj_with_mqa", "self_attn.kv_b_proj"),
    ),
)
LINEAR_ATTENTION: tuple[Leaves, ...] = (
    ("linear_attn.in_proj_qkvz", "linear_attn.out_proj"),
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
# What no checkpoint of these methods quantises, or is not counted: tables, norms, routers, gates of
# a column, convolutions, encoders and the layers that draft.
NEVER = re.compile(
    r"lm_head|embed|norm|\bgate\b|router|shared_expert_gate|correction_bias|conv1d|in_proj_(a|b|ba)\b"
    r"|visual|vision|audio|multi_modal|mtp"
)
LAYER = re.compile(r"\blayers\.(\d+)\b")  # in a name that is no expression


@dataclass(frozen=True)
class Kind:
    """Products of one kind: `num_layers` have them, by one of the `namings` of all in a layer."""

    name: KindName
    num_layers: int
    namings: tuple[Leaves, ...]

    @cached_property
    def leaves(self) -> set[str]:
        """Paths of modules in a layer, by every naming."""
        return set().union(*self.namings)


def kinds_of(spec: ModelSpec) -> list[Kind]:
    """Return the kinds of products that the layers of models have; some have none in this one."""
    linear = spec.layers.linear
    num_linear = linear.num_layers if linear else 0
    num_dense = spec.layers.dense if spec.num_experts else spec.num_ffn_layers
    num_shared = spec.num_expert_layers if spec.shared_expert_size else 0
    ends = {0, max(0, spec.num_experts - 1)}  # a list of single experts lacks one of these
    return [
        Kind("attention", spec.num_attention_layers, ATTENTION),
        Kind("linear attention", num_linear, LINEAR_ATTENTION),
        Kind("FFNs", num_dense, _under(FFN_PARENTS)),
        Kind("shared experts", num_shared, _under(SHARED_PARENTS)),
        Kind("experts", spec.num_expert_layers, _under(EXPERT_PARENTS, sorted(ends))),
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


def quantised_part(field: str, ignored: Sequence[str], spec: ModelSpec) -> Quantised:
    """Return the part of the products that the modules `ignored` by `field` leave quantised. Raises
    UserError for a part whose bytes are not counted, naming a module.
    """
    kinds = kinds_of(spec)
    names = [Name(field, text) for text in ignored]
    names = [name for name in names if _is_of_products(name, kinds, spec.num_layers)]
    present = [kind for kind in kinds if kind.num_layers]
    unquantised = [kind for kind in present if _is_ignored(kind, names, spec.num_layers)]
    quantised = [kind.name for kind in present if kind not in unquantised]
    if not unquantised:
        return "layers"
    if quantised == ["experts"]:
        return "experts"
    remaining = " and ".join(quantised) or "nothing"
    raise UserError(
        f"{names[0].setting} leaves {remaining} quantised, where bytes are counted of all products "
        "or of experts alone; take the unquantised model"
    )


def _is_of_products(name: Name, kinds: Sequence[Kind], num_layers: int) -> bool:
    """Return whether a name matches a product of any kind. Raises UserError for a name that may be
    one's in a spelling that is not known.
    """
    if name.layer is not None and name.layer >= num_layers:
        return False  # of a layer that drafts
    for kind in kinds:
        # An expression may be of the layer that drafts, behind the last.
        if any(name.matched(kind, layer) for layer in range(num_layers + 1)):
            return True
    if NEVER.search(name.text):
        return False
    raise UserError(f"{name.setting} is none of the modules that are known; {FIX}")


def _is_ignored(kind: Kind, names: Sequence[Name], num_layers: int) -> bool:
    """Return whether `names` cover a kind in all its layers, or touch it in none. Raises UserError
    for what is between.
    """
    num_covered = 0
    touching: list[Name] = []
    for layer in range(num_layers):
        covered: set[str] = set()
        for name in names:
            matched = name.matched(kind, layer)
            if matched:
                touching.append(name)
            covered |= matched
        num_covered += any(covered.issuperset(naming) for naming in kind.namings)
    if touching and num_covered < kind.num_layers:
        raise UserError(
            f"{touching[0].setting} ignores some of the {kind.name}: all names together cover "
            f"those of {num_covered} layers, of {kind.num_layers}; {FIX}"
        )
    return bool(touching)
