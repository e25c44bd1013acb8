"""How a checkpoint stores the weights of its layers' products, by its config.json."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from sarathi_lab.config.errors import UserError
from sarathi_lab.model.ignored_modules import Name, named_shares
from sarathi_lab.model.quantisation import (
    BITS_OF_BYTE,
    FP8,
    MXFP4_BITS,
    NVFP4_BITS,
    SCALE_BITS,
    STORED,
    ProductType,
    Quantisation,
    StoredPart,
)
from sarathi_lab.model.spec import ModelSpec

Settings = Mapping[str, object]
FIELD = "quantization_config"
MLX_FIELD = "quantization"  # which its converter also writes as `FIELD`, without a method
AGAIN = "fetch config.json again"
# Fields of modules that stay as they were, by the methods' names for them.
IGNORING = (
    *("ignore", "exclude_modules", "modules_to_not_convert", "ignored_layers"),
    "llm_int8_skip_modules",
)
INTEGER_METHODS = (
    *("awq", "gptq", "awq_marlin", "gptq_marlin", "auto-round", "auto_round"),
    "intel/auto-round",
)
# Of bitsandbytes' 4 bits: a float32 for 64 weights, or 8 bits and one for 256 of these.
NF4_BITS, DOUBLE_NF4_BITS = 4 + 32 / 64, 4 + 8 / 64 + 32 / (64 * 256)
# Bits that weights of a group have in common, by MLX's modes: a scale and a bias, or a scale alone.
MLX_GROUP_BITS = {"affine": 2 * SCALE_BITS, "mxfp4": 8, "mxfp8": 8, "nvfp4": 8}
# Bits of a group's scale, by the strategies of compressed-tensors that have groups.
SCALE_BITS_OF_GROUPS: Mapping[object, int] = {"group": SCALE_BITS, "tensor_group": BITS_OF_BYTE}
BITS_OF_SCALES = {"uint8": 8, "float8_e4m3fn": 8, "float8_e8m0fnu": 8}
BITS_OF_SCALES |= {"float16": 16, "bfloat16": 16, "float32": 32}
PLAIN_NAME = re.compile(r"[\w.]+")  # of a module, in a field that has expressions, too
MLX_EXPERTS = "switch_mlp"  # the name of all of a layer's experts
ALL_PRODUCTS = "Linear"  # as a target of compressed-tensors
EVERYTHING = "re:.*"
MODEL_BYTES = 2  # of a weight that is not quantised, in 16 bits
HEAD = "lm_head"
OUTSIDE_LAYERS = (HEAD, "embed_tokens")  # modules of tables
CACHE_FIELDS = ("kv_cache_scheme", "kv_cache_quant_algo")
MOST_BITS = 16
EXPERTS_FIELD = "expert_dtype"
NVFP4 = 4  # bits
NOT_QUANTISED = "-:"  # begins a regular expression of GPTQ's `dynamic`
PER_COLUMN = -1  # a group's size, for one scale of a whole column


def read_quantisation(config: Settings, spec: ModelSpec) -> Quantisation | None:
    """Read `quantization_config` of the config.json of `spec`; None: the model's type. Raises
    UserError, naming the field, for a method or a part of the products whose bytes are not known.
    """
    settings = _settings(config)
    if not settings:
        return None
    if "quant_method" not in settings and "bits" in settings:
        return _mlx(settings, spec)
    if settings.get("store_dtype"):
        raise UserError(
            f"{FIELD}.store_dtype={settings['store_dtype']} stores some weights in another type "
            f"than the others, whose bytes have no formula; take the unquantised model"
        )
    groups = _object(f"{FIELD}.config_groups", settings.get("config_groups") or {})
    if settings.get("quant_method") == "compressed-tensors" or len(groups) > 1:
        return _groups(groups, settings, spec)
    quantisation = _read_method(settings)
    if quantisation.of == "experts" and not spec.num_experts:
        raise UserError(
            f"{FIELD}.quant_method={quantisation.name} is of experts, which model {spec.name} has "
            f"not; {AGAIN}"
        )
    if quantisation.of == "layers":
        own = [*_own_bits(settings), *_own_experts(config, settings)]
        return _with_named(quantisation, [_ignored(settings), *own], spec)
    return quantisation


def unused_fields(config: Settings) -> tuple[str, ...]:
    """Return the fields of `quantization_config` that say how the cache is stored, which a run
    states by `cache.dtype`.
    """
    settings = _settings(config)
    stated = [name for name in CACHE_FIELDS if settings.get(name)]
    return tuple(f"{FIELD}.{name} (the cache is stored by cache.dtype)" for name in stated)


def _settings(config: Settings) -> Settings:
    for field in (FIELD, MLX_FIELD, "compression_config"):
        settings = config.get(field)
        if settings:
            return _object(field, settings)
    return {}


def _read_method(settings: Settings) -> Quantisation:
    """Return how weights are stored, as if all of the layers' products were."""
    method = str(settings.get("quant_method"))
    if method in ("fp8", "fbgemm_fp8"):
        return FP8
    if method == "bitsandbytes":
        return _bitsandbytes(settings)
    if method == "mxfp4":
        # gpt-oss keeps all but its experts in 16 bits, by `modules_to_not_convert`.
        return STORED[method]
    if method in INTEGER_METHODS:
        return _integers(method, settings)
    if method == "modelopt":
        return _modelopt(settings)
    raise UserError(
        f"{FIELD}.quant_method={method} has no formula of its bytes; take fp8, awq, gptq, mxfp4, "
        "modelopt, bitsandbytes or compressed-tensors, or the unquantised model"
    )


