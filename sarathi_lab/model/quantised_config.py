"""How a checkpoint stores the weights of its layers' products, by its config.json."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from sarathi_lab.config.errors import UserError
from sarathi_lab.model.config_facts import Facts
from sarathi_lab.model.ignored_modules import HEAD, Name, ignored_shares
from sarathi_lab.model.quantisation import (
    BITS_OF_BYTE,
    FP8,
    MXFP4_BITS,
    SCALE_BITS,
    STORED,
    KindName,
    ProductType,
    Quantisation,
    StoredPart,
)
from sarathi_lab.model.spec import ModelSpec

Settings = Mapping[str, object]
FIELD = "quantization_config"
FIELDS = (FIELD, "compression_config", "quantization")
AGAIN = "fetch config.json again"
UNQUANTISED = "take the unquantised model"
# Fields of modules that stay as they were, by the methods' names for them.
IGNORING = (
    "ignore",
    "exclude_modules",
    "modules_to_not_convert",
    "ignored_layers",
    "llm_int8_skip_modules",
)
# Fields that give some modules bits of their own, or weights another type than the bits say.
NOT_COUNTED = ("store_dtype", "extra_config", "dynamic")
INTEGER_METHODS = (
    *("awq", "gptq", "awq_marlin", "gptq_marlin", "auto-round", "auto_round"),
    "intel/auto-round",
)
# Of bitsandbytes' 4 bits: a float32 for 64 weights, or 8 bits and one for 256 of these.
NF4_BITS = 4 + 32 / 64
DOUBLE_NF4_BITS = 4 + 8 / 64 + 32 / (64 * 256)
# Bits of a group's scale, by the strategies of compressed-tensors that have groups.
SCALE_BITS_OF_GROUPS = {"group": SCALE_BITS, "tensor_group": BITS_OF_BYTE}
ALL_PRODUCTS = ["Linear"]  # targets of compressed-tensors
CACHE_FIELDS = ("kv_cache_scheme", "kv_cache_quant_algo")
EXPERTS_FIELD = "expert_dtype"
NVFP4 = 4  # bits
PER_COLUMN = -1  # a group's size, for one scale of a whole column


def read_quantisation(config: Settings, spec: ModelSpec) -> Quantisation | None:
    """Read `quantization_config` of the config.json of `spec`; None: the model's type. Raises
    UserError, naming the field, for a method or a part of the products whose bytes are not known.
    """
    settings = _settings(config)
    if not settings:
        return None
    for name in NOT_COUNTED:
        value = settings.get(name)
        if value and not _is_of_plain_head(value):
            raise UserError(
                f"{FIELD}.{name}={settings[name]} gives some weights bits of their own, which "
                f"have no formula; {UNQUANTISED}"
            )
    quantisation = _read_method(settings)
    if quantisation.of == "experts":
        # gpt-oss keeps all but its experts in 16 bits, by `modules_to_not_convert`.
        if not spec.num_experts:
            raise UserError(
                f"{FIELD}.quant_method={quantisation.name} is of experts, which model {spec.name} "
                f"has not; {AGAIN}"
            )
        return quantisation
    expert_dtype = config.get(EXPERTS_FIELD) or settings.get(EXPERTS_FIELD)
    return _in_parts(quantisation, settings, spec, expert_dtype)


def _is_of_plain_head(value: object) -> bool:
    """Return whether a field names the output head alone, and leaves it in 16 bits."""
    if not isinstance(value, Mapping):
        return False
    for module, own in value.items():
        is_plain = isinstance(own, Mapping) and own.get("bits", 16) == 16
        if not is_plain or HEAD not in str(module):
            return False
    return True


def unused_fields(config: Settings) -> tuple[str, ...]:
    """Return the fields of `quantization_config` that say how the cache is stored, which a run
    states by `cache.dtype`.
    """
    settings = _settings(config)
    fields = list[str]()
    for name in CACHE_FIELDS:
        if settings.get(name):
            fields.append(f"{FIELD}.{name} (the cache is stored by cache.dtype)")
    return tuple(fields)


def _settings(config: Settings) -> Settings:
    for field in FIELDS:
        if config.get(field):
            return Facts(config, AGAIN).object(field)
    return {}


def _read_method(settings: Settings) -> Quantisation:
    """Return how weights are stored, as if all of the layers' products were."""
    method = str(settings.get("quant_method"))
    if method in ("fp8", "fbgemm_fp8"):
        return FP8
    if method == "mxfp4":
        return STORED[method]
    if method == "bitsandbytes":
        return _bitsandbytes(settings)
    if method in INTEGER_METHODS:
        return _integers(method, settings)
    if method == "modelopt":
        return _modelopt(settings)
    if method == "compressed-tensors":
        return _compressed_tensors(settings)
    stated = f"{FIELD}.quant_method={method}"
    if "quant_method" not in settings:  # such as MLX's, with bits and group_size alone
        stated = f"quantisation by {' and '.join(settings)}, without a quant_method,"
    raise UserError(
        f"{stated} has no formula of its bytes; take fp8, awq, gptq, mxfp4, "
        "modelopt, bitsandbytes or compressed-tensors, or the unquantised model"
    )


