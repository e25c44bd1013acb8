"""How a checkpoint stores the weights of its layers' products, by its config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import get_args

from sarathi_lab.config.errors import UserError
from sarathi_lab.model.ignored_modules import named_shares
from sarathi_lab.model.quantisation import (
    BITS_OF_BYTE,
    FP8,
    NVFP4_BITS,
    SCALE_BITS,
    STORED,
    KindName,
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
OUTSIDE_LAYERS = ("lm_head", "embed_tokens")  # modules of tables
CACHE_FIELDS = ("kv_cache_scheme", "kv_cache_quant_algo")
MOST_BITS = 16
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
    quantisation = _read_method(settings)
    if quantisation.of == "experts" and not spec.num_experts:
        raise UserError(
            f"{FIELD}.quant_method={quantisation.name} is of experts, which model {spec.name} has "
            f"not; {AGAIN}"
        )
    if quantisation.of == "layers":
        return _without_ignored(quantisation, settings, spec)
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
    if settings.get("store_dtype"):
        raise UserError(
            f"{FIELD}.store_dtype={settings['store_dtype']} stores some weights in another type "
            f"than {method}, whose bytes have no formula; take the unquantised model"
        )
    if method in ("fp8", "fbgemm_fp8"):
        return FP8
    if method == "bitsandbytes":
        return _bitsandbytes(settings)
    if method == "mxfp4":
        # gpt-oss keeps all but its experts in 16 bits, by `modules_to_not_convert`.
        return STORED[method]
    if method in INTEGER_METHODS:
        return _integers(method, settings)
    if method == "compressed-tensors":
        return _compressed_tensors(settings)
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
    bits = _bits("bits", settings)
    of_group = _share_of_group(SCALE_BITS + bits, settings)
    return Quantisation(method, (bits + of_group) / BITS_OF_BYTE)


def _compressed_tensors(settings: Settings) -> Quantisation:
    groups = settings.get("config_groups")
    if not isinstance(groups, Mapping) or len(groups) != 1:
        raise UserError(
            f"{FIELD}.config_groups={groups!r} is not one group of weights, which the bytes would "
            "follow from; take another quantisation of the model"
        )
    name, value = next(iter(groups.items()))
    group = _object(f"{FIELD}.config_groups.{name}", value)
    targets = group.get("targets") or ["Linear"]
    if targets != ["Linear"]:
        raise UserError(
            f"{FIELD}.config_groups.{name}.targets={targets!r} is not all of the products, "
            "['Linear'], which the bytes are counted of; take the unquantised model"
        )
    weights = _object(f"{FIELD}.config_groups.{name}.weights", group.get("weights"))
    activations = group.get("input_activations")
    bits = _bits("num_bits", weights)
    of_group = 0.0
    if weights.get("strategy") == "group":
        of_group = _share_of_group(SCALE_BITS, weights)
    if weights.get("strategy") == "tensor_group":
        of_group = _share_of_group(BITS_OF_BYTE, weights)
    return Quantisation(
        "compressed-tensors",
        (bits + of_group) / BITS_OF_BYTE,
        has_fp8_products=bits == BITS_OF_BYTE and activations is not None,
    )


def _modelopt(settings: Settings) -> Quantisation:
    algorithm = str(settings.get("quant_algo"))
    if algorithm == "FP8":
        return Quantisation("modelopt fp8", 1.0, has_fp8_products=True)
    if algorithm == "NVFP4":
        return Quantisation("modelopt nvfp4", NVFP4_BITS / BITS_OF_BYTE)
    raise UserError(
        f"{FIELD}.quant_algo={algorithm} has no formula of its bytes; take FP8 or NVFP4"
    )


def _bitsandbytes(settings: Settings) -> Quantisation:
    if settings.get("load_in_4bit") or settings.get("_load_in_4bit"):
        bits = DOUBLE_NF4_BITS if settings.get("bnb_4bit_use_double_quant") else NF4_BITS
        return Quantisation("bitsandbytes nf4", bits / BITS_OF_BYTE)
    return Quantisation("bitsandbytes int8", 1.0)


def _ignored(settings: Settings) -> tuple[str, list[str]]:
    """Return the field that names modules which stay as they were, and the names."""
    for field in IGNORING:
        names = settings.get(field)
        if not names:
            continue
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise UserError(f"{FIELD}.{field}={names!r} is no list of names; {AGAIN}")
        return field, names
    dynamic = _object(f"{FIELD}.dynamic", settings.get("dynamic") or {})
    return "dynamic", [f"re:{name.removeprefix(NOT_QUANTISED)}" for name in dynamic]


def _without_ignored(
    quantisation: Quantisation, settings: Settings, spec: ModelSpec
) -> Quantisation:
    """Leave out the modules that are ignored."""
    field, names = _ignored(settings)
    if not names:
        return quantisation
    ignored = named_shares(field, names, spec)
    shares = {kind: 1 - share for kind, share in ignored.items()}
    if all(share == 1 for share in shares.values()):
        return quantisation
    if not any(shares.values()):
        raise UserError(
            f"{FIELD}.{field}={names[0]} and the others leave nothing quantised; {AGAIN}"
        )
    if all(share == (kind == "experts") for kind, share in shares.items()):
        return replace(quantisation, of="experts")
    parts = [StoredPart(kind, share, quantisation.weight_bytes) for kind, share in shares.items()]
    return replace(quantisation, of="parts", parts=tuple(parts))


def _mlx(settings: Settings, spec: ModelSpec) -> Quantisation:
    """Read MLX's settings, with those of single modules: an object, or false for none."""
    rest = _mlx_bytes(settings, settings)
    overrides = {name: value for name, value in settings.items() if "." in name}
    tables = [rest]
    saved: dict[KindName, float] = {}  # bytes of a weight by which overrides change the mean
    shares: dict[KindName, float] = {}  # quantised
    by_value: dict[float | None, list[str]] = {}
    for name, value in overrides.items():
        num_bytes = None
        if value is not False:
            num_bytes = _mlx_bytes(_object(f"{MLX_FIELD}.{name}", value), settings)
        if name.rpartition(".")[2] in OUTSIDE_LAYERS:
            tables.append(num_bytes or 2.0)
        else:
            by_value.setdefault(num_bytes, []).append(name)
    for num_bytes, names in by_value.items():
        for kind, share in named_shares(MLX_FIELD, names, spec).items():
            if num_bytes is None:
                shares[kind] = shares.get(kind, 1.0) - share
            else:
                saved[kind] = saved.get(kind, 0.0) + share * (num_bytes - rest)
    parts = []
    for kind in {**shares, **saved}:
        share = max(0.0, shares.get(kind, 1.0))
        mean = rest + (saved.get(kind, 0.0) / share if share else 0.0)
        parts.append(StoredPart(kind, share, mean))
    is_uniform = all(part.share == 1 and part.weight_bytes == rest for part in parts)
    quantisation = Quantisation("mlx", rest, table_bytes=tables[-1])
    if is_uniform:
        return quantisation
    return replace(quantisation, of="parts", parts=_all_kinds(parts, rest))


def _all_kinds(parts: list[StoredPart], num_bytes: float) -> tuple[StoredPart, ...]:
    """Add the kinds of which nothing is said."""
    said = {part.kind for part in parts}
    others = [StoredPart(kind, 1.0, num_bytes) for kind in get_args(KindName) if kind not in said]
    return (*parts, *others)


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