def _integers(method: str, settings: Settings) -> Quantisation:
    """Integers of `bits`, with a scale and a zero for each group along the inner dimension."""
    for name in _object(f"{FIELD}.dynamic", settings.get("dynamic") or {}):
        if not str(name).startswith(NOT_QUANTISED):
            raise UserError(
                f"{FIELD}.dynamic={name!r} gives modules bits of their own, which have no formula; "
                "take the unquantised model"
            )
    weight_bytes = _bytes_in_group(settings)
    head_bytes = None
    if settings.get("lm_head"):
        head_bytes = weight_bytes
    return Quantisation(method, weight_bytes, head_bytes=head_bytes)


def _bytes_in_group(settings: Settings) -> float:
    """Return the bytes of a weight with its share of its group's scale, and an integer's zero."""
    bits = _bits("bits", settings)
    data_type = str(settings.get("data_type") or "int")  # AutoRound's
    if data_type.startswith(("mx_fp", "nv_fp")):
        group_bits = BITS_OF_BYTE
    elif data_type.startswith("int"):
        group_bits = SCALE_BITS + bits
    else:
        raise UserError(
            f"{FIELD}: data_type={data_type} has no formula of its bytes; take int, mx_fp or nv_fp"
        )
    return (bits + _share_of_group(group_bits, settings)) / BITS_OF_BYTE


def _own_bits(settings: Settings) -> list[Named]:
    """Return the modules to which AutoRound's `extra_config` gives bits of their own."""
    extra = _object(f"{FIELD}.extra_config", settings.get("extra_config") or {})
    names_by_bytes: dict[tuple[bool, float | None], list[str]] = {}
    for name, value in extra.items():
        own = _object(f"{FIELD}.extra_config.{name}", value)
        stated = {**settings, **own}
        is_quantised = _bits("bits", stated) < MODEL_BYTES * BITS_OF_BYTE
        weight_bytes = _bytes_in_group(stated) if is_quantised else None
        is_expression = PLAIN_NAME.fullmatch(name) is None
        # AutoRound searches for its expressions anywhere in a path.
        text = f"re:.*(?:{name})" if is_expression else name
        names_by_bytes.setdefault((is_expression, weight_bytes), []).append(text)
    # A plain name overrules expressions.
    by_rank = sorted(names_by_bytes.items(), key=lambda entry: entry[0][0])
    return [Named("extra_config", names, weight_bytes) for (_, weight_bytes), names in by_rank]


def _own_experts(config: Settings, settings: Settings) -> list[Named]:
    """Return the experts where they have fewer bits than all others (DeepSeek-V4)."""
    dtype = config.get(EXPERTS_FIELD) or settings.get(EXPERTS_FIELD)
    if dtype is None or dtype == "fp8":
        return []
    if dtype != "fp4":
        raise UserError(
            f"{EXPERTS_FIELD}={dtype} has no formula of its bytes; take fp4 or fp8, or the "
            "unquantised model"
        )
    return [Named(EXPERTS_FIELD, ["re:.*mlp.experts.*"], MXFP4_BITS / BITS_OF_BYTE)]


def _group(name: str, group: Settings) -> Quantisation:
    """Read one group of compressed-tensors, as if all products were in it."""
    weights = _object(f"{FIELD}.config_groups.{name}.weights", group.get("weights"))
    activations = group.get("input_activations")
    bits = _bits("num_bits", weights)
    of_group = 0.0
    strategy = weights.get("strategy")
    if strategy in SCALE_BITS_OF_GROUPS:
        group_bits = _scale_bits(name, weights, SCALE_BITS_OF_GROUPS[strategy])
        if weights.get("symmetric") is False:
            group_bits += bits  # a zero
        of_group = _share_of_group(group_bits, weights)
    # Of integers and MXFP4 products in 4 bits have other kernels, or none.
    is_nvfp4 = bits == NVFP4 and weights.get("type") == "float" and strategy == "tensor_group"
    product_type: ProductType = "model"
    if activations is not None and bits == BITS_OF_BYTE:
        product_type = "int8" if weights.get("type") == "int" else "fp8"
    elif activations is not None and is_nvfp4:
        product_type = "fp4"
    weight_bytes = (bits + of_group) / BITS_OF_BYTE
    return Quantisation("compressed-tensors", weight_bytes, product_type)