def _integers(method: str, settings: Settings) -> Quantisation:
    """Integers of `bits`, with a scale and a zero for each group along the inner dimension."""
    facts = Facts(settings, AGAIN)
    data_type = facts.text("data_type") or "int"  # AutoRound's
    if not data_type.startswith("int"):
        raise UserError(f"{FIELD}.data_type={data_type} has no formula of its bytes; take int")
    bits = facts.size("bits")
    weight_bytes = (bits + _share_of_group(SCALE_BITS + bits, facts)) / BITS_OF_BYTE
    has_quantised_head = facts.flag("lm_head", default=False)
    head_bytes = weight_bytes if has_quantised_head else None
    return Quantisation(method, weight_bytes, head_bytes=head_bytes)


def _share_of_group(group_bits: int, facts: Facts) -> float:
    """Return a weight's share of the bits that a group has in common."""
    if facts.text("group_size") == str(PER_COLUMN):
        return 0.0
    return group_bits / facts.size("group_size")


def _bitsandbytes(settings: Settings) -> Quantisation:
    if not settings.get("load_in_4bit") and not settings.get("_load_in_4bit"):
        return Quantisation("bitsandbytes int8", 1.0)
    is_double = settings.get("bnb_4bit_use_double_quant")
    bits = DOUBLE_NF4_BITS if is_double else NF4_BITS
    return Quantisation("bitsandbytes nf4", bits / BITS_OF_BYTE)


def _modelopt(settings: Settings) -> Quantisation:
    algorithm = str(settings.get("quant_algo"))
    if algorithm not in ("FP8", "NVFP4"):
        raise UserError(
            f"{FIELD}.quant_algo={algorithm} has no formula of its bytes; take FP8 or NVFP4"
        )
    stored = STORED[algorithm.lower()]
    return replace(stored, name=f"modelopt {stored.name}", head_bytes=stored.weight_bytes)


def _compressed_tensors(settings: Settings) -> Quantisation:
    """Read the group of all products, the output head's among them."""
    groups = list(Facts(settings, AGAIN).object("config_groups").values())
    if len(groups) != 1 or not isinstance(groups[0], Mapping):
        raise UserError(
            f"{FIELD}.config_groups={groups!r} is not one group of weights, which the bytes would "
            "follow from; take another quantisation of the model"
        )
    group = Facts(groups[0], AGAIN)
    if group.has("targets") and group.list_of("targets") != ALL_PRODUCTS:
        raise UserError(
            f"{FIELD}.config_groups: targets={group.text('targets')} names modules, whose share "
            f"has no formula; {UNQUANTISED}"
        )
    weights = Facts(group.object("weights"), AGAIN)
    bits = weights.size("num_bits")
    strategy = weights.text("strategy")
    of_group = 0.0
    if strategy in SCALE_BITS_OF_GROUPS:
        group_bits = SCALE_BITS_OF_GROUPS[strategy]
        # Such as torch.uint8 or float8_e4m3fn.
        stated_bits = re.search(r"\d+", weights.text("scale_dtype"))
        if stated_bits is not None:
            group_bits = int(stated_bits[0])
        if not weights.flag("symmetric", default=True):
            group_bits += bits  # a zero
        of_group = _share_of_group(group_bits, weights)
    weight_bytes = (bits + of_group) / BITS_OF_BYTE
    product_type: ProductType = "model"
    is_integer = weights.text("type") == "int"
    if group.has("input_activations") and bits == BITS_OF_BYTE:
        product_type = "int8" if is_integer else "fp8"
    # Products of integers and of MXFP4 in 4 bits have other kernels, or none.
    if group.has("input_activations") and bits == NVFP4 and strategy == "tensor_group":
        product_type = "model" if is_integer else "fp4"
    return Quantisation("compressed-tensors", weight_bytes, product_type, head_bytes=weight_bytes)


def _in_parts(
    quantisation: Quantisation, settings: Settings, spec: ModelSpec, expert_dtype: object
) -> Quantisation:
    """Leave out the modules that stay as they were; experts may have fewer bits than all others."""
    field, names = _ignored(settings)
    if any(Name(field, name).is_of_head for name in names):
        quantisation = replace(quantisation, head_bytes=None)
    bytes_of_kinds: dict[KindName, float] = {}
    if expert_dtype == "fp4":  # DeepSeek-V4's
        bytes_of_kinds["experts"] = MXFP4_BITS / BITS_OF_BYTE
    elif expert_dtype not in (None, "fp8"):
        raise UserError(
            f"{EXPERTS_FIELD}={expert_dtype} has no formula of its bytes; take fp4 or fp8, or "
            f"{UNQUANTISED}"
        )
    parts = []
    for kind, share in ignored_shares(field, names, spec).items():
        weight_bytes = bytes_of_kinds.get(kind, quantisation.weight_bytes)
        parts.append(StoredPart(kind, 1 - share, weight_bytes))
    if all(part.share == 0 for part in parts):
        raise UserError(
            f"{FIELD}.{field}={names[0]} and the others leave nothing quantised; {AGAIN}"
        )
    in_parts = replace(quantisation, of="parts", parts=tuple(parts))
    if bytes_of_kinds:
        return in_parts
    quantised = [part.kind for part in parts if part.share == 1]
    left_out = [part.kind for part in parts if part.share == 0]
    if len(quantised) == len(parts):
        return quantisation
    if quantised == ["experts"] and len(left_out) == len(parts) - 1:
        return replace(quantisation, of="experts")
    return in_parts


def _ignored(settings: Settings) -> tuple[str, Sequence[str]]:
    """Return the modules that stay as they were, and the fields that name them."""
    facts = Facts(settings, AGAIN)
    fields = [field for field in IGNORING if settings.get(field)]
    names = list[str]()
    for field in fields:
        names += map(str, facts.list_of(field))
    return " or ".join(fields), names