def _scale_bits(name: str, weights: Settings, default: int) -> int:
    """Return the bits of a group's scale."""
    stated = weights.get("scale_dtype")
    if not stated:
        return default
    dtype = str(stated).removeprefix("torch.")
    if dtype not in BITS_OF_SCALES:
        raise UserError(
            f"{FIELD}.config_groups.{name}.weights.scale_dtype={stated} is none of "
            f"{', '.join(BITS_OF_SCALES)}; take the unquantised model"
        )
    return BITS_OF_SCALES[dtype]


def _groups(groups: Settings, settings: Settings, spec: ModelSpec) -> Quantisation:
    """Read the groups of compressed-tensors, of modules by their names or of all others."""
    if not groups:
        raise UserError(
            f"{FIELD}.config_groups={groups!r} has no group of weights, which the bytes would "
            "follow from; take another quantisation of the model"
        )
    named = [_ignored(settings)]
    rest: Quantisation | None = None  # of all other products, the output head's among them
    read = list[Quantisation]()
    for name, value in groups.items():
        group = _object(f"{FIELD}.config_groups.{name}", value)
        stored = _group(name, group)
        read.append(stored)
        targets = group.get("targets") or [ALL_PRODUCTS]
        if not isinstance(targets, list):
            raise UserError(f"{FIELD}.config_groups.{name}.targets={targets!r} is no list; {AGAIN}")
        names = [str(target) for target in targets if target != ALL_PRODUCTS]
        if len(names) < len(targets):
            rest = stored
        if names:
            named.append(Named(f"config_groups.{name}.targets", names, stored.weight_bytes))
    if rest is None:
        named.append(Named("config_groups", [EVERYTHING], None))
    base = rest or read[0]
    head_bytes = None if rest is None else rest.weight_bytes
    base = replace(base, product_type=_common_product_type(read), head_bytes=head_bytes)
    return _with_named(base, named, spec)


def _common_product_type(groups: Sequence[Quantisation]) -> ProductType:
    """Return the one type that all products are counted in: that of the most bits."""
    types = {stored.product_type for stored in groups}
    if len(types) == 1:
        return groups[0].product_type
    if "model" in types:
        return "model"
    return "fp8"


def _modelopt(settings: Settings) -> Quantisation:
    algorithm = str(settings.get("quant_algo"))
    if algorithm == "FP8":
        return Quantisation("modelopt fp8", 1.0, product_type="fp8", head_bytes=1.0)
    if algorithm == "NVFP4":
        weight_bytes = NVFP4_BITS / BITS_OF_BYTE
        return Quantisation(
            "modelopt nvfp4", weight_bytes, product_type="fp4", head_bytes=weight_bytes
        )
    raise UserError(
        f"{FIELD}.quant_algo={algorithm} has no formula of its bytes; take FP8 or NVFP4"
    )


def _bitsandbytes(settings: Settings) -> Quantisation:
    if settings.get("load_in_4bit") or settings.get("_load_in_4bit"):
        bits = NF4_BITS
        if settings.get("bnb_4bit_use_double_quant"):
            bits = DOUBLE_NF4_BITS
        return Quantisation("bitsandbytes nf4", bits / BITS_OF_BYTE)
    return Quantisation("bitsandbytes int8", 1.0)


class Named(NamedTuple):
    """Modules by their names in a field, and the bytes of their weights (None: as the model's)."""

    field: str
    names: list[str]
    weight_bytes: float | None


def _ignored(settings: Settings) -> Named:
    """Return the modules that stay as they were, by all fields that name some."""
    fields = list[str]()
    ignored = list[str]()
    for field in IGNORING:
        names = settings.get(field)
        if not names:
            continue
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise UserError(f"{FIELD}.{field}={names!r} is no list of names; {AGAIN}")
        fields.append(field)
        ignored += names
    dynamic = _object(f"{FIELD}.dynamic", settings.get("dynamic") or {})
    if dynamic:
        fields.append("dynamic")
        ignored += [f"re:{name.removeprefix(NOT_QUANTISED)}" for name in dynamic]
    return Named(" or ".join(fields), ignored, None)


def _with_named(
    quantisation: Quantisation, groups: Sequence[Named], spec: ModelSpec
) -> Quantisation:
    """Give the modules of `groups` bytes of their own; where several name one, the first counts."""
    groups = [group for group in groups if group.names]
    quantisation = replace(quantisation, head_bytes=_head_bytes(quantisation, groups))
    shares = [named_shares(group.field, group.names, spec) for group in groups]
    stored_parts = []
    for kind in named_shares(FIELD, [], spec):
        unnamed_share = 1.0  # by the groups so far
        quantised = 1.0
        num_bytes = 0.0
        for group, of_kinds in zip(groups, shares, strict=True):
            share = min(unnamed_share, of_kinds[kind])
            unnamed_share -= share
            if group.weight_bytes is None:
                quantised -= share
            else:
                num_bytes += share * group.weight_bytes
        num_bytes += unnamed_share * quantisation.weight_bytes
        mean = num_bytes / quantised if quantised > 0 else quantisation.weight_bytes
        stored_parts.append(StoredPart(kind, quantised, mean))
    are_alike = all(part.weight_bytes == quantisation.weight_bytes for part in stored_parts)
    if are_alike and all(part.share == 1 for part in stored_parts):
        return quantisation
    if not any(part.share for part in stored_parts):
        first = groups[0]
        raise UserError(
            f"{FIELD}.{first.field}={first.names[0]} and the others leave nothing quantised; "
            f"{AGAIN}"
        )
    if are_alike and all(part.share == (part.kind == "experts") for part in stored_parts):
        return replace(quantisation, of="experts")
    return replace(quantisation, of="parts", parts=tuple(stored_parts))


def _head_bytes(quantisation: Quantisation, groups: Sequence[Named]) -> float | None:
    """Return the bytes of an output head that some group names, else of all others."""
    for group in groups:
        if any(Name(group.field, name).is_of_head for name in group.names):
            return group.weight_bytes
    return quantisation.head_bytes


def _mlx(settings: Settings, spec: ModelSpec) -> Quantisation:
    """Read MLX's settings, with those of single modules: an object, or false for none."""
    rest = _mlx_bytes(settings, settings)
    table_bytes = rest
    by_bytes: dict[float | None, list[str]] = {}
    for name, value in settings.items():
        if "." not in name and not isinstance(value, Mapping):
            continue  # a setting of all modules
        num_bytes = None
        if value is not False:
            num_bytes = _mlx_bytes(_object(f"{MLX_FIELD}.{name}", value), settings)
        if name.rpartition(".")[2] in OUTSIDE_LAYERS:
            table_bytes = MODEL_BYTES if num_bytes is None else num_bytes
        else:
            by_bytes.setdefault(num_bytes, []).append(name.replace(MLX_EXPERTS, "experts"))
    groups = [Named(MLX_FIELD, names, num_bytes) for num_bytes, names in by_bytes.items()]
    return _with_named(Quantisation("mlx", rest, table_bytes=table_bytes), groups, spec)


def _mlx_bytes(settings: Settings, defaults: Settings) -> float:
    """Return the bytes of a weight with its share of what its group has in common."""
    stated = {**{name: defaults.get(name) for name in ("bits", "group_size", "mode")}, **settings}
    mode = str(stated.get("mode") or "affine")
    if mode not in MLX_GROUP_BITS:
        raise UserError(
            f"{MLX_FIELD}: mode={mode} has no formula of its bytes; take one of "
            f"{', '.join(MLX_GROUP_BITS)}"
        )
    of_group = _share_of_group(MLX_GROUP_BITS[mode], stated)
    return (_bits("bits", stated) + of_group) / BITS_OF_BYTE


def _object(name: str, value: object) -> Settings:
    if not isinstance(value, Mapping):
        raise UserError(f"{name}={value!r} is no object; {AGAIN}")
    return value


def _bits(name: str, settings: Settings) -> int:
    bits = _whole(name, settings)
    if not 0 < bits <= MOST_BITS:
        raise UserError(f"{FIELD}: {name}={bits} is not from 1 to {MOST_BITS} bits; {AGAIN}")
    return bits


def _share_of_group(bits: int, settings: Settings) -> float:
    """Return a weight's share of the `bits` that a group has in common."""
    size = _whole("group_size", settings)
    if size < 1 and size != PER_COLUMN:
        raise UserError(
            f"{FIELD}: group_size={size} is no number of weights, nor {PER_COLUMN} for a column; "
            f"{AGAIN}"
        )
    return 0.0 if size == PER_COLUMN else bits / size


def _whole(name: str, settings: Settings) -> int:
    value = settings.get(name)
    if isinstance(value, bool) or not isinstance(value, int):
        raise UserError(f"{FIELD}: {name}={value!r} is no whole number; {AGAIN}")
    return value
